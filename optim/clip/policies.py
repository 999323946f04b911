"""What is done with gradients that are too long: rules that look at one step alone. What a rule is, `rule` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..gradients.in_place import clamp_gradients
from ..norm.norms import Norms
from ..norm.units import UnitDim
from .rule import (
    Clip,
    Decision,
    Initial,
    Threshold,
    at,
    checked_threshold,
    clip_coefficient,
    counted,
    counting,
)


@dataclass(frozen=True)
class ByValue(Clip):
    """Clamp every element to [-clip_value, clip_value], after measuring.

    Args:
        clip_value: In units of the unscaled gradient; finite, > 0.
    """

    in_place = True
    clip_value: float

    def check(self) -> None:
        checked_threshold(self.clip_value, "clip_value")

    def factors(self, norms: Norms) -> None:
        return None

    def finish_(self, gradients_of: Sequence[Tensor]) -> None:
        clamp_gradients(gradients_of, self.clip_value)


@dataclass(frozen=True)
class ByGroup(Clip):
    """Param groups with a threshold are clipped by their own norm, the others by theirs together.

    What ``"max_norm"`` in a param group comes to; `GradStats.clip_coef` is the coefficient of the others. An optimizer that
    normalises its update anyway (Muon, LAMB) needs no clipping, and its gradients should not shorten those of others: give
    its groups ``math.inf``.

    Args:
        thresholds: For each param group; None: it is one of the others. Infinite: it is not clipped, and none of them.
        others: Theirs; None: they are not clipped.
        norm_type: p >= 1, or inf; None: what `Measure` says. The others' norm is made of their groups' norms.
        clip_value: Clamp every element afterwards, as `ByValue`.
    """

    level = "groups"
    in_place = True
    thresholds: tuple[float | None, ...]
    others: Threshold | None = None
    norm_type: float | None = None
    clip_value: float | None = None

    def check(self) -> None:
        for value in self.thresholds:
            if value is not None:
                checked_threshold(value, "max_norm", infinite=True)
        if self.others is not None:
            checked_threshold(self.others, "max_norm")
        if self.clip_value is not None:
            checked_threshold(self.clip_value, "clip_value")

    def finish_(self, gradients_of: Sequence[Tensor]) -> None:
        if self.clip_value is not None:
            clamp_gradients(gradients_of, self.clip_value)

    def initial(self) -> Mapping[str, Initial]:
        return counting(self.others)

    def decide(self, norms: Norms, state: Mapping[str, Tensor]) -> Decision:
        common, own = self._of_others(norms, at(self.others, state.get("steps"))), self.thresholds
        coefs = [
            common if self._is_other(index) else clip_coefficient(norm, own[index])
            for index, norm in enumerate(norms.groups.unbind())
        ]
        return Decision(torch.stack(coefs), counted(state))

    def shown(self, factors: Tensor, norms: Norms) -> Tensor:
        others = (factor for index, factor in enumerate(factors.unbind()) if self._is_other(index))
        return next(others, torch.ones_like(norms.total))

    def _is_other(self, index: int) -> bool:
        return index >= len(self.thresholds) or self.thresholds[index] is None

    def _of_others(self, norms: Norms, threshold: float | Tensor | None) -> Tensor:
        others = [norm for index, norm in enumerate(norms.groups.unbind()) if self._is_other(index)]
        if threshold is None or not others:
            return torch.ones_like(norms.total)
        p = 2.0 if self.norm_type is None else self.norm_type
        return clip_coefficient(torch.linalg.vector_norm(torch.stack(others), p), threshold)


@dataclass(frozen=True)
class PerParameter(Clip):
    """Every logical parameter is clipped by its own norm; all of its pieces by the same factor.

    Args:
        max_norm: In units of the unscaled gradient; finite, > 0.
        norm_type: p >= 1, or inf; None: what `Measure` says.
    """

    level = "parameters"
    max_norm: Threshold
    norm_type: float | None = None

    def check(self) -> None:
        checked_threshold(self.max_norm, "max_norm")

    def initial(self) -> Mapping[str, Initial]:
        return counting(self.max_norm)

    def decide(self, norms: Norms, state: Mapping[str, Tensor]) -> Decision:
        return Decision(clip_coefficient(norms.parameters, at(self.max_norm, state.get("steps"))), counted(state))


@dataclass(frozen=True)
class Adaptive(Clip):
    """Unit-wise adaptive clipping: a unit's gradient is no longer than a fraction of the unit itself.

        factor = min(1, clipping * max(||w||, eps) / ||g||)        Brock et al. 2021, arXiv:2102.06171

    A unit is a row of the logical tensor (what leads to one output), whoever holds parts of it; a tensor of fewer than two
    dims is one unit.

    Args:
        clipping: The fraction; finite, > 0.
        eps: What a smaller unit counts as, so that weights that begin at zero can leave it.
        unit_dim: The dim along which units lie: 0 for weights [out, in], 1 for [in, out]; or by glob over the names.
    """

    level = "units"
    weights = True
    clipping: float = 0.01
    eps: float = 1e-3
    unit_dim: UnitDim = 0

    norm_type = 2.0

    def check(self) -> None:
        checked_threshold(self.clipping, "clipping")
        checked_threshold(self.eps, "eps")

    def factors(self, norms: Norms) -> Tensor:
        longest = self.clipping * norms.weights.clamp(min=self.eps)
        return (longest / norms.units.clamp(min=1e-6)).clamp(max=1.0)
