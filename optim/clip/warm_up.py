"""A threshold that moves."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .rule import checked_count, checked_threshold


@dataclass(frozen=True)
class WarmUp:
    """threshold = start + (end - start) * min(1, steps so far / steps): from one to the other on a line.

        max_norm=WarmUp(10.0, 1.0, steps=1000)

    Any function from a 0-dim tensor, the number of steps that were not skipped, to a 0-dim tensor does in its place.

    Args:
        start, end: In units of the unscaled gradient; finite, > 0.
        steps: >= 1: from that step on it is ``end``.
    """

    start: float
    end: float
    steps: int

    def check(self) -> None:
        """Raise ValueError for arguments that are out of range."""
        checked_threshold(self.start, "WarmUp start")
        checked_threshold(self.end, "WarmUp end")
        checked_count(self.steps, "WarmUp steps", 1)

    def __call__(self, taken: Tensor) -> Tensor:
        return self.start + (self.end - self.start) * (taken / self.steps).clamp(max=1.0)
