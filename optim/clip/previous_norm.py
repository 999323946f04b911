"""Clip by the norm of the step before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..norm.norms import Norms
from .rule import Clip, Decision, Initial, Threshold, at, checked_threshold, clip_coefficient, counted, counting


@dataclass(frozen=True)
class ByPreviousNorm(Clip):
    """coef_t = min(1, max_norm / (total_norm_(t-1) + 1e-6)), which is known before backward of step t begins.

    The norm of step t is measured all the same, in the same collective: it says whether the step overflowed, and what the
    next one is clipped by. A gradient that grows suddenly is not held back: put it into `SkipSpikes` where that may happen.
    The first step is clipped by its own norm. A step that is skipped leaves the norm that is remembered.

    Args:
        max_norm: As for `ByNorm`.
        norm_type: p >= 1, or inf; None: what `Measure` says.
    """

    max_norm: Threshold
    norm_type: float | None = None

    def check(self) -> None:
        checked_threshold(self.max_norm, "max_norm")

    def initial(self) -> Mapping[str, Initial]:
        return {"norm": 0.0, **counting(self.max_norm)}

    def decide(self, norms: Norms, state: Mapping[str, Tensor]) -> Decision:
        before = torch.where(state["norm"] > 0, state["norm"], norms.total)
        factor = clip_coefficient(before, at(self.max_norm, state.get("steps")))
        return Decision(factor, {"norm": norms.total, **counted(state)})
