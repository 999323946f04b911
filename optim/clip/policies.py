"""What is done with gradients that are too long: one small rule a class.

A rule says at which level it works, and gets the norms that were measured there, of the gradients as they will be stepped
with (unscaled, averaged), in device tensors of the same bits on every rank:

    level          norms.<level>            factors
    "total"        0-dim                    0-dim, folded into the update where the optimizer can
    "groups"       [param groups]           one for each param group
    "parameters"   [logical parameters]     one for each, over all of its pieces
    "units"        [units of all of them]   one for each unit: the slices along a dim, such as rows

A factor multiplies the gradients of what it is the factor of. A step whose total norm is not finite is skipped, whatever a
rule says. Everything that rules need travels in the one packed collective of the step, and nothing is read by the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

import torch
from torch import Tensor

from ..gradients.in_place import clamp_gradients
from ..norm.global_norm import Level, Norms, checked_norm_type
from ..norm.units import UnitDim


class Clip(ABC):
    """A rule; give it as ``max_norm=``. One of your own says its `level` and computes `factors`."""

    level: ClassVar[Level] = "total"
    weights: ClassVar[bool] = False
    """Whether ``norms.weights`` is needed: the norms of the weights themselves, at the same level."""
    in_place: ClassVar[bool] = False
    """Whether `finish_` changes gradients: they are then unscaled and multiplied before it, in a pass of their own."""
    norm_type: float | None = None
    """The p of the norms; None: what `Measure` says."""
    unit_dim: UnitDim = 0
    """At level "units" the dim along which they lie."""

    def check(self) -> None:  # noqa: B027 (a rule without numbers has nothing to check)
        """Raise ValueError for arguments that are out of range; asked on all ranks together, before anything is changed."""

    @abstractmethod
    def factors(self, norms: Norms) -> Tensor | None:
        """What gradients are multiplied by, of the shape of the norms at this level; None: by 1. Host reads: none."""

    def shown(self, factors: Tensor, norms: Norms) -> Tensor:
        """0-dim: what `GradStats.clip_coef` says; the smallest factor."""
        if factors.dim() == 0:
            return factors
        return factors.amin() if factors.numel() else torch.ones_like(norms.total)

    def finish_(self, gradients_of: Sequence[Tensor]) -> None:  # noqa: B027 (most rules have nothing to do here)
        """Change the ``.grad`` of these tensors, in place, after the factors."""


@dataclass(frozen=True)
class ByNorm(Clip):
    """coef = min(1, max_norm / (total_norm + 1e-6))       Pascanu et al. 2013, arXiv:1211.5063

    Args:
        max_norm: In units of the unscaled gradient; finite, > 0.
        norm_type: p >= 1, or inf; None: what `Measure` says.
    """

    max_norm: float
    norm_type: float | None = None

    def check(self) -> None:
        checked_threshold(self.max_norm, "max_norm")

    def factors(self, norms: Norms) -> Tensor:
        return clip_coefficient(norms.total, self.max_norm)


@dataclass(frozen=True)
class ByValue(Clip):
    """Clamp every element to [-clip_value, clip_value], after measuring.

    Args:
        clip_value: In units of the unscaled gradient; finite, > 0.
    """

    in_place: ClassVar[bool] = True
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

    level: ClassVar[Level] = "groups"
    in_place: ClassVar[bool] = True
    thresholds: tuple[float | None, ...]
    others: float | None = None
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

    def factors(self, norms: Norms) -> Tensor:
        common, own = self._of_others(norms), self.thresholds
        coefs = [
            common if index >= len(own) or own[index] is None else clip_coefficient(norm, own[index])
            for index, norm in enumerate(norms.groups.unbind())
        ]
        return torch.stack(coefs)

    def shown(self, factors: Tensor, norms: Norms) -> Tensor:
        return self._of_others(norms)

    def _of_others(self, norms: Norms) -> Tensor:
        own = self.thresholds
        others = [norm for i, norm in enumerate(norms.groups.unbind()) if i >= len(own) or own[i] is None]
        if self.others is None or not others:
            return torch.ones_like(norms.total)
        p = 2.0 if self.norm_type is None else self.norm_type
        return clip_coefficient(torch.linalg.vector_norm(torch.stack(others), p), self.others)


@dataclass(frozen=True)
class PerParameter(Clip):
    """Every logical parameter is clipped by its own norm; all of its pieces by the same factor.

    Args:
        max_norm: In units of the unscaled gradient; finite, > 0.
        norm_type: p >= 1, or inf; None: what `Measure` says.
    """

    level: ClassVar[Level] = "parameters"
    max_norm: float
    norm_type: float | None = None

    def check(self) -> None:
        checked_threshold(self.max_norm, "max_norm")

    def factors(self, norms: Norms) -> Tensor:
        return clip_coefficient(norms.parameters, self.max_norm)


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

    level: ClassVar[Level] = "units"
    weights: ClassVar[bool] = True
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


def clip_coefficient(norm: Tensor, max_norm: float | Tensor | None) -> Tensor:
    """min(1, max_norm / (norm + 1e-6)), elementwise; 0 or NaN where the norm is not finite, and the step is skipped."""
    return torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)


def checked_threshold(value: float, name: str, infinite: bool = False) -> float:
    """``value`` as a float.

    Args:
        infinite: It may be: a param group that is not clipped, nor one of those that are clipped together.
    Raises:
        ValueError: It is not finite and positive.
    """
    value = float(value)
    if not (value > 0 and (infinite or isfinite(value))):
        without = "math.inf: this group is not clipped" if infinite else "None: no clipping"
        raise ValueError(f"{name}={value}: give a finite number > 0, in units of the unscaled gradient ({without})")
    return value


def clip_of(max_norm: float | Clip | None) -> Clip | None:
    """The rule that ``max_norm=`` stands for, checked.

    Raises:
        ValueError: An argument is out of range.
    """
    clip = max_norm if max_norm is None or isinstance(max_norm, Clip) else ByNorm(max_norm)
    if clip is not None:
        clip.check()
        if clip.norm_type is not None:
            checked_norm_type(clip.norm_type)
    return clip
