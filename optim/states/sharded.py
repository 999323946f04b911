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
from ..gradients.bucket import BUCKET_BYTES, Exact, Exchange
from ..gradients.during_backward import BackwardReducer, run_all
from ..gradients.early import kind_of, model_meets_over_data, sizes_of, uneven_kinds
from ..gradients.flat import FlatBucket, flat_buckets
from ..norm.entries import ParameterEntry, entries_of
from ..norm.plan import Bucket, ReductionPlan
from .chain import other_layout
from .cuts import Cut, check_same_cuts, cut_of
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
        self.buckets: list[Slices] = []  # early and late: all, in the order in which they are reduced and gathered
        self._early: list[Slices] = []
        self._late: list[Slices] = []
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

    def install(self, optimizer: torch.optim.Optimizer, held: Sequence[Held], tensors: Sequence[Tensor]) -> StandIns:
        """Raises ValueError, on every rank, where two ranks of the axis would shard different parameters."""
        topology = self.registry.topology
        named: list[Tensor | tuple[str, Tensor]] = [(h.name, tensor) for h, tensor in zip(held, tensors, strict=True)]
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
        self, params: Sequence[Tensor], entries: Sequence[ParameterEntry], cuts: Sequence[Cut]
    ) -> list[tuple[Cut, FlatBucket]]:
        """How each bucket is cut, and its layout, in the order in which backward fills them.

        Ranks that hold replicas of a parameter must cut it in the same places, whatever else they hold: so only parameters
        of one kind of layout share a bucket.
        """
        together: dict[tuple[Cut, Bucket, torch.dtype, str], list[int]] = {}
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
        """Whether its bucket waits for the end of backward: `gradients/early`. Others may have other owned parameters."""
        return self._all_late or bool(entry.spec.owned) or kind_of(entry, self.registry.topology) in self._uneven

    def _make_bucket(self, params: list[Tensor], layout: FlatBucket, cut: Cut, waits: bool) -> Slices:
        for param in params:
            if self._main_grads and is_half(param):
                use_main_grad_(param)
        dtype, exchange = self._grad_dtype(params[0]), self.how.exchange or Exact()
        bucket = Slices(params, layout, self.registry, cut.axes, cut.summed, dtype, exchange, self.how.gradients)
        (self._late if cut.summed and waits else self._early).append(bucket)
        return bucket

    def _agree(self, entries: list[ParameterEntry], over: Mapping[int, Cut]) -> None:
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

    def derive(self, plan: ReductionPlan, held: Sequence[Held], tensors: Sequence[Tensor]) -> ReductionPlan:
        """The plan of the pieces: its buckets are summed over the axis too."""
        entries = []
        for h, tensor, entry in zip(held, tensors, plan.entries, strict=True):
            if axes := next((self._cut_over[given] for given in h.path if given in self._cut_over), None):
                averaged = (*entry.averaged, *axes)  # if these are data axes at all: by the bucket, or by torch before
                entry = replace(entry, spec=piece_spec(entry.spec, axes), shape=tuple(tensor.shape), averaged=averaged)
            entries.append(entry)
        over = self.registry.topology.atoms(self.how.axis)
        return replace(plan, entries=tuple(entries), buckets=tuple(sorted(self._norm_buckets)), cut_over=over)

    # The step --------------------------------------------------------------------------------------------------------

    @contextmanager
    def micro_batch(self, window: AnyWindow) -> Iterator[None]:
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
    def catch_up(self, window: AnyWindow) -> None:
        """Raises RuntimeError with sharded gradients, where those of the window before have not been cleared."""
        if self._reducer is not None:
            _check_cleared(window)
            if not window.micro_batches:
                for bucket in self.buckets:
                    bucket.refresh()
                self._reducer.reduce_now()

    @torch.no_grad()
    def bring(self, window: AnyWindow, averaged: bool) -> None:
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

    def step(self, update: Callable[[], object]) -> None:
        update()
        self.publish()

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
        return next((found for bucket in self.buckets if (found := bucket.find_overwritten()) is not None), None)

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
