"""Gradients completed before anything is measured: data replicas averaged, pending sums made, tied copies combined.

Gradients of one kind of layout with the same peers travel together in flat buckets, a few collectives for a whole model.
The buckets are fixed by the parameters, so a rank that has no gradient for one sends zeros, and everybody gets the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...parallel.interop.local import local_parameters
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..norm.entries import ParameterEntry, entries_of
from ..norm.plan import Bucket, ReductionPlan
from .axes import layout_kind, sync_axes, sync_ranks, sync_scale
from .bucket import BUCKET_BYTES, GradientBucket
from .exchange import Exact, Exchange
from .flat import flat_buckets
from .in_place import gradient_dtype, is_complete, mark_complete


class _Kind(NamedTuple):
    """What the parameters of a bucket have in common."""

    ranks: tuple[int, ...]
    layout: Bucket
    dtype: str
    device: str
    scale: float


class GradientSync:
    """Completes the gradients of one plan's parameters, in place.

    Args:
        params: The parameters, in the order of the plan's entries.
        plan: Their specs.
        registry: The groups.
        average_data: False where something else averages over the data axes (`DistributedDataParallel`, FSDP); partial
            and tied gradients are summed all the same.
        exchange: How flat buckets are summed.
        adopt: As for `GradientBucket`.
        only: The entries that it completes; all, if None.
        bucket_bytes: Of a bucket; a larger parameter gets one of its own.

    Attributes:
        buckets: In the order in which backward fills them, but those with other peers apart: it is one order on all ranks
            that share one.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        plan: ReductionPlan,
        registry: ProcessGroupRegistry,
        average_data: bool = True,
        *,
        exchange: Exchange | None = None,
        adopt: bool = False,
        only: Callable[[ParameterEntry], bool] | None = None,
        bucket_bytes: int | None = None,
    ) -> None:
        self.params, self.registry = list(params), registry
        topology = plan.topology
        together: dict[_Kind, list[int]] = {}
        self._local: dict[float, list[int]] = {}  # by scale
        chosen = [i for i, entry in enumerate(plan.entries) if only is None or only(entry)]
        for index in chosen:
            param, entry = self.params[index], plan.entries[index]
            ranks = sync_ranks(entry.spec, topology, plan.rank, average_data, entry.averaged)
            scale = sync_scale(topology, average_data, entry.averaged)
            if entry.trained and len(ranks) > 1:
                kind = layout_kind(entry.spec, topology)
                key = _Kind(ranks, kind, str(gradient_dtype(param)), str(param.device), scale)
                together.setdefault(key, []).append(index)
            else:
                self._local.setdefault(scale, []).append(index)
        # Only what must not be summed twice needs a mark.
        self._pending = [
            self.params[index]
            for index in chosen
            if len(sync_ranks(plan.entries[index].spec, topology, plan.rank, average_data=False)) > 1
        ]
        # A mark knows a gradient by its version, which views of one buffer share.
        self._adopted = {id(param) for param in self.params if adopt} - {id(param) for param in self._pending}
        nbytes = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        self.buckets = self._make_buckets(together, exchange or Exact(), nbytes)

    def _make_buckets(self, together: dict[_Kind, list[int]], exchange: Exchange, nbytes: int) -> list[GradientBucket]:
        """The parameters of each kind in flat buckets of about so many bytes."""
        made: list[tuple[tuple[int, ...], Bucket, int, GradientBucket]] = []
        for kind, indices in sorted(together.items()):
            dtype, numels = gradient_dtype(self.params[indices[0]]), [self.params[index].numel() for index in indices]
            group = self.registry.group_of(kind.ranks)
            for layout in flat_buckets(indices, numels, 1, nbytes // dtype.itemsize):
                members = [self.params[index] for index in layout.indices]
                adopt = all(id(param) in self._adopted for param in members)
                bucket = GradientBucket(members, layout, group, exchange, dtype, kind.scale, adopt)
                # Tied copies stand in other places of other stages, so only the kind says the same on all ranks.
                made.append((kind.ranks, kind.layout if kind.layout.tied else Bucket(), -layout.indices[-1], bucket))
        return [bucket for *_, bucket in sorted(made, key=lambda item: item[:3])]

    @torch.no_grad()
    def __call__(self) -> None:
        """Reduce the gradients; afterwards a parameter that takes part in a bucket has one on every rank.

        Collectives: one all-reduce a bucket, none where no group is larger than 1. Host reads: none.
        """
        finishes = [bucket.start() for bucket in self.buckets]
        for finish in finishes:
            finish()
        self.finish()

    @torch.no_grad()
    def finish(self) -> None:
        """What is left to do when the buckets have been reduced."""
        for scale, indices in self._local.items():
            local = [grad for index in indices if (grad := self.params[index].grad) is not None]
            if local and scale != 1.0:
                torch._foreach_mul_(local, scale)
        for param in self._pending:
            mark_complete(param)


def sync_gradients(
    params: Iterable[Tensor | tuple[str, Tensor]], registry: ProcessGroupRegistry, *, average_data: bool = True
) -> None:
    """Complete the gradients of declared parameters, in place: what `ParallelOptimizer` does before it measures.

    Call it once, after the last backward of a step; every rank with the same parameters.

    Args:
        params: Declared parameters, or (name, parameter) pairs.
        registry: The groups.
        average_data: As for `GradientSync`.
    Raises:
        ValueError: A parameter has no spec; a pending sum has been made already (nothing was written to it since).
    Collectives: one all-reduce for each set of peers and kind of layout (and 32 MiB of gradients). Host reads: none.
    """
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
        GradientSync(local, plan, registry, average_data)()
