"""Clip every parameter by an exponential mean of its own norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from ..norm.norms import Norms
from .rule import (
    Clip,
    Decision,
    Initial,
    OfEachParameter,
    checked_count,
    checked_decay,
    checked_positive,
    checked_threshold,
    shortened,
)


@dataclass(frozen=True)
class AdaGC(Clip):
    """A parameter's gradient is no longer than ``times`` the exponential mean of what it was after clipping.

        the first ``warm_up`` steps:   h_t = min(1, max_norm / total_norm)
                                       mean[i] <- min(mean[i], h_t ||g_i||)
        from there on:                 h_t[i] = min(1, times mean[i] / ||g_i||)
                                       mean[i] <- decay mean[i] + (1 - decay) h_t[i] ||g_i||
                                                             Wang et al. 2025, arXiv:2502.11034

    ``g_i`` is a logical parameter's gradient, all of its pieces by the same factor. A norm of 0, of a parameter that was
    not used in a step, says nothing of what its norm is, and does not move its mean (which could not leave 0 again); one
    that had no gradient in the warm-up begins it with its first. Skipped steps move nothing.

    Args:
        max_norm: Of the total norm, in the warm-up; finite, > 0.
        times: How much longer than the mean; finite, > 0.
        decay: >= 0, < 1.
        warm_up: Steps; >= 1.
    """

    level = "parameters"
    max_norm: float = 1.0
    times: float = 1.05
    decay: float = 0.98
    warm_up: int = 100

    def check(self) -> None:
        checked_threshold(self.max_norm, "max_norm")
        checked_positive(self.times, "times")
        checked_decay(self.decay, "decay")
        checked_count(self.warm_up, "warm_up", 1)

    def initial(self) -> Mapping[str, Initial]:
        return {"steps": 0.0, "mean": OfEachParameter(inf)}

    def decide(self, norms: Norms, state: Mapping[str, Tensor]) -> Decision:
        norm, steps, mean = norms.parameters, state["steps"], state["mean"]
        warms_up = (steps < self.warm_up) | mean.isinf()
        own = shortened(norm, self.times * mean)
        factors = torch.where(warms_up, shortened(norms.total, self.max_norm), own)
        clipped = factors * norm
        new = torch.where(warms_up, torch.minimum(mean, clipped), self.decay * mean + (1 - self.decay) * clipped)
        return Decision(factors, {"steps": steps + 1, "mean": torch.where(norm > 0, new, mean)})
