"""Clip sharded gradients by their global norm or by value; usable alone, as torch's functions are."""

from __future__ import annotations

from math import inf
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from ...parallel.layout.annotation import Annotation, annotate
from ...parallel.layout.spec import P
from ...parallel.mesh.calls import in_call
from ...parallel.mesh.registry import ProcessGroupRegistry, check_registry
from ..gradients.in_place import clamp_each, scale_each
from ..norm.agreement import agreed
from ..norm.entries import entries_of
from ..norm.global_norm import GlobalNorm
from ..norm.norms import Norms, Reduction, checked_norm_type, checked_reduction
from ..norm.plan import ReductionPlan
from ..norm.stats import GradStats
from .given import Given, check_packed, clip_of
from .listed import Listed, Params, Pending, check_gradients, given_in
from .on_list import OnList
from .rule import checked_threshold
from .state import ClipState


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
        return _stats(_measure(Listed.of(given_in(params), registry), registry, norm_type, reduction), None)


@torch.no_grad()
def clip_grad_norm_(
    params: Params,
    max_norm: Given | ClipState,
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
        listed = Listed.of(given, registry)
        if _is_of_total(clip):
            stats = _stats(_measure(listed, registry, norm_type, reduction), clip)
        else:
            lists = _STATES.setdefault(registry, _State()).lists
            if clip not in lists:
                lists[clip] = OnList(listed, registry, clip, norm_type, reduction)
            stats = lists[clip](clip, [param for _, param in given], listed)
        if error_if_nonfinite and stats.found_inf:
            raise RuntimeError(
                f"the gradients' norm of order {float(norm_type)} is {float(stats.total_norm)}, so they can't be clipped, "
                "and were not changed; leave error_if_nonfinite=True out to get it as found_inf, and skip the step then"
            )
        if _is_of_total(clip):
            listed.change(lambda gradients: scale_each(gradients, stats.clip_coef))
    return stats


def _in_use(max_norm: Given | ClipState, reduction: Reduction) -> ClipState:
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
    listed = Listed.of(given_in(params), registry)
    check_gradients(listed, registry)
    listed.change(lambda gradients: clamp_each(gradients, clip_value))


def _measure(listed: Listed, registry: ProcessGroupRegistry, norm_type: float, reduction: Reduction) -> Norms:
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
        self.lists: WeakKeyDictionary[ClipState, OnList] = WeakKeyDictionary()
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
