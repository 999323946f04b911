"""The clipping rules, with and without state, and the conversion of the argument ``max_norm=``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isinf
from types import EllipsisType
from typing import Literal

import torch
from torch import Tensor

from ...parallel.mesh.deprecation import renamed_fields
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.text import some
from ..gradients.in_place import clamp_gradients
from ..norm.global_norm import Named, UnitDim, check_glob, units_of
from ..norm.measure import Norms, checked_norm_type, clip_coefficient
from ..norm.plan import ReductionPlan
from ..norm.plan_agreement import with_names
from .base import (
    Clip,
    ClipResult,
    ClipState,
    Initial,
    PerParameterState,
    Threshold,
    bound_factor,
    check_decay,
    check_number_threshold,
    check_positive,
    check_threshold,
    check_whole_number,
    initial_step_count,
    next_step_count,
    resolve_threshold,
)


@dataclass(frozen=True)
class ByNorm(Clip):
    """Clips by the global norm: coef = min(1, max_norm / (total_norm + 1e-6)).

        ParallelOptimizer(adamw, registry, max_norm=ByNorm(1.0, norm_type=1.0))

    Pascanu et al. 2013, arXiv:1211.5063. ``max_norm=1.0`` is short for ``max_norm=ByNorm(1.0)``.

    Args:
        max_norm: The threshold for the norm of the gradients without the loss scale; finite, > 0. Or a function of the
            number of steps that were not skipped, such as `WarmUp`.
        norm_type: p >= 1, or inf. None (default): the ``norm_type`` of the optimizer or of `clip_grad_norm_`.
    """

    max_norm: Threshold
    norm_type: float | None = None

    def check(self) -> None:
        check_threshold(self.max_norm, "max_norm")

    def initial(self) -> Mapping[str, Initial]:
        return initial_step_count(self.max_norm)

    def decide(self, norms: Norms, state: Mapping[str, Tensor]) -> ClipResult:
        return ClipResult(
            clip_coefficient(norms.total, resolve_threshold(self.max_norm, state)), next_step_count(state)
        )


@dataclass(frozen=True)
class ByValue(Clip):
    """Clamps every element of the gradients to [-clip_value, clip_value]. Reported norms are norms before the clamp.

        ParallelOptimizer(adamw, registry, max_norm=ByValue(0.5))

    Args:
        clip_value: The bound of an element of a gradient without the loss scale; finite, > 0.
    """

    in_place = True
    clip_value: float

    def check(self) -> None:
        check_number_threshold(self.clip_value, "clip_value")

    def factors(self, norms: Norms) -> None:
        return None

    def finish_(self, gradients_of: Sequence[Tensor]) -> None:
        clamp_gradients(gradients_of, self.clip_value)


@dataclass(frozen=True)
class ByGroup(Clip):
    """Clips each param group that has a threshold by the norm of the group, and all other groups by their common norm.

        optimizer.param_groups[1]["max_norm"] = 0.5  # ParallelOptimizer then combines its rule into a ByGroup

    `GradStats.clip_coef` is the coefficient of the groups without a threshold; 1 if every group has one. Give
    ``math.inf`` to groups whose optimizer normalises its update (Muon, LAMB). These groups need no clipping, and their
    gradients then do not lower the coefficient of other groups.

    Args:
        thresholds: One threshold per param group. None: the group has no threshold of its own, and is clipped by
            ``others``; so are groups for which the tuple is too short. ``math.inf``: the group is not clipped, and its
            gradients do not enter the common norm.
        others: The threshold for the common norm of all groups without a threshold. None (default): these groups are
            not clipped.
        norm_type: The p of the groups' norms and of the common norm; p >= 1, or inf. None (default): the ``norm_type`` of
            the optimizer or of `clip_grad_norm_`.
        clip_value: Bound of a clamp of every element, as in `ByValue`, after the multiplication by the coefficients. None
            (default): no clamp.
    """

    level = "groups"
    in_place = True
    thresholds: tuple[float | None, ...]
    others: Threshold | None = None
    norm_type: float | None = None
    clip_value: float | None = None

    def check(self) -> None:
        for index, value in enumerate(self.thresholds):
            if value is not None:
                check_number_threshold(value, f"ByGroup thresholds[{index}]", infinite=True)
        if self.others is not None:
            check_threshold(self.others, "ByGroup others")
        if self.clip_value is not None:
            check_number_threshold(self.clip_value, "clip_value")

    def finish_(self, gradients_of: Sequence[Tensor]) -> None:
        if self.clip_value is not None:
            clamp_gradients(gradients_of, self.clip_value)

    def initial(self) -> Mapping[str, Initial]:
        return initial_step_count(self.others)

    def decide(self, norms: Norms, state: Mapping[str, Tensor]) -> ClipResult:
        common, own = self._common_coef(norms, resolve_threshold(self.others, state)), self.thresholds
        coefs = [
            common if self._is_other(index) else clip_coefficient(norm, own[index])
            for index, norm in enumerate(norms.groups.unbind())
        ]
        return ClipResult(torch.stack(coefs), next_step_count(state))

    def reported_coef(self, factors: Tensor, norms: Norms) -> Tensor:
        others = (factor for index, factor in enumerate(factors.unbind()) if self._is_other(index))
        return next(others, torch.ones_like(norms.total))

    def _is_other(self, index: int) -> bool:
        return index >= len(self.thresholds) or self.thresholds[index] is None

    def _common_coef(self, norms: Norms, threshold: float | Tensor | None) -> Tensor:
        others = [norm for index, norm in enumerate(norms.groups.unbind()) if self._is_other(index)]
        if threshold is None or not others:
            return torch.ones_like(norms.total)
        return clip_coefficient(torch.linalg.vector_norm(torch.stack(others), norms.norm_type), threshold)


@dataclass(frozen=True)
class PerParameter(Clip):
    """Clips every logical parameter by its own norm. All shards of a parameter get the same factor.

        ParallelOptimizer(adamw, registry, max_norm=PerParameter(0.1))

    Args:
        max_norm: The threshold for the norm of a parameter's gradient without the loss scale; finite, > 0. Or a
            function of the number of steps that were not skipped, such as `WarmUp`.
        norm_type: p >= 1, or inf. None (default): the ``norm_type`` of the optimizer or of `clip_grad_norm_`.
    """

    level = "parameters"
    max_norm: Threshold
    norm_type: float | None = None

    def check(self) -> None:
        check_threshold(self.max_norm, "max_norm")

    def initial(self) -> Mapping[str, Initial]:
        return initial_step_count(self.max_norm)

    def decide(self, norms: Norms, state: Mapping[str, Tensor]) -> ClipResult:
        return ClipResult(
            clip_coefficient(norms.parameters, resolve_threshold(self.max_norm, state)), next_step_count(state)
        )


@dataclass(frozen=True)
class Adaptive(Clip):
    """Clips the gradient of each row of a weight to a fraction of the norm of the row (adaptive gradient clipping).

        ParallelOptimizer(sgd, registry, max_norm=Adaptive(0.01))

    ```text
    factor = min(1, clipping * max(||w||, eps) / max(||g||, 1e-6))        Brock et al. 2021, arXiv:2102.06171
    ```

    ``w`` and ``g`` are the weights and the gradient of one unit. By default a unit is a row of the full tensor: the
    weights of one output. Its elements may be distributed over several ranks. A tensor of fewer than two dims is one
    unit.

    Args:
        clipping: The fraction; finite, > 0. Default: 0.01.
        eps: Lower bound of ||w||, so that weights that start at zero can change; finite, > 0. Default: 1e-3.
        unit_dim: The dim along which a tensor is divided into units: 0 (default) for weights [out, in], 1 for [in,
            out]. Or a dict from globs over parameter names to dims.
    """

    level = "units"
    weights = True
    clipping: float = 0.01
    eps: float = 1e-3
    unit_dim: UnitDim = 0

    norm_type = 2.0

    def check(self) -> None:
        check_positive(self.clipping, "clipping")
        check_positive(self.eps, "eps")
        dims = self.unit_dim if isinstance(self.unit_dim, Mapping) else {"*": self.unit_dim}
        for pattern, dim in dims.items():
            check_glob(pattern, "a key of unit_dim=", "write one key per glob, such as {'*.conv.*': 1}")
            if not isinstance(dim, int) or isinstance(dim, bool):
                raise TypeError(
                    f"unit_dim= has the {type(dim).__name__} {dim!r} for {pattern!r}, expected one dim (an integer); write "
                    "unit_dim=1, or a dict such as unit_dim={'*.conv.*': 1}"
                )

    def factors(self, norms: Norms) -> Tensor:
        longest = self.clipping * norms.weights.clamp(min=self.eps)
        return (longest / norms.units.clamp(min=1e-6)).clamp(max=1.0)


# Groups of parameters by name -----------------------------------------------------------------------------------------

OfGroup = Threshold | Clip | None
"""The clipping of a named group: a threshold for its norm, or a rule. None or ``math.inf``: the group is not clipped."""


@dataclass(frozen=True, init=False)
class ByName(Clip):
    """Clips named groups of parameters, each by the norm of all logical parameters in it.

        ByName({"*.experts.*": 0.5, "mtp*": ZClip(), "*.bias": None}, others=1.0)

    ``max_norm={"*.experts.*": 0.5, "*": 1.0}`` is short for ``ByName`` of this dict without ``others``. Named groups
    are independent of param groups. A parameter belongs to the first pattern that matches its name. A pattern that is
    the first match of no parameter is an error on every rank. `GradStats.named_norms` has the norm per pattern, and
    `GradStats.clip_coef` is the smallest factor.

    Args:
        groups: A dict from globs over the names of `torch.nn.Module.named_parameters` to thresholds or rules. None or
            ``math.inf``: the group is not clipped. A rule must have level "total", must not clamp (`ByValue`) or need norms
            of weights, and must have no ``norm_type``. It receives the group's norm as the total norm, and has a separate
            state per group.
        others: The threshold or rule for all parameters that no pattern matches. None: these parameters are not clipped.
            The default ``...`` requires a matching pattern for every parameter; else ValueError is raised on every rank.
        norm_type: p >= 1, or inf. None (default): the ``norm_type`` of the optimizer or of `clip_grad_norm_`.
    """

    level = "named"
    groups: tuple[tuple[str, Clip | None], ...]
    others: Clip | EllipsisType | None
    norm_type: float | None

    def __init__(
        self, groups: Mapping[str, OfGroup], others: OfGroup | EllipsisType = ..., norm_type: float | None = None
    ) -> None:
        if not isinstance(groups, Mapping):
            raise TypeError(
                f"the groups of ByName are a {type(groups).__name__}, expected a dict from globs to thresholds or rules; "
                "write ByName({'*.experts.*': 0.5, '*': 1.0})"
            )
        made = tuple((pattern, _to_rule(value)) for pattern, value in groups.items())
        rule = others if isinstance(others, EllipsisType) else _to_rule(others)
        for name, value in (("groups", made), ("others", rule), ("norm_type", norm_type)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "patterns", tuple(pattern for pattern, _ in made))

    def check(self) -> None:
        if not self.groups:
            raise ValueError(
                "ByName has no groups: give a threshold or a rule per pattern, such as {'*.experts.*': 0.5}"
            )
        for pattern, rule in self._all:
            check_glob(pattern, "a key of max_norm=", "write one key per glob, such as {'*.experts.*': 0.5, '*': 1.0}")
            if rule is None:
                continue
            where = f"the rule of {pattern!r}" if pattern else "the rule of others="
            if rule.level != "total" or rule.in_place or rule.weights or rule.norm_type is not None:
                raise ValueError(
                    f"{where} is {rule!r}: give a rule without norm_type that multiplies all gradients by one factor, such "
                    "as ByNorm(1.0) or ZClip(), and set norm_type in ByName(..., norm_type=...)"
                )
            try:
                rule.check()
            except (TypeError, ValueError) as error:
                raise type(error)(f"{where}: {error}") from error

    @property
    def _all(self) -> tuple[tuple[str, Clip | None], ...]:
        others = None if isinstance(self.others, EllipsisType) else self.others
        return *self.groups, ("", others)  # "" stands for others=: as a pattern it matches no name

    @property
    def unclipped(self) -> tuple[str, ...]:
        """Return the patterns that are not clipped, and ``"others"`` if parameters without a pattern are not clipped."""
        others = ("others",) if self.others is None else ()
        return *(pattern for pattern, rule in self.groups if rule is None), *others

    def check_names(self, names: Sequence[str]) -> None:
        """Check the patterns against ``names``, the names of all logical parameters.

        Raises:
            ValueError: A pattern is the first match of no name; or no pattern matches a name, and `others` was not given.
        """
        named = Named.of(names, self.patterns)
        if not isinstance(self.others, EllipsisType):
            return
        left = [name for name, group in zip(names, named.groups, strict=True) if group == len(self.patterns)]
        if left:
            raise ValueError(
                f"no pattern of max_norm={{{', '.join(f'{pattern!r}: ...' for pattern in self.patterns)}}} matches "
                f"{some(left)} ({len(left)} of {len(names)} parameters): add '*' with a threshold for these parameters, or "
                "'*': None to leave them unclipped"
            )

    def initial(self) -> Mapping[str, Initial]:
        rules = ((pattern, rule) for pattern, rule in self._all if rule is not None)
        return {f"{pattern}/{name}": value for pattern, rule in rules for name, value in rule.initial().items()}

    def decide(self, norms: Norms, state: Mapping[str, Tensor]) -> ClipResult:
        factors, results, one = list[Tensor](), list[tuple[str, ClipResult]](), torch.ones_like(norms.total)
        for (pattern, rule), norm in zip(self._all, norms.named.unbind(), strict=True):
            if rule is None:
                factors.append(one)
                continue
            own = {name: state[f"{pattern}/{name}"] for name in rule.initial()}
            decision = rule.decide(norms._replace(total=norm), own)
            factors.append(one if decision.factors is None else decision.factors)
            results.append((pattern, decision))
        skips = [decision.skip for _, decision in results if decision.skip is not None]
        skip, new = torch.stack(skips).any() if skips else None, dict[str, Tensor]()
        for pattern, decision in results:
            named = {f"{pattern}/{name}": value for name, value in decision.state.items()}
            if skip is not None:  # a group whose own rule does not skip the step keeps its state if another rule does
                keeps = skip if decision.skip is None else skip & ~decision.skip
                named = {name: torch.where(keeps, state.get(name, value), value) for name, value in named.items()}
            new |= named
        return ClipResult(torch.stack(factors), new, skip)


def _to_rule(value: OfGroup) -> Clip | None:
    if value is None or isinstance(value, Clip):
        return value
    return None if isinstance(value, (int, float)) and isinf(value) and value > 0 else ByNorm(value)


# The argument ``max_norm=`` -------------------------------------------------------------------------------------------

ClipSpec = Threshold | Clip | Mapping[str, OfGroup] | None
"""The types of ``max_norm=``: a threshold of the global norm, a rule, or a dict for `ByName`. None: no clipping."""


def clip_of(max_norm: ClipSpec) -> Clip | None:
    """Return the checked rule that the argument ``max_norm=`` describes; None if it is None."""
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
    clip = clip_of(max_norm)
    return None if clip is None else ClipState(clip)


def planned_for(clip: Clip | None, plan: ReductionPlan, registry: ProcessGroupRegistry) -> ReductionPlan:
    """Return ``plan``, with parameter names if the rule needs them, after a check that the rule supports the parameters.

    On every rank, it raises ValueError if the rule does not support a parameter, if one of its patterns is the first
    match of no parameter, or if a `ByName` without ``others`` has no pattern for a parameter.
    Collectives: an object all-gather, if the rule needs parameter names and ``plan`` has none; none with one rank.
    """
    if clip is None or not ClipState(clip).needs_names:
        return plan
    plan = plan if plan.parameter_names else with_names(plan, registry)
    if clip.level == "units":
        units_of(plan, clip.unit_dim)
    clip.check_names(plan.parameter_names)
    return plan


def check_packed(clip: Clip | None, reduction: str) -> None:
    """Raise ValueError if ``reduction`` is not ``"packed"`` and the rule needs norms of units or of weights."""
    if clip is not None and reduction != "packed" and (clip.weights or clip.level == "units"):
        raise ValueError(f"max_norm={clip!r} needs norms that only reduction='packed' computes: leave reduction= out")


# AdaGC ----------------------------------------------------------------------------------------------------------------


@renamed_fields(times="factor")
@dataclass(frozen=True)
class AdaGC(Clip):
    """Clips each parameter's gradient to ``factor`` times a running mean: the mean norm of its earlier clipped gradients.

        ParallelOptimizer(adamw, registry, max_norm=AdaGC())

    ```text
    in the first ``warm_up`` steps:   h_t = min(1, max_norm / total_norm)
                                      mean[i] <- min(mean[i], h_t ||g_i||)
    afterwards:                       h_t[i] = min(1, factor mean[i] / ||g_i||)
                                      mean[i] <- decay mean[i] + (1 - decay) h_t[i] ||g_i||
                                                         Wang et al. 2025, arXiv:2502.11034
    ```

    ``g_i`` is the gradient of a logical parameter; all of its shards get the factor ``h_t[i]``. A gradient norm of 0, such
    as the norm of an unused parameter, does not change the mean, because a mean of 0 would stay 0. If a parameter has no
    gradient in the warm-up, its first gradient is treated as in the warm-up. Skipped steps do not change the state.

    Args:
        max_norm: The threshold for the total norm in the warm-up; finite, > 0. Default: 1.
        factor: The bound of a gradient's norm, as a multiple of the mean; finite, > 0. Default: 1.05.
        decay: The decay of the mean; >= 0, < 1. Default: 0.98.
        warm_up: Steps of the warm-up; >= 1. Default: 100.
    """

    level = "parameters"
    max_norm: float = 1.0
    factor: float = 1.05
    decay: float = 0.98
    warm_up: int = 100

    def check(self) -> None:
        check_number_threshold(self.max_norm, "max_norm")
        check_positive(self.factor, "factor")
        check_decay(self.decay, "decay")
        check_whole_number(self.warm_up, "warm_up", 1)

    def initial(self) -> Mapping[str, Initial]:
        return {"steps": 0.0, "mean": PerParameterState(inf)}

    def decide(self, norms: Norms, state: Mapping[str, Tensor]) -> ClipResult:
        norm, steps, mean = norms.parameters, state["steps"], state["mean"]
        warms_up = (steps < self.warm_up) | mean.isinf()
        own = bound_factor(norm, self.factor * mean)
        factors = torch.where(warms_up, bound_factor(norms.total, self.max_norm), own)
        clipped = factors * norm
        new = torch.where(warms_up, torch.minimum(mean, clipped), self.decay * mean + (1 - self.decay) * clipped)
        return ClipResult(factors, {"steps": steps + 1, "mean": torch.where(norm > 0, new, mean)})


# ByPreviousNorm -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByPreviousNorm(Clip):
    """Clips by the norm of the previous step: coef_t = min(1, max_norm / (total_norm_(t-1) + 1e-6)).

        ParallelOptimizer(adamw, registry, max_norm=ByPreviousNorm(1.0))

    The coefficient does not depend on the gradients of step t. The norm of step t is still measured, with the same
    collective as for other rules. It is used for overflow detection and for clipping in step t + 1. A spike of the norm
    is not clipped in its own step: wrap this rule in `SkipSpikes` if spikes may happen. The first step, and a step
    after a norm of 0, is clipped by its own norm. A skipped step does not change the stored norm.

    Args:
        max_norm: The threshold for the norm of the gradients without the loss scale; finite, > 0. Or a function of the
            number of steps that were not skipped, such as `WarmUp`.
        norm_type: p >= 1, or inf. None (default): the ``norm_type`` of the optimizer or of `clip_grad_norm_`.
    """

    max_norm: Threshold
    norm_type: float | None = None

    def check(self) -> None:
        check_threshold(self.max_norm, "max_norm")

    def initial(self) -> Mapping[str, Initial]:
        return {"norm": 0.0, **initial_step_count(self.max_norm)}

    def decide(self, norms: Norms, state: Mapping[str, Tensor]) -> ClipResult:
        before = torch.where(state["norm"] > 0, state["norm"], norms.total)
        factor = clip_coefficient(before, resolve_threshold(self.max_norm, state))
        return ClipResult(factor, {"norm": norms.total, **next_step_count(state)})


# SkipSpikes -----------------------------------------------------------------------------------------------------------


class _NoClipping(Clip):
    """The inner rule of `SkipSpikes` without ``inner``."""

    def factors(self, norms: Norms) -> None:
        return None


_NO_CLIPPING = _NoClipping()
_COPIED_FROM_INNER = ("level", "patterns", "weights", "in_place", "norm_type", "unit_dim")
_INNER = "then/"  # prefix of the inner rule's states, in checkpoints too


@renamed_fields(times="factor", then="inner", of="statistic")
@dataclass(frozen=True)
class SkipSpikes(Clip):
    """Skips the step on every rank if the total norm is larger than ``factor`` times the median of the last total norms.

        ParallelOptimizer(adamw, registry, max_norm=SkipSpikes(factor=4.0, inner=1.0))

    Such a norm is called a spike. If the median is 0, no step is skipped. A skipped step leaves weights and optimizer
    states bitwise unchanged. The loss scale is not reduced, because a spike is not an overflow. `GradStats.spiked` and
    `GradStats.skipped` report the skip, and `ParallelOptimizer.skipped_steps` counts it. Schedules treat the step like
    every other skipped step. The limit of ``on_nonfinite=Skip(...)`` on consecutive skipped steps does not count
    spikes.

    The rule stores the last ``window`` norms. In place of the norm of a spike it stores the threshold, ``factor`` times
    the median, so that one spike changes the median little. If all norms stay at a higher level, the median rises,
    until steps are applied again.

    Args:
        factor: The threshold, as a multiple of the median; finite, > 1. Default: 4.
        inner: The clipping of steps that are not skipped: a rule, a threshold, or a dict as for `ByName`. A spike does not
            change the state of this rule. None (default): no clipping.
        statistic: ``"median"`` (default); or ``"mean"``, to use the mean in place of the median.
        window: Number of last norms that are stored; >= 1. Default: 128.
        warm_up: No step is skipped until this many norms are stored; >= 1, at most ``window``. Default: 16.
    """

    factor: float = 4.0
    inner: ClipSpec = None
    statistic: Literal["median", "mean"] = "median"
    window: int = 128
    warm_up: int = 16

    def __post_init__(self) -> None:
        inner = clip_of(self.inner)
        object.__setattr__(self, "inner", inner)
        for name in _COPIED_FROM_INNER if inner is not None else ():  # without ``inner``, a subclass may set them
            object.__setattr__(self, name, getattr(inner, name))

    def check(self) -> None:
        check_positive(self.factor, "factor")
        if self.factor <= 1:
            raise ValueError(
                f"factor={self.factor}: give a number > 1; otherwise about half of the steps or more would be skipped"
            )
        if self.statistic not in ("median", "mean"):
            raise ValueError(f"statistic={self.statistic!r}: give 'median' or 'mean'")
        check_whole_number(self.window, "window", 1)
        check_whole_number(self.warm_up, "warm_up", 1)
        if self.warm_up > self.window:
            raise ValueError(
                f"warm_up={self.warm_up} and window={self.window}: the window never has {self.warm_up} norms; give a "
                f"warm_up of at most {self.window}, or a longer window"
            )

    def initial(self) -> Mapping[str, Initial]:
        inner = {_INNER + name: value for name, value in self._inner.initial().items()}
        return {"steps": 0.0, "norms": [inf] * self.window, **inner}

    def decide(self, norms: Norms, state: Mapping[str, Tensor]) -> ClipResult:
        norm, steps, last = norms.total, state["steps"], state["norms"]
        bound = self.factor * self._statistic(last, steps)
        spike = (steps >= self.warm_up) & (bound > 0) & (norm > bound)
        here = torch.arange(self.window, device=last.device) == torch.remainder(steps, self.window)
        new = {"steps": steps + 1, "norms": torch.where(here, torch.where(spike, bound, norm), last)}
        own = {name: state[_INNER + name] for name in self._inner.initial()}
        result = self._inner.decide(norms, own)
        new |= {_INNER + name: torch.where(spike, own[name], value) for name, value in result.state.items()}
        return ClipResult(result.factors, new, spike if result.skip is None else spike | result.skip)

    def check_names(self, names: Sequence[str]) -> None:
        self._inner.check_names(names)

    @property
    def unclipped(self) -> tuple[str, ...]:
        return self._inner.unclipped

    def reported_coef(self, factors: Tensor, norms: Norms) -> Tensor:
        return self._inner.reported_coef(factors, norms)

    def finish_(self, gradients_of: Sequence[Tensor]) -> None:
        self._inner.finish_(gradients_of)

    @property
    def _inner(self) -> Clip:
        assert self.inner is None or isinstance(self.inner, Clip), "__post_init__ has converted it"
        return _NO_CLIPPING if self.inner is None else self.inner

    def _statistic(self, last: Tensor, steps: Tensor) -> Tensor:
        """Return the median or mean of the stored norms ``last``, 0-dim. Unused elements are inf and are sorted last."""
        count = steps.clamp(min=1, max=self.window)
        ordered = last.sort().values
        if self.statistic == "mean":
            there = torch.arange(self.window, device=last.device) < count
            return torch.where(there, ordered, torch.zeros_like(ordered)).sum() / count
        middle = torch.stack([torch.floor((count - 1) / 2), torch.floor(count / 2)]).long()
        return ordered.gather(0, middle).mean()


# WarmUp ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WarmUp:
    """A threshold that changes linearly over the first steps.

        ParallelOptimizer(adamw, registry, max_norm=WarmUp(10.0, 1.0, steps=1000))

    ```text
    threshold = start + (end - start) * min(1, steps taken / steps)
    ```

    ``steps taken`` is the number of steps that were not skipped. A rule that accepts a `WarmUp` accepts any
    function that maps this number to a threshold, both as 0-dim tensors.

    Args:
        start: The first threshold, for a norm of gradients without the loss scale; finite, > 0.
        end: The last threshold; finite, > 0.
        steps: Number of steps until the threshold is ``end``; >= 1.
    """

    start: float
    end: float
    steps: int

    def check(self) -> None:
        """Raise ValueError if an argument is out of range; TypeError if ``start`` or ``end`` is not a number."""
        check_positive(self.start, "WarmUp start")
        check_positive(self.end, "WarmUp end")
        check_whole_number(self.steps, "WarmUp steps", 1)

    def __call__(self, taken: Tensor) -> Tensor:
        return self.start + (self.end - self.start) * (taken / self.steps).clamp(max=1.0)


# ZClip ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ZClip(Clip):
    """Clips a total norm that is more than ``z`` standard deviations above the running mean of earlier total norms.

        ParallelOptimizer(adamw, registry, max_norm=ZClip())

    ```text
    z_t = (g_t - mean) / sqrt(var)                       g_t: the total norm
    c_t = mean + z^2 / z_t sqrt(var)  if z_t > z, else g_t          reciprocal clipping
    mean <- decay mean + (1 - decay) c_t
    var  <- decay var  + (1 - decay) (c_t - mean)^2      with the new mean
                                                         Kumar et al. 2025, arXiv:2504.02507
    ```

    ``c_t`` is the norm after clipping; if z_t > z, the larger g_t, the smaller c_t. In the first ``warm_up`` steps only
    ``max_norm`` clips, and the mean and variance are the population mean and variance of all norms so far, as in the
    authors' code. The norms of skipped steps do not enter the mean and variance.

    Args:
        z: The threshold of the z-score; > 0. Default: 2.5.
        decay: The decay of the exponential mean and variance; >= 0, < 1. Default: 0.97.
        warm_up: Steps of the warm-up; >= 2. Default: 25.
        max_norm: An additional threshold for the norm in every step, with the coefficient min(1, max_norm /
            total_norm). A number, finite, > 0; or a function, such as `WarmUp`. It has no effect on the mean and
            variance, which are computed from c_t. None (default): no additional threshold.
    """

    z: float = 2.5
    decay: float = 0.97
    warm_up: int = 25
    max_norm: Threshold | None = None

    def check(self) -> None:
        check_positive(self.z, "z")
        check_decay(self.decay, "decay")
        check_whole_number(self.warm_up, "warm_up", 2)
        if self.max_norm is not None:
            check_threshold(self.max_norm, "max_norm")

    def initial(self) -> Mapping[str, Initial]:
        return {"steps": 0.0, "mean": 0.0, "var": 0.0}

    def decide(self, norms: Norms, state: Mapping[str, Tensor]) -> ClipResult:
        norm, steps, mean, var = norms.total, state["steps"], state["mean"], state["var"]
        warmed_up, above = steps >= self.warm_up, norm - mean
        spike = warmed_up & (above > self.z * var.sqrt())
        bound = torch.where(spike, mean + self.z**2 * var / above, norm)
        most = resolve_threshold(self.max_norm, state)
        factor = bound_factor(norm, bound if most is None else torch.clamp(bound, max=most))
        # During warm-up the n-th norm gets weight 1 / n, which gives the plain mean; afterwards 1 - decay.
        weight = torch.where(warmed_up, 1 - self.decay, 1 / (steps + 1))
        new = mean + weight * (bound - mean)
        from_new = torch.where(warmed_up, bound - new, bound - mean)
        return ClipResult(
            factor,
            {"steps": steps + 1, "mean": new, "var": var + weight * ((bound - new) * from_new - var)},
        )
