"""The figures of one measured step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Measurement:
    """What `Telemetry` found in one step; on the device, the same bits on every rank.

    Args:
        step: Which step, counted from 1.
        names: Of the figures, with slashes, as dashboards want them: ``"update_norm/total"``.
        values: [figures] float64.
    """

    step: int
    names: tuple[str, ...]
    values: Tensor

    def to_dict(self) -> dict[str, float]:
        """By name, NaN and inf as they are. Host reads: one."""
        return dict(zip(self.names, self.values.tolist(), strict=True))
