"""Clip sharded gradients by their global norm or by value; usable alone, as torch's functions are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import inf
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...parallel.interop.local import local_parameters
from ...parallel.layout.annotation import annotate, annotation_of
from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import on_all_ranks
from ...parallel.mesh.calls import in_call
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..gradients.axes import sync_axes
from ..gradients.in_place import clamp_gradients, is_complete, scale_gradients
from ..norm.agreement import agree
from ..norm.entries import check_dense_real, entries_of
from ..norm.global_norm import GlobalNorm, Norms, Reduction, checked_norm_type, checked_reduction
from ..norm.plan import ReductionPlan
from ..norm.stats import GradStats
from .policies import ByNorm, checked_threshold

Params = Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]]


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
    with in_call(registry, "global_norm"), _listed(params, registry) as named:
        return _stats(_measure(named, registry, norm_type, reduction), None)


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
    with in_call(registry, "clip_grad_norm_"), _listed(params, registry) as named:
        stats = _stats(_measure(named, registry, norm_type, reduction), clip)
        if error_if_nonfinite and stats.found_inf:
            raise RuntimeError(
                f"the gradients' norm of order {float(norm_type)} is {float(stats.total_norm)}, so they can't be clipped, "
                "and were not changed; leave error_if_nonfinite=True out to get it as found_inf, and skip the step then"
            )
        scale_gradients([param for _, param in named], stats.clip_coef)
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
    with _listed(params, registry) as named:
        _check_gradients(named, registry)
        clamp_gradients([param for _, param in named], clip_value)


@contextmanager
def _listed(params: Params, registry: ProcessGroupRegistry) -> Iterator[list[tuple[str | None, Tensor]]]:
    """(name, parameter) pairs, each parameter once, with local ones in the place of DTensors."""
    given = [params] if isinstance(params, Tensor) else list(params)
    pairs = [item if isinstance(item, tuple) else (None, item) for item in given]
    once = {id(param): (name, param) for name, param in pairs}.values()
    with local_parameters([param for _, param in once], registry.topology) as local:
        yield [(name, param) for (name, _), param in zip(once, local, strict=True)]


def _measure(
    params: list[tuple[str | None, Tensor]], registry: ProcessGroupRegistry, norm_type: float, reduction: Reduction
) -> Norms:
    state = _STATES.setdefault(registry, _State())
    key = (
        checked_norm_type(norm_type),
        checked_reduction(reduction),
        *((id(annotation_of(p)), p.shape) for _, p in params),
    )

    def plan() -> ReductionPlan:
        named = [param if name is None else (name, param) for name, param in params]
        return ReductionPlan.of(entries_of([named], registry.topology), registry.topology, registry.global_rank)

    def checked_plan() -> ReductionPlan:
        _check_gradients(params, registry)
        return plan()

    def measurer(plan: ReductionPlan) -> GlobalNorm:
        if key not in state.norms:
            annotations: list[object] = [annotation_of(param) for _, param in params]
            state.remember(key, GlobalNorm(plan, registry, norm_type, reduction), annotations)
        return state.norms[key]

    gradients = [param.grad for _, param in params]
    # By group, which collectives there are depends on all ranks' lists; whether one has changed only its rank knows.
    if not state.checked or reduction == "per_group":
        return measurer(agree(on_all_ranks(checked_plan, registry), registry))(gradients)
    # Packed, later lists are planned without a word to others: those that depend on local data may differ between ranks.
    try:
        _check_gradients(params, registry)
        measure = state.norms.get(key) or measurer(plan())
    except (ValueError, TypeError):
        _measure_nan(registry, norm_type)  # the others, which must not wait, find no norm and clip nothing
        raise
    return measure(gradients)


def _measure_nan(registry: ProcessGroupRegistry, norm_type: float) -> None:
    """Take part in a packed measurement as one who has a gradient of NaN."""
    nan = torch.full((1,), torch.nan, device=registry.device)
    annotate(nan, P(), "nan")
    topology = registry.topology
    plan = ReductionPlan.of(entries_of([[nan]], topology), topology, registry.global_rank)
    GlobalNorm(plan, registry, norm_type)([nan])


class _State:
    """The measurers that a registry has been used with; they keep their annotations alive, whose ids are the keys."""

    def __init__(self) -> None:
        self.norms: dict[tuple[object, ...], GlobalNorm] = {}
        self.annotations: list[object] = []
        self.checked = False

    def remember(self, key: tuple[object, ...], norm: GlobalNorm, annotations: list[object]) -> None:
        """Keep ``norm``; lists that change from call to call must not pile up."""
        if len(self.norms) >= 64:
            self.norms.clear()
            self.annotations.clear()
        self.norms[key] = norm
        self.annotations.append(annotations)
        self.checked = True


_STATES: WeakKeyDictionary[ProcessGroupRegistry, _State] = WeakKeyDictionary()


def _check_gradients(params: list[tuple[str | None, Tensor]], registry: ProcessGroupRegistry) -> None:
    for index, (given, param) in enumerate(params):
        annotation = annotation_of(param)
        name = given or (annotation.name if annotation else None) or f"parameter {index}"
        if param.grad is not None:
            check_dense_real(param.grad, f"the gradient of {name}")
        if annotation is not None and (annotation.spec.partial or annotation.spec.tied) and not is_complete(param):
            pending = sync_axes(annotation.spec_on(registry.topology), registry.topology, average_data=False)
            if registry.topology.size(*pending) > 1:
                raise ValueError(
                    f"the gradient of {name} ({annotation.spec}) is still a pending sum over {', '.join(pending)}: call "
                    "sync_gradients(params, registry) after the last backward, or use ParallelOptimizer, which does"
                )


def _stats(norms: Norms, clip: ByNorm | None) -> GradStats:
    finite, one = norms.total < inf, torch.ones_like(norms.total)
    coef = one if clip is None else torch.where(finite, clip.factors(norms), one)
    return GradStats(norms.total, coef, finite.logical_not().float(), norms.groups)
