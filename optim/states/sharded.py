"""Optimizer states, and gradients, sharded over a mesh axis: every rank of it steps its slice of the parameters.

    ZeRO-1    gradients of buckets --reduce-scatter--> slices, stepped --all-gather--> parameters
    ZeRO-2    the same, but each bucket is reduced as soon as backward has filled it, and its gradients are freed

An all-reduce is a reduce-scatter and an all-gather, so no more travels than with replicated data parallelism, while the
step's work and the optimizer's memory are divided by the size N of the axis: of optimizer states and masters a rank keeps
1 / N, up to a few elements a bucket.

Reference: Rajbhandari et al. 2019, "ZeRO", arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from ...parallel.mesh.process_group_collectives import ALL_GATHER
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ..gradients.buckets import (
    BUCKET_BYTES,
    Exact,
    Exchange,
    Finish,
    FlatBucket,
    GradientBucket,
    Segment,
    dense,
    flat_buckets,
    sync_axes,
)
from ..gradients.in_place import clear_gradients
from ..gradients.reduce_in_backward import (
    BackwardReducer,
    kind_of,
    model_meets_over_data,
    run_all,
    sizes_of,
    uneven_kinds,
)
from ..norm.param_table import ParamPosition
from ..norm.plan import Bucket, ParameterEntry, ReductionPlan, entries_of
from ..step.window import Window
from .chain import Binding, Link, Placement, Position, Replacements, other_layout
from .elementwise import check_elementwise

# Buckets of sharded parameters ----------------------------------------------------------------------------------------

# One flat bucket of parameters at run time: its gradients come to this rank's slice, its slice goes out to all ranks.


class ZeroBucket:
    """The parameters of one bucket, and this rank's slice of them.

    Args:
        params: The model's; one dtype and device.
        layout: How they lie in the bucket.
        registry: The groups.
        axes: The slices are their ranks'.
        summed: Whether gradients are still to be summed over the axes; else all ranks of them have the same. Over data axes
            the sum is divided by their size.
        grad_dtype: Of the slice of the gradients, and of the collective.
        exchange: How gradients are summed.
        release: Free the parameters' gradients when they have been reduced. Else the slice may share memory with them.

    Attributes:
        segments: What this rank's slice holds.
        pieces: For each segment a 1-dim parameter: a view of the model's parameter, or of a copy where that is not
            contiguous.
        gradients: For each segment the gradient that has come so far, or None.
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
        exchange: Exchange,
        release: bool,
    ) -> None:
        self.params, self.layout, self.summed, self.grad_dtype = list(params), layout, summed, grad_dtype
        self.release = release
        rank, self.group, self._numel = registry.rank(*axes), registry.group(*axes), layout.slice_numel
        self._own = slice(rank * self._numel, (rank + 1) * self._numel)
        average = 1 / registry.size(*axes) if {*axes} <= {*registry.topology.data_axes} else 1.0
        # Divided before the sum, float16 gradients overflow no earlier than one rank's would; else the slice is less work.
        early = average if grad_dtype == torch.float16 else 1.0
        self._late = 1.0 if grad_dtype == torch.float16 else average
        self._travels_as_it_is = len(self.params) == 1 and self.params[0].numel() == layout.padded_numel
        self._bucket = GradientBucket(self.params, layout, self.group, exchange, grad_dtype, early)
        self.segments = layout.segments(rank)
        self.pieces: list[Tensor] = [nn.Parameter(self._piece(segment)) for segment in self.segments]
        self.gradients: list[Tensor | None] = [None] * len(self.segments)
        self._seen = self._look()
        self._piece_versions = self._look_at_pieces()

    # Weights ---------------------------------------------------------------------------------------------------------

    def _part(self, segment: Segment) -> Tensor:
        """The segment's elements of the parameter, without autograd and with a version counter of their own."""
        flat = self.params[segment.position].data.reshape(-1)
        return flat[segment.start : segment.start + segment.numel]

    def _piece(self, segment: Segment) -> Tensor:
        """The same, a view if the parameter is contiguous, else a copy of no more than that."""
        part = self._part(segment)
        return part if self.params[segment.position].is_contiguous() else part.clone()

    def _look(self) -> list[tuple[int, int, tuple[int, ...]]]:
        return [(param.data_ptr(), param._version, param.stride()) for param in self.params]

    def _look_at_pieces(self) -> list[int]:
        return [piece._version for piece in self.pieces]

    @torch.no_grad()
    def refresh(self) -> None:
        """Set the pieces to the parameters where somebody wrote to those or gave them other memory. Host reads: none."""
        now = self._look()
        for segment, piece in zip(self.segments, self.pieces, strict=True):
            if now[segment.position] != self._seen[segment.position]:
                piece.data = self._piece(segment)
                torch.autograd.graph.increment_version(piece)  # tells masters to compare
        self._seen, self._piece_versions = now, self._look_at_pieces()

    def has_copies(self) -> bool:
        """Return True if a piece is a copy and not a view."""
        return any(not self.params[segment.position].is_contiguous() for segment in self.segments)

    def find_overwritten(self) -> Tensor | None:
        """Return the first parameter of which a piece is a copy with other values. Pieces that were written to, and
        parameters that `refresh` reads, are left out. Host synchronization: one per copy."""
        now = self._look()
        for segment, piece, version in zip(self.segments, self.pieces, self._piece_versions, strict=True):
            position = segment.position
            if self.params[position].is_contiguous() or now[position] != self._seen[position]:
                continue
            if piece._version == version and not has_equal_values(self._part(segment), piece.detach()):
                return self.params[position]
        return None

    def reload(self) -> None:
        """Set the pieces to the parameters, whether or not a write was seen."""
        self._seen = [(0, -1, ())] * len(self.params)
        self.refresh()

    def gather(self) -> Finish:
        """Start to bring all ranks' pieces into the parameters. Collectives: one all-gather."""
        if self._travels_as_it_is and self.params[0].is_contiguous():
            flat = self.params[0].data.view(-1)
        else:
            flat = self.params[0].new_empty(self._numel * self.layout.slices)
            own = flat[self._own]
            if self.pieces:  # a slice may be nothing but padding
                torch._foreach_copy_([own[s.offset : s.offset + s.numel] for s in self.segments], self.pieces)
        work: Any = getattr(dist, ALL_GATHER)(flat, flat[self._own], group=self.group, async_op=True)

        @torch.no_grad()
        def finish() -> None:
            work.wait()
            if flat.data_ptr() == self.params[0].data_ptr():
                torch.autograd.graph.increment_version(self.params)
            else:
                places = zip(self.layout.offsets, self.params, strict=True)
                arrived = [flat[at : at + p.numel()].view(p.shape) for at, p in places]
                if flat.is_cpu:
                    torch._foreach_copy_(self.params, arrived)
                else:  # where one lies in another order it would be a kernel each
                    copy_each_(self.params, arrived)
            self._seen, self._piece_versions = self._look(), self._look_at_pieces()

        return finish

    # Gradients -------------------------------------------------------------------------------------------------------

    def forget_gradients(self, set_to_none: bool = True) -> None:
        """Clear the slice of the gradients, and those of the parameters."""
        clear_gradients(self.params, set_to_none)
        self.gradients = [None if gradient is None or set_to_none else gradient.zero_() for gradient in self.gradients]

    def start(self) -> Finish:
        """`reduce`, as buckets are reduced while backward runs."""
        return self.reduce()

    @torch.no_grad()
    def reduce(self, summed: bool = False) -> Finish:
        """Start to add the parameters' gradients to this rank's slice of them; one that a rank lacks counts as zeros.

        Args:
            summed: Sum them over the axis though that should have been done.
        Collectives: one reduce-scatter where they are summed, else none. Host reads: none.
        """
        if summed := summed or self.summed:
            own = self.params[0].new_empty(self._numel, dtype=self.grad_dtype)
            arrived, *held = self._bucket.reduce_scatter(own)
        else:
            parts = [self._gradient_part(segment) for segment in self.segments]
        if self.release:
            for param in self.params:
                param.grad = None

        @torch.no_grad()
        def finish() -> None:
            if summed:
                arrived()
                held.clear()
                if self._late != 1.0:
                    own.mul_(self._late)
                self._add([own[s.offset : s.offset + s.numel] for s in self.segments])
            else:
                self._add(parts)

        return finish

    def _gradient_part(self, segment: Segment) -> Tensor | None:
        gradient = dense(self.params[segment.position].grad)
        if gradient is None:
            return None
        part = gradient.reshape(-1)[segment.start : segment.start + segment.numel]
        return part.to(self.grad_dtype, copy=self.release)

    def _add(self, parts: Sequence[Tensor | None]) -> None:
        sums, terms = [], []
        for index, part in enumerate(parts):
            present = self.gradients[index]
            if present is None:
                self.gradients[index] = part
            elif part is not None:
                sums.append(present)
                terms.append(part)
        if sums:
            torch._foreach_add_(sums, terms)


def reference_slice(
    gradients: Sequence[Sequence[Tensor]], layout: FlatBucket, rank: int, average: bool
) -> list[Tensor]:
    """What ``ZeroBucket.gradients`` of ``rank`` must be, plain: sum the ranks' whole gradients and cut.

    Args:
        gradients: Of each rank of the axis, those of the bucket's parameters.
        average: Divide by the number of ranks.
    """
    totals = [torch.stack(list(of_all)).double().sum(0).flatten() for of_all in zip(*gradients, strict=True)]
    parts = [totals[s.position][s.start : s.start + s.numel] for s in layout.segments(rank)]
    return [part / len(gradients) if average else part for part in parts]


def reference_sharded_step(
    params: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    layout: FlatBucket,
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """A step of a bucket whose states are sharded, plain: each rank steps its slice, and all slices make up the parameters.

    Args:
        params, gradients: As for `reference_slice`; the ranks are of a data axis.
        optimizers: Of each rank one over copies of its segments.
    """
    for rank, optimizer in enumerate(optimizers):
        copies = [copy for group in optimizer.param_groups for copy in group["params"]]
        for copy, gradient in zip(copies, reference_slice(gradients, layout, rank, average=True), strict=True):
            copy.grad = gradient.to(copy.dtype)
        optimizer.step()
        for copy, s in zip(copies, layout.segments(rank), strict=True):
            params[s.position].data.view(-1)[s.start : s.start + s.numel] = copy.detach()


# The axes over which a parameter is sharded ---------------------------------------------------------------------------


class ShardingDecision(NamedTuple):
    """The axes that cut a parameter, none where it stays whole, and whether its gradients are to be summed over them."""

    axes: tuple[str, ...] = ()
    summed: bool = False


def cut_of(
    entry: ParameterEntry, axis: str, topology: Topology, averages_data: bool, gradients: bool
) -> ShardingDecision:
    """How a parameter is cut over an axis, or over those of an alias on which all ranks hold and step the same of it.

    Where torch has averaged its gradient over some of them and not over others, the others cut. The gradients of a DTensor
    are its own until the step, so they can't be taken from backward.

    Args:
        averages_data: Whether the optimizer averages gradients over the data axes.
        gradients: They are taken from backward.
    """
    spec = entry.spec
    taken = {*spec.distinct_axes(topology), *dict(spec.owned), *dict(spec.tied)}
    free = tuple(axis for axis in topology.atoms(axis) if axis not in taken and topology.size(axis) > 1)
    if not entry.trained or not entry.numel or (gradients and entry.averaged):
        return ShardingDecision()
    to_sum = sync_axes(spec, topology, averages_data, entry.averaged)
    summed = tuple(axis for axis in free if axis in to_sum)
    return ShardingDecision(summed or free, bool(summed))


Cuts = Mapping[tuple[str, ...], list[str]]
"""The names of the parameters that a rank cuts over these axes."""


def check_same_cuts(cuts: Sequence[Cuts], topology: Topology) -> None:
    """Raise ValueError where two ranks along the same axes would cut different parameters over them.

    Args:
        cuts: Of each rank.
    """
    for axes in sorted({axes for of_rank in cuts for axes in of_rank}):
        for rank, of_rank in enumerate(cuts):
            first = topology.peers(rank, *axes)[0]
            names, others = of_rank.get(axes, []), cuts[first].get(axes, [])
            if names != others:
                differ = sorted({*names} ^ {*others})
                over = axes[0] if len(axes) == 1 else " x ".join(axes)
                raise ValueError(
                    f"ranks {first} and {rank} would shard different parameters over {over!r}, {', '.join(differ[:5])} on "
                    "only one of them: freeze the same parameters on all ranks before making the optimizer"
                )


# The spec of a shard --------------------------------------------------------------------------------------------------


def piece_spec(spec: P, axes: tuple[str, ...]) -> P:
    """The spec of a piece of a parameter laid out as ``spec``: 1-dim, and sharded over ``axes`` as well."""
    partial = tuple(name for name in spec.partial if name not in axes)
    return P((*spec.sharded_axes, *axes), partial=partial, owned=dict(spec.owned), tied=dict(spec.tied))


# The placement and its transform --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sharded(Placement):
    """Shard optimizer states and master weights over an axis (ZeRO-1), and gradients (ZeRO-2).

    Sharded are all parameters that require gradients and are the same on all ranks of the axis. Those stay whole that the
    axis shards already, that only one coordinate owns or that are tied over it; DTensors too, with sharded gradients.

    A piece is 1-dim and has its parameter's name and a spec that names the axis, so plans, norms and clipping need no
    exception for it. It shares the parameter's memory, unless that is not contiguous; where the precision has masters, they
    are made of pieces. Right for optimizers that treat every element alike, whatever tensor it is in.

    Args:
        axis: Over its ranks, usually ``"data"``. Of an alias those axes count that a parameter is the same on: experts that
            ``mid`` splits are sharded over ``edp`` where ``data`` is ``edp x mid``.
        gradients: Every backward reduces gradients into this rank's slice, and all ranks must call `backward` for every
            micro-batch. Bucket by bucket while it runs; of owned parameters and of those with uneven pieces, and of all
            where the model itself uses a data axis (a spec names it, or it is none by its name, or ``cp``), when it ends.
        exchange: How gradients are summed over the axis; None: as they are.
    Collectives: to install it, an object all-gather; in a window (ZeRO-1) or micro-batch, one reduce-scatter a bucket of 32
    MiB of gradients that the axis still has to sum; in a step one all-gather a bucket. Host reads: none.
    Memory besides the slices: flat copies of two buckets, during these.
    """

    position: ClassVar[Position] = Position.CUT
    axis: str = "data"
    gradients: bool = False
    exchange: Exchange | None = None

    def check(self, binding: Binding) -> None:
        topology, switch = binding.registry.topology, binding.data_parallel
        if self.axis not in topology.axes and self.axis not in topology.aliases:
            raise ValueError(f"Sharded({self.axis!r}): it is no axis of the mesh ({topology.named()}); name one")
        role = topology.role(self.axis)
        if switch is not None and not switch.is_ddp:
            raise ValueError("fully_shard shards optimizer states already: leave Sharded out of states=")
        if self.gradients and role == "data" and not binding.averages_data:
            raise ValueError(
                "Sharded(gradients=True) needs the optimizer itself to average over the data axes: leave data_parallel "
                "out, or shard only the states"
            )
        if binding.overlap:
            raise ValueError(
                "Reduce(overlap=True) is for states that are whole, and Sharded(gradients=True) reduces in backward "
                "too: leave one out"
            )
        check_elementwise(binding.optimizer, "Sharded gives the optimizer 1-dim pieces of parameters")

    def link(self, binding: Binding) -> Link:
        return Shards(self, binding) if binding.registry.size(self.axis) > 1 else Link()


class Shards(Link):
    """Puts this rank's pieces of the parameters in their place in the param groups of an optimizer; see `Sharded`."""

    def __init__(self, how: Sharded, binding: Binding) -> None:
        self.how, self.registry, self._main_grads = how, binding.registry, binding.main_grads
        self._averages_data = binding.averages_data
        self.buckets: list[ZeroBucket] = []  # early and late: all, in the order in which they are reduced and gathered
        self._early: list[ZeroBucket] = []
        self._late: list[ZeroBucket] = []
        self._norm_buckets: set[Bucket] = set()
        self._all_late, self._uneven = False, frozenset[str]()
        self._names: dict[Tensor, str] = {}
        self._cut_over: dict[Tensor, tuple[str, ...]] = {}
        self._cuts: list[tuple[int, int]] = []
        self._reducer: BackwardReducer | None = None

    def cut_over(self, tensor: Tensor) -> tuple[str, ...] | None:
        """The axes whose ranks step pieces of the tensor, which may be none on this one; None: it is whole."""
        return self._cut_over.get(tensor)

    # Layout ----------------------------------------------------------------------------------------------------------

    def install(self, optimizer: torch.optim.Optimizer, positions: Sequence[ParamPosition]) -> Replacements:
        """Raises ValueError, on every rank, where two ranks of the axis would shard different parameters."""
        topology = self.registry.topology
        tensors = [at.tensor for at in positions]
        named: list[Tensor | tuple[str, Tensor]] = [(at.name, at.tensor) for at in positions]
        entries = entries_of([named], topology)
        cuts = [cut_of(entry, self.how.axis, topology, self._averages_data, self.how.gradients) for entry in entries]
        planned, over = self._layouts(tensors, entries, cuts), {i: cut for i, cut in enumerate(cuts) if cut.axes}
        self._agree(entries, over)
        self._cut_over |= {tensors[index]: cut.axes for index, cut in over.items()}
        self._names |= {tensors[index]: entries[index].name for index in over}
        pieces: dict[Tensor, list[tuple[Tensor, int]]] = {tensors[index]: [] for index in over}
        for cut, layout in planned:
            waits = self._waits(entries[layout.indices[0]])
            bucket = self._make_bucket([tensors[index] for index in layout.indices], layout, cut, waits)
            for segment, piece in zip(bucket.segments, bucket.pieces, strict=True):
                index = layout.indices[segment.position]
                annotate(piece, piece_spec(entries[index].spec, over[index].axes), entries[index].name)
                pieces[tensors[index]].append((piece, segment.start))
        self.buckets = self._early + self._late
        self._cuts += [
            (offset, piece.numel()) for tensor in tensors for piece, offset in pieces.get(tensor, [(tensor, 0)])
        ]
        if self.how.gradients:
            if self._reducer is not None:
                self._reducer.remove_hooks()
            self._reducer = BackwardReducer(self._names.__getitem__, self._early, self._late)
        return pieces

    def _layouts(
        self, params: Sequence[Tensor], entries: Sequence[ParameterEntry], cuts: Sequence[ShardingDecision]
    ) -> list[tuple[ShardingDecision, FlatBucket]]:
        """How each bucket is cut, and its layout, in the order in which backward fills them.

        Ranks that hold replicas of a parameter must cut it in the same places, whatever else they hold: so only parameters
        of one kind of layout share a bucket.
        """
        together: dict[tuple[ShardingDecision, Bucket, torch.dtype, str], list[int]] = {}
        for index, (param, entry, cut) in enumerate(zip(params, entries, cuts, strict=True)):
            if cut.axes:
                key = (cut, Bucket.of(entry.spec, self.registry.topology), param.dtype, str(param.device))
                together.setdefault(key, []).append(index)
        planned = []
        for (cut, *_), indices in together.items():
            bucket_numel = BUCKET_BYTES // self._grad_dtype(params[indices[0]]).itemsize
            numels, size = [params[index].numel() for index in indices], self.registry.size(*cut.axes)
            planned += [(cut, layout) for layout in flat_buckets(indices, numels, size, bucket_numel)]
        return sorted(planned, key=lambda item: -item[1].indices[-1])

    def _grad_dtype(self, param: Tensor) -> torch.dtype:
        return torch.float32 if self._main_grads and is_half(param) else param.dtype

    def _waits(self, entry: ParameterEntry) -> bool:
        """Whether its bucket waits for the end of backward (`reduce_in_backward`). Other ranks may own others."""
        return self._all_late or bool(entry.spec.owned) or kind_of(entry, self.registry.topology) in self._uneven

    def _make_bucket(self, params: list[Tensor], layout: FlatBucket, cut: ShardingDecision, waits: bool) -> ZeroBucket:
        for param in params:
            if self._main_grads and is_half(param):
                use_main_grad_(param)
        dtype, exchange = self._grad_dtype(params[0]), self.how.exchange or Exact()
        bucket = ZeroBucket(params, layout, self.registry, cut.axes, cut.summed, dtype, exchange, self.how.gradients)
        (self._late if cut.summed and waits else self._early).append(bucket)
        return bucket

    def _agree(self, entries: list[ParameterEntry], over: Mapping[int, ShardingDecision]) -> None:
        """Add to the buckets of the norm those of all ranks, and compare what the ranks of the axis shard."""
        topology, cuts = self.registry.topology, dict[tuple[str, ...], list[str]]()
        for index, cut in over.items():
            cuts.setdefault(cut.axes, []).append(entries[index].name)
        specs = [piece_spec(e.spec, over[i].axes) if i in over else e.spec for i, e in enumerate(entries)]
        mine = {Bucket.of(spec, topology) for spec in specs}
        sizes = sizes_of((entries[index] for index in over if not entries[index].spec.owned), topology)
        meets = model_meets_over_data(entries, topology, *topology.atoms(self.how.axis))
        reports = gather_objects((mine, cuts, sizes, meets), self.registry)
        self._all_late |= any(meets for *_, meets in reports)
        self._uneven |= uneven_kinds([sizes for _, _, sizes, _ in reports], topology)
        check_same_cuts([cuts for _, cuts, *_ in reports], topology)
        self._norm_buckets.update(*(buckets for buckets, *_ in reports))

    def derive(self, plan: ReductionPlan, positions: Sequence[ParamPosition]) -> ReductionPlan:
        """The plan of the pieces: its buckets are summed over the axis too."""
        entries = []
        for at, entry in zip(positions, plan.entries, strict=True):
            if axes := next((self._cut_over[given] for given in at.path if given in self._cut_over), None):
                averaged = (*entry.averaged, *axes)  # if these are data axes at all: by the bucket, or by torch before
                entry = replace(
                    entry, spec=piece_spec(entry.spec, axes), shape=tuple(at.tensor.shape), averaged=averaged
                )
            entries.append(entry)
        over = self.registry.topology.atoms(self.how.axis)
        return replace(plan, entries=tuple(entries), buckets=tuple(sorted(self._norm_buckets)), cut_over=over)

    # The step --------------------------------------------------------------------------------------------------------

    @contextmanager
    def micro_batch(self, window: Window) -> Iterator[None]:
        """With sharded gradients every bucket is reduced into this rank's slice, where micro-batches add up, and the
        parameters have no gradients afterwards.

        Raises RuntimeError where the gradients of the window before have not been cleared.
        """
        if self._reducer is None:
            yield
            return
        _check_cleared(window)
        window.reduced = True
        with self._reducer.micro_batch(window.several):
            yield
        window.came |= self._reducer.came

    @torch.no_grad()
    def catch_up(self, window: Window) -> None:
        """Raises RuntimeError with sharded gradients, where those of the window before have not been cleared."""
        if self._reducer is not None:
            _check_cleared(window)
            if not window.micro_batches:
                for bucket in self.buckets:
                    bucket.refresh()
                self._reducer.reduce_now()

    @torch.no_grad()
    def bring(self, window: Window, averaged: bool) -> None:
        """Reduce the gradients, as far as backward has not, and give each piece its part. Raises RuntimeError with sharded
        gradients, where one micro-batch of a window went past `micro_batch` and another did not."""
        buckets = self.buckets
        if self._reducer is not None and window.micro_batches:
            self._check_nothing_came()
        for bucket in buckets:  # see what was written to the model's parameters since the last step
            bucket.refresh()
        if self._reducer is None:
            for bucket in buckets:
                bucket.gradients = [None] * len(bucket.pieces)  # the parameters' gradients hold all of the window
            summed = not averaged and self.registry.topology.role(self.how.axis) == "data"
            run_all([partial(bucket.reduce, summed=summed) for bucket in buckets])
        for bucket in buckets:
            for piece, gradient in zip(bucket.pieces, bucket.gradients, strict=True):
                piece.grad = gradient

    def _check_nothing_came(self) -> None:
        """Raise RuntimeError if a parameter whose gradients have been reduced, and taken, has one again."""
        for param, name in self._names.items():
            if param.grad is not None:
                raise RuntimeError(
                    f"{name} got a gradient outside of optimizer.backward, in a window that used it: with "
                    "Sharded(gradients=True) all micro-batches of a window go through optimizer.backward, or none"
                )

    @torch.no_grad()
    def publish(self) -> None:
        """Bring all ranks' pieces together in the model's parameters."""
        run_all([bucket.gather for bucket in self.buckets])

    def reload(self) -> None:
        for bucket in self.buckets:
            bucket.reload()

    def has_copies(self) -> bool:
        return any(bucket.has_copies() for bucket in self.buckets)

    def find_overwritten(self) -> Tensor | None:
        found = next((found for bucket in self.buckets if (found := bucket.find_overwritten()) is not None), None)
        for bucket in self.buckets:
            bucket.refresh()  # visible writes change the versions of pieces, by which later transforms see them
        return found

    def clear(self, set_to_none: bool) -> None:
        """Clear the gradients of the pieces and of the model's parameters."""
        for bucket in self.buckets:
            for piece in bucket.pieces:
                piece.grad = None if set_to_none else piece.grad
            bucket.forget_gradients(set_to_none)

    # Saving ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Under ``"shards"`` how parameters were cut."""
        return {"shards": {"axis": self.how.axis, "size": self.registry.size(self.how.axis), "pieces": self._cuts[:]}}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the state is of optimizer states that were sharded in another way, or not at all."""
        saved, own = state.get("shards"), self.state_dict()["shards"]
        if saved != own:
            raise other_layout(saved, own)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The model may have been loaded before; masters, if there are any, then have the last word."""
        for bucket in self.buckets:
            bucket.refresh()


def _check_cleared(window: Window) -> None:
    if window.holds_old:
        raise RuntimeError(
            "the gradients of the last window are still there, reduced, and can't be added to: call zero_grad() after "
            "every step (and after clipping, if more micro-batches are to come)"
        )
