"""One flat bucket at run time: the gradients of parameters of one kind of layout, end to end, on their way to a sum.

    replicated states   every rank needs the sum of the whole bucket        --all-reduce-->       the parameters' gradients
    sharded states      every rank needs its slice of the sum               --reduce-scatter-->   a slice

Only parameters of one kind (same distinct axes, owners, ties, dtype and device) share a bucket. All ranks that hold copies
of one of them hold all of the others too, so that the same element lies at the same place of equally long buffers wherever
it is summed, and copies get the same bits whatever order a backend sums in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...amp.casting import copy_each_
from ...parallel.interop.local_parameters import local_parameters
from ...parallel.layout.spec import P
from ...parallel.mesh.call_tracker import in_call
from ...parallel.mesh.process_group_collectives import REDUCE_SCATTER
from ...parallel.mesh.registry import ProcessGroupRegistry, check_registry
from ...parallel.mesh.topology import Topology
from ..kernels.memory import is_lazy
from ..norm.plan import Bucket, ParameterEntry, ReductionPlan, check_unused, entries_of
from .in_place import change_each, gradient_dtype, is_complete, mark_complete, widen_gradients

# Parameters laid end to end in flat buckets that are cut into equal slices, one a rank. Pure arithmetic ---------------

#     bucket   | parameter 7 |   parameter 8   | 9 |     parameter 10      | padding |
#     slices   |        rank 0        |        rank 1        |        rank 2         |
#
# Rank 1 then holds the *segments* 8[9:], 9 and 10[:8]: in each bucket at most one contiguous run of any parameter, so
# that a parameter has at most one segment on a rank. All ranks have slices of one length. Parameters and slices begin at
# multiples of ``ALIGNMENT`` elements, and so do segments, in their parameter and in their slice; what lies between is
# padding.

ALIGNMENT = 8
"""16 bytes in half precision: what kernels and collectives on a GPU load at a time, from addresses that are multiples."""


@dataclass(frozen=True)
class Segment:
    """What one slice holds of one parameter: ``numel`` elements from ``start`` on of the flattened parameter, which lie
    from ``offset`` on in the slice. ``position`` is the parameter's in the bucket."""

    position: int
    start: int
    numel: int
    offset: int


@dataclass(frozen=True)
class FlatBucket:
    """Parameters (by index) end to end, cut into ``slices`` equal slices."""

    indices: tuple[int, ...]
    numels: tuple[int, ...]
    slices: int

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter starts."""
        return tuple(accumulate((_aligned(numel) for numel in self.numels[:-1]), initial=0))

    @property
    def end(self) -> int:
        """Where the last parameter ends."""
        return self.offsets[-1] + self.numels[-1]

    @property
    def numel(self) -> int:
        """Elements without padding."""
        return sum(self.numels)

    @property
    def slice_numel(self) -> int:
        """Elements of each slice, padding included."""
        return _aligned(-(-self.end // self.slices))

    @property
    def padded_numel(self) -> int:
        """Elements of all slices."""
        return self.slice_numel * self.slices

    def segments(self, index: int) -> list[Segment]:
        """What slice ``index`` holds, in the order of the parameters; none of a parameter without elements."""
        low, high = index * self.slice_numel, (index + 1) * self.slice_numel
        found = []
        for position, (offset, numel) in enumerate(zip(self.offsets, self.numels, strict=True)):
            first, last = max(low, offset), min(high, offset + numel)
            if first < last:
                found.append(Segment(position, first - offset, last - first, first - low))
        return found


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def flat_buckets(indices: Sequence[int], numels: Sequence[int], slices: int, bucket_numel: int) -> list[FlatBucket]:
    """Buckets of about ``bucket_numel`` elements, at least one parameter each; the last parameters come first.

    Backward makes the gradients of the last parameters first, so the first bucket of the list is the first to be full.

    Args:
        indices: Of the parameters, ascending.
        numels: Of each of them.
        slices: How many slices.
        bucket_numel: A larger parameter gets a bucket of its own.
    """
    runs: list[list[int]] = []
    size = 0
    for position in reversed(range(len(indices))):
        if not runs or size + numels[position] > bucket_numel:
            runs.append([])
            size = 0
        runs[-1].append(position)
        size += numels[position]
    return [
        FlatBucket(tuple(indices[p] for p in reversed(run)), tuple(numels[p] for p in reversed(run)), slices)
        for run in runs
    ]


# Bucket ---------------------------------------------------------------------------------------------------------------

BUCKET_BYTES = 32 * 2**20

Finish = Callable[[], object]
Memory = dict[str, Tensor]


class Exchange(ABC):
    """How a flat buffer of gradients is summed over a group: what goes over the wire. Collectives: one a call. Host reads:
    none.

    It starts a sum and returns what finishes it, so that buckets overlap with each other and with backward; the caller
    keeps the tensors until then. What it has to remember it keeps in the bucket's ``memory``; all ranks of the group give
    the same exchange.
    """

    @abstractmethod
    def all_reduce(self, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        """Start to put the sum of all ranks' ``flat`` (1-dim, contiguous) in its place; the result finishes it."""

    @abstractmethod
    def reduce_scatter(self, own: Tensor, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        """Start to put this rank's slice of the sum of all ranks' ``flat`` into ``own``; the result finishes it."""


class Exact(Exchange):
    """Sums in the gradients' own dtype."""

    def all_reduce(self, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        work: Any = dist.all_reduce(flat, group=group, async_op=True)
        return work.wait  # type: ignore[no-any-return]

    def reduce_scatter(self, own: Tensor, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        work: Any = getattr(dist, REDUCE_SCATTER)(own, flat, group=group, async_op=True)
        return work.wait  # type: ignore[no-any-return]


class Reducible(Protocol):
    """Gradients that are completed together, when all of them are there.

    Attributes:
        adopt: Gradients may become views of a buffer. Set to False where a CUDA graph is made: from then on they stay where
            they lie, and graphs of other micro-batches add to them there.
    """

    adopt: bool

    @property
    def params(self) -> Sequence[Tensor]: ...

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Whose gradients are summed; None: this rank's alone."""

    def start(self) -> Finish:
        """Start to reduce the gradients that there are; the result finishes it."""


class UnreducedGradients:
    """The gradients that this rank sums with nobody, but has to divide.

    Args:
        params: The tensors whose ``.grad`` it is.
        scale: What they are multiplied by.
    """

    group = None
    adopt = False

    def __init__(self, params: Sequence[Tensor], scale: float) -> None:
        self.params, self.scale = list(params), scale

    @torch.no_grad()
    def start(self) -> Finish:
        """Multiply them. Collectives, host reads: none."""
        widen_gradients(self.params)
        gradients = [param.grad for param in self.params if param.grad is not None]
        if gradients:
            change_each(torch._foreach_mul_, gradients, self.scale)
        return _nothing


def _nothing() -> None:
    pass


class GradientBucket:
    """The gradients of the parameters of one bucket, on one rank.

    Args:
        params: The tensors whose ``.grad`` is summed; one dtype and device.
        layout: How they lie in the buffer; its slices are those of a `reduce_scatter`.
        group: Whose gradients are summed.
        exchange: How.
        dtype: Of the buffer.
        scale: What gradients are multiplied by before they are summed: half-precision sums then overflow no earlier than
            one rank's gradient would.
        adopt: Let gradients become views of the flat buffer after an all-reduce, which saves a copy (see also `Reducible`).
            Not where a gradient has another owner who would not see that.
        pending: Those that must not be summed twice, and are marked: their gradients are never views.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        layout: FlatBucket,
        group: dist.ProcessGroup,
        exchange: Exchange,
        dtype: torch.dtype,
        scale: float = 1.0,
        adopt: bool = False,
        pending: Sequence[Tensor] = (),
    ) -> None:
        self.params, self.layout, self.dtype, self.scale = list(params), layout, dtype, scale
        self.group, self._exchange, self._pending = group, exchange, list(pending)
        # A mark knows a gradient by its version, which views of a buffer share.
        self.adopt = adopt and not self._pending
        self._memory: Memory = {}
        self._padded = layout.padded_numel
        self._spans = [(at, at + numel) for at, numel in zip(layout.offsets, layout.numels, strict=True)]
        gaps = (stop for (_, stop), start in zip(self._spans, layout.offsets[1:], strict=False) if stop != start)
        self._first_gap = next(gaps, layout.end)

    def start(self) -> Finish:
        """`all_reduce`, as buckets are reduced while backward runs."""
        return self.all_reduce()

    @torch.no_grad()
    def all_reduce(self) -> Finish:
        """Start to sum the gradients over the group; one that a rank lacks counts as zeros, and everybody gets the sum.

        Collectives: one. Host reads: none.
        """
        flat = self._packed()
        arrived = self._exchange.all_reduce(flat, self.group, self._memory)

        @torch.no_grad()
        def finish() -> None:
            arrived()
            self._unpack(flat)
            for param in self._pending:
                mark_complete(param)

        return finish

    @torch.no_grad()
    def reduce_scatter(self, own: Tensor) -> tuple[Finish, Tensor]:
        """Start to put this rank's slice of the sum into ``own``, [slice_numel] of the bucket's dtype.

        Returns:
            What finishes it, and the buffer, which must be kept until then. The gradients are not needed any more, unless
            one is the whole buffer.
        Collectives: one. Host reads: none.
        """
        first = dense(self.params[0].grad)
        if first is not None and first.dtype == self.dtype and self.fits_exactly(first):
            flat = first.view(-1) if self.scale == 1.0 else first.view(-1) * self.scale
        else:
            flat = self._packed()
        return self._exchange.reduce_scatter(own, flat, self.group, self._memory), flat

    def _packed(self) -> Tensor:
        """[padded_numel]: the gradients times the scale, zeros where there are none."""
        flat = self.params[0].new_empty(self._padded, dtype=self.dtype)
        flat[self._first_gap :].zero_()
        views, gradients = [], []
        for view, param in zip(self.views(flat), self.params, strict=True):
            gradient = dense(param.grad)
            if gradient is None:
                view.zero_()
            elif not flat.is_cpu:  # all together: one by one it would be a kernel each
                views.append(view)
                gradients.append(gradient)
            elif self.scale == 1.0:
                view.copy_(gradient)
            elif gradient.dtype == self.dtype:  # in one pass over memory
                torch.mul(gradient, self.scale, out=view)
            else:
                view.copy_(gradient).mul_(self.scale)
        if views:
            copy_each_(views, gradients)
            if self.scale != 1.0:
                torch._foreach_mul_(views, self.scale)
        return flat

    def _unpack(self, flat: Tensor) -> None:
        targets, sources = [], []
        for view, param in zip(self.views(flat), self.params, strict=True):
            if param.grad is None and not param.requires_grad:
                continue  # frozen since the bucket was made: what is no gradient must not be stepped with
            narrow = param.grad is not None and param.grad.dtype != self.dtype  # the sum would be rounded into it
            if (self.adopt or narrow) and param.is_contiguous():
                param.grad = view
                continue
            if param.grad is None or narrow or param.grad.is_neg():
                param.grad = torch.empty_like(param, dtype=self.dtype)
            targets.append(param.grad)
            sources.append(view)
        if targets:
            copy_each_(targets, sources)

    def fits_exactly(self, tensor: Tensor) -> bool:
        """Whether the flattened tensor is the whole buffer: a large parameter that needs no copy to travel."""
        whole = len(self.params) == 1 and tensor.numel() == self._padded
        return whole and tensor.is_contiguous() and not is_lazy(tensor)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Where each parameter lies in the flat buffer, of its shape."""
        places = zip(self.params, self._spans, strict=True)
        return [flat[start:stop].view(param.shape) for param, (start, stop) in places]


def reduce_all(buckets: Iterable[Reducible]) -> None:
    """Start all of a group, then finish them in the same order, then those of the next group. Collectives: those of the
    buckets.

    Over NCCL the kernels of two groups may need more of a GPU than there is: in flight together, started in one order here
    and in another there, they would wait for each other.
    """
    for _, of_group in groupby(buckets, key=lambda bucket: id(bucket.group)):
        for finish in [bucket.start() for bucket in of_group]:
            finish()


def keep_in_place(buckets: Iterable[Reducible]) -> None:
    """From now on their gradients stay where they lie, for a CUDA graph; see `Reducible`."""
    for bucket in buckets:
        bucket.adopt = False


def dense(gradient: Tensor | None) -> Tensor | None:
    """An embedding's sparse gradient as a dense one, which it becomes in a buffer anyway."""
    return gradient if gradient is None or gradient.layout == torch.strided else gradient.to_dense()


# Over which ranks a gradient must be summed before it is whole, and what it is divided by -----------------------------

# The loss is taken to be the mean over the data axes of what each rank computed. So every gradient is divided by the size
# of all data axes and summed over those that do not shard the parameter, over its partial axes and over its tied copies:
#
#     grad = 1/|data| * sum over (data axes not sharding it) x (partial axes) x (tied copies) of the local gradient
#
# Data axes over which a DTensor's gradient has been averaged already (`fully_shard` does) are left out of both.


def sync_axes(spec: P, topology: Topology, average_data: bool, averaged: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The axes over which a gradient must be summed before it is whole (a tied axis: over its tied coordinates)."""
    spec = spec.on(topology)
    done = {*spec.named_axes, *averaged}
    data = [axis for axis in topology.data_axes if axis not in done] if average_data else []
    named = {*data, *spec.partial, *dict(spec.tied)}
    return tuple(axis for axis in topology.axes if axis in named)


def sync_ranks(
    spec: P, topology: Topology, rank: int, average_data: bool, averaged: tuple[str, ...] = ()
) -> tuple[int, ...]:
    """The ranks, ascending, whose gradients are summed into the one that ``rank`` has of a parameter laid out so."""
    spec = spec.on(topology)
    peers = topology.peers(rank, *sync_axes(spec, topology, average_data, averaged))
    if not spec.tied:
        return tuple(peers)
    where = {axis: spec.tied_coordinates(axis, topology) for axis, _ in spec.tied}
    return tuple(peer for peer in peers if all(topology.coordinate_of(peer, axis) in where[axis] for axis in where))


def layout_kind(spec: P, topology: Topology) -> Bucket:
    """The kind of layout, of which one flat bucket holds parameters; axes of size 1 distinguish nothing."""
    kind, large = Bucket.of(spec, topology), {axis for axis in topology.axes if topology.size(axis) > 1}
    return Bucket(
        tuple(axis for axis in kind.distinct if axis in large),
        tuple((axis, index) for axis, index in kind.owned if axis in large),
        tuple((axis, where) for axis, where in kind.tied if axis in large),
    )


def sync_scale(topology: Topology, average_data: bool, averaged: tuple[str, ...] = ()) -> float:
    """What the local gradient is multiplied by before it is summed."""
    data = [axis for axis in topology.data_axes if axis not in averaged] if average_data else []
    return 1 / prod(topology.size(axis) for axis in data)


# Sync -----------------------------------------------------------------------------------------------------------------

# Gradients completed before anything is measured: data replicas averaged, pending sums made, tied copies combined.
#
# Gradients of one kind of layout with the same peers travel together in flat buckets, a few collectives for a whole
# model. The buckets are fixed by the parameters, so a rank that has no gradient for one sends zeros, and everybody gets
# the sum.


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
    divided = [UnreducedGradients(those, scale) for scale, those in alone.items()]
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
