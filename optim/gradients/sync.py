"""What must be reduced before anything is measured: data replicas averaged, pending sums made, tied copies combined.

The loss is taken to be the mean over the data axes of what each rank computed. So every gradient is divided by the size
of all data axes and summed over those that do not shard the parameter, over its partial axes and over its tied copies:

    grad = 1/|data| * sum over (data axes not sharding it) x (partial axes) x (tied copies) of the local gradient

Data axes over which a DTensor's gradient has been averaged already (`fully_shard` does) are left out of both.

Gradients with the same peers travel together in flat buckets, a few collectives for a whole model. The buckets are fixed
by the parameters, so a rank that has no gradient for one sends zeros, and everybody gets the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.interop.local import local_parameters
from ...parallel.layout.spec import P
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ..norm.plan import ReductionPlan, entries_of

BUCKET_BYTES = 32 * 2**20


def sync_axes(spec: P, topology: Topology, average_data: bool, averaged: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The axes over which a gradient must be summed before it is whole (a tied axis: over its tied coordinates)."""
    done = {*spec.named_axes, *averaged}
    data = [axis for axis in topology.data_axes if axis not in done] if average_data else []
    named = {*data, *spec.partial, *dict(spec.tied)}
    return tuple(axis for axis in topology.axes if axis in named)


def sync_ranks(
    spec: P, topology: Topology, rank: int, average_data: bool, averaged: tuple[str, ...] = ()
) -> tuple[int, ...]:
    """The ranks, ascending, whose gradients are summed into the one that ``rank`` has of a parameter laid out so."""
    peers = topology.peers(rank, *sync_axes(spec, topology, average_data, averaged))
    if not spec.tied:
        return peers
    where = {axis: spec.tied_coordinates(axis, topology) for axis, _ in spec.tied}
    return tuple(peer for peer in peers if all(topology.coordinate_of(peer, axis) in where[axis] for axis in where))


@dataclass(frozen=True)
class SyncBucket:
    """Indices of parameters whose gradients are reduced in one collective over ``ranks``, times ``scale``."""

    ranks: tuple[int, ...]
    indices: tuple[int, ...]
    scale: float


class GradientSync:
    """Completes the gradients of one plan's parameters, in place.

    Args:
        params: The parameters, in the order of the plan's entries.
        plan: Their specs.
        registry: The groups.
        average_data: False where something else averages over the data axes (`DistributedDataParallel`, FSDP); partial
            and tied gradients are summed all the same.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        plan: ReductionPlan,
        registry: ProcessGroupRegistry,
        average_data: bool = True,
    ) -> None:
        self.params, self.registry = list(params), registry
        topology = plan.topology
        together: dict[tuple[tuple[int, ...], str, str, float], list[int]] = {}
        self._local: dict[float, list[int]] = {}  # by scale
        for index, (param, entry) in enumerate(zip(self.params, plan.entries, strict=True)):
            ranks = sync_ranks(entry.spec, topology, plan.rank, average_data, entry.averaged)
            data = [axis for axis in topology.data_axes if axis not in entry.averaged] if average_data else []
            scale = 1 / prod(topology.size(axis) for axis in data)
            if entry.trained and len(ranks) > 1:
                together.setdefault((ranks, str(gradient_dtype(param)), str(param.device), scale), []).append(index)
            else:
                self._local.setdefault(scale, []).append(index)
        # Sorted by peers, the collectives have one order on all ranks that share one.
        self.buckets = [
            SyncBucket(ranks, part, scale)
            for (ranks, _, _, scale), indices in sorted(together.items())
            for part in self._split(indices)
        ]
        # Only what must not be summed twice needs a mark.
        self._pending = [
            param
            for param, entry in zip(self.params, plan.entries, strict=True)
            if len(sync_ranks(entry.spec, topology, plan.rank, average_data=False)) > 1
        ]

    def _split(self, indices: list[int]) -> list[tuple[int, ...]]:
        """``indices`` cut into runs of about BUCKET_BYTES."""
        parts: list[list[int]] = [[]]
        size = 0
        for index in indices:
            nbytes = self.params[index].numel() * gradient_dtype(self.params[index]).itemsize
            if parts[-1] and size + nbytes > BUCKET_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(index)
            size += nbytes
        return [tuple(part) for part in parts]

    @torch.no_grad()
    def __call__(self) -> None:
        """Reduce the gradients; afterwards a parameter that takes part in a bucket has one on every rank.

        Collectives: one all-reduce a bucket, none where no group is larger than 1. Host reads: none.
        """
        for scale, indices in self._local.items():
            local = [grad for index in indices if (grad := self.params[index].grad) is not None]
            if local and scale != 1.0:
                torch._foreach_mul_(local, scale)
        flats = [self._pack(bucket) for bucket in self.buckets]
        works = [
            dist.all_reduce(flat, group=self.registry.group_of(bucket.ranks), async_op=True)
            for flat, bucket in zip(flats, self.buckets, strict=True)
        ]
        for bucket, flat, work in zip(self.buckets, flats, works, strict=True):
            work.wait()
            self._unpack(bucket, flat)
        for param in self._pending:
            mark_complete(param)

    def _pack(self, bucket: SyncBucket) -> Tensor:
        params = [self.params[index] for index in bucket.indices]
        dtype, device = gradient_dtype(params[0]), params[0].device
        flat = torch.zeros(sum(p.numel() for p in params), dtype=dtype, device=device)
        pairs = [(view, p.grad) for view, p in zip(_views(flat, params), params, strict=True) if p.grad is not None]
        if pairs:
            views, grads = zip(*pairs, strict=True)
            torch._foreach_copy_(views, grads)
        # Divided before the sum, half-precision gradients overflow no earlier than one rank's would.
        return flat.mul_(bucket.scale) if bucket.scale != 1.0 else flat

    def _unpack(self, bucket: SyncBucket, flat: Tensor) -> None:
        params = [self.params[index] for index in bucket.indices]
        views = _views(flat, params)
        for param in params:
            if param.grad is None:
                param.grad = torch.empty_like(param, dtype=gradient_dtype(param))
        torch._foreach_copy_([param.grad for param in params if param.grad is not None], views)


def gradient_dtype(param: Tensor) -> torch.dtype:
    """What backward adds up in: the parameter's dtype, or float32 where a half-precision one has main grads."""
    return param.grad_dtype or param.dtype


def _views(flat: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    pieces = flat.split([param.numel() for param in params])
    return [piece.view(param.shape) for piece, param in zip(pieces, params, strict=True)]


def mark_complete(param: Tensor) -> None:
    """Remember that the gradient, as it is now, is no pending sum."""
    if param.grad is not None:
        param._meshstep_complete = (param.grad.data_ptr(), param.grad._version)  # type: ignore[attr-defined]


def is_complete(param: Tensor) -> bool:
    """Whether nothing has written to the gradient since `mark_complete`."""
    grad = param.grad
    return grad is None or getattr(param, "_meshstep_complete", None) == (grad.data_ptr(), grad._version)


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
    Collectives: one all-reduce for each set of peers (and 32 MiB of gradients). Host reads: none.
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
