"""Flat gradient buckets. A bucket concatenates the gradients of several parameters for one collective.

    replicated optimizer states   every rank needs the full sum           all-reduce
    sharded optimizer states      every rank needs its slice of the sum   reduce-scatter

The parameters of a bucket have equal layout over the mesh, dtype and device. So a rank that holds a replica of one
parameter of the bucket holds replicas of all parameters of the bucket. The flat buffers of these ranks have equal
length and order. The sums of replicas are therefore computed in the same order, and are bitwise identical, even if
different process groups compute them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from math import prod
from typing import NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from ...amp.casting import copy_each_
from ...parallel.interop.local_parameters import local_parameters
from ...parallel.layout.spec import P
from ...parallel.mesh.call_tracker import track_call
from ...parallel.mesh.process_group_collectives import REDUCE_SCATTER
from ...parallel.mesh.registry import ProcessGroupRegistry, check_registry
from ...parallel.mesh.topology import Topology
from ..kernels.memory import is_lazy
from ..norm.plan import NormBucket, ParameterEntry, ReductionPlan, check_unused, entries_of
from ..norm.plan_agreement import agreed
from .in_place import change_each, gradient_dtype, is_complete, mark_complete, separate_gradients, widen_gradients

T = TypeVar("T")

# Layout of a flat bucket, which is divided into equal slices, one per rank --------------------------------------------

#     bucket   | parameter 7 |   parameter 8   | 9 |     parameter 10      | padding |
#     slices   |        rank 0        |        rank 1        |        rank 2         |
#
# In this picture rank 1 holds three segments: the end of parameter 8, all of parameter 9, and the start of parameter
# 10. A slice holds at most one contiguous segment of any parameter. All slices have the same length. Parameters, slices
# and segments begin at multiples of ``ALIGNMENT`` elements; padding fills the gaps.

ALIGNMENT = 8
"""Alignment of parameters, slices and segments in a flat buffer, in elements.

Eight half-precision elements are 16 bytes, which GPU kernels and collectives load at once from aligned addresses.
`norm.exact_norm` also needs the value: shards must begin at multiples of its chunk length.
"""


@dataclass(frozen=True)
class Segment:
    """The contiguous elements of one parameter that lie in one rank's slice of a flat bucket.

    ``param_index`` is the index of the parameter in the bucket. In elements, ``start`` is the beginning of the segment in
    the flattened parameter, and ``offset`` in the slice.
    """

    param_index: int
    start: int
    numel: int
    offset: int


@dataclass(frozen=True)
class FlatBucket:
    """The position of each parameter in one flat buffer. The buffer is divided into slices of equal length.

    ``indices`` are ascending. ``slices`` is the number of slices: 1 for an all-reduce, else the number of ranks.
    """

    indices: tuple[int, ...]
    numels: tuple[int, ...]
    slices: int

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Return (first element, end) of each parameter in the buffer."""
        found, start = [], 0
        for numel in self.numels:
            found.append((start, start + numel))
            start += _aligned(numel)
        return tuple(found)

    def pair_spans(self, items: Iterable[T]) -> Iterator[tuple[T, tuple[int, int]]]:
        """Iterate over (item, span) pairs. ``items`` has one item per parameter, in the order of `indices`."""
        return zip(items, self.spans, strict=True)

    @property
    def slice_numel(self) -> int:
        return _aligned(-(-self.spans[-1][1] // self.slices))

    @property
    def padded_numel(self) -> int:
        return self.slice_numel * self.slices

    def segments(self, index: int) -> list[Segment]:
        """Return the segments in slice number ``index``, in the order of the parameters."""
        low, high = index * self.slice_numel, (index + 1) * self.slice_numel
        found = []
        for param_index, (start, stop) in enumerate(self.spans):
            first, last = max(low, start), min(high, stop)
            if first < last:
                found.append(Segment(param_index, first - start, last - first, first - low))
        return found


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def flat_buckets(numels: dict[int, int], slices: int, bucket_numel: int) -> list[FlatBucket]:
    """Return flat buckets of the parameters. The bucket of the last parameters comes first.

    Backward usually fills the buckets in this order. A parameter with more than ``bucket_numel`` elements gets a
    separate bucket. ``numels`` has the numbers of elements by ascending index of the parameter.
    """
    runs: list[list[int]] = []
    size = 0
    for index in reversed(numels):
        if not runs or size + numels[index] > bucket_numel:
            runs.append([])
            size = 0
        runs[-1].append(index)
        size += numels[index]
    return [FlatBucket(tuple(reversed(run)), tuple(numels[index] for index in reversed(run)), slices) for run in runs]


# Bucket ---------------------------------------------------------------------------------------------------------------

BUCKET_BYTES = 32 * 2**20
LARGE = 2**20
"""Minimum number of elements of a GPU gradient that `GradientBucket.pack` copies and scales in a separate kernel.

Smaller gradients are copied together and then scaled together: two passes over memory, but fewer kernels.
"""

Finish = Callable[[], object]
Memory = dict[str, Tensor]


class CommHook(ABC):
    """A communication hook: it sums a flat gradient buffer over a process group. `Bf16Compression` is an example.

    Each method starts a sum and returns a function that finishes it, so that sums of several buckets overlap with each
    other and with backward. The caller keeps ``flat`` and ``own`` alive until the returned function has run. ``memory``
    is a dict per bucket, initially empty, in which the hook can keep tensors from step to step. All ranks of the group
    must use the same hook.

    Collectives: the hooks of this library issue one per call.
    Host synchronization: none by the hooks of this library.
    """

    @abstractmethod
    def all_reduce(self, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        """Start to replace ``flat`` (1-dim, contiguous) by its sum over the group. Return a function that finishes it."""

    @abstractmethod
    def reduce_scatter(self, own: Tensor, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        """Start to write this rank's slice of the sum of ``flat`` over the group into ``own``.

        ``flat`` may share memory with a gradient, so do not write to it. Return a function that finishes the sum.
        """


class NoCompression(CommHook):
    """Sums gradients in their own dtype. This is the default hook.

    ```python
    ParallelOptimizer(adamw, registry, overlap=True, compression=NoCompression())
    ```
    """

    def all_reduce(self, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        work: dist.Work = dist.all_reduce(flat, group=group, async_op=True)
        return work.wait

    def reduce_scatter(self, own: Tensor, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        work: dist.Work = getattr(dist, REDUCE_SCATTER)(own, flat, group=group, async_op=True)
        return work.wait


class Reducible(Protocol):
    """The gradients of several parameters, which are reduced together.

    If ``adopt`` is True, gradients may become views of a flat buffer. `keep_in_place` sets it to False when a CUDA
    graph is captured: graphs of other micro-batches accumulate into the gradients at their present addresses.
    """

    adopt: bool

    @property
    def params(self) -> Sequence[Tensor]: ...

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Return the process group of the reduction. None: gradients are not summed over ranks."""

    def start(self) -> Finish:
        """Start to reduce the gradients, and return a function that finishes the reduction.

        In a sum over ranks, a gradient that is None counts as zeros.
        """


class UnreducedGradients:
    """The gradients of several parameters, which are multiplied by a factor and not summed over ranks."""

    group = None
    adopt = False

    def __init__(self, params: Sequence[Tensor], scale: float) -> None:
        self.params, self.scale = list(params), scale

    @torch.no_grad()
    def start(self) -> Finish:
        """Scale the gradients in place, and return a function that does nothing."""
        widen_gradients(self.params)
        gradients = [param.grad for param in self.params if param.grad is not None]
        if gradients:
            change_each(torch._foreach_mul_, gradients, self.scale)
        return nothing


def nothing() -> None:
    """Finish a reduction that has no communication."""


class GradientBucket:
    """The gradients of the parameters of one flat bucket, on this rank. A collective sums them over a process group.

    Args:
        layout: The layout of the flat buffer. For `reduce_scatter` it has one slice per rank of the group.
        dtype: Dtype of the buffer.
        scale: Factor on each rank's gradients before the sum. With 1 / (number of ranks) here and not after the sum, an
            average overflows less easily in half precision.
        adopt: True: after an all-reduce, the gradients of contiguous parameters become views of the flat buffer, which
            saves a copy. Do not use it if other code holds a reference to a gradient tensor. False: only gradients with
            another dtype than the buffer become views.
        pending: Parameters with partial or tied gradients, which must not be summed a second time. After an all-reduce
            their gradients are marked as reduced (`mark_complete`). A bucket with such parameters ignores ``adopt``.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        layout: FlatBucket,
        group: dist.ProcessGroup,
        hook: CommHook,
        dtype: torch.dtype,
        scale: float = 1.0,
        adopt: bool = False,
        pending: Sequence[Tensor] = (),
    ) -> None:
        self.params, self.layout, self.dtype, self.scale = list(params), layout, dtype, scale
        self.group, self._hook, self._pending = group, hook, list(pending)
        # The mark of a reduced gradient contains the gradient's version counter (`mark_complete`). All views of one buffer
        # share a counter, so a write to one gradient would make the marks of all gradients in the buffer invalid.
        self.adopt = adopt and not self._pending
        self._memory: Memory = {}
        self._padded = layout.padded_numel
        self._spans = list(layout.pair_spans(self.params))
        ends = [*layout.spans, (layout.padded_numel, layout.padded_numel)]
        self._gaps = [(stop, start) for (_, stop), (start, _) in pairwise(ends) if stop != start]

    def start(self) -> Finish:
        return self.all_reduce()

    @torch.no_grad()
    def all_reduce(self) -> Finish:
        """Start to sum the gradients over the group, and return a function that finishes the sum.

        A gradient that is None counts as zeros, and is set to the sum if the parameter then requires a gradient.
        """
        flat = self.pack()
        wait = self._hook.all_reduce(flat, self.group, self._memory)

        @torch.no_grad()
        def finish() -> None:
            wait()
            self._unpack(flat)
            for param in self._pending:
                mark_complete(param)

        return finish

    @torch.no_grad()
    def reduce_scatter(self, own: Tensor) -> tuple[Finish, Tensor]:
        """Start to write this rank's slice of the sum into ``own``, [slice_numel] of the bucket's dtype.

        Return a function that finishes the sum, and the flat buffer. Keep the buffer alive, and don't write to the
        gradients, until the function has run, because the buffer can be the memory of a gradient. You may set them to
        None.
        """
        first = dense(self.params[0].grad)
        if first is not None and first.dtype == self.dtype and self.fits_exactly(first):
            flat = first.view(-1) if self.scale == 1.0 else first.view(-1) * self.scale
        else:
            flat = self.pack()
        return self._hook.reduce_scatter(own, flat, self.group, self._memory), flat

    def pack(self) -> Tensor:
        """Return a new flat buffer, [padded_numel]: gradients times the scale; zeros for None gradients and padding."""
        flat = self.params[0].new_empty(self._padded, dtype=self.dtype)
        if self._gaps:
            torch._foreach_zero_([flat[start:stop] for start, stop in self._gaps])
        views, gradients = [], []
        for param, view in self.views(flat):
            gradient = dense(param.grad)
            if gradient is None:
                view.zero_()
            elif gradient.dtype == self.dtype and self.scale != 1.0 and (flat.is_cpu or view.numel() >= LARGE):
                torch.mul(gradient, self.scale, out=view)  # one pass over memory instead of two
            elif not flat.is_cpu:  # batched below: copying one by one costs a kernel per gradient
                views.append(view)
                gradients.append(gradient)
            else:
                view.copy_(gradient)
                if self.scale != 1.0:
                    view.mul_(self.scale)
        if views:
            copy_each_(views, gradients)
            if self.scale != 1.0:
                torch._foreach_mul_(views, self.scale)
        return flat

    def _unpack(self, flat: Tensor) -> None:
        targets, sources = [], []
        for param, view in self.views(flat):
            if param.grad is None and not param.requires_grad:
                continue  # frozen after the bucket was made; if it had a gradient, the optimizer would step it
            narrow = param.grad is not None and param.grad.dtype != self.dtype  # copying the sum would round it
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
        """Return True if ``tensor``, flattened, can be the flat buffer without a copy."""
        whole = len(self.params) == 1 and tensor.numel() == self._padded
        return whole and tensor.is_contiguous() and not is_lazy(tensor)

    def views(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return (parameter, view of its elements in the buffer ``flat``) pairs."""
        return [(param, flat[start:stop].view(param.shape)) for param, (start, stop) in self._spans]


class InFlight:
    """Starts reductions, finishes them in the order in which they started, and limits how many run at the same time.

    Each of the ``most`` running reductions (None: no limit) may hold a flat copy of its bucket.
    """

    def __init__(self, most: int | None) -> None:
        self.most = most
        self._started: deque[Finish] = deque()

    def run(self, starts: Iterable[Callable[[], Finish]], *, to_the_end: bool = False) -> None:
        """Start reductions. As soon as ``most`` reductions run, finish the oldest one.

        With ``to_the_end``, finish all reductions before returning, including those of earlier calls.
        """
        for start in starts:
            self._started.append(start())
            if self.most is not None and len(self._started) >= self.most:
                self._started.popleft()()
        while to_the_end and self._started:
            self._started.popleft()()


def run_all(starts: Iterable[Callable[[], Finish]], most: int | None = 2) -> None:
    """Start and finish all reductions. At most ``most`` reductions (default 2; None: no limit) run at the same time."""
    InFlight(most).run(starts, to_the_end=True)


def reduce_all(buckets: Iterable[Reducible]) -> None:
    """Reduce all buckets. Reductions of consecutive buckets overlap if the buckets have the same process group.

    At most two reductions run at the same time, so there are flat copies of two buckets. Gradients that share memory are
    copied before, because a sum that is written in place would be added to the next bucket.
    """
    for _, same_group in groupby(buckets, key=lambda bucket: id(bucket.group)):
        group_buckets = list(same_group)
        if not all(bucket.adopt and all(param.is_contiguous() for param in bucket.params) for bucket in group_buckets):
            separate_gradients(param for bucket in group_buckets for param in bucket.params)
        run_all(bucket.start for bucket in group_buckets)


def keep_in_place(buckets: Iterable[Reducible]) -> None:
    """Set ``adopt`` of all buckets to False: gradients used by CUDA graphs must keep their addresses."""
    for bucket in buckets:
        bucket.adopt = False


def dense(gradient: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or gradient.layout == torch.strided else gradient.to_dense()


# The ranks over which a gradient is summed, and its divisor -----------------------------------------------------------

# The loss is the mean of the losses of all data-parallel ranks. So every gradient is divided by the number of
# data-parallel ranks. It is summed over the data-parallel axes that the parameter's spec does not name, over the partial
# axes of the spec, and over the stages that hold a tied parameter:
#
#     grad = 1/|data| * sum over (data axes not in the spec) x (partial axes) x (tied stages) of the local gradient
#
# If a DTensor's gradient is already averaged over some axes (by `fully_shard`), the divisor and the sum omit these axes.


def sync_axes(spec: P, topology: Topology, average_data: bool, averaged: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the axes over which a local gradient must be summed, in the topology's order.

    A tied axis is returned although the sum has only the ranks at its tied coordinates (`sync_ranks`). With
    ``average_data=False``, only partial and tied axes are returned. Over ``averaged`` the gradient is already averaged.
    """
    spec = spec.resolve(topology)
    done = {*spec.named_axes, *averaged}
    data = [axis for axis in topology.data_axes if axis not in done] if average_data else []
    named = {*data, *spec.partial, *dict(spec.tied)}
    return tuple(axis for axis in topology.axes if axis in named)


def sync_ranks(
    spec: P, topology: Topology, rank: int, average_data: bool, averaged: tuple[str, ...] = ()
) -> tuple[int, ...]:
    """Return the ranks over which the gradient on ``rank`` is summed, ascending, including ``rank``."""
    spec = spec.resolve(topology)
    peers = topology.peers(rank, *sync_axes(spec, topology, average_data, averaged))
    if not spec.tied:
        return tuple(peers)
    where = {axis: spec.tied_coordinates(axis, topology) for axis, _ in spec.tied}
    return tuple(peer for peer in peers if all(topology.coordinate_of(peer, axis) in where[axis] for axis in where))


def layout_kind(spec: P, topology: Topology) -> NormBucket:
    """Return the `NormBucket` of ``spec`` without axes of size 1. It is equal for all parameters of a flat bucket."""
    kind, large = NormBucket.of(spec, topology), {axis for axis in topology.axes if topology.size(axis) > 1}
    return NormBucket(
        tuple(axis for axis in kind.distinct if axis in large),
        tuple((axis, index) for axis, index in kind.owned if axis in large),
        tuple((axis, where) for axis, where in kind.tied if axis in large),
    )


def sync_scale(topology: Topology, average_data: bool, averaged: tuple[str, ...]) -> float:
    data = [axis for axis in topology.data_axes if axis not in averaged] if average_data else []
    return 1 / prod(topology.size(axis) for axis in data)


# Gradient reduction ---------------------------------------------------------------------------------------------------

# Before gradients are measured, they are averaged over data-parallel replicas, and partial and tied gradients are summed.
#
# Gradients that are equal in all fields of `_BucketKey` share flat buckets, so that a full model needs few collectives.
# Buckets do not depend on which gradients exist: a rank that has no gradient of a parameter sends zeros.


class _BucketKey(NamedTuple):
    """The properties that all parameters of a bucket share. ``ranks`` are the ranks over which gradients are summed."""

    ranks: tuple[int, ...]
    layout: NormBucket
    dtype: str
    device: str
    scale: float


def gradient_buckets(
    params: Sequence[Tensor],
    plan: ReductionPlan,
    registry: ProcessGroupRegistry,
    average_data: bool = True,
    *,
    hook: CommHook | None = None,
    adopt: bool = False,
    only: Callable[[ParameterEntry], bool] | None = None,
    bucket_bytes: int | None = None,
) -> list[Reducible]:
    """Return the buckets that reduce the gradients of one plan's parameters.

    After the reduction, a parameter whose gradient is summed over ranks has a gradient on each of these ranks, unless
    it was frozen after the plan was made. Buckets that are summed over the same ranks have the same order on these
    ranks. Buckets of gradients that are only scaled come last.

    ``params`` are in the order of the plan's entries. With ``average_data=False``, other code averages over the
    data-parallel axes (`DistributedDataParallel`, FSDP); partial and tied gradients are still summed. With ``adopt``,
    gradients of contiguous parameters may become views of the flat buffer. ``only`` is True for the entries whose
    gradients are reduced. A parameter larger than ``bucket_bytes`` (None: 32 MiB) gets a separate bucket.
    """
    topology = plan.topology
    by_key, by_scale = _group_params(params, plan, average_data, only)
    # Partial and tied gradients must be summed only once: a second sum would multiply them.
    is_pending = plan.for_each(lambda spec: len(sync_ranks(spec, topology, plan.rank, average_data=False)) > 1)
    keyed_buckets: list[tuple[tuple[int, ...], NormBucket, int, GradientBucket]] = []
    for kind, found in sorted(by_key.items()):
        indices = sorted(found)
        dtype, numels = gradient_dtype(params[indices[0]]), {index: params[index].numel() for index in indices}
        group, nbytes = registry.group_of(kind.ranks), BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        for layout in flat_buckets(numels, 1, nbytes // dtype.itemsize):
            bucket_params = [params[index] for index in layout.indices]
            pending = [params[index] for index in layout.indices if is_pending[index]]
            bucket = GradientBucket(
                bucket_params, layout, group, hook or NoCompression(), dtype, kind.scale, adopt, pending
            )
            # Ranks that reduce the same buckets must sort them into the same order. The index of a tied parameter may
            # differ between stages, so the layout precedes the index in the sort key of buckets of tied parameters.
            keyed_buckets.append(
                (kind.ranks, kind.layout if kind.layout.tied else NormBucket(), -layout.indices[-1], bucket)
            )
    divided = [UnreducedGradients(scaled_params, scale) for scale, scaled_params in by_scale.items()]
    return [*(bucket for *_, bucket in sorted(keyed_buckets, key=lambda item: item[:3])), *divided]


def _group_params(
    params: Sequence[Tensor], plan: ReductionPlan, average_data: bool, only: Callable[[ParameterEntry], bool] | None
) -> tuple[dict[_BucketKey, list[int]], dict[float, list[Tensor]]]:
    """Return {key: indices of parameters whose gradients are summed} and {scale: parameters whose gradients are scaled}."""
    topology = plan.topology
    by_layout: dict[tuple[P, tuple[str, ...], bool], list[int]] = {}  # thousands of parameters share a few layouts
    for index, entry in enumerate(plan.entries):
        if only is None or only(entry):
            by_layout.setdefault((entry.spec, entry.averaged, entry.trained), []).append(index)
    by_key: dict[_BucketKey, list[int]] = {}
    by_scale: dict[float, list[Tensor]] = {}
    for (spec, averaged, trained), members in by_layout.items():
        ranks = sync_ranks(spec, topology, plan.rank, average_data, averaged)
        scale = sync_scale(topology, average_data, averaged)
        if trained and len(ranks) > 1:  # else a parameter may be no leaf, and has no dtype of its gradient
            by_dtype: dict[tuple[str, str], list[int]] = {}
            for index in members:
                by_dtype.setdefault((str(gradient_dtype(params[index])), str(params[index].device)), []).append(index)
            for (grad_dtype, device), indices in by_dtype.items():
                kind = _BucketKey(ranks, layout_kind(spec, topology), grad_dtype, device, scale)
                by_key.setdefault(kind, []).extend(indices)
        elif scale != 1.0:
            by_scale.setdefault(scale, []).extend(params[index] for index in members)
    return by_key, by_scale


def sync_gradients(
    params: Iterable[Tensor | tuple[str, Tensor]], registry: ProcessGroupRegistry, *, average_data: bool = True
) -> None:
    """Reduce the gradients of declared parameters in place, as `ParallelOptimizer` does before it measures them.

        loss.backward()
        sync_gradients(model.parameters(), registry)
        stats = clip_grad_norm_(model.parameters(), 1.0, registry)

    It averages gradients over data-parallel axes, and sums partial and tied gradients. Call it once, after the last
    backward of a step, on every rank, with the same parameters on all ranks that hold them.

    Args:
        params: Declared parameters, or (name, parameter) pairs.
        registry: The process groups.
        average_data: True (default): average over the data-parallel axes. False: other code averages over them
            (`DistributedDataParallel`, FSDP), so only partial and tied gradients are summed.
    Raises:
        ValueError: A parameter has no spec; its spec does not fit its shape, the topology or this rank; its partial or
            tied gradient was already summed; the layout of a DTensor or of its gradient is not supported; ``params`` is
            an exhausted generator; or, in the first call, ranks declare a parameter differently.
        TypeError: A parameter is complex or sparse, an item of ``params`` is not a tensor, or ``registry`` is not a
            `ProcessGroupRegistry`.
        RuntimeError: ``registry`` is closed, and there are several ranks. In the first call, on every rank: ranks are in
            different calls of this library.

        The first call with a registry compares the ranks' declarations, and raises an error of ``params`` on every rank.
        Later calls raise it on the rank with the wrong argument only, and the other ranks wait for it until the timeout.
    Collectives: in the first call with a registry, an object all-gather that compares the declarations, and a second one
        if they differ or shards are uneven. One all-reduce per bucket; a bucket has at most 32 MiB, or a single larger
        parameter. The gradients in a bucket have equal layout, dtype and device, and are summed over the same ranks.
        Partial gradients of sharded DTensors may need separate all-reduces.
    Host synchronization: in the first call with a registry; otherwise none if all gradients are dense.
    """
    check_registry(registry)
    topology = registry.topology

    pairs: list[tuple[str | None, Tensor]] = []

    def make() -> ReductionPlan:
        check_unused(params)
        pairs[:] = [item if isinstance(item, tuple) else (None, item) for item in params]
        if wrong := [type(param).__name__ for _, param in pairs if not isinstance(param, Tensor)]:
            raise TypeError(
                f"params has an item of type {wrong[0]} where a parameter is expected; give parameters, or pairs (name, "
                "parameter)"
            )
        named = [param if name is None else (name, param) for name, param in pairs]
        return ReductionPlan.of(entries_of([named], topology), topology, registry.global_rank)

    with track_call("sync_gradients", registry):
        plan = make() if registry in _SYNCED else agreed(make, registry)
        _SYNCED.add(registry)
    separate_gradients(param for _, param in pairs)  # below, a copy of a DTensor's gradient would be lost
    with local_parameters([param for _, param in pairs], topology, to_sum=True) as local:
        for entry, param in plan.pair_entries(local):
            pending = topology.size(*sync_axes(entry.spec, topology, average_data=False)) > 1
            if pending and param.grad is not None and is_complete(param):
                raise ValueError(
                    f"the gradient of {entry.name} ({entry.spec}) is already summed; summing it again would multiply it: "
                    "call sync_gradients once, after the last backward"
                )
        with track_call("sync_gradients", registry):
            reduce_all(gradient_buckets(local, plan, registry, average_data))


_SYNCED: WeakSet[ProcessGroupRegistry] = WeakSet()
"""Registries with which `sync_gradients` has compared the declarations of all ranks."""


# Compression of float32 gradients to bfloat16 -------------------------------------------------------------------------


@dataclass(frozen=True)
class Bf16Compression(CommHook):
    """Reduces float32 gradients in bfloat16: half the bytes, 8 significant bits.

        ParallelOptimizer(adamw, registry, overlap=True, compression=Bf16Compression())
        ParallelOptimizer(adamw, registry, states=Sharded("data", compression=Bf16Compression()))

    Error feedback stores the rounding error of a rank's gradients, and adds it to the rank's next gradients. So small
    gradients are delayed instead of lost. Rounding errors of the sum itself are lost. Gradients of other dtypes are
    reduced in their own dtype: half-precision gradients already have 2 bytes per element, and float64 gradients need
    their full precision.

    Each rank stores its rounding errors per bucket. They are not part of a state dict, and `add_param_group` and
    `refresh` may reset them to 0. With a loss scale they are errors of the scaled gradients. The error of a non-finite
    gradient element is set to 0.

    Args:
        error_feedback: True (default): keep rounding errors. This takes 4 bytes per element on every rank. False:
            rounding errors are lost.
    Collectives: one per call, as in `NoCompression`.
    Host synchronization: none.

    Reference: Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019, arXiv:1901.09847.
    """

    error_feedback: bool = True

    def all_reduce(self, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        if flat.dtype != torch.float32:
            return NoCompression().all_reduce(flat, group, memory)
        wire = self._rounded(flat, memory)
        arrived = NoCompression().all_reduce(wire, group, memory)

        def finish() -> None:
            arrived()
            flat.copy_(wire)

        return finish

    def reduce_scatter(self, own: Tensor, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        if flat.dtype != torch.float32:
            return NoCompression().reduce_scatter(own, flat, group, memory)
        part = torch.empty_like(own, dtype=torch.bfloat16)
        held = [self._rounded(flat, memory)]  # the collective reads this buffer until it has finished
        arrived = NoCompression().reduce_scatter(part, held[0], group, memory)

        def finish() -> None:
            arrived()
            held.clear()
            own.copy_(part)

        return finish

    @torch.no_grad()
    def _rounded(self, flat: Tensor, memory: Memory) -> Tensor:
        """Return ``flat`` in bfloat16. With ``error_feedback``, add the stored rounding error first, and store the new one.

        ``flat`` stays unchanged, because it may be the memory of a gradient.
        """
        if not self.error_feedback:
            return flat.bfloat16()
        lost = memory.get("lost")
        if lost is None:
            lost = memory["lost"] = torch.zeros_like(flat)
        wire = lost.add_(flat).bfloat16()
        # A non-finite gradient skips the step. Its error (inf - inf = NaN) must not be added to the next gradients.
        lost.sub_(wire).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return wire
