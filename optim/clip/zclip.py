"""Clip norms that stand out from those of the steps before: their z-score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..norm.norms import Norms
from .rule import (
    Clip,
    Decision,
    Initial,
    Threshold,
    at,
    checked_count,
    checked_decay,
    checked_positive,
    checked_threshold,
    shortened,
)


@dataclass(frozen=True)
class ZClip(Clip):
    """Norms that are more than ``z`` standard deviations above their mean are clipped, the harder the further they are.

        z_t = (g_t - mean) / sqrt(var)                       g_t: the total norm
        c_t = mean + z^2 / z_t sqrt(var)  if z_t > z, else g_t          reciprocal clipping
        mean <- decay mean + (1 - decay) c_t
        var  <- decay var  + (1 - decay) (c_t - mean)^2      with the new mean
                                                             Kumar et al. 2025, arXiv:2504.02507

    In the first ``warm_up`` steps nothing is clipped but by ``max_norm``, and mean and variance are those of the norms so
    far (of the population, as the authors' code has it). The statistics take a spike as it was clipped, c_t. Skipped
    steps are none of them.

    Args:
        z: The threshold of the z-score; > 0.
        decay: Of the exponential mean and variance; >= 0, < 1.
        warm_up: Steps; >= 2.
        max_norm: No norm is longer than that besides, from the first step on; as for `ByNorm`, after it, so that the
            statistics don't see it. None: no such bound.
    """

    z: float = 2.5
    decay: float = 0.97
    warm_up: int = 25
    max_norm: Threshold | None = None

    def check(self) -> None:
        checked_positive(self.z, "z")
        checked_decay(self.decay, "decay")
        checked_count(self.warm_up, "warm_up", 2)
        if self.max_norm is not None:
            checked_threshold(self.max_norm, "max_norm")

    def initial(self) -> Mapping[str, Initial]:
        return {"steps": 0.0, "mean": 0.0, "var": 0.0}

    def decide(self, norms: Norms, state: Mapping[str, Tensor]) -> Decision:
        norm, steps, mean, var = norms.total, state["steps"], state["mean"], state["var"]
        warm, above = steps >= self.warm_up, norm - mean
        spike = warm & (above > self.z * var.sqrt())
        bound = torch.where(spike, mean + self.z**2 * var / above, norm)
        most = at(self.max_norm, steps)
        factor = shortened(norm, bound if most is None else torch.clamp(bound, max=most))
        # The mean's weight: of the n norms of the warm-up each 1 / n, of a later one 1 - decay.
        weight = torch.where(warm, 1 - self.decay, 1 / (steps + 1))
        new = mean + weight * (bound - mean)
        from_new = torch.where(warm, bound - new, bound - mean)
        return Decision(
            factor,
            {"steps": steps + 1, "mean": new, "var": var + weight * ((bound - new) * from_new - var)},
        )
