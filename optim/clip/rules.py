"""The clip rules, those that look at one step and those that remember, and what may be given as ``max_norm=``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isinf
from typing import Literal

import torch
from torch import Tensor

from ...parallel.mesh.registry import ProcessGroupRegistry
from ..gradients.in_place import clamp_gradients
from ..norm.groupings import Named, UnitDim, Units
from ..norm.measure import Norms, checked_norm_type
from ..norm.plan import ReductionPlan
from ..norm.plan_agreement import with_names
from .rule import (
    ByNorm,
    Clip,
    ClipState,
    Decision,
    Initial,
    OfEachParameter,
    Threshold,
    at,
    checked_count,
    checked_decay,
    checked_positive,
    checked_threshold,
    clip_coefficient,
    counted,
    counting,
    shortened,
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
        norm_type: p >= 1, or inf; None: that of the optimizer. The others' norm is made of their groups' norms.
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
        norm_type: p >= 1, or inf; None: that of the optimizer.
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


# Groups of parameters by name -----------------------------------------------------------------------------------------

OfGroup = Threshold | Clip | None
"""What is done with a named group: a threshold of its norm, or a rule for it; None or ``math.inf``: nothing."""


@dataclass(frozen=True, init=False)
class ByName(Clip):
    """Named groups of parameters, each clipped by the norm of all of its logical parameters, whoever holds them.

        ByName({"*.experts.*": 0.5, "mtp*": ZClip(), "*.bias": None}, others=1.0)

    ``max_norm={"*.experts.*": 0.5, "mtp*": ZClip()}`` is short for it, without ``others``. No param groups are needed. The
    first pattern that matches a name has it; one that is the first match of no parameter of the model is an error on
    every rank. `GradStats.named_norms` has the norms, ``clip_coef`` the smallest factor.

    Args:
        groups: By glob over names, as `torch.nn.Module.named_parameters` has them: thresholds, or rules of the level
            "total", which take the group's norm for the total, and remember what they remember of each group apart.
        others: The same for the parameters that no pattern matches, all together.
        norm_type: p >= 1, or inf; None: that of the optimizer.
    """

    level = "named"
    groups: tuple[tuple[str, Clip | None], ...]
    others: Clip | None
    norm_type: float | None

    def __init__(self, groups: Mapping[str, OfGroup], others: OfGroup = None, norm_type: float | None = None) -> None:
        made = tuple((pattern, _rule_of(value)) for pattern, value in groups.items())
        for name, value in (("groups", made), ("others", _rule_of(others)), ("norm_type", norm_type)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "patterns", tuple(pattern for pattern, _ in made))

    def check(self) -> None:
        if not self.groups:
            raise ValueError("there is no named group: give a threshold or a rule by pattern, as {'*.experts.*': 0.5}")
        for pattern, rule in self._all:
            if rule is None:
                continue
            where = f"of {pattern!r}" if pattern else "of the others"
            if rule.level != "total" or rule.in_place or rule.weights or rule.norm_type is not None:
                raise ValueError(
                    f"the rule {where} is {rule!r}: give one of the level 'total' that only multiplies, such as ByNorm or "
                    "ZClip, and the norm_type to ByName"
                )
            try:
                rule.check()
            except (TypeError, ValueError) as error:
                raise type(error)(f"{where}: {error}") from error

    @property
    def _all(self) -> tuple[tuple[str, Clip | None], ...]:
        return *self.groups, ("", self.others)  # nothing is matched by an empty pattern

    def initial(self) -> Mapping[str, Initial]:
        rules = ((pattern, rule) for pattern, rule in self._all if rule is not None)
        return {f"{pattern}/{name}": value for pattern, rule in rules for name, value in rule.initial().items()}

    def decide(self, norms: Norms, state: Mapping[str, Tensor]) -> Decision:
        factors, new, skips = list[Tensor](), dict[str, Tensor](), list[Tensor]()
        one = torch.ones_like(norms.total)
        for (pattern, rule), norm in zip(self._all, norms.named.unbind(), strict=True):
            if rule is None:
                factors.append(one)
                continue
            own = {name: state[f"{pattern}/{name}"] for name in rule.initial()}
            decision = rule.decide(norms._replace(total=norm), own)
            factors.append(one if decision.factors is None else decision.factors)
            new |= {f"{pattern}/{name}": value for name, value in decision.state.items()}
            skips += [] if decision.skip is None else [decision.skip]
        return Decision(torch.stack(factors), new, torch.stack(skips).any() if skips else None)


def _rule_of(value: OfGroup) -> Clip | None:
    if value is None or isinstance(value, Clip):
        return value
    return None if isinstance(value, (int, float)) and isinf(value) and value > 0 else ByNorm(value)


# The argument ``max_norm=`` -------------------------------------------------------------------------------------------

ClipSpec = Threshold | Clip | Mapping[str, OfGroup] | None
"""A threshold of the global norm; another rule; thresholds or rules by pattern (`ByName`); None: measure only."""


def clip_of(max_norm: ClipSpec) -> Clip | None:
    """The rule that ``max_norm=`` stands for, checked.

    Raises:
        ValueError: An argument is out of range.
    """
    clip: Clip | None
    if max_norm is None or isinstance(max_norm, Clip):
        clip = max_norm
    elif isinstance(max_norm, Mapping):
        clip = ByName(max_norm)
    else:
        clip = ByNorm(max_norm)
    if clip is not None:
        clip.check()
        if clip.norm_type is not None:
            checked_norm_type(clip.norm_type)
    return clip


def in_use(max_norm: ClipSpec) -> ClipState | None:
    """The rule, with nothing remembered yet; raises as `clip_of`."""
    clip = clip_of(max_norm)
    return None if clip is None else ClipState(clip)


def planned_for(clip: Clip | None, plan: ReductionPlan, registry: ProcessGroupRegistry) -> ReductionPlan:
    """``plan``, with what the rule needs to know of it.

    Raises:
        ValueError: On every rank: it does not go with a parameter, or no parameter with it.
    Collectives: an object all-gather, where the rule speaks of parameters and their names have not been agreed.
    """
    if clip is None or not ClipState(clip).needs_names:
        return plan
    plan = plan if plan.parameter_names else with_names(plan, registry)
    if clip.level == "units":
        Units.of(plan, (), clip.unit_dim)
    if clip.level == "named":
        Named.of(plan.parameter_names, clip.patterns)
    return plan


def check_packed(clip: Clip | None, reduction: str) -> None:
    """Raise ValueError where a rule needs more than the other reduction measures."""
    if clip is not None and reduction != "packed" and (clip.weights or clip.level == "units"):
        raise ValueError(f"max_norm={clip!r} needs reduction='packed', in which everything travels")


# AdaGC ----------------------------------------------------------------------------------------------------------------


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


# ByPreviousNorm -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByPreviousNorm(Clip):
    """coef_t = min(1, max_norm / (total_norm_(t-1) + 1e-6)), which is known before backward of step t begins.

    The norm of step t is measured all the same, in the same collective: it says whether the step overflowed, and what the
    next one is clipped by. A gradient that grows suddenly is not held back: put it into `SkipSpikes` where that may happen.
    The first step is clipped by its own norm. A step that is skipped leaves the norm that is remembered.

    Args:
        max_norm: As for `ByNorm`.
        norm_type: p >= 1, or inf; None: that of the optimizer.
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


# SkipSpikes -----------------------------------------------------------------------------------------------------------

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
    then: ClipSpec = None
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


# WarmUp ---------------------------------------------------------------------------------------------------------------


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


# ZClip ----------------------------------------------------------------------------------------------------------------


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
