"""Leave out steps whose gradient is far longer than usual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from torch import Tensor

from ..norm.norms import Norms
from .given import Given, clip_of
from .rule import Clip, Decision, Initial, checked_count, checked_positive

_FROM_THEN = ("level", "patterns", "weights", "in_place", "norm_type", "unit_dim")
_THEN = "then/"


@dataclass(frozen=True)
class SkipSpikes(Clip):
    """Skip the step, on every rank, where  total_norm > times * median of the last ``window`` total norms.

    Weights and optimizer states stay as they are, to the bit, and the loss scale does not back off: a spike is no overflow.
    `GradStats.spiked` and ``skipped`` say it, and `skipped_steps` counts it; schedules that hold on a skip hold. It is none
    of the steps that `Skip` counts in a row.

    Among the last norms a spike counts as the threshold that it exceeded, ``times * median``. So one spike moves a mean
    little and a median hardly, and if norms stay at a higher level, steps are made again when the statistics have come up
    to it.

    Args:
        times: How much longer than usual; finite, > 1.
        then: What is done with the gradients of steps that are made: a rule, a threshold, or as `ByName` takes them. None:
            nothing. What it remembers is not touched by a spike.
        of: ``"median"`` or ``"mean"`` of the window.
        window: Steps; >= 1.
        warm_up: No step is skipped before there are so many norms; >= 1, at most ``window``.
    """

    times: float = 4.0
    then: Given = None
    of: Literal["median", "mean"] = "median"
    window: int = 128
    warm_up: int = 16

    def __post_init__(self) -> None:
        then = clip_of(self.then)
        object.__setattr__(self, "then", then)
        for name in _FROM_THEN if then is not None else ():
            object.__setattr__(self, name, getattr(then, name))

    def check(self) -> None:
        checked_positive(self.times, "times")
        if self.times <= 1:
            raise ValueError(f"times={self.times}: give a number > 1, or half of the steps would be skipped")
        if self.of not in ("median", "mean"):
            raise ValueError(f"of={self.of!r}: give 'median' or 'mean'")
        checked_count(self.window, "window", 1)
        checked_count(self.warm_up, "warm_up", 1)
        if self.warm_up > self.window:
            raise ValueError(
                f"warm_up={self.warm_up} and window={self.window}: a window never has so many norms; give a warm_up of at "
                f"most {self.window}, or a longer window"
            )

    def initial(self) -> Mapping[str, Initial]:
        inner = {} if self._then is None else {_THEN + name: value for name, value in self._then.initial().items()}
        return {"steps": 0.0, "norms": [inf] * self.window, **inner}

    def decide(self, norms: Norms, state: Mapping[str, Tensor]) -> Decision:
        norm, steps, last = norms.total, state["steps"], state["norms"]
        bound = self.times * self._usual(last, steps)
        spike = (steps >= self.warm_up) & (bound > 0) & (norm > bound)
        here = torch.arange(self.window, device=last.device) == torch.remainder(steps, self.window)
        new = {"steps": steps + 1, "norms": torch.where(here, torch.where(spike, bound, norm), last)}
        if self._then is None:
            return Decision(None, new, spike)
        own = {name: state[_THEN + name] for name in self._then.initial()}
        inner = self._then.decide(norms, own)
        new |= {_THEN + name: torch.where(spike, own[name], value) for name, value in inner.state.items()}
        return Decision(inner.factors, new, spike if inner.skip is None else spike | inner.skip)

    def shown(self, factors: Tensor, norms: Norms) -> Tensor:
        return super().shown(factors, norms) if self._then is None else self._then.shown(factors, norms)

    def finish_(self, gradients_of: Sequence[Tensor]) -> None:
        if self._then is not None:
            self._then.finish_(gradients_of)

    @property
    def _then(self) -> Clip | None:
        assert self.then is None or isinstance(self.then, Clip), "made one at the start"
        return self.then

    def _usual(self, last: Tensor, steps: Tensor) -> Tensor:
        """0-dim: of the norms that are there, which come first when they are sorted."""
        count = steps.clamp(min=1, max=self.window)
        ordered = last.sort().values
        if self.of == "mean":
            there = torch.arange(self.window, device=last.device) < count
            return torch.where(there, ordered, torch.zeros_like(ordered)).sum() / count
        middle = torch.stack([torch.floor((count - 1) / 2), torch.floor(count / 2)]).long()
        return ordered.gather(0, middle).mean()
