"""Optimizer-state sharding (ZeRO-1) and gradient sharding (ZeRO-2) over a mesh axis.

    ZeRO-1    gradient buckets --reduce-scatter--> this rank's slices, stepped --all-gather--> parameters
    ZeRO-2    as ZeRO-1, but most buckets are reduced as soon as backward has filled them; then gradients are freed

An all-reduce consists of a reduce-scatter and an all-gather. So if gradients and parameters have the same dtype, the
communication volume of ZeRO-1 is that of replicated data parallelism. With float32 gradients and bfloat16 parameters it
is three quarters of it. With an axis of size N, each rank does 1 / N of the update's work on the sharded parameters,
and stores 1 / N of their optimizer states and masters, apart from padding of a few elements per parameter.

Reference: Rajbhandari et al. 2019, "ZeRO", arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...amp.casting import copy_each_, has_equal_values, is_half
from ...amp.master_weights import use_main_grad_
from ...parallel.layout.annotation import annotate
from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.call_tracker import is_transport_error
from ...parallel.mesh.deprecation import renamed_arguments
from ...parallel.mesh.process_group_collectives import ALL_GATHER
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ..gradients.buckets import (
    BUCKET_BYTES,
    CommHook,
    Finish,
    FlatBucket,
    GradientBucket,
    NoCompression,
    Segment,
    dense,
    flat_buckets,
    run_all,
    sync_axes,
)
from ..gradients.fixed_order import SlicedBucket, SlicedTreeSum, TreeRanks, sum_dtype
from ..gradients.in_place import clear_gradients
from ..gradients.reduce_in_backward import (
    BackwardReducer,
    Sizes,
    kind_of,
    model_meets_over_data,
    sizes_of,
    uneven_kinds,
)
from ..norm.param_table import ParamPosition
from ..norm.plan import NormBucket, ParameterEntry, ReductionPlan, entries_of
from ..step.update_request import Update, UpdateRequest
from ..step.window import Window
from .chain import other_layout
from .elementwise import check_elementwise
from .param_transform import ParamTransform, PlacementContext, Position, Replacements, StatePlacement

# Buckets of sharded parameters ----------------------------------------------------------------------------------------

# A flat bucket of parameters is divided into one slice per rank. A reduce-scatter reduces gradients into each rank's
# slice. After the update, an all-gather collects the slices of the parameters.


@dataclass(eq=False)
class Shard:
    """The elements of one parameter in this rank's slice of a bucket.

    Args:
        segment: The range of elements of the flattened parameter.
        tensor: The 1-dim parameter with these elements that the optimizer steps: a view of the model parameter, or a copy
            if the model parameter is not contiguous.
        gradient: The sum of the reduced gradients of this accumulation window; None (default): no gradient yet.
        version: The version counter of ``tensor`` when the bucket last wrote it. Default: 0.
    """

    segment: Segment
    tensor: Tensor
    gradient: Tensor | None = None
    version: int = 0


class ZeroBucket:
    """A flat bucket of parameters, of one dtype and device, and this rank's slice of it.

    Args:
        axes: The mesh axes over which the bucket is sharded, one slice per rank.
        summed: True if gradients must be summed over the axes; False: all ranks of the axes have equal gradients. If
            all axes are data axes, the sum is divided by the number of ranks.
        grad_dtype: The dtype of the collective and of the gradient slice.
        hook: The communication hook that sums gradients.
        release: True: free the parameters' gradients after their reduction. False: the slice may share memory with
            them.

    Attributes:
        shards: This rank's slice, in the order of the parameters; empty if it consists of padding.
    """

    adopt = False

    def __init__(
        self,
        params: Sequence[Tensor],
        layout: FlatBucket,
        registry: ProcessGroupRegistry,
        axes: tuple[str, ...],
        summed: bool,
        grad_dtype: torch.dtype,
        hook: CommHook,
        release: bool,
    ) -> None:
        self.params, self.layout, self.summed, self.grad_dtype = list(params), layout, summed, grad_dtype
        self.release = release
        rank, self.group, self._numel = registry.rank(*axes), registry.group(*axes), layout.slice_numel
        self._own = slice(rank * self._numel, (rank + 1) * self._numel)
        average = 1 / registry.size(*axes) if {*axes} <= {*registry.topology.data_axes} else 1.0
        # float16 gradients are divided before the sum, because the sum could overflow. Other gradients are divided
        # afterwards, when only the slice must be divided.
        scale_before = average if grad_dtype == torch.float16 else 1.0
        self._scale_after = 1.0 if grad_dtype == torch.float16 else average
        self._travels_as_it_is = len(self.params) == 1 and self.params[0].numel() == layout.padded_numel
        self._bucket = GradientBucket(self.params, layout, self.group, hook, grad_dtype, scale_before)
        self.shards = [Shard(segment, nn.Parameter(self._values(segment))) for segment in layout.segments(rank)]
        self._note_written(self._look())

    # Weights ---------------------------------------------------------------------------------------------------------

    def _part(self, segment: Segment) -> Tensor:
        """Return the segment's elements as a detached 1-dim tensor: a view if the parameter is contiguous.

        Otherwise it is a view or a copy, as of `torch.Tensor.reshape`. It does not share the parameter's version counter.
        """
        flat = self.params[segment.param_index].data.reshape(-1)
        return flat[segment.start : segment.start + segment.numel]

    def _values(self, segment: Segment) -> Tensor:
        """Return the segment's elements as a view if the parameter is contiguous, else as a copy of only these elements."""
        part = self._part(segment)
        return part if self.params[segment.param_index].is_contiguous() else part.clone()

    def _look(self) -> list[tuple[int, int, tuple[int, ...]]]:
        return [(param.data_ptr(), param._version, param.stride()) for param in self.params]

    def _note_written(self, seen: list[tuple[int, int, tuple[int, ...]]]) -> None:
        self._seen = seen
        for shard in self.shards:
            shard.version = shard.tensor._version

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the shards of parameters that other code wrote, or that have new memory. Host synchronization: none."""
        now = self._look()
        for shard in self.shards:
            index = shard.segment.param_index
            if now[index] != self._seen[index]:
                shard.tensor.data = self._values(shard.segment)
                torch.autograd.graph.increment_version(shard.tensor)  # so that masters detect the write
        self._note_written(now)

    def has_copies(self) -> bool:
        return any(not self.params[shard.segment.param_index].is_contiguous() for shard in self.shards)

    def find_overwritten(self) -> Tensor | None:
        """Return the first parameter whose values differ from those of a copied shard; None: no parameter differs.

        Shards that were written are left out. So are parameters whose version counter or memory has changed, because
        `refresh` copies them to their shards.

        Host synchronization: one or two per copy.
        """
        now = self._look()
        for shard in self.shards:
            index, tensor = shard.segment.param_index, shard.tensor
            if self.params[index].is_contiguous() or now[index] != self._seen[index]:
                continue
            if tensor._version == shard.version and not has_equal_values(self._part(shard.segment), tensor.detach()):
                return self.params[index]
        return None

    def reload(self) -> None:
        """Set all shards to the values of the parameters, also after undetected writes, such as through ``.data``."""
        self._seen = [(0, -1, ())] * len(self.params)
        self.refresh()

    def gather(self) -> Finish:
        """Start to gather the slices of all ranks. The returned function waits for them and writes them to the parameters.

        Collectives: one all-gather over the axes of the bucket.
        """
        if self._travels_as_it_is and self.params[0].is_contiguous():
            flat = self.params[0].data.view(-1)
        else:
            flat = self.params[0].new_empty(self._numel * self.layout.slices)
            if self.shards:
                places = [place for _, place in self._places(flat[self._own])]
                torch._foreach_copy_(places, [shard.tensor for shard in self.shards])
        work: Any = getattr(dist, ALL_GATHER)(flat, flat[self._own], group=self.group, async_op=True)

        @torch.no_grad()
        def finish() -> None:
            work.wait()
            if flat.data_ptr() == self.params[0].data_ptr():
                torch.autograd.graph.increment_version(self.params)
            else:
                arrived = [view for _, view in self._bucket.views(flat)]
                if flat.is_cpu:
                    torch._foreach_copy_(self.params, arrived)
                else:  # few kernels; `_foreach_copy_` would launch one per parameter if any memory format differs
                    copy_each_(self.params, arrived)
            self._note_written(self._look())

        return finish

    def _places(self, own: Tensor) -> list[tuple[Shard, Tensor]]:
        """Return each shard with its part of ``own``, a buffer of this rank's slice."""
        segments = ((shard, shard.segment) for shard in self.shards)
        return [(shard, own[segment.offset : segment.offset + segment.numel]) for shard, segment in segments]

    # Gradients -------------------------------------------------------------------------------------------------------

    def clear(self, set_to_none: bool) -> None:
        clear_gradients(self.params, set_to_none)
        for shard in self.shards:
            if set_to_none:
                shard.tensor.grad = shard.gradient = None
            elif shard.gradient is not None:
                shard.gradient.zero_()

    @torch.no_grad()
    def start(self, summed: bool = False) -> Finish:
        """Start to reduce the parameters' gradients into this rank's slice.

        The returned function waits for the result, and adds it to the shards' gradients. In a sum over ranks, a missing
        gradient counts as zeros. With ``summed``, gradients are summed even if the attribute ``summed`` is False.
        Collectives: one reduce-scatter if gradients are summed, else none.
        """
        if summed := summed or self.summed:
            own = self.params[0].new_empty(self._numel, dtype=self.grad_dtype)
            arrived, *held = self._bucket.reduce_scatter(own)
        else:
            parts = [(shard, self._gradient_part(shard.segment)) for shard in self.shards]
        if self.release:
            clear_gradients(self.params, set_to_none=True)

        @torch.no_grad()
        def finish() -> None:
            if summed:
                arrived()
                held.clear()
                if self._scale_after != 1.0:
                    own.mul_(self._scale_after)
                _add(self._places(own))
            else:
                _add(parts)

        return finish

    def receive(self, own: Tensor | None) -> None:
        """Set the shards' gradients to the parts of ``own``, this rank's slice of the sum; None: there is no gradient."""
        if own is None:
            for shard in self.shards:
                shard.gradient = None
        else:
            for shard, part in self._places(own.to(self.grad_dtype)):
                shard.gradient = part

    def _gradient_part(self, segment: Segment) -> Tensor | None:
        gradient = dense(self.params[segment.param_index].grad)
        if gradient is None:
            return None
        part = gradient.reshape(-1)[segment.start : segment.start + segment.numel]
        return part.to(self.grad_dtype, copy=self.release)


class FixedOrderZeroBucket(ZeroBucket):
    """A bucket for ``gradients=True`` whose gradients are summed in the order of ``sum_order="fixed"``.

    ``axes`` are all data axes, and the sum is not divided by the number of ranks. Half-precision gradients are summed in
    float32. Other arguments are as in `ZeroBucket`.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        layout: FlatBucket,
        registry: ProcessGroupRegistry,
        axes: tuple[str, ...],
        grad_dtype: torch.dtype,
        ranks: TreeRanks,
    ) -> None:
        hook = NoCompression()
        super().__init__(params, layout, registry, axes, summed=True, grad_dtype=grad_dtype, hook=hook, release=True)
        # `ZeroBucket` would pack gradients in ``grad_dtype``, and divide them.
        self._bucket = GradientBucket(self.params, layout, self.group, hook, sum_dtype(self.params[0]))
        self._sum = SlicedTreeSum(ranks)

    def clear(self, set_to_none: bool) -> None:
        super().clear(set_to_none)
        self._sum.clear()

    @torch.no_grad()
    def start(self, summed: bool = False) -> Finish:
        """Start to exchange the gradients of one micro-batch, and free them. `end_window` sets the shards' gradients.

        The returned function waits, and adds the slices of all ranks to partial sums. ``summed`` has no effect.
        Collectives: one all-to-all.
        """
        add = self._sum.start(self._bucket.pack())
        clear_gradients(self.params, set_to_none=True)
        return add

    def end_window(self) -> None:
        """Set the shards' gradients to the sum over the accumulation window."""
        self.receive(self._sum.finish())


def _add(parts: Iterable[tuple[Shard, Tensor | None]]) -> None:
    """Add to each shard's gradient its part of the sum."""
    sums, terms = [], []
    for shard, part in parts:
        if shard.gradient is None:
            shard.gradient = part
        elif part is not None:
            sums.append(shard.gradient)
            terms.append(part)
    if sums:
        torch._foreach_add_(sums, terms)


# The axes over which an optimizer state is sharded --------------------------------------------------------------------


class ShardingDecision(NamedTuple):
    """The mesh axes over which a parameter's optimizer state is sharded, and whether its gradient is summed over them."""

    axes: tuple[str, ...] = ()
    summed: bool = False


def choose_sharded_axes(
    entry: ParameterEntry, axis: str, topology: Topology, averages_data: bool, gradients: bool
) -> ShardingDecision:
    """Choose the mesh axes over which the optimizer state of a parameter is sharded.

    Candidates are the axes of ``axis`` that are larger than 1 and over which the parameter is replicated and not tied.
    If the gradient must still be summed over some candidates, only these are used; otherwise all are used. Frozen and
    empty parameters are not sharded. With ``gradients=True`` a DTensor is not sharded, because its gradient can't be
    moved during backward.
    """
    spec = entry.spec
    taken = {*spec.distinct_axes(topology), *dict(spec.owned), *dict(spec.tied)}
    free = tuple(axis for axis in topology.expand_aliases(axis) if axis not in taken and topology.size(axis) > 1)
    if not entry.trained or not entry.numel or (gradients and entry.averaged):
        return ShardingDecision()
    to_sum = sync_axes(spec, topology, averages_data, entry.averaged)
    summed = tuple(axis for axis in free if axis in to_sum)
    return ShardingDecision(summed or free, bool(summed))


ShardedNames = Mapping[tuple[str, ...], list[str]]
"""The names of the parameters whose optimizer states a rank shards, by the axes over which they are sharded."""


def check_same_names(by_rank: Sequence[ShardedNames], topology: Topology) -> None:
    """Raise ValueError if two ranks along the same axes would shard different parameters, or in different orders."""
    for axes in sorted({axes for of_rank in by_rank for axes in of_rank}):
        for rank, of_rank in enumerate(by_rank):
            first = topology.peers(rank, *axes)[0]
            names, others = of_rank.get(axes, []), by_rank[first].get(axes, [])
            if names != others:
                differ = sorted({*names} ^ {*others})
                over = axes[0] if len(axes) == 1 else " x ".join(axes)
                if not differ:
                    raise ValueError(
                        f"ranks {first} and {rank} would shard the same parameters over {over!r}, but in different orders; "
                        "give the optimizer the parameters in the same order on all ranks"
                    )
                raise ValueError(
                    f"ranks {first} and {rank} would shard different parameters over {over!r}: only one of them has "
                    f"{', '.join(differ[:5])}; give the optimizer the same parameters on both ranks, and freeze the "
                    "same parameters before you create the optimizer"
                )


# The spec of a shard --------------------------------------------------------------------------------------------------


def shard_spec(spec: P, axes: tuple[str, ...]) -> P:
    """Return the layout of a 1-dim shard of a parameter with the layout ``spec``."""
    partial = tuple(name for name in spec.partial if name not in axes)
    return P((*spec.sharded_axes, *axes), partial=partial, owned=dict(spec.owned), tied=dict(spec.tied))


# The placement and its transform --------------------------------------------------------------------------------------


@renamed_arguments(exchange="compression")
@dataclass(frozen=True)
class Sharded(StatePlacement):
    """The state placement that shards optimizer states and masters over an axis (ZeRO-1), and also gradients (ZeRO-2).

        optimizer = ParallelOptimizer(adamw, registry, states=Sharded("data", gradients=True))

    It applies to parameters that require gradients and are replicated over the axis. It does not apply to parameters
    that are already sharded over the axis, that exist at one coordinate of the axis only (``owned``), or that are tied
    over it. With ``gradients=True`` it does not apply to DTensors.

    The optimizer steps 1-dim shards of the parameters. A shard has the name of its parameter, and a layout that is
    sharded over the axis; norms and clipping treat it like any parameter. A shard shares memory with its parameter if
    the parameter is contiguous. Each float32 master is the master of one shard. The optimizer's update must be
    elementwise, or the optimizer must gather full tensors, as `Muon` does.

    Args:
        axis: A mesh axis, or an alias of several axes. Default ``"data"``. If an alias has axes over which a parameter
            is not replicated, the other axes are used for this parameter. For example, if ``data`` is ``edp x mid``,
            experts that are sharded over ``mid`` have their states sharded over ``edp``.
        gradients: True (ZeRO-2): each backward reduces gradients into this rank's slice, so all ranks must call
            `backward` for every micro-batch. Default False (ZeRO-1): gradients are reduced at the end of an
            accumulation window.
        compression: The communication hook that reduces gradients over the axis, such as `Bf16Compression`. Default
            None: without compression. Not supported with ``sum_order="fixed"``.
    Raises:
        ValueError: By the constructor of `ParallelOptimizer`, on every rank: the mesh has no such axis; the optimizer is
            neither elementwise nor gathers full tensors, or it quantizes its states; ranks along the axis step different
            parameters; or ``overlap=True``, `fully_shard` as ``data_parallel`` or a precision with ``main_grads=False``
            is given. With ``gradients=True`` also: other code averages gradients over the data axes; or, with
            ``sum_order="fixed"``, gradients must be summed over other axes than all data axes.

    With ``gradients=True`` most buckets are reduced while backward runs. Buckets of owned parameters, and buckets whose
    layout differs between ranks, are reduced at the end of backward. So are all buckets if the model itself may issue
    collectives over a data axis or over ``axis``. That is assumed if a declared layout names the axis, or if the axis may
    do more than split the batch. An axis only splits the batch if its name implies it, such as ``data`` or ``dp``, but
    not ``cp`` or ``tensor``.

    Collectives: one object all-gather when the optimizer is made, gets a param group or is refreshed. One reduce-scatter
    per bucket of 32 MiB of gradients that must be summed over the axis, in each accumulation window (ZeRO-1) or
    micro-batch (ZeRO-2). One all-gather per bucket in each step. With ``sum_order="fixed"``, one all-to-all replaces each
    reduce-scatter.
    Host synchronization: none in a step.
    Memory in addition to the slices: flat copies of two buckets during these collectives, and of three buckets during
    backward with ``gradients=True``.
    """

    position: ClassVar[Position] = Position.SHARD
    axis: str = "data"
    gradients: bool = False
    compression: CommHook | None = None

    def check(self, context: PlacementContext) -> None:
        topology, switch = context.registry.topology, context.data_parallel
        if self.axis not in topology.axes and self.axis not in topology.aliases:
            raise ValueError(
                f"Sharded({self.axis!r}): the mesh has no such axis or alias ({topology.named()}); name one of these, or "
                "leave Sharded out of states="
            )
        role = topology.role(self.axis)
        if switch is not None and not switch.is_ddp:
            raise ValueError("fully_shard shards optimizer states already: leave Sharded out of states=")
        if self.gradients and role == "data" and not context.averages_data and context.tree is None:
            instead = (
                "remove average_data=False and the code that averages gradients"
                if switch is None
                else "leave data_parallel out and don't wrap the model"
            )
            raise ValueError(
                "Sharded(gradients=True) requires that the optimizer itself averages gradients over the data axes: "
                f"{instead}, or leave gradients=True out"
            )
        if context.overlap:
            raise ValueError(
                "overlap=True does not work with Sharded: leave overlap out, and give Sharded(..., gradients=True) to "
                "reduce gradients during backward"
            )
        check_elementwise(context.optimizer, "Sharded gives the optimizer 1-dim shards of parameters")

    def transform(self, context: PlacementContext) -> ParamTransform:
        return Shards(self, context) if context.registry.size(self.axis) > 1 else ParamTransform()


class _Param(NamedTuple):
    """A parameter in the param groups, and the decision over which axes its optimizer state is sharded, if any."""

    tensor: Tensor
    entry: ParameterEntry
    decision: ShardingDecision

    @property
    def spec(self) -> P:
        """Return the layout of the stepped tensor: a shard, or the parameter itself."""
        return shard_spec(self.entry.spec, self.decision.axes) if self.decision.axes else self.entry.spec


class _RankReport(NamedTuple):
    """The values that `Shards.install` gathers from each rank.

    ``meets`` is True if the model may issue collectives over the axis of `Sharded` or a data axis.
    """

    buckets: set[NormBucket]
    names: ShardedNames
    sizes: Sizes
    meets: bool
    problem: str | None


class Shards(ParamTransform):
    """The transform of `Sharded`: replaces parameters in the param groups by this rank's shards of them."""

    completes_failed_backward = True

    def __init__(self, placement: Sharded, context: PlacementContext) -> None:
        self.placement, self.registry, self._main_grads = placement, context.registry, context.main_grads
        self._averages_data, self._tree = context.averages_data, context.tree
        self._sliced: list[ZeroBucket] = []  # buckets whose slices `FixedOrderSum` sums
        # ``gradients=True`` reduces buckets during or after backward. `buckets` has all of them, in the order of reduction
        # and gathering. With ``gradients=False`` all buckets are reduced at the end of the accumulation window.
        self._during_backward: list[ZeroBucket] = []
        self._after_backward: list[ZeroBucket] = []
        self.buckets: list[ZeroBucket] = []  # `_during_backward`, then `_after_backward`
        self._norm_buckets: set[NormBucket] = set()
        self._all_after_backward, self._uneven = False, frozenset[str]()
        self._sharded: dict[Tensor, _Param] = {}
        self._segments: list[tuple[int, int]] = []
        self._reducer: BackwardReducer | None = None

    def sharded_over(self, tensor: Tensor) -> tuple[str, ...] | None:
        return self._sharded[tensor].decision.axes if tensor in self._sharded else None

    # Layout ----------------------------------------------------------------------------------------------------------

    def install(self, optimizer: torch.optim.Optimizer, positions: Sequence[ParamPosition]) -> Replacements:
        """Make buckets and shards, and return this rank's shards of each parameter, with their offsets.

        On every rank, it raises ValueError if ranks along the axis would shard different parameters, or the same
        parameters in different orders; or if, with ``gradients=True`` and ``sum_order="fixed"``, a parameter whose
        gradient must be summed is not sharded over exactly the data axes.
        Collectives: an object all-gather.
        """
        named: list[Tensor | tuple[str, Tensor]] = [(at.name, at.tensor) for at in positions]
        entries = entries_of([named], self.registry.topology)
        params = [_Param(at.tensor, entry, self._decision(entry)) for at, entry in zip(positions, entries, strict=True)]
        sharded = [param for param in params if param.decision.axes]
        layouts = self._layouts(sharded)
        self._compare_ranks(params)
        self._sharded |= {param.tensor: param for param in sharded}
        shards: dict[Tensor, list[tuple[Tensor, int]]] = {param.tensor: [] for param in sharded}
        for layout in layouts:
            members = [sharded[index] for index in layout.indices]
            for shard in self._make_bucket(members, layout).shards:
                param = members[shard.segment.param_index]
                annotate(shard.tensor, param.spec, param.entry.name)
                shards[param.tensor].append((shard.tensor, shard.segment.start))
        self.buckets = self._during_backward + self._after_backward
        if self.placement.gradients:
            if self._reducer is not None:
                self._reducer.remove_hooks()
            known = self._sharded  # not `self`, because a reference to this transform would be a reference cycle
            self._reducer = BackwardReducer(
                lambda param: known[param].entry.name, self._during_backward, self._after_backward
            )
        return shards

    def _decision(self, entry: ParameterEntry) -> ShardingDecision:
        """Choose the axes over which the state of a parameter is sharded, and whether its bucket sums gradients."""
        choose = partial(
            choose_sharded_axes, entry, self.placement.axis, self.registry.topology, gradients=self.placement.gradients
        )
        if self._tree is not None:
            decision = choose(averages_data=True)
            if self._is_in_tree(decision) or (self.placement.gradients and decision.summed):
                return decision
        return choose(averages_data=self._averages_data)

    def _not_in_tree(self, params: Sequence[_Param]) -> str | None:
        """Return an error text if ``sum_order="fixed"`` can't sum the gradient of a parameter in backward, else None."""
        if self._tree is None or not self.placement.gradients:
            return None
        for _, entry, decision in params:
            if decision.summed and not self._is_in_tree(decision):
                return (
                    f"{entry.name}: with sum_order='fixed' gradients are summed over "
                    f"{', '.join(self._tree.axes)}, but Sharded({self.placement.axis!r}, gradients=True) shards them over "
                    f"{', '.join(decision.axes)}: give Sharded an alias of all data axes, or leave gradients=True out"
                )
        return None

    def _is_in_tree(self, decision: ShardingDecision) -> bool:
        return self._tree is not None and decision.summed and {*decision.axes} == {*self._tree.axes}

    def _layouts(self, sharded: Sequence[_Param]) -> list[FlatBucket]:
        """Return the layout of each bucket, with indices of ``sharded``, in the order in which backward fills the buckets.

        Ranks with replicas of a parameter must shard it at the same offsets, even if their other parameters differ.
        Therefore all parameters in a bucket have the same layout over the mesh, the same dtype and the same device.
        """
        together: dict[tuple[ShardingDecision, NormBucket, torch.dtype, str], list[int]] = {}
        for index, (tensor, entry, decision) in enumerate(sharded):
            layout = NormBucket.of(entry.spec, self.registry.topology)
            together.setdefault((decision, layout, tensor.dtype, str(tensor.device)), []).append(index)
        layouts = list[FlatBucket]()
        for (decision, *_), indices in together.items():
            numels = {index: sharded[index].tensor.numel() for index in indices}
            bucket_numel = BUCKET_BYTES // self._grad_dtype(sharded[indices[0]].tensor).itemsize
            layouts += flat_buckets(numels, self.registry.size(*decision.axes), bucket_numel)
        return sorted(layouts, key=lambda layout: -layout.indices[-1])

    def _grad_dtype(self, param: Tensor) -> torch.dtype:
        return torch.float32 if self._main_grads and is_half(param) else param.dtype

    def _is_reduced_after_backward(self, entry: ParameterEntry) -> bool:
        """Return True if the parameter's bucket must be reduced after backward, not during it (see `Sharded`)."""
        topology = self.registry.topology
        return self._all_after_backward or bool(entry.spec.owned) or kind_of(entry, topology) in self._uneven

    def _make_bucket(self, members: Sequence[_Param], layout: FlatBucket) -> ZeroBucket:
        params, (_, entry, decision) = [member.tensor for member in members], members[0]
        for param in params:
            if self._main_grads and is_half(param):
                use_main_grad_(param)
        dtype, release = self._grad_dtype(params[0]), self.placement.gradients
        tree = self._tree if self._is_in_tree(decision) else None
        if tree is not None and release:
            bucket: ZeroBucket = FixedOrderZeroBucket(params, layout, self.registry, decision.axes, dtype, tree)
        else:
            hook = self.placement.compression or NoCompression()
            bucket = ZeroBucket(
                params, layout, self.registry, decision.axes, decision.summed, dtype, hook, release=release
            )
            if tree is not None:
                self._sliced.append(bucket)
        is_after = decision.summed and self._is_reduced_after_backward(entry)
        (self._after_backward if is_after else self._during_backward).append(bucket)
        return bucket

    def sliced(self) -> list[SlicedBucket]:
        return [SlicedBucket(bucket.params, bucket.layout, bucket.receive) for bucket in self._sliced]

    def summed_in_backward(self) -> list[Tensor]:
        return [param for bucket in self.buckets if isinstance(bucket, FixedOrderZeroBucket) for param in bucket.params]

    def _compare_ranks(self, params: Sequence[_Param]) -> None:
        """Compare the parameters to shard between ranks, and collect the norm buckets of all ranks.

        It raises ValueError as `install` does.
        Collectives: an object all-gather.
        """
        topology, names = self.registry.topology, dict[tuple[str, ...], list[str]]()
        for _, entry, decision in params:
            if decision.axes:
                names.setdefault(decision.axes, []).append(entry.name)
        mine = {NormBucket.of(param.spec, topology) for param in params}
        movable = (entry for _, entry, decision in params if decision.axes and not entry.spec.owned)
        entries = [param.entry for param in params]
        meets = model_meets_over_data(entries, topology, *topology.expand_aliases(self.placement.axis))
        report = _RankReport(mine, names, sizes_of(movable, topology), meets, self._not_in_tree(params))
        reports = gather_objects(report, self.registry)
        if problem := next((of_rank.problem for of_rank in reports if of_rank.problem is not None), None):
            raise ValueError(problem)
        self._all_after_backward |= any(of_rank.meets for of_rank in reports)
        self._uneven |= uneven_kinds([of_rank.sizes for of_rank in reports], topology)
        check_same_names([of_rank.names for of_rank in reports], topology)
        self._norm_buckets.update(*(of_rank.buckets for of_rank in reports))

    def derive(self, plan: ReductionPlan, positions: Sequence[ParamPosition]) -> ReductionPlan:
        """Return the reduction plan of the shards. It sums norm contributions also over the axes of `Sharded`.

        It also records the segment of each stepped tensor, because only here the positions of all of them are passed.
        `check_state` compares these segments with a saved state.
        """
        entries = []
        for entry, at in plan.pair_entries(positions):
            if axes := next(filter(None, map(self.sharded_over, at.path)), None):
                # Gradients are reduced over these axes by `ZeroBucket`, `FixedOrderSum` or torch's data parallelism, or
                # are equal along them.
                averaged = (*entry.averaged, *axes)
                entry = replace(
                    entry, spec=shard_spec(entry.spec, axes), shape=tuple(at.tensor.shape), averaged=averaged
                )
            entries.append(entry)
        self._segments = [(at.offset, at.tensor.numel()) for at in positions]
        over = self.registry.topology.expand_aliases(self.placement.axis)
        return replace(plan, entries=tuple(entries), buckets=tuple(sorted(self._norm_buckets)), sharded_over=over)

    # The step --------------------------------------------------------------------------------------------------------

    @contextmanager
    def micro_batch(self, window: Window) -> Iterator[None]:
        """Return a context manager around the backward of one micro-batch.

        With ``gradients=True`` it reduces each bucket, adds the result to this rank's slice of gradients, and frees the
        parameters' gradients. The gradients of the previous window must have been cleared.
        """
        if self._reducer is None:
            yield
            return
        _check_cleared(window)
        window.reduced = True
        with self._reducer.micro_batch(window.several):
            yield
        window.saw_grads |= self._reducer.came

    @torch.no_grad()
    def catch_up(self, window: Window) -> None:
        """Reduce all buckets if ``gradients=True`` and this rank ran no micro-batch in the window; else do nothing.

        Collectives: one reduce-scatter per bucket whose gradients must be summed; with ``sum_order="fixed"`` one
            all-to-all instead.
        """
        if self._reducer is not None:
            _check_cleared(window)
            if not window.micro_batches:
                for bucket in self.buckets:
                    bucket.refresh()
                self._reducer.reduce_now()

    @torch.no_grad()
    def pull_grads(self, window: Window, averaged: bool) -> None:
        """Set the gradient of each shard. With ``gradients=False``, first reduce the gradients of the window.

        ``averaged`` is False if torch's data parallelism should have averaged the gradients, but did not. With
        ``gradients=True``, it raises RuntimeError if some micro-batches of the window bypassed `micro_batch`.
        Collectives: with ``gradients=False``, one reduce-scatter per bucket whose gradients must be summed. None for a
            bucket whose gradients `FixedOrderSum` has summed already (``sum_order="fixed"``).
        """
        buckets = self.buckets
        if self._reducer is not None and window.micro_batches:
            self._check_nothing_came()
        for bucket in buckets:  # other code may have written weights since the last step
            bucket.refresh()
        if self._reducer is None:
            reduced = [bucket for bucket in buckets if bucket not in self._sliced]
            for bucket in reduced:
                bucket.receive(None)  # the parameters' gradients are sums over the window
            summed = not averaged and self.registry.topology.role(self.placement.axis) == "data"
            run_all([partial(bucket.start, summed=summed) for bucket in reduced])
        for bucket in buckets:
            if isinstance(bucket, FixedOrderZeroBucket):
                bucket.end_window()
        for bucket in buckets:
            for shard in bucket.shards:
                # The gradient is float32 also for a half-precision shard with main gradients. A later transform, such as
                # `Masters`, has set the shard's `grad_dtype`.
                shard.tensor.grad = shard.gradient

    def _check_nothing_came(self) -> None:
        for param, sharded in self._sharded.items():
            if param.grad is not None:
                raise RuntimeError(
                    f"{sharded.entry.name} got a gradient from a backward that the optimizer did not run, but the "
                    "optimizer ran another backward of this step: with Sharded(gradients=True), use "
                    "optimizer.backward(loss) or optimizer.window() for all micro-batches of a step, or for none"
                )

    def step(self, request: UpdateRequest, update: Update) -> None:
        """Call ``update``, then `write_back`, even if ``update`` raised an error (except an error of a collective).

        The other ranks wait for this rank in the all-gathers of `write_back`.
        """
        try:
            update(request)
        except Exception as error:
            if not is_transport_error(error):
                self.write_back()
            raise
        self.write_back()

    @torch.no_grad()
    def write_back(self) -> None:
        """Gather the shards of all ranks into the model's parameters. Collectives: one all-gather per bucket."""
        run_all([bucket.gather for bucket in self.buckets])

    def reload(self) -> None:
        for bucket in self.buckets:
            bucket.reload()

    def has_copies(self) -> bool:
        return any(bucket.has_copies() for bucket in self.buckets)

    def find_overwritten(self) -> Tensor | None:
        found = next((found for bucket in self.buckets if (found := bucket.find_overwritten()) is not None), None)
        # Later transforms, such as master weights, detect writes to a parameter by the version counter of its shard,
        # which `refresh` increments.
        for bucket in self.buckets:
            bucket.refresh()
        return found

    def clear(self, set_to_none: bool) -> None:
        for bucket in self.buckets:
            bucket.clear(set_to_none)

    # Saving ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        axis = self.placement.axis
        return {"shards": {"axis": axis, "size": self.registry.size(axis), "pieces": self._segments[:]}}

    def check_state(self, state: Mapping[str, Any]) -> None:
        saved, own = state.get("shards"), self.state_dict()["shards"]
        if saved != own:
            raise other_layout(saved, own)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Update the shards from the model's weights, which may have been loaded before. Masters are loaded later."""
        for bucket in self.buckets:
            bucket.refresh()


def _check_cleared(window: Window) -> None:
    if window.has_stale_grads:
        raise RuntimeError(
            "the reduced gradients of the previous step or clip have not been cleared, and new gradients can't be added to "
            "them: call zero_grad() of this optimizer after every step (and after clipping, if more micro-batches follow); "
            "zero_grad() of the model does not clear them"
        )
