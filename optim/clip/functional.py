"""Clip sharded gradients by their global norm or by value; usable alone, as torch's functions are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...amp.capture import is_captured
from ...parallel.interop.local_parameters import local_gradients, local_parameters
from ...parallel.layout.annotation import Annotation, annotate
from ...parallel.layout.regions import Region
from ...parallel.layout.spec import P
from ...parallel.mesh.call_tracker import in_call
from ...parallel.mesh.registry import ProcessGroupRegistry, check_registry
from ..gradients.buckets import sync_axes
from ..gradients.in_place import clamp_each, is_complete, keep_complete_marks, scale_each
from ..norm.global_norm import GlobalNorm
from ..norm.measure import GradStats, Norms, Reduction, checked_norm_type, checked_reduction
from ..norm.packed_sum import PackedSum
from ..norm.plan import ReductionPlan, check_dense_real, check_unused, entries_of
from ..norm.plan_agreement import agreed
from .clipper import AgreedThresholds, GradientClipper, GradScaleInfo
from .rule import ClipState, checked_threshold
from .rules import ClipSpec, check_packed, clip_of, planned_for

# Parameters given to a function ---------------------------------------------------------------------------------------

Params = Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
Pending = list[tuple[int, Annotation]]
NamedParam = tuple[str | None, Tensor]


def given_in(params: Params) -> list[NamedParam]:
    """(name, parameter), each parameter once."""
    check_unused(params)
    items: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    if not any(issubclass(kind, tuple) for kind in {*map(type, items)}):
        return [(None, param) for param in {id(param): param for param in items}.values()]
    pairs = [item if isinstance(item, tuple) else (None, item) for item in items]
    return [*{id(param): (name, param) for name, param in pairs}.values()]


@dataclass
class OneShotParams:
    """Parameters, each once: their names, themselves or the local ones of DTensors, their gradients and annotations."""

    names: list[str | None]
    params: list[Tensor]
    gradients: list[Tensor | None]
    annotations: list[Annotation | None]

    @classmethod
    def of(cls, given: Sequence[NamedParam], registry: ProcessGroupRegistry) -> OneShotParams:
        """Raises ValueError: the layout of a DTensor or of its gradient is none that can be worked with."""
        return cls([name for name, _ in given], *local_gradients([param for _, param in given], registry.topology))

    @cached_property
    def pending(self) -> Pending:
        """The positions of those whose gradients may be sums that are still to be made."""
        return [
            (index, annotation)
            for index, annotation in enumerate(self.annotations)
            if annotation is not None and ((spec := annotation.spec).partial or spec.tied)
        ]

    def change(self, change: Callable[[list[Tensor | None]], None]) -> None:
        """Change the gradients in place; sums that have been made stay so."""
        with keep_complete_marks((self.params[i], self.gradients[i]) for i, _ in self.pending):
            change(self.gradients)

    @property
    def sizes(self) -> list[int]:
        """Elements of each gradient; of the parameter where there is none."""
        return [
            (param if grad is None else grad).numel() for param, grad in zip(self.params, self.gradients, strict=True)
        ]

    def plan(self, registry: ProcessGroupRegistry) -> ReductionPlan:
        """As this rank sees it. Raises ValueError, TypeError: as `entries_of` and `ReductionPlan.of`."""
        named = [param if name is None else (name, param) for name, param in zip(self.names, self.params, strict=True)]
        return ReductionPlan.of(entries_of([named], registry.topology), registry.topology, registry.global_rank)


def check_gradients(listed: OneShotParams, registry: ProcessGroupRegistry) -> None:
    """Raise TypeError for a gradient that is sparse or complex, and ValueError for one that is still a pending sum."""
    gradients = [gradient for gradient in listed.gradients if gradient is not None]
    dense = {gradient.layout for gradient in gradients} <= {torch.strided}
    if not dense or any(dtype.is_complex for dtype in {gradient.dtype for gradient in gradients}):
        for index, gradient in enumerate(listed.gradients):
            if gradient is not None:
                check_dense_real(gradient, f"the gradient of {_name(listed, index)}")
    for index, annotation in listed.pending:
        if not is_complete(listed.params[index], listed.gradients[index]):
            over = sync_axes(annotation.spec_on(registry.topology), registry.topology, average_data=False)
            if registry.topology.size(*over) > 1:
                raise ValueError(
                    f"the gradient of {_name(listed, index)} ({annotation.spec}) is still a pending sum over "
                    f"{', '.join(over)}: call sync_gradients(params, registry) after the last backward, or use "
                    "ParallelOptimizer, which does"
                )


def _name(listed: OneShotParams, index: int) -> str:
    annotation = listed.annotations[index]
    return listed.names[index] or (annotation.name if annotation else None) or f"parameter {index}"


# Rules that need single parameters ------------------------------------------------------------------------------------

# A rule that speaks of single parameters, on a list of them that is no optimizer's: ranks agree once what is in it.


class StatefulClipper:
    """Measures the gradients of one list, in one collective, and applies a rule to them.

    Raises, collectives: where it is made, as `agreed`, on every rank.
    """

    def __init__(
        self,
        listed: OneShotParams,
        registry: ProcessGroupRegistry,
        clip: ClipState,
        norm_type: float,
        reduction: Reduction,
    ) -> None:
        def checked_plan() -> ReductionPlan:
            check_gradients(listed, registry)
            return listed.plan(registry)

        plan = planned_for(clip.rule, agreed(checked_plan, registry, names=True), registry)
        clip.bind(plan.parameter_names)
        self.registry, self.key = registry, _key(listed)
        self._annotations = listed.annotations  # their ids are in the key
        no_groups: Any = SimpleNamespace(param_groups=[])
        self.clipping = GradientClipper(
            listed.params,
            _regions(plan),
            plan,
            registry,
            AgreedThresholds((), True),
            no_groups,
            norm_type=norm_type,
            reduction=reduction,
        )

    def __call__(self, clip: ClipState, params: list[Tensor], listed: OneShotParams) -> GradStats:
        """Clip in place, and what was measured. Collectives: one. Host reads: none.

        Args:
            clip: That of the first call.
            params: As they were given, DTensors among them.
            listed: The same, taken apart.
        Raises:
            ValueError, TypeError: On the rank that has another list, or gradients that can't be measured; on the others the
                step is one that is skipped.
        """
        try:
            check_gradients(listed, self.registry)
            if _key(listed) != self.key:
                raise ValueError(
                    f"{type(clip.rule).__name__} speaks of single parameters, and this is another list of them than in the "
                    "first call: give the same one in every call, or make a ClipState for each list"
                )
        except (ValueError, TypeError):
            self._clip(clip, [torch.empty(0)] * len(self._annotations), wrong=True)
            raise
        with local_parameters(params, self.registry.topology) as local:
            return self._clip(clip, local, wrong=False)

    def _clip(self, clip: ClipState, params: list[Tensor], wrong: bool) -> GradStats:
        vote = torch.full((1,), -float(wrong), dtype=torch.float64, device=self.registry.device)
        self.clipping.params = params
        scale_info = GradScaleInfo(PackedSum.of({"bypassed": vote}))
        return self.clipping(clip, scale_info, now=True, captured=is_captured()).stats


def _key(listed: OneShotParams) -> tuple[object, ...]:
    return *map(id, listed.annotations), *listed.sizes


def _regions(plan: ReductionPlan) -> list[Region | None]:
    """For each entry which part of the logical tensor it is."""
    return [
        None
        if entry.full_shape is None
        else Region.of_shard(entry.full_shape, entry.shape, entry.spec, plan.topology, plan.coordinate, entry.name)
        for entry in plan.entries
    ]


# Functions without an optimizer ---------------------------------------------------------------------------------------


def global_norm(
    params: Params,
    registry: ProcessGroupRegistry,
    norm_type: float = 2.0,
    *,
    reduction: Reduction = "packed",
) -> GradStats:
    """The global p-norm of the gradients of ``params``; changes nothing.

    Args:
        params: Declared parameters, or (name, parameter) pairs; ``.grad`` is this rank's piece, None counts as zero.
            They may be other ones on every call and, with ``reduction="packed"``, others on every rank.
        registry: The groups of the mesh that the specs name.
        norm_type: p >= 1, or inf.
        reduction: ``"packed"`` or ``"per_group"``; see `GlobalNorm`.
    Returns:
        GradStats, the same bits on every rank. Averaging over data axes and pending sums are the caller's (or
        `ParallelOptimizer`'s, or `sync_gradients`'s) to make before.
    Raises:
        ValueError: A parameter has no spec or one that does not fit; a gradient is still a pending sum; norm_type < 1.
        TypeError: A complex or sparse gradient. Where ranks are compared, each of these is raised on all of them; in later
            packed calls on its rank alone, and the others' norm is NaN.
    Collectives: one all-reduce over the world (p = inf: one all-gather). On the first call with a registry also a check
        that all ranks declare the same, and with ``"per_group"``, whose collectives follow from what ranks declare, on
        every call. Host reads: those of the check.
    """
    check_registry(registry)
    with in_call(registry, "global_norm"):
        return _stats(_measure(OneShotParams.of(given_in(params), registry), registry, norm_type, reduction), None)


@torch.no_grad()
def clip_grad_norm_(
    params: Params,
    max_norm: ClipSpec | ClipState,
    registry: ProcessGroupRegistry,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    reduction: Reduction = "packed",
) -> GradStats:
    """Clip sharded gradients by their global p-norm, in place.

        coef = min(1, max_norm / (total_norm + 1e-6))

    A norm that is not finite leaves the gradients as they are and is reported by ``found_inf``; don't step then.

    Args:
        params: As for `global_norm`. With a rule that speaks of single parameters the same list in every call.
        max_norm: Threshold in unscaled gradient units; finite, > 0. Or another rule; one that remembers steps, or speaks of
            single parameters, as a `ClipState` that is made once. Where it skips spikes, don't step if ``stats.skipped``.
        error_if_nonfinite: Raise instead, on every rank, which reads the host in every call.
    Returns:
        GradStats with the norm before clipping; 0-dim tensors, the same bits on every rank.
    Raises:
        As `global_norm`; ValueError for a bad max_norm; TypeError for a rule that needs a `ClipState`; RuntimeError for a
            norm that is not finite, if asked for. Nothing is changed then.
    Collectives, host reads: as `global_norm`; in the first call with a `ClipState` also those that agree on names.
    Reference: Pascanu et al. 2013, arXiv:1211.5063.
    """
    clip = _in_use(max_norm, reduction)
    norm_type = norm_type if clip.rule.norm_type is None else clip.rule.norm_type
    check_registry(registry)
    with in_call(registry, "clip_grad_norm_"):
        given = given_in(params)
        listed = OneShotParams.of(given, registry)
        if _is_of_total(clip):
            stats = _stats(_measure(listed, registry, norm_type, reduction), clip)
        else:
            lists = _STATES.setdefault(registry, _State()).lists
            if clip not in lists:
                lists[clip] = StatefulClipper(listed, registry, clip, norm_type, reduction)
            stats = lists[clip](clip, [param for _, param in given], listed)
        if error_if_nonfinite and stats.found_inf:
            raise RuntimeError(
                f"the gradients' norm of order {float(norm_type)} is {float(stats.total_norm)}, so they can't be clipped, "
                "and were not changed; leave error_if_nonfinite=True out to get it as found_inf, and skip the step then"
            )
        if _is_of_total(clip):
            listed.change(lambda gradients: scale_each(gradients, stats.clip_coef))
    return stats


def _in_use(max_norm: ClipSpec | ClipState, reduction: Reduction) -> ClipState:
    """Raises ValueError, TypeError: what was given is out of range, or is to be a `ClipState`."""
    rule = clip_of(max_norm.rule if isinstance(max_norm, ClipState) else max_norm)
    if rule is None:
        raise ValueError("max_norm=None: give a threshold or a rule; global_norm(params, registry) measures only")
    check_packed(rule, reduction)
    if isinstance(max_norm, ClipState):
        return max_norm
    clip = ClipState(rule)
    if rule.initial() or not _is_of_total(clip):
        raise TypeError(
            f"{type(rule).__name__} {'remembers steps' if rule.initial() else 'speaks of single parameters'}: make "
            f"clip = ClipState({type(rule).__name__}(...)) once, and give clip in every call"
        )
    return clip


def _is_of_total(clip: ClipState) -> bool:
    """Whether one factor is made of the total norm alone."""
    rule = clip.rule
    return rule.level == "total" and not (rule.weights or rule.in_place or clip.needs_names)


@torch.no_grad()
def clip_grad_value_(params: Params, clip_value: float, registry: ProcessGroupRegistry) -> None:
    """Clamp every element of the gradients to [-clip_value, clip_value], in place.

    Elements need no collective, but whole gradients: a pending sum must be made first. NaN stays NaN.

    Args:
        params: As for `global_norm`.
        clip_value: Threshold in unscaled gradient units; finite, > 0.
        registry: Tells which gradients may be pending sums.
    Raises:
        ValueError: A gradient is still a pending sum, or clip_value is not finite and positive.
        TypeError: A complex or sparse gradient.
    Collectives: none. Host reads: none.
    """
    checked_threshold(clip_value, "clip_value")
    check_registry(registry)
    listed = OneShotParams.of(given_in(params), registry)
    check_gradients(listed, registry)
    listed.change(lambda gradients: clamp_each(gradients, clip_value))


def _measure(listed: OneShotParams, registry: ProcessGroupRegistry, norm_type: float, reduction: Reduction) -> Norms:
    state = _STATES.setdefault(registry, _State())
    key = (checked_norm_type(norm_type), checked_reduction(reduction), *map(id, listed.annotations), *listed.sizes)

    known = state.norms.get(key)
    if known is not None:
        listed.pending = known.pending  # the annotations are the same, so these are

    def checked_plan() -> ReductionPlan:
        check_gradients(listed, registry)
        return listed.plan(registry)

    def measurer(plan: ReductionPlan) -> GlobalNorm:
        if known is not None:
            return known.norm
        norm = GlobalNorm(plan, registry, norm_type, reduction)
        state.remember(key, _Known(norm, listed.pending, listed.annotations))
        return norm

    # By group, which collectives there are depends on all ranks' lists; whether one has changed only its rank knows.
    if not state.checked or reduction == "per_group":
        return measurer(agreed(checked_plan, registry))(listed.gradients)
    # Packed, later lists are planned without a word to others: those that depend on local data may differ between ranks.
    try:
        check_gradients(listed, registry)
        measure = measurer(listed.plan(registry)) if known is None else known.norm
    except (ValueError, TypeError):
        _measure_nan(registry, norm_type)  # the others, which must not wait, find no norm and clip nothing
        raise
    return measure(listed.gradients)


def _measure_nan(registry: ProcessGroupRegistry, norm_type: float) -> None:
    """Take part in a packed measurement as one who has a gradient of NaN."""
    nan = torch.full((1,), torch.nan, device=registry.device)
    annotate(nan, P(), "nan")
    topology = registry.topology
    plan = ReductionPlan.of(entries_of([[nan]], topology), topology, registry.global_rank)
    GlobalNorm(plan, registry, norm_type)([nan])


class _Known(NamedTuple):
    """A list of gradients that has been measured before. It keeps its annotations alive, whose ids are in its key."""

    norm: GlobalNorm
    pending: Pending
    annotations: list[Annotation | None]


class _State:
    """The lists that a registry has been used with, by what tells them apart."""

    def __init__(self) -> None:
        self.norms: dict[tuple[object, ...], _Known] = {}
        self.lists: WeakKeyDictionary[ClipState, StatefulClipper] = WeakKeyDictionary()
        self.checked = False

    def remember(self, key: tuple[object, ...], known: _Known) -> None:
        """Keep one; lists that change from call to call must not pile up."""
        if len(self.norms) >= 64:
            self.norms.clear()
        self.norms[key] = known
        self.checked = True


_STATES: WeakKeyDictionary[ProcessGroupRegistry, _State] = WeakKeyDictionary()


def _stats(norms: Norms, clip: ClipState | None) -> GradStats:
    finite, coef, spiked = norms.total < inf, torch.ones_like(norms.total), None
    if clip is not None:
        decision = clip.decide(norms)
        clip.remember(decision, finite)
        coef = coef if decision.factors is None else torch.where(finite, decision.factors, coef)
        spiked = decision.spiked(finite)
    return GradStats(norms.total, coef, finite.logical_not().float(), norms.groups, spiked=spiked)
