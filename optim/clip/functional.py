"""Measure and clip sharded gradients, as torch's functions in `torch.nn.utils` do, without a `ParallelOptimizer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf, isfinite
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...amp.capture import is_captured
from ...parallel.interop.inferred_registry import registry_of_meshes
from ...parallel.interop.local_parameters import local_gradients, local_parameters
from ...parallel.layout.annotation import Annotation, annotate
from ...parallel.layout.spec import P
from ...parallel.mesh.call_tracker import track_call
from ...parallel.mesh.registry import ProcessGroupRegistry, check_registry
from ..gradients.buckets import sync_axes
from ..gradients.in_place import clamp_each, distinct, is_complete, keep_complete_marks, scale_each, separate_gradients
from ..norm.global_norm import GlobalNorm
from ..norm.measure import GradStats, Norms, Reduction, checked_norm_type, checked_reduction
from ..norm.packed_sum import PackedSum
from ..norm.plan import ReductionPlan, check_dense_real, check_unused, entries_of
from ..norm.plan_agreement import agreed
from ..norm.replicas import BROADCAST, ReplicaCheck, ReplicaMismatchError, advice_on
from .base import ClipState, check_number_threshold
from .clipper import GradientClipper, GradScaleInfo
from .rules import ClipSpec, check_packed, clip_of, planned_for

# Parameters given to a function ---------------------------------------------------------------------------------------

Params = nn.Module | Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
Pending = list[tuple[int, Annotation]]
NamedParam = tuple[str | None, Tensor]


def unique_params(params: Params) -> list[NamedParam]:
    """Return (name, parameter) pairs, with each parameter once. The name is None if ``params`` has none for it."""
    if isinstance(params, nn.Module):
        return list(params.named_parameters())
    check_unused(params)
    given: Any = params
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"params is {given!r}; give a module, parameters, or (name, parameter) pairs")
    items: list[Any] = [given] if isinstance(given, Tensor) else list(given)
    kinds = {*map(type, items)}
    if not any(issubclass(kind, tuple) for kind in kinds):
        _check_tensors(kinds)
        return [(None, param) for param in {id(param): param for param in items}.values()]
    pairs = [item if isinstance(item, tuple) else (None, item) for item in items]
    wrong = next((pair for pair in pairs if len(pair) != 2), None)
    if wrong is not None:
        raise ValueError(f"params has a tuple of {len(wrong)} items; give (name, parameter) pairs")
    _check_tensors({type(param) for _, param in pairs})
    return [*{id(param): (name, param) for name, param in pairs}.values()]


def _check_tensors(kinds: set[type]) -> None:
    if wrong := [kind.__name__ for kind in kinds if not issubclass(kind, Tensor)]:
        raise TypeError(
            f"params has an item of type {wrong[0]} where a parameter is expected; give a module, parameters, or pairs "
            "(name, parameter)"
        )


@dataclass
class OneShotParams:
    """The parameters and gradients of one call of a function such as `clip_grad_norm_`.

    ``params`` and ``gradients`` have local tensors in place of DTensors. An annotation is None for a plain parameter that
    was not declared; for a DTensor it also comes from the placements.
    ``known_sizes`` is the result of `sizes`, if all gradients are known to be dense and real. With
    ``undeclared_are_replicas``, undeclared parameters count as replicated over all axes for which they have no
    placement.
    """

    given: Sequence[NamedParam]
    params: list[Tensor]
    gradients: list[Tensor | None]
    annotations: list[Annotation | None]
    known_sizes: Sequence[int] | None = None
    undeclared_are_replicas: bool = False

    @classmethod
    def of(
        cls, given: Sequence[NamedParam], registry: ProcessGroupRegistry, undeclared_are_replicas: bool = False
    ) -> OneShotParams:
        """Return the `OneShotParams` of the pairs ``given``.

        With ``undeclared_are_replicas``, partial gradients of DTensors are replaced by their sums.
        It raises ValueError for an unsupported layout of a DTensor or its gradient.
        Collectives: with ``undeclared_are_replicas``, one or more per partial gradient of a DTensor; else none.
        """
        params = [param for _, param in given]
        local = local_gradients(params, registry.topology, sum_partial=undeclared_are_replicas)
        return cls(given, *local, undeclared_are_replicas)

    @cached_property
    def pending(self) -> Pending:
        return [
            (index, annotation)
            for index, annotation in enumerate(self.annotations)
            if annotation is not None and ((spec := annotation.spec).partial or spec.tied)
        ]

    def change(self, change: Callable[[list[Tensor | None]], None]) -> None:
        """Call ``change(gradients)``, which writes to the gradients in place.

        Partial and tied gradients that are marked as already summed over ranks (`mark_complete`) stay marked.
        """
        with keep_complete_marks((self.params[i], self.gradients[i]) for i, _ in self.pending):
            change(self.gradients)

    @property
    def sizes(self) -> Sequence[int]:
        """Return one number of elements per parameter: of its gradient, or of the parameter if it has no gradient."""
        if self.known_sizes is not None:
            return self.known_sizes
        return [
            (param if grad is None else grad).numel() for param, grad in zip(self.params, self.gradients, strict=True)
        ]

    def plan(self, registry: ProcessGroupRegistry) -> ReductionPlan:
        named = [param if name is None else (name, param) for name, param in self.given]
        entries = entries_of([named], registry.topology, undeclared_are_replicas=self.undeclared_are_replicas)
        return ReductionPlan.of(entries, registry.topology, registry.global_rank)


def check_gradients(listed: OneShotParams, registry: ProcessGroupRegistry) -> None:
    """Raise TypeError if a gradient is sparse or complex, and ValueError if a partial gradient was not summed yet."""
    for index, gradient in enumerate(listed.gradients if listed.known_sizes is None else ()):
        if gradient is not None and (gradient.layout != torch.strided or gradient.is_complex()):
            check_dense_real(gradient, f"the gradient of {_name(listed, index)}")
    for index, annotation in listed.pending:
        if not is_complete(listed.params[index], listed.gradients[index]):
            over = sync_axes(annotation.spec_on(registry.topology), registry.topology, average_data=False)
            if registry.topology.size(*over) > 1:
                raise ValueError(
                    f"the gradient of {_name(listed, index)} ({annotation.spec}) is partial: it must still be summed over "
                    f"{', '.join(over)}. Call sync_gradients(params, registry) after the last backward, or use "
                    "ParallelOptimizer, whose step sums it"
                )


def _checked_plan(listed: OneShotParams, registry: ProcessGroupRegistry) -> ReductionPlan:
    check_gradients(listed, registry)
    return listed.plan(registry)


def _name(listed: OneShotParams, index: int) -> str:
    annotation = listed.annotations[index]
    return listed.given[index][0] or (annotation.name if annotation else None) or f"parameter {index}"


# Rules that distinguish parameters ------------------------------------------------------------------------------------

# A rule with factors per parameter, named group or unit needs a plan, which assigns shards to logical parameters. A
# `ParallelOptimizer` has a plan. `clip_grad_norm_` makes one in the first call with a `ClipState`, and compares it over
# all ranks.


class StatefulClipper:
    """Clips one list of parameters, call by call, with a rule that does more than multiply all gradients by one factor.

    The constructor raises on every rank, as `agreed` and `planned_for` do, and issues their collectives.
    Host synchronization: yes, in the constructor.
    """

    def __init__(
        self,
        listed: OneShotParams,
        registry: ProcessGroupRegistry,
        clip: ClipState,
        norm_type: float,
        reduction: Reduction,
    ) -> None:
        plan = planned_for(clip.rule, agreed(partial(_checked_plan, listed, registry), registry, names=True), registry)
        clip.bind(plan.parameter_names)
        self.registry, self.key, self.options = registry, _key(listed), (norm_type, reduction)
        self._annotations = listed.annotations  # keeps the objects alive whose ids are in the key
        self.clipping = GradientClipper(
            listed.params,
            [entry.region(plan.topology, plan.coordinate) for entry in plan.entries],
            plan,
            registry,
            norm_type=norm_type,
            reduction=reduction,
        )

    def check_options(self, clip: ClipState, norm_type: float, reduction: Reduction) -> None:
        """Raise ValueError if ``norm_type`` or ``reduction`` differs from its value in the first call.

        Collectives: if it raises, as `__call__`, because the other ranks may wait in this collective.
        """
        if (norm_type, reduction) != self.options:
            first_norm_type, first_reduction = self.options
            self.take_part(clip)
            raise ValueError(
                f"norm_type={norm_type}, reduction={reduction!r}: the first call with this ClipState had norm_type="
                f"{first_norm_type}, reduction={first_reduction!r}; give the same values, or make another ClipState"
            )

    def __call__(self, clip: ClipState, params: list[Tensor], listed: OneShotParams) -> GradStats:
        """Clip the gradients in place, and return their measurements.

        If this method raises ValueError or TypeError on one rank, the other ranks do not scale their gradients (but a rule
        such as `ByValue` still clamps them), and return ``found_inf`` = 1 unless the norm is 0.

        It raises an error if the list of parameters differs from the list of the first call, if a partial gradient of
        this rank was not summed yet, or if a gradient of this rank is complex or sparse.
        Collectives, host synchronization: as `GlobalNorm` (one collective with ``reduction="packed"``).
        """
        try:
            check_gradients(listed, self.registry)
            if _key(listed) != self.key:
                raise ValueError(
                    "the list of parameters differs from the list of the first call with this ClipState of "
                    f"{type(clip.rule).__name__}: give the same list in every call, or make a ClipState for each list"
                )
        except (ValueError, TypeError):
            self.take_part(clip)
            raise
        separate_gradients(params)
        with local_parameters(params, self.registry.topology) as local:
            return self._clip(clip, local, wrong=False)

    def take_part(self, clip: ClipState) -> None:
        """Run the collectives of `__call__` before this rank raises.

        On the other ranks, `__call__` then returns ``found_inf`` = 1, or 0 if the norm is 0.
        """
        self._clip(clip, [torch.empty(0)] * len(self._annotations), wrong=True)

    def _clip(self, clip: ClipState, params: list[Tensor], wrong: bool) -> GradStats:
        vote = torch.full((1,), -float(wrong), dtype=torch.float64, device=self.registry.device)
        self.clipping.params = params
        scale_info = GradScaleInfo(PackedSum.of({"bypassed": vote}))
        return self.clipping(clip, scale_info, in_place=True, captured=is_captured(), rule=clip.rule).stats


def _key(listed: OneShotParams) -> tuple[object, ...]:
    return *map(id, listed.annotations), *listed.sizes


# Functions without an optimizer ---------------------------------------------------------------------------------------


def global_norm(
    params: Params,
    registry: ProcessGroupRegistry | None = None,
    norm_type: float = 2.0,
    *,
    reduction: Reduction = "packed",
) -> GradStats:
    """Return the global p-norm of the gradients of ``params``, without changing the gradients.

        stats = global_norm(model.parameters(), registry)
        print(float(stats.total_norm))

    Gradients must be averaged over data-parallel axes, and partial gradients must be summed, before the call. Use
    `sync_gradients` or `ParallelOptimizer`.

    Args:
        params: A module, parameters, or (name, parameter) pairs. ``.grad`` is this rank's shard of the gradient; None
            counts as zero. With ``reduction="packed"`` the parameters of calls after the first one may differ, also
            between ranks.
        registry: The process groups of the mesh on which the parameters were declared. None (default): the placements of
            the DTensors describe how they are sharded over their meshes. Plain parameters count as replicated over all
            ranks, and a DTensor counts as replicated over the axes that its mesh does not have. The first call on these
            meshes compares the replicas and their gradients bitwise. A DTensor's gradient that is ``Partial`` over its mesh
            (norms under `SequenceParallel`) is replaced by its sum.
        norm_type: p >= 1, or inf. Default: 2.
        reduction: ``"packed"`` (default) or ``"per_group"``; see `GlobalNorm`.
    Returns:
        GradStats, bitwise identical on every rank.
    Raises:
        ValueError: A parameter has no spec, or a spec that does not fit its shape or the mesh; ranks declare a
            parameter differently; the layout of a DTensor is not supported; a partial gradient was not summed;
            ``params`` is an exhausted generator; or another argument is out of range, such as norm_type < 1.
        TypeError: A parameter or gradient is complex or sparse, or an argument has a wrong type.
        RuntimeError: On every rank, if ranks are compared: ranks are in different calls of this library.
        ReplicaMismatchError: On every rank, in a call without a registry that compares replicas: replicas or their
            gradients differ. The error names the parameters and the axes.

        A call that compares the ranks' declarations raises an error of an argument, a spec or a gradient on all ranks.
        Other calls raise it only on the rank with the wrong argument, parameter or gradient. The norm is then NaN on the
        other ranks. Without a registry, or if ``norm_type`` is wrong on this rank and >= 12 on the other ranks, the other
        ranks may instead wait until the timeout.
    Collectives: with ``"packed"``, one all-reduce over all ranks (p >= 12: one all-gather); with ``"per_group"``, see
        `GlobalNorm`. The first call with a registry also gathers and compares the ranks' declarations. With ``"per_group"``
        every call compares them, because its collectives depend on the declarations. Without a registry, the first call
        and every call with DTensors on new meshes also gather the meshes and compare replicas; each partial gradient takes
        one more all-reduce or reduce-scatter per partial mesh dim.
    Host synchronization: only when ranks are compared, or if gradients are not on the device of the process groups.
    """
    try:
        checked_norm_type(norm_type)
        checked_reduction(reduction)
        listed, registry = _listed(unique_params(params), registry)
    except Exception as error:
        _take_part(error, registry, norm_type, reduction, "global_norm")
        raise
    with track_call("global_norm", registry):
        _compare_replicas_once(listed, registry)
        return _stats(_measure(listed, registry, norm_type, reduction), None)


def _listed(
    given: Sequence[NamedParam], registry: ProcessGroupRegistry | None
) -> tuple[OneShotParams, ProcessGroupRegistry]:
    """Return the parameters of one call, and ``registry``; if it is None, a registry made from the DTensors' meshes.

    Raises as `OneShotParams.of`, `registry_of_meshes` and `check_registry`.
    Collectives: as `registry_of_meshes` and `OneShotParams.of`, only if ``registry`` is None.
    """
    is_inferred = registry is None
    if registry is None:
        registry = registry_of_meshes([param for _, param in given])
    elif isinstance(registry, int | float):
        raise TypeError(
            f"registry is {registry!r}: give a ProcessGroupRegistry, or None. If {registry!r} is the order of the norm, "
            f"write norm_type={registry!r}"
        )
    check_registry(registry)
    return OneShotParams.of(given, registry, is_inferred), registry


def _compare_replicas_once(listed: OneShotParams, registry: ProcessGroupRegistry) -> None:
    """Compare the replicas of all parameters and of their gradients over all ranks, once per registry.

    Does nothing if ``registry`` was not made from DTensors, after a successful comparison with it, and on a single rank.

    Raises as `agreed`; ReplicaMismatchError on every rank.
    Collectives, host synchronization: if it compares, as `agreed`, and one all-reduce whose result the host reads.
    """
    state = _CACHES.setdefault(registry, _RegistryCache())
    if state.checked or not listed.undeclared_are_replicas or registry.topology.world_size == 1:
        return

    plan = agreed(partial(_checked_plan, listed, registry), registry, names=True)
    check = ReplicaCheck(plan, listed.params, registry.device)
    totals = check.slots(listed.gradients)
    dist.all_reduce(totals, group=registry.group(*registry.topology.axes))
    if mismatches := check.mismatches(totals.cpu()):
        advice = advice_on(
            "pass registry=, and the call does not compare replicas", "meshstep.optim.clip_grad_norm_", BROADCAST
        )
        raise ReplicaMismatchError(mismatches, "replicas differ, and gradients are unchanged", advice)
    state.checked = True


@torch.no_grad()
def clip_grad_norm_(
    params: Params,
    max_norm: ClipSpec | ClipState,
    registry: ProcessGroupRegistry | None = None,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    reduction: Reduction = "packed",
) -> GradStats:
    """Clip sharded gradients by their global p-norm, in place.

    ```text
    coef = min(1, max_norm / (total_norm + 1e-6))        Pascanu et al. 2013, arXiv:1211.5063
    ```

        stats = clip_grad_norm_(model.parameters(), 1.0, registry)
        if not stats.found_inf:
            optimizer.step()

    For a model of DTensors (FSDP2, torch's tensor parallelism, experts on another mesh) no registry is needed. The call
    then replaces ``torch.nn.utils.clip_grad_norm_``, and ``float(stats)`` is the norm:

        grad_norm = clip_grad_norm_(model.parameters(), 1.0)

    If the norm is non-finite, ``stats.found_inf`` is 1, and the gradients stay unchanged. Exception: a rule that clamps
    by value, such as `ByValue`, clamps them. Do not call ``optimizer.step()`` if ``stats.found_inf`` is 1.

    Args:
        params: A module, parameters, or (name, parameter) pairs, as for `global_norm`. With a rule that has several
            factors, has state per parameter, needs norms of weights or clamps by value, give the same list in every call.
        max_norm: The threshold for the norm; finite, > 0. Or a clipping rule. Unless the rule only multiplies all
            gradients by one factor that depends on this call's total norm, make a `ClipState` of it once, and pass the
            `ClipState` in every call. With a rule that skips spikes, do not call ``optimizer.step()`` if
            ``stats.skipped`` is 1.
        registry: The process groups of the mesh on which the parameters were declared. None (default): a registry is
            made from the meshes of the DTensors, as for `global_norm`.
        norm_type: p >= 1, or inf. A ``norm_type`` of the rule takes precedence. Default: 2.
        error_if_nonfinite: True: raise on every rank if the norm is non-finite; this synchronizes the host in every call.
            Default: False.
        reduction: ``"packed"`` (default) or ``"per_group"``; see `GlobalNorm`.
    Returns:
        GradStats with the norm before clipping, bitwise identical on every rank.
    Raises: As `global_norm`. After an error the gradients of this rank are unchanged, unless the rule clamped them, or
        partial gradients of DTensors were replaced by their sums. If only this rank raises, ``stats.found_inf`` is 1 on
        the other ranks. With a rule that needs the same list in every call (see ``params``), their norm may be finite, and
        ``found_inf`` is 0 if it is 0. Also:
        ValueError: ``max_norm`` is None or out of range; the rule does not support ``reduction`` or the parameters; or a
            later call with the same `ClipState` has parameters of other layouts or sizes, or another ``norm_type`` or
            ``reduction``.
        TypeError: The rule needs a `ClipState`.
        RuntimeError: ``error_if_nonfinite`` is True, and the norm is non-finite or another rank raised.
    Collectives: as `global_norm`. With a `ClipState` of a rule that has several factors (per parameter, named group,
        param group or unit), has state per parameter, needs norms of weights or clamps by value, only the first call
        compares declarations, and exchanges parameter names.
    Host synchronization: as `global_norm`; with ``error_if_nonfinite`` one more per call.
    """
    clip = None
    try:
        clip = _to_clip_state(max_norm, reduction)
        norm_type = norm_type if clip.rule.norm_type is None else clip.rule.norm_type
        checked_norm_type(norm_type)
        checked_reduction(reduction)
        given = unique_params(params)
        listed, registry = _listed(given, registry)
    except Exception as error:
        _take_part(error, registry, norm_type, reduction, "clip_grad_norm_", clip)
        raise
    with track_call("clip_grad_norm_", registry):
        _compare_replicas_once(listed, registry)
        if _needs_only_total(clip):
            stats = _stats(_measure(listed, registry, norm_type, reduction), clip)
        else:
            lists = _CACHES.setdefault(registry, _RegistryCache()).lists
            if clip not in lists:
                lists[clip] = StatefulClipper(listed, registry, clip, norm_type, reduction)
            lists[clip].check_options(clip, norm_type, reduction)
            stats = lists[clip](clip, [param for _, param in given], listed)
        if error_if_nonfinite and stats.found_inf:
            norm = float(stats.total_norm)
            raise RuntimeError(
                f"the gradients' norm of order {float(norm_type)} is {norm}"
                f"{', but another rank raised an error' if isfinite(norm) else ''}: skip the step, or leave "
                "error_if_nonfinite=True out and skip steps with stats.found_inf == 1"
            )
        if _needs_only_total(clip):
            listed.change(lambda gradients: scale_each(distinct(gradients), stats.clip_coef))
    return stats


def _to_clip_state(max_norm: ClipSpec | ClipState, reduction: Reduction) -> ClipState:
    """Return the checked rule with its state."""
    rule = clip_of(max_norm.rule if isinstance(max_norm, ClipState) else max_norm)
    if rule is None:
        raise ValueError(
            "max_norm=None: give a threshold or a rule; to measure without clipping, call global_norm(params)"
        )
    check_packed(rule, reduction)
    if isinstance(max_norm, ClipState):
        return max_norm
    clip = ClipState(rule)
    if rule.initial() or not _needs_only_total(clip):
        changes = "changes gradients in place" if rule.in_place else "needs norms of weights"
        why = "has state" if rule.initial() else changes if rule.level == "total" else "distinguishes parameters"
        name = type(rule).__name__
        raise TypeError(
            f"{name} {why}: create clip = ClipState({name}(...)) once, and pass clip as max_norm in every call"
        )
    return clip


def _needs_only_total(clip: ClipState) -> bool:
    """Return True if the rule only multiplies all gradients by one factor that depends on the total norm."""
    rule = clip.rule
    return rule.level == "total" and not (rule.weights or rule.in_place or clip.needs_names)


@torch.no_grad()
def scale_gradients_(params: Params, factor: Tensor, registry: ProcessGroupRegistry | None = None) -> None:
    """Multiply the gradients by ``factor``, in place. After `global_norm`, this is the second half of `clip_grad_norm_`.

        stats = global_norm(model.parameters())
        scale_gradients_(model.parameters(), stats.clip_coef_for(1.0))

    Args:
        params: A module, parameters, or (name, parameter) pairs.
        factor: 0-dim tensor, equal on all ranks.
        registry: The process groups of the mesh on which the parameters were declared. None (default): a registry is
            made from the meshes of the DTensors, as for `global_norm`.
    Raises:
        ValueError: A partial gradient was not summed, the layout of a DTensor is not supported, or ``params`` is an
            exhausted generator.
        TypeError: A gradient is complex or sparse, or ``params`` or ``registry`` has a wrong type.
    Collectives: none with a registry. Without one, the first call and every call with DTensors on new meshes gather the
        meshes, and each partial gradient is summed.
    Host synchronization: only if meshes are gathered.
    """
    listed, registry = _listed(unique_params(params), registry)
    check_gradients(listed, registry)
    listed.change(lambda gradients: scale_each(distinct(gradients), factor))


@torch.no_grad()
def clip_grad_value_(params: Params, clip_value: float, registry: ProcessGroupRegistry | None = None) -> None:
    """Clamp every element of the gradients to [-clip_value, clip_value], in place. NaN stays NaN.

        clip_grad_value_(model.parameters(), 0.5, registry)

    Partial gradients must be summed before the call.

    Args:
        params: A module, parameters, or (name, parameter) pairs.
        clip_value: The bound of an element; finite, > 0.
        registry: The process groups. They are needed to check that partial gradients were summed. None (default): they
            are made from the meshes of the DTensors, and partial gradients of DTensors are summed.
    Raises:
        ValueError: A partial gradient was not summed, the layout of a DTensor is not supported, ``clip_value`` is not
            finite and positive, or ``params`` is an exhausted generator.
        TypeError: A gradient is complex or sparse, or an argument has a wrong type.
    Collectives: none with a registry. Without one, the first call and every call with DTensors on new meshes gather the
        meshes, and each partial gradient is summed.
    Host synchronization: only if meshes are gathered.
    """
    check_number_threshold(clip_value, "clip_value")
    listed, registry = _listed(unique_params(params), registry)
    check_gradients(listed, registry)
    listed.change(lambda gradients: clamp_each(gradients, clip_value))


def _measure(listed: OneShotParams, registry: ProcessGroupRegistry, norm_type: float, reduction: Reduction) -> Norms:
    """Return the norms of the gradients, by the cached `GlobalNorm` if the same list was measured before.

    If ranks have not compared their declarations with this registry, or with "per_group", they compare them first.

    Raises as `agreed`, if ranks compare; else as `check_gradients` and `OneShotParams.plan`, on this rank only.
    """
    state = _CACHES.setdefault(registry, _RegistryCache())
    key = (float(norm_type), reduction, *_key(listed))
    known = state.norms.get(key)
    if known is not None:
        listed.pending = known.pending  # equal keys mean equal annotations, so `pending` is equal too

    plan: ReductionPlan | None
    # With "per_group", the collectives depend on the parameter lists of all ranks, and a rank cannot detect that
    # another rank's list changed. With "packed", later lists are not compared, because the list of parameters may depend
    # on a rank's data.
    if not state.checked or reduction == "per_group":
        plan = agreed(partial(_checked_plan, listed, registry), registry)
    else:
        try:
            check_gradients(listed, registry)
            plan = listed.plan(registry) if known is None else None
        except (ValueError, TypeError):
            _measure_nan(registry, norm_type)  # the other ranks wait in this collective, and get a NaN norm
            raise
    if known is None:
        assert plan is not None
        norm = GlobalNorm(plan, registry, norm_type, reduction)
        known = _CachedNorm(norm, listed.pending, listed.annotations)
        state.remember(key, known)
    return known.norm(listed.gradients)


def _take_part(
    error: Exception, registry: object, norm_type: float, reduction: object, call: str, clip: ClipState | None = None
) -> None:
    """Run the collective of a call in which the other ranks wait, before this rank raises ``error``.

    If the call compares declarations, the other ranks then raise the error too. Otherwise they get a norm of NaN, or
    ``found_inf`` = 1. Exception: if ``norm_type`` is the wrong argument, ranks whose norm has p >= `HIGH` wait until the
    timeout, because this rank measures with p = 2.

    ``error`` concerns an argument, and was raised before any collective of the call. If ``registry`` is not a
    `ProcessGroupRegistry`, nothing is done. ``clip`` is None if the call has no rule, or the error is about the rule.
    """
    if not isinstance(registry, ProcessGroupRegistry):
        return
    state = _CACHES.setdefault(registry, _RegistryCache())
    stateful = None if clip is None else state.lists.get(clip)

    def fail() -> ReductionPlan:
        raise error

    with track_call(call, registry):
        if clip is not None and stateful is not None:
            stateful.take_part(clip)
        elif not state.checked or reduction == "per_group" or (clip is not None and not _needs_only_total(clip)):
            agreed(fail, registry)
        else:
            try:
                checked_norm_type(norm_type)
            except (ValueError, TypeError):
                norm_type = 2.0
            _measure_nan(registry, norm_type)


def _measure_nan(registry: ProcessGroupRegistry, norm_type: float) -> None:
    """Run the packed collective with one gradient of NaN, so that the norm is NaN on all ranks."""
    nan = torch.full((1,), torch.nan, device=registry.device)
    annotate(nan, P(), "nan")
    topology = registry.topology
    plan = ReductionPlan.of(entries_of([[nan]], topology), topology, registry.global_rank)
    GlobalNorm(plan, registry, norm_type)([nan])


class _CachedNorm(NamedTuple):
    """The `GlobalNorm` of a list of parameters. It keeps the annotations alive, because their ids are in the cache key."""

    norm: GlobalNorm
    pending: Pending
    annotations: list[Annotation | None]


class _RegistryCache:
    """Objects that are cached for one registry: a `GlobalNorm` per list of parameters, a clipper per `ClipState`."""

    def __init__(self) -> None:
        self.norms: dict[tuple[object, ...], _CachedNorm] = {}
        self.lists: WeakKeyDictionary[ClipState, StatefulClipper] = WeakKeyDictionary()
        self.checked = False  # True after all ranks have compared their declarations, or replicas, with this registry

    def remember(self, key: tuple[object, ...], known: _CachedNorm) -> None:
        """Store ``known`` for a list of parameters. A cache with 64 lists is emptied first, to limit its size."""
        if len(self.norms) >= 64:
            self.norms.clear()
        self.norms[key] = known
        self.checked = True


_CACHES: WeakKeyDictionary[ProcessGroupRegistry, _RegistryCache] = WeakKeyDictionary()


def _stats(norms: Norms, clip: ClipState | None) -> GradStats:
    finite, coef, spiked = norms.total < inf, torch.ones_like(norms.total), None
    if clip is not None:
        decision = clip.decide(norms)
        clip.remember(decision, finite)
        coef = coef if decision.factors is None else torch.where(finite, decision.factors, coef)
        spiked = decision.spiked(finite)
    return GradStats(norms.total, coef, finite.logical_not().float(), norms.groups, spiked=spiked)
