"""Optimizer states, and gradients, sharded over a mesh axis: every rank of it steps its slice of the parameters.

    ZeRO-1    gradients of buckets --reduce-scatter--> slices, stepped --all-gather--> parameters
    ZeRO-2    the same, but each bucket is reduced as soon as backward has filled it, and its gradients are freed

An all-reduce is a reduce-scatter and an all-gather, so no more travels than with replicated data parallelism, while the
step's work and the optimizer's memory are divided by the size N of the axis: of optimizer states and masters a rank keeps
1 / N, up to a few elements a bucket.

Reference: Rajbhandari et al. 2019, "ZeRO", arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...amp.casting import is_half
from ...amp.master_weights import use_main_grad_
from ...parallel.layout.annotation import annotate
from ...parallel.mesh.agreement import gather_objects
from ..gradients.axes import sync_axes
from ..gradients.bucket import BUCKET_BYTES, Exact, Exchange
from ..gradients.during_backward import BackwardReducer, run_all
from ..gradients.early import model_meets_over_data, stages_differ
from ..gradients.flat import FlatBucket, flat_buckets
from ..norm.entries import ParameterEntry, entries_of
from ..norm.plan import Bucket, ReductionPlan
from .chain import other_layout
from .elementwise import check_elementwise
from .link import AnyWindow, Binding, Link, Placement, Position
from .piece_spec import piece_spec
from .pieces import Held, StandIns
from .slices import Slices


@dataclass(frozen=True)
class Sharded(Placement):
    """Shard optimizer states and master weights over an axis (ZeRO-1), and gradients (ZeRO-2).

    Sharded are all parameters that require gradients and are the same on all ranks of the axis. Those stay whole that the
    axis shards already, that only one coordinate owns or that are tied over it; DTensors too, with sharded gradients.

    A piece is 1-dim and has its parameter's name and a spec that names the axis, so plans, norms and clipping need no
    exception for it. It shares the parameter's memory, unless that is not contiguous; where the precision has masters, they
    are made of pieces. Right for optimizers that treat every element alike, whatever tensor it is in.

    Args:
        axis: Over its ranks, usually ``"data"``.
        gradients: Every backward reduces gradients into this rank's slice, and all ranks must call `backward` for every
            micro-batch. Bucket by bucket while it runs; of owned parameters, and of all where the model itself uses a data
            axis (a spec names it, or it is none by its name, or ``cp``) or pieces are uneven, only when it has ended.
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
        if self.axis not in topology.axes:
            axes = ", ".join(topology.axes) or "none"
            raise ValueError(f"Sharded({self.axis!r}): it is no axis of the mesh; its axes are {axes}")
        if switch is not None and not switch.is_ddp:
            raise ValueError("fully_shard shards optimizer states already: leave Sharded out of states=")
        if self.gradients and self.axis in topology.data_axes and not binding.averages_data:
            raise ValueError(
                "Sharded(gradients=True) needs the optimizer itself to average over the data axes: leave data_parallel "
                "out, or shard only the states"
            )
        if binding.overlap:
            raise ValueError(
                "Reduce(overlap=True) is for states that are whole: Sharded(gradients=True) reduces while backward runs"
            )
        check_elementwise(binding.optimizer, "Sharded gives the optimizer 1-dim pieces of parameters")

    def link(self, binding: Binding) -> Link:
        return Shards(self, binding) if binding.registry.size(self.axis) > 1 else Link()


class Shards(Link):
    """Puts this rank's pieces of the parameters in their place in the param groups of an optimizer; see `Sharded`."""

    def __init__(self, how: Sharded, binding: Binding) -> None:
        self.how, self.registry, self._main_grads = how, binding.registry, binding.main_grads
        self._averages_data = binding.averages_data
        self.buckets: list[Slices] = []  # early and late: all, in the order in which they are reduced and gathered
        self._early: list[Slices] = []
        self._late: list[Slices] = []
        self._norm_buckets: set[Bucket] = set()
        self._all_late = False
        self._names: dict[Tensor, str] = {}
        self._cuts: list[tuple[int, int]] = []
        self._reducer: BackwardReducer | None = None

    def is_cut(self, tensor: Tensor) -> bool:
        """Whether ranks of the axis step pieces of the tensor, which may be none on this one."""
        return tensor in self._names

    # Layout ----------------------------------------------------------------------------------------------------------

    def install(self, optimizer: torch.optim.Optimizer, held: Sequence[Held], tensors: Sequence[Tensor]) -> StandIns:
        """Raises ValueError, on every rank, where two ranks of the axis would shard different parameters."""
        named: list[Tensor | tuple[str, Tensor]] = [(h.name, tensor) for h, tensor in zip(held, tensors, strict=True)]
        entries = entries_of([named], self.registry.topology)
        planned = self._layouts(tensors, entries)
        chosen = {index for _, layout in planned for index in layout.indices}
        self._agree(entries, chosen)
        self._names |= {tensors[index]: entries[index].name for index in chosen}
        pieces: dict[Tensor, list[tuple[Tensor, int]]] = {tensors[index]: [] for index in chosen}
        for summed, layout in planned:
            owned = any(entries[index].spec.owned for index in layout.indices)
            bucket = self._make_bucket([tensors[index] for index in layout.indices], layout, summed, owned)
            for segment, piece in zip(bucket.segments, bucket.pieces, strict=True):
                index = layout.indices[segment.position]
                annotate(piece, piece_spec(entries[index].spec, self.how.axis), entries[index].name)
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

    def _layouts(self, params: Sequence[Tensor], entries: Sequence[ParameterEntry]) -> list[tuple[bool, FlatBucket]]:
        """(whether the axis sums the gradients, layout) of each bucket, in the order in which backward fills them.

        Ranks that hold replicas of a parameter must cut it in the same places, whatever else they hold: so only parameters
        of one kind of layout share a bucket.
        """
        topology, axis = self.registry.topology, self.how.axis
        together: dict[tuple[bool, Bucket, torch.dtype, str], list[int]] = {}
        for index, (param, entry) in enumerate(zip(params, entries, strict=True)):
            if self._can_shard(param, entry):
                summed = axis in sync_axes(entry.spec, topology, self._averages_data, entry.averaged)
                key = (summed, Bucket.of(entry.spec, topology), param.dtype, str(param.device))
                together.setdefault(key, []).append(index)
        planned = []
        for (summed, *_), indices in together.items():
            bucket_numel = BUCKET_BYTES // self._grad_dtype(params[indices[0]]).itemsize
            numels = [params[index].numel() for index in indices]
            size = self.registry.size(axis)
            planned += [(summed, layout) for layout in flat_buckets(indices, numels, size, bucket_numel)]
        return sorted(planned, key=lambda item: -item[1].indices[-1])

    def _can_shard(self, param: Tensor, entry: ParameterEntry) -> bool:
        """Whether all ranks of the axis hold, and step, the same parameter.

        The gradients of a DTensor are its own until the step, so they can't be taken from backward.
        """
        spec = entry.spec
        taken = {*spec.distinct_axes(self.registry.topology), *dict(spec.owned), *dict(spec.tied)}
        reachable = not (self.how.gradients and entry.averaged)
        return param.requires_grad and param.numel() > 0 and reachable and self.how.axis not in taken

    def _grad_dtype(self, param: Tensor) -> torch.dtype:
        return torch.float32 if self._main_grads and is_half(param) else param.dtype

    def _make_bucket(self, params: list[Tensor], layout: FlatBucket, summed: bool, owned: bool) -> Slices:
        for param in params:
            if self._main_grads and is_half(param):
                use_main_grad_(param)
        dtype, exchange = self._grad_dtype(params[0]), self.how.exchange or Exact()
        bucket = Slices(params, layout, self.registry, self.how.axis, summed, dtype, exchange, self.how.gradients)
        # Others may have other owned parameters; see `gradients/early`.
        early = not summed or not (self._all_late or owned)
        (self._early if early else self._late).append(bucket)
        return bucket

    def _agree(self, entries: list[ParameterEntry], chosen: set[int]) -> None:
        """Add to the buckets of the norm those of all ranks, and compare what the ranks of the axis shard."""
        axis, topology = self.how.axis, self.registry.topology
        specs = [piece_spec(e.spec, axis) if i in chosen else e.spec for i, e in enumerate(entries)]
        mine = {Bucket.of(spec, topology) for spec in specs}
        sizes = [entries[index].numel for index in sorted(chosen) if not entries[index].spec.owned]
        meets = model_meets_over_data(entries, topology, axis)
        names = [entries[index].name for index in sorted(chosen)]
        reports = gather_objects((mine, names, sizes, meets), self.registry)
        self._all_late |= any(meets for *_, meets in reports) or stages_differ([r[2] for r in reports], topology)
        for rank, (_, names, *_) in enumerate(reports):
            first = topology.peers(rank, axis)[0]
            if names != reports[first][1]:
                differ = sorted({*names} ^ {*reports[first][1]})
                raise ValueError(
                    f"ranks {first} and {rank} would shard different parameters over {axis!r}, {', '.join(differ[:5])} on "
                    "only one of them: freeze the same parameters on all ranks before making the optimizer"
                )
        self._norm_buckets.update(*(buckets for buckets, *_ in reports))

    def derive(self, plan: ReductionPlan, held: Sequence[Held], tensors: Sequence[Tensor]) -> ReductionPlan:
        """The plan of the pieces: its buckets are summed over the axis too."""
        axis, entries = self.how.axis, []
        for h, tensor, entry in zip(held, tensors, plan.entries, strict=True):
            if any(given in self._names for given in h.path):
                averaged = (*entry.averaged, axis)  # if it is a data axis at all: by the bucket, or by torch before
                entry = replace(entry, spec=piece_spec(entry.spec, axis), shape=tuple(tensor.shape), averaged=averaged)
            entries.append(entry)
        return replace(plan, entries=tuple(entries), buckets=tuple(sorted(self._norm_buckets)), cut_over=axis)

    # The step --------------------------------------------------------------------------------------------------------

    @contextmanager
    def micro_batch(self, window: AnyWindow) -> Iterator[None]:
        """With sharded gradients every bucket is reduced into this rank's slice, where micro-batches add up, and the
        parameters have no gradients afterwards.

        Raises:
            RuntimeError: The gradients of the window before have not been cleared.
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
    def bring(self, window: AnyWindow, averaged: bool) -> None:
        """Reduce the gradients, as far as backward has not, and give each piece its part.

        Raises:
            RuntimeError: With sharded gradients: those of the window before have not been cleared; or a micro-batch went
                past `micro_batch`, in a window in which another did not.
        """
        buckets = self.buckets
        if self._reducer is not None:
            _check_cleared(window)
        for bucket in buckets:  # see what was written to the model's parameters since the last step
            bucket.refresh()
        if self._reducer is None:
            for bucket in buckets:
                bucket.gradients = [None] * len(bucket.pieces)  # the parameters' gradients hold all of the window
            summed = not averaged and self.how.axis in self.registry.topology.data_axes
            run_all([partial(bucket.reduce, summed=summed) for bucket in buckets])
        elif window.micro_batches:
            self._reducer.check_nothing_came()
        else:
            self._reducer.reduce_now()
        for bucket in buckets:
            for piece, gradient in zip(bucket.pieces, bucket.gradients, strict=True):
                piece.grad = gradient

    def step(self, update: Callable[[], object]) -> None:
        update()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Bring all ranks' pieces together in the model's parameters."""
        run_all([bucket.gather for bucket in self.buckets])

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


def _check_cleared(window: AnyWindow) -> None:
    if window.holds_old:
        raise RuntimeError(
            "the gradients of the last window are still there, reduced, and can't be added to: call zero_grad() after "
            "every step (and after clipping, if more micro-batches are to come)"
        )
