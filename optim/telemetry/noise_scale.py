"""The gradient noise scale: how large a batch is worth while, from gradients before and after they are averaged.

    E |g_b|^2 = |G|^2 + S / b                     g_b: the mean gradient of b samples; S: the trace of their covariance

    small = mean over data ranks of |local gradient|^2,    x = mean over data ranks of 1 / b
    big   = |averaged gradient|^2,                         y = 1 / (all samples)

    S = (small - big) / (x - y)        |G|^2 = (x big - y small) / (x - y)        B_simple = S / |G|^2

Both estimates are unbiased, also where data ranks have batches of different sizes, which are weighted by them; their ratio
is not, and noisy. So numerator and denominator are averaged over measured steps, each by itself.

Reference: McCandlish et al. 2018, "An empirical model of large-batch training", arXiv:1812.06162, appendix A.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...parallel.mesh.plain_values import check_finite, fields


@dataclass(frozen=True)
class NoiseScale:
    """Ask `Telemetry` for the noise scale.

    Args:
        samples: How many one data rank has in a window, all of its micro-batches together: the scale is in the same unit.
            None: it is in what ``backward(weight=...)`` counts, such as tokens; without weights in micro-batches where
            ``accumulation_steps`` is given, else in batches of a data rank.
        decay: Of the exponential means over measured steps, from 0 (the last one alone) to 1.
    """

    samples: float | None = None
    decay: float = 0.9

    def check(self) -> None:
        """Raise ValueError if it is out of range."""
        if self.samples is not None and not (isfinite(self.samples) and self.samples > 0):
            raise ValueError(f"NoiseScale(samples={self.samples}): give a finite number > 0, of one data rank's window")
        if not 0 <= self.decay < 1:
            raise ValueError(f"NoiseScale(decay={self.decay}): give a number >= 0 and < 1")


class Estimates(NamedTuple):
    """0-dim each: of |G|^2, and of S, the trace of the covariance of one sample's gradient."""

    signal: Tensor
    trace: Tensor


def estimates(small: Tensor, big: Tensor, inverse_small: Tensor, inverse_big: Tensor) -> Estimates:
    """Unbiased ones, from two squared norms and the mean of 1 / samples of each; 0-dim. See the module."""
    difference = inverse_small - inverse_big
    signal = (inverse_small * big - inverse_big * small) / difference
    return Estimates(signal, (small - big) / difference)


class RunningScale:
    """The exponential means of both, by which the scale is told. Not finite ones, of a step that overflowed, are left out.

    Attributes:
        means: [3] float64: of |G|^2, of S, and of 1, by which the two are divided.
    """

    def __init__(self, decay: float, device: torch.device) -> None:
        self.decay, self.means = decay, torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, found: Estimates) -> Tensor:
        """[3] float64: B_simple, |G|^2 and S, all of the means; NaN where nothing has come. Host reads: none."""
        new = torch.stack([found.signal, found.trace, torch.ones_like(found.signal)])
        mixed = self.means * self.decay + new * (1 - self.decay)
        self.means = torch.where(new.isfinite().all(), mixed, self.means)
        signal, trace, weight = self.means.unbind()
        return torch.stack([trace / signal, signal / weight, trace / weight])

    def state_dict(self) -> dict[str, Any]:
        """The means; the same on every rank."""
        return {"means": self.means.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with them. Raises ValueError where they are no such tensor; nothing is changed."""
        self.check_state(state)
        self.means = state["means"].to(self.means)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError where ``state`` has no finite means."""
        fields({"means": partial(check_finite, shape=self.means.shape)})(state, "noise")
