"""Gradients completed before anything is measured: data replicas averaged, pending sums made, tied copies combined.

Gradients of one kind of layout with the same peers travel together in flat buckets, a few collectives for a whole model.
The buckets are fixed by the parameters, so a rank that has no gradient for one sends zeros, and everybody gets the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from ...parallel.interop.local import local_parameters
from ...parallel.layout.spec import P
from ...parallel.mesh.calls import in_call
from ...parallel.mesh.registry import ProcessGroupRegistry, check_registry
from ..norm.entries import ParameterEntry, check_unused, entries_of
from ..norm.plan import Bucket, ReductionPlan
from .axes import layout_kind, sync_axes, sync_ranks, sync_scale
from .bucket import BUCKET_BYTES, Exact, Exchange, GradientBucket, LocalGradients, Reducible, reduce_all
from .flat import flat_buckets
from .in_place import gradient_dtype, is_complete


class _Kind(NamedTuple):
    """What the parameters of a bucket have in common."""

    ranks: tuple[int, ...]
    layout: Bucket
    dtype: str
    device: str
    scale: float


def gradient_buckets(
    params: Sequence[Tensor],
    plan: ReductionPlan,
    registry: ProcessGroupRegistry,
    average_data: bool = True,
    *,
    exchange: Exchange | None = None,
    adopt: bool = False,
    only: Callable[[ParameterEntry], bool] | None = None,
    bucket_bytes: int | None = None,
) -> list[Reducible]:
    """What completes the gradients of one plan's parameters, in place; afterwards one that takes part in a sum is there on
    every rank.

    In the order in which backward fills them, but buckets with other peers apart: it is one order on all ranks that share
    one. Last what is only divided.

    Args:
        params: The parameters, in the order of the plan's entries.
        plan: Their specs.
        registry: The groups.
        average_data: False where something else averages over the data axes (`DistributedDataParallel`, FSDP); partial
            and tied gradients are summed all the same.
        exchange: How flat buckets are summed.
        adopt: As for `GradientBucket`.
        only: The entries whose gradients are completed; all, if None.
        bucket_bytes: Of a bucket; a larger parameter gets one of its own.
    Collectives: of each bucket one all-reduce, none where no group is larger than 1. Host reads: none.
    """
    topology = plan.topology
    together, alone = _kinds(params, plan, average_data, only)
    # Backward leaves a sum to be made, that must not be made twice.
    is_pending = plan.for_each(lambda spec: len(sync_ranks(spec, topology, plan.rank, average_data=False)) > 1)
    made: list[tuple[tuple[int, ...], Bucket, int, GradientBucket]] = []
    for kind, found in sorted(together.items()):
        indices = sorted(found)
        dtype, numels = gradient_dtype(params[indices[0]]), [params[index].numel() for index in indices]
        group, nbytes = registry.group_of(kind.ranks), BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        for layout in flat_buckets(indices, numels, 1, nbytes // dtype.itemsize):
            of_bucket = [params[index] for index in layout.indices]
            pending = [params[index] for index in layout.indices if is_pending[index]]
            bucket = GradientBucket(of_bucket, layout, group, exchange or Exact(), dtype, kind.scale, adopt, pending)
            # Tied copies stand in other places of other stages, so only the kind says the same on all ranks.
            made.append((kind.ranks, kind.layout if kind.layout.tied else Bucket(), -layout.indices[-1], bucket))
    divided = [LocalGradients(those, scale) for scale, those in alone.items()]
    return [*(bucket for *_, bucket in sorted(made, key=lambda item: item[:3])), *divided]


def _kinds(
    params: Sequence[Tensor], plan: ReductionPlan, average_data: bool, only: Callable[[ParameterEntry], bool] | None
) -> tuple[dict[_Kind, list[int]], dict[float, list[Tensor]]]:
    """The indices of the parameters whose gradients are summed, by kind; and those that are only multiplied, by what."""
    topology = plan.topology
    alike: dict[tuple[P, tuple[str, ...], bool], list[int]] = {}  # thousands of parameters are a few of these
    for index, entry in enumerate(plan.entries):
        if only is None or only(entry):
            alike.setdefault((entry.spec, entry.averaged, entry.trained), []).append(index)
    together: dict[_Kind, list[int]] = {}
    alone: dict[float, list[Tensor]] = {}  # by scale
    for (spec, averaged, trained), members in alike.items():
        ranks = sync_ranks(spec, topology, plan.rank, average_data, averaged)
        scale = sync_scale(topology, average_data, averaged)
        if trained and len(ranks) > 1:
            kept: dict[tuple[str, str], list[int]] = {}
            for index in members:
                kept.setdefault((str(gradient_dtype(params[index])), str(params[index].device)), []).append(index)
            for (of_dtype, device), indices in kept.items():
                kind = _Kind(ranks, layout_kind(spec, topology), of_dtype, device, scale)
                together.setdefault(kind, []).extend(indices)
        elif scale != 1.0:
            alone.setdefault(scale, []).extend(params[index] for index in members)
    return together, alone


def sync_gradients(
    params: Iterable[Tensor | tuple[str, Tensor]], registry: ProcessGroupRegistry, *, average_data: bool = True
) -> None:
    """Complete the gradients of declared parameters, in place: what `ParallelOptimizer` does before it measures.

    Call it once, after the last backward of a step; every rank with the same parameters.

    Args:
        params: Declared parameters, or (name, parameter) pairs.
        registry: The groups.
        average_data: As for `gradient_buckets`.
    Raises:
        ValueError: A parameter has no spec; a pending sum has been made already (nothing was written to it since).
    Collectives: one all-reduce for each set of peers and kind of layout (and 32 MiB of gradients). Host reads: none.
    """
    check_registry(registry)
    check_unused(params)
    pairs = [item if isinstance(item, tuple) else (None, item) for item in params]
    topology = registry.topology
    named = [param if name is None else (name, param) for name, param in pairs]
    plan = ReductionPlan.of(entries_of([named], topology), topology, registry.global_rank)
    with local_parameters([param for _, param in pairs], topology, to_sum=True) as local:
        for entry, param in zip(plan.entries, local, strict=True):
            pending = topology.size(*sync_axes(entry.spec, topology, average_data=False)) > 1
            if pending and param.grad is not None and is_complete(param):
                raise ValueError(
                    f"the gradient of {entry.name} ({entry.spec}) has been summed already and not written since; summing "
                    "it again would multiply it: call sync_gradients once, after the last backward"
                )
        with in_call(registry, "sync_gradients"):
            reduce_all(gradient_buckets(local, plan, registry, average_data))
