"""Clip sharded gradients by their global norm or by value; usable alone, as torch's functions are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...parallel.interop.local import local_gradients
from ...parallel.layout.annotation import Annotation, annotate
from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import on_all_ranks
from ...parallel.mesh.calls import in_call
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..gradients.axes import sync_axes
from ..gradients.in_place import clamp_each, is_complete, mark_complete, scale_each
from ..norm.agreement import agree
from ..norm.entries import check_dense_real, entries_of
from ..norm.global_norm import GlobalNorm, Norms, Reduction, checked_norm_type, checked_reduction
from ..norm.plan import ReductionPlan
from ..norm.stats import GradStats
from .policies import ByNorm, checked_threshold

Params = Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
Pending = list[tuple[int, Annotation]]


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
    with in_call(registry, "global_norm"):
        return _stats(_measure(_Listed.of(params, registry), registry, norm_type, reduction), None)


@torch.no_grad()
def clip_grad_norm_(
    params: Params,
    max_norm: float,
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
        params: As for `global_norm`.
        max_norm: Threshold in unscaled gradient units; finite, > 0.
        error_if_nonfinite: Raise instead, on every rank, which reads the host in every call.
    Returns:
        GradStats with the norm before clipping; 0-dim tensors, the same bits on every rank.
    Raises:
        As `global_norm`; ValueError for a bad max_norm; RuntimeError for a norm that is not finite, if asked for. Nothing
            is changed then.
    Collectives, host reads: as `global_norm`.
    Reference: Pascanu et al. 2013, arXiv:1211.5063.
    """
    clip = ByNorm(max_norm)
    clip.check()
    with in_call(registry, "clip_grad_norm_"):
        listed = _Listed.of(params, registry)
        stats = _stats(_measure(listed, registry, norm_type, reduction), clip)
        if error_if_nonfinite and stats.found_inf:
            raise RuntimeError(
                f"the gradients' norm of order {float(norm_type)} is {float(stats.total_norm)}, so they can't be clipped, "
                "and were not changed; leave error_if_nonfinite=True out to get it as found_inf, and skip the step then"
            )
        listed.change(lambda gradients: scale_each(gradients, stats.clip_coef))
    return stats


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
    clip_value = checked_threshold(clip_value, "clip_value")
    listed = _Listed.of(params, registry)
    _check_gradients(listed, registry)
    listed.change(lambda gradients: clamp_each(gradients, clip_value))


@dataclass
class _Listed:
    """Parameters, each once: their names, themselves or the local ones of DTensors, their gradients and annotations."""

    names: list[str | None]
    params: list[Tensor]
    gradients: list[Tensor | None]
    annotations: list[Annotation | None]

    @classmethod
    def of(cls, params: Params, registry: ProcessGroupRegistry) -> _Listed:
        """Raises ValueError: the layout of a DTensor or of its gradient is none that can be worked with."""
        given: list[Any] = [params] if isinstance(params, Tensor) else list(params)
        names: list[str | None] = [None] * len(given)
        if any(issubclass(kind, tuple) for kind in {*map(type, given)}):
            names = [item[0] if isinstance(item, tuple) else None for item in given]
            given = [item[1] if isinstance(item, tuple) else item for item in given]
        once: dict[int, Tensor] = dict(zip(map(id, given), given, strict=True))
        if len(once) < len(given):
            names = [*dict(zip(map(id, given), names, strict=True)).values()]
        return cls(names, *local_gradients([*once.values()], registry.topology))

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
        complete = [
            (self.params[i], self.gradients[i])
            for i, _ in self.pending
            if is_complete(self.params[i], self.gradients[i])
        ]
        change(self.gradients)
        for param, gradient in complete:
            mark_complete(param, gradient)


def _measure(listed: _Listed, registry: ProcessGroupRegistry, norm_type: float, reduction: Reduction) -> Norms:
    state = _STATES.setdefault(registry, _State())
    sizes = [
        (param if grad is None else grad).numel() for param, grad in zip(listed.params, listed.gradients, strict=True)
    ]
    key = (checked_norm_type(norm_type), checked_reduction(reduction), *map(id, listed.annotations), *sizes)

    known = state.norms.get(key)
    if known is not None:
        listed.pending = known.pending  # the annotations are the same, so these are

    def plan() -> ReductionPlan:
        named = [
            param if name is None else (name, param) for name, param in zip(listed.names, listed.params, strict=True)
        ]
        return ReductionPlan.of(entries_of([named], registry.topology), registry.topology, registry.global_rank)

    def checked_plan() -> ReductionPlan:
        _check_gradients(listed, registry)
        return plan()

    def measurer(plan: ReductionPlan) -> GlobalNorm:
        if known is not None:
            return known.norm
        norm = GlobalNorm(plan, registry, norm_type, reduction)
        state.remember(key, _Known(norm, listed.pending, listed.annotations))
        return norm

    # By group, which collectives there are depends on all ranks' lists; whether one has changed only its rank knows.
    if not state.checked or reduction == "per_group":
        return measurer(agree(on_all_ranks(checked_plan, registry), registry))(listed.gradients)
    # Packed, later lists are planned without a word to others: those that depend on local data may differ between ranks.
    try:
        _check_gradients(listed, registry)
        measure = measurer(plan()) if known is None else known.norm
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
        self.checked = False

    def remember(self, key: tuple[object, ...], known: _Known) -> None:
        """Keep one; lists that change from call to call must not pile up."""
        if len(self.norms) >= 64:
            self.norms.clear()
        self.norms[key] = known
        self.checked = True


_STATES: WeakKeyDictionary[ProcessGroupRegistry, _State] = WeakKeyDictionary()


def _check_gradients(listed: _Listed, registry: ProcessGroupRegistry) -> None:
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


def _name(listed: _Listed, index: int) -> str:
    annotation = listed.annotations[index]
    return listed.names[index] or (annotation.name if annotation else None) or f"parameter {index}"


def _stats(norms: Norms, clip: ByNorm | None) -> GradStats:
    finite, one = norms.total < inf, torch.ones_like(norms.total)
    coef = one if clip is None else torch.where(finite, clip.factors(norms), one)
    return GradStats(norms.total, coef, finite.logical_not().float(), norms.groups)
