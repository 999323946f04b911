"""CPU offload: the masters and optimizer states of some parameters are kept in CPU memory and stepped on the CPU.

    device   parameters, gradients ----------+                           +--> parameters
    CPU                                      +--> step of the copies ----+

The parameters stay on the device, where their gradients are reduced and measured. A step copies the gradients of
offloaded parameters to the CPU, where it updates copies of these parameters. It then copies the new weights back in the
parameters' dtype. The bus transfers 6 bytes per element in modes with masters, and 8 in float32.

Transfers use buckets of up to 32 MiB of gradients, with one copy per direction. If the optimizer steps bucket by bucket
(see `Offloaded`), they overlap with the CPU's updates. "down" is the transfer of gradients to the CPU, "up" is the
transfer of weights to the device, and numbers are buckets:

    device      step of the other parameters
    down        1 | 2 | 3
    CPU             step 1 | step 2 | step 3
    up                       1      | 2      | 3

On a CUDA device each direction has its own stream (`TransferStreams`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...amp.by_bucket import holding
from ...amp.casting import has_equal_values, is_half
from ...amp.master_weights import use_main_grad_
from ...parallel.layout.annotation import copy_annotation
from ...parallel.mesh.agreement import on_all_ranks_with
from ...parallel.mesh.value_checks import check_scalar
from ..gradients.buckets import BUCKET_BYTES, flat_buckets
from ..gradients.in_place import clear_gradients, gradient_dtype
from ..norm.param_table import ParamPosition
from ..norm.plan import ReductionPlan
from ..step.update import may_step_in_several_calls
from ..step.update_request import Update, UpdateRequest
from ..step.window import Window
from .param_transform import ParamTransform, PlacementContext, Position, Replacements, StatePlacement

# Copies on the CPU, in buckets ----------------------------------------------------------------------------------------

# For parameters on a device, each direction needs one copy per bucket over the bus:
#
#     device   gradients --foreach--> flat --+                                          +--> flat --foreach--> parameters
#     CPU                                    +--> flat gradients --update--> flat weights
#
# The CPU copies of the parameters are views of the flat weights. A bucket with one parameter has no flat device buffer:
# its gradient and its weight are copied directly over the bus. If the parameters are on the CPU, gradients and weights
# are copied to and from the flat CPU buffers directly and synchronously.

ALIGNMENT = 64
"""A parameter starts at a multiple of this number of elements in a flat buffer, so that GPU kernels use vector loads."""


class TransferStreams:
    """The CUDA streams that copy gradients to the CPU (``down``) and weights to ``device`` (``up``)."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.down, self.up = device, torch.cuda.Stream(device), torch.cuda.Stream(device)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Return a context manager whose transfers run after earlier work of the current stream, and before later work."""
        compute = torch.cuda.current_stream(self.device)
        for stream in (self.down, self.up):
            stream.wait_stream(compute)
        try:
            yield
        finally:
            for stream in (self.down, self.up):
                compute.wait_stream(stream)


class HostBucket:
    """A bucket of parameters of one dtype and device, with a CPU copy of each parameter.

    Call `start` and `send` only while ``streams`` are open (`TransferStreams.opened`). Parameters on a CUDA device need
    streams; for other parameters, ``streams`` is None.

    Attributes:
        copies: The CPU copy of each parameter, in the same order. It has the memory format of the parameter, because
            fused kernels require equal formats. It is pinned if the parameter is on a CUDA device.

    Memory: on the CPU a copy of the parameters, and after the first step a copy of their gradients. On a device one flat
    copy of the bucket during a transfer; none for a bucket with a single parameter.
    """

    def __init__(self, params: Sequence[Tensor], grad_dtype: torch.dtype, streams: TransferStreams | None) -> None:
        self.params, self.device, self._grad_dtype = list(params), params[0].device, grad_dtype
        self._streams, self._pinned = streams, streams is not None  # transfers without pinned memory are synchronous
        self._views_of: list[tuple[int, torch.Size, tuple[int, ...]]] = []  # start, shape and stride in a flat buffer
        self._numel = 0
        for param in params:
            self._views_of.append((self._numel, param.shape, torch.empty_like(param, device="meta").stride()))
            self._numel += -(-param.numel() // ALIGNMENT) * ALIGNMENT
        self._weights = self._flat(params[0].dtype)
        # `.data` gives each copy its own version counter, by which masters detect writes to the copy.
        self.copies: list[Tensor] = [nn.Parameter(view.data) for view in self._views(self._weights)]
        self._gradients: Tensor | None = None
        self._came: list[int] = []  # indices of the parameters whose gradients are being copied
        self._arrived: torch.cuda.Event | None = None
        self.load(range(len(params)))

    def _flat(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self._numel, dtype=dtype, device="cpu", pin_memory=self._pinned)

    def _flat_there(self, host: Tensor) -> Tensor:
        return torch.empty_like(host, device=self.device)

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [flat[start:].as_strided(shape, stride) for start, shape, stride in self._views_of]

    # To the CPU ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, written: Sequence[int]) -> None:
        """Set all CPU copies to the parameters' values. Host synchronization: a wait for the device.

        The version counters of the copies of ``written`` (indices of the parameters that have changed) are incremented,
        so that masters detect the change.
        """
        with nullcontext() if self._streams is None else self._streams.opened():
            self._down(self._weights, dict(enumerate(self.params)))
            self.wait()
        torch.autograd.graph.increment_version([self.copies[index] for index in written])

    @torch.no_grad()
    def start(self) -> None:
        """Start to copy the gradients that are not None to the CPU.

        Host synchronization: none for parameters on a CUDA device; otherwise the copy is synchronous.
        """
        gradients = {index: param.grad for index, param in enumerate(self.params) if param.grad is not None}
        self._came = list(gradients)
        if gradients:
            if self._gradients is None:
                self._gradients = self._flat(self._grad_dtype)
            self._down(self._gradients, gradients)

    def finish(self) -> None:
        """Wait until the gradients have arrived on the CPU, and set the copies' gradients.

        Host synchronization: a wait for the transfer, not for later work on the device.
        """
        if self._gradients is not None and self._came:
            self.wait()
            views = self._views(self._gradients)
            for index in self._came:
                self.copies[index].grad = views[index]

    def _down(self, host: Tensor, tensors: Mapping[int, Tensor]) -> None:
        """Start to copy ``tensors`` to a flat CPU buffer.

        Each key is the index of the parameter at whose position the tensor is written. Positions of other parameters may
        be overwritten.
        """
        with nullcontext() if self._streams is None else torch.cuda.stream(self._streams.down):
            if self.device.type == "cpu" or len(self.params) == 1:
                views = self._views(host)
                self._copy([views[index] for index in tensors], list(tensors.values()))
            else:
                flat = self._flat_there(host)
                views = self._views(flat)
                torch._foreach_copy_([views[index] for index in tensors], list(tensors.values()))
                host.copy_(flat, non_blocking=self._pinned)
            self._mark()

    def _copy(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        if self.device.type == "cpu":
            torch._foreach_copy_(targets, sources)
        else:
            targets[0].copy_(sources[0], non_blocking=self._pinned)

    def _mark(self) -> None:
        if self._pinned:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(self.device))

    def wait(self) -> None:
        """Wait for the last transfer, in either direction. Host synchronization: yes."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None

    # To the device ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def send(self) -> None:
        """Start to write the CPU copies into the parameters. Call `wait` before you write to the copies.

        Host synchronization: none for parameters on a CUDA device; otherwise the copy is synchronous.
        """
        with nullcontext() if self._streams is None else torch.cuda.stream(self._streams.up):
            if self.device.type == "cpu" or len(self.params) == 1:
                self._copy(self.params, self.copies)
            else:
                flat = self._flat_there(self._weights)
                flat.copy_(self._weights, non_blocking=self._pinned)
                torch._foreach_copy_(self.params, self._views(flat))
            self._mark()


# The placement and its transform --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offloaded(StatePlacement):
    """The state placement that keeps and steps masters and optimizer states of some parameters on the CPU.

        optimizer = ParallelOptimizer(adamw, registry, states=Offloaded(0.5))  # at least half of the elements

    Device memory then holds only the parameter and the gradient of an offloaded element. This saves 8 bytes per element
    for AdamW's states, and 4 for a master. During a step, the device also holds a flat bucket of gradients, of at most
    32 MiB, and one of new weights. Pinned CPU memory holds copies of the offloaded parameters and gradients. If the
    parameters are already on the CPU, they are copied as well.

    A step waits on the host for the gradients and for the decision whether it is skipped, so a CUDA graph can't capture
    it.

    All ranks with a replica of a tensor offload it if any of them chose it, because CPU and GPU kernels round differently
    and replicas would diverge. So a rank may offload more than ``fraction``, if ranks with replicas of a tensor differ in
    their other tensors. Examples are owned parameters, and pipeline stages with a tied embedding.

    Elementwise optimizers that can skip a step on the device, such as torch's fused ones, step bucket by bucket. All
    parameters are stepped at once, after all gradients have arrived, in these cases: with other optimizers, including
    full-tensor optimizers such as `Muon`; with momentum and dampening; if the optimizer has step hooks; with
    `Replayable`; and with `HalfStates` or stochastic rounding, because their random numbers depend on the step count.

    Args:
        fraction: The smallest fraction of elements to offload, from 0 to 1, counted over parameters that require
            gradients. Default 1.0: all are offloaded. Otherwise the largest parameters that fit into ``1 - fraction``
            of the elements stay on the device, unless a rank with a replica offloads them.
    Raises:
        ValueError: By the constructor of `ParallelOptimizer`, on every rank: ``fraction`` is out of range; or masters
            need float32 gradients, but ``data_parallel`` or ``main_grads=False`` keeps them in half precision.
        TypeError: By the constructor, on every rank: ``fraction`` is not a number.
    Collectives: none in a step. With several ranks and a fraction between 0 and 1, one object all-gather when the
        optimizer is made, gets a param group or is refreshed.
    Host synchronization, if parameters are on a device: a step waits for the decision whether it is skipped, for each
    bucket of gradients, and for the last bucket of weights per device.
    """

    position: ClassVar[Position] = Position.DEVICE
    fraction: float = 1.0

    def check(self, context: PlacementContext) -> None:
        check_scalar(self.fraction, "fraction", "the fraction of the elements that goes to the CPU")
        if not 0 <= self.fraction <= 1:
            raise ValueError(
                f"Offloaded({self.fraction}): give the fraction of the elements that goes to the CPU, from 0 to 1"
            )
        precision, switch = context.precision, context.data_parallel
        if switch is not None and not switch.float32_grads and precision.masters:
            raise ValueError(
                f"Offloaded with precision={precision.name!r} needs float32 gradients, {switch.float32_grads_advice}"
            )

    def transform(self, context: PlacementContext) -> ParamTransform:
        return OffloadTransform(self.fraction, context)


class OffloadTransform(ParamTransform):
    """The transform of `Offloaded`: replaces some of an optimizer's parameters by copies on the CPU."""

    replica_dependent = True  # replicas are compared on the device, which is faster than on the CPU

    def __init__(self, fraction: float, context: PlacementContext) -> None:
        self.fraction, self.main_grads = fraction, context.main_grads
        self.optimizer, self.registry = context.optimizer, context.registry
        self._chosen: list[Tensor] = []  # the tensors that the next `install` replaces
        self.copies: dict[Tensor, Tensor] = {}  # CPU copy per offloaded parameter
        self.buckets: list[HostBucket] = []
        self._streams: dict[torch.device, TransferStreams] = {}  # one per CUDA device with offloaded parameters
        self._places: dict[Tensor, tuple[int, int]] = {}  # (param group, position) per offloaded parameter
        self._seen: dict[Tensor, _Look] = {}  # per offloaded parameter, after the last step

    def keeps_grad_here(self, tensor: Tensor) -> bool:
        return tensor in self.copies

    def not_captured(self) -> str | None:
        return "Offloaded waits for the GPU and steps on the CPU: leave it out of states=" if self.copies else None

    def agree(self, positions: Sequence[ParamPosition], plan: ReductionPlan, earlier_error: Exception | None) -> None:
        """Choose the tensors to offload: this rank's choice, and the replicas of tensors that other ranks chose."""
        trained = [at for at in positions if at.tensor.requires_grad and at.tensor.numel()]
        chosen = {*offloaded([at.tensor.numel() for at in trained], self.fraction)}
        if 0 < self.fraction < 1 and plan.topology.world_size > 1:

            def choose() -> tuple[list[Piece], list[tuple[Piece, bool]]]:
                if earlier_error is not None:
                    raise earlier_error
                pieces = [Piece.of(at, plan) for at in trained]
                return pieces, [(piece, index in chosen) for index, piece in enumerate(pieces)]

            pieces, by_rank = on_all_ranks_with(choose, self.registry)
            anywhere = offloaded_on_all_ranks(by_rank)
            chosen = {index for index, piece in enumerate(pieces) if piece in anywhere}
        self._chosen = [at.tensor for index, at in enumerate(trained) if index in chosen]

    @torch.no_grad()
    def install(self, optimizer: torch.optim.Optimizer, positions: Sequence[ParamPosition]) -> Replacements:
        for tensor in self._chosen:
            if self.main_grads and is_half(tensor):
                use_main_grad_(tensor)
        new = list(_buckets(self._chosen, self._streams))
        self._chosen = []
        self.buckets += new
        made = {param: copy for bucket in new for param, copy in zip(bucket.params, bucket.copies, strict=True)}
        for param, copy in made.items():
            copy_annotation(param, copy)
        self.copies |= made
        # Only new parameters are recorded here. For parameters of earlier groups, the records of the last step must be
        # kept, because they reveal later writes.
        self._seen |= {param: _Look.of(param, copy) for param, copy in made.items()}
        return {param: [(copy, 0)] for param, copy in made.items()}

    def derive(self, plan: ReductionPlan, positions: Sequence[ParamPosition]) -> ReductionPlan:
        """Return ``plan``, and record the positions of the offloaded parameters in the param groups."""
        sizes: Counter[int] = Counter()
        for entry, at in plan.pair_entries(positions):
            for given in at.path:
                if given in self.copies:
                    self._places[given] = entry.group, sizes[entry.group]
            sizes[entry.group] += 1
        return plan

    # The step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def pull_grads(self, window: Window, averaged: bool) -> None:
        """Update the CPU copies of parameters that other code wrote since the last step.

        Host synchronization: a wait for the device per bucket with such a parameter.
        """
        self._refresh()

    def _refresh(self) -> None:
        for bucket in self.buckets:
            written = [index for index, param in enumerate(bucket.params) if self._is_written(param)]
            if written:
                bucket.load(written)  # increments the version counters of the copies, so that masters detect the write
        self._note_versions()

    def _is_written(self, param: Tensor) -> bool:
        return self._seen[param].param != _Look.of(param, self.copies[param]).param

    @torch.no_grad()
    def step(self, request: UpdateRequest, update: Update) -> None:
        """Copy gradients to the CPU, step on device and CPU, and copy the weights back; bucket by bucket if possible.

        Host synchronization: a wait for the gradients of each bucket, and for the last bucket of weights per device.
        """
        with self._opened():
            if self.may_step_partially and may_step_in_several_calls(self.optimizer):
                self._step_in_parts(request, update)
            else:
                for bucket in self.buckets:
                    bucket.start()
                for bucket in self.buckets:
                    bucket.finish()
                update(request)
                self._send(self.buckets)
            self._arrive()

    @contextmanager
    def _opened(self) -> Iterator[None]:
        with ExitStack() as stack:
            for streams in self._streams.values():
                stack.enter_context(streams.opened())
            yield

    def _step_in_parts(self, request: UpdateRequest, update: Update) -> None:
        """Step the parameters that stay on the device, then the CPU copies bucket by bucket.

        The device updates its parameters while the CPU waits for gradients and updates the copies.
        """
        for bucket in self.buckets[:1]:
            bucket.start()
        here = {self._places[param] for param in self.copies}
        groups = enumerate(self.optimizer.param_groups)
        rest = [(index, at) for index, group in groups for at in range(len(group["params"])) if (index, at) not in here]
        if rest or not self.buckets:
            with self._holding(rest):
                update(request)
        for bucket, following in zip_longest(self.buckets, self.buckets[1:]):
            if following is not None:
                following.start()
            bucket.finish()
            with self._holding(self._places[param] for param in bucket.params):
                update(request)
            self._send([bucket])

    def _holding(self, places: Iterable[tuple[int, int]]) -> AbstractContextManager[None]:
        """Return a context manager in which param groups hold only the parameters at ``places`` (see `_places`)."""
        groups = self.optimizer.param_groups
        bucket: list[list[Tensor]] = [[] for _ in groups]
        for index, at in places:
            bucket[index].append(groups[index]["params"][at])
        return holding(self.optimizer, bucket)

    def _send(self, buckets: Sequence[HostBucket]) -> None:
        for bucket in buckets:
            clear_gradients(bucket.copies, set_to_none=True)
            bucket.send()

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the CPU weights to the device. Host synchronization: a wait for the last bucket per device."""
        with self._opened():
            self._send(self.buckets)
            self._arrive()

    def reload(self) -> None:
        """Copy the model's weights to the CPU. Host synchronization: a wait for the device."""
        for bucket in self.buckets:
            bucket.load(range(len(bucket.params)))
        self._note_versions()

    def _arrive(self) -> None:
        for bucket in {bucket.device: bucket for bucket in self.buckets}.values():
            bucket.wait()  # uploads to a device complete in order, so those of earlier buckets are complete too
        self._note_versions()

    def _note_versions(self) -> None:
        self._seen = {param: _Look.of(param, copy) for param, copy in self.copies.items()}

    def has_copies(self) -> bool:
        return bool(self.copies)

    def find_overwritten(self) -> Tensor | None:
        """Return the first parameter whose values differ from its CPU copy, or None.

        Parameters are left out if the version counter or memory shows a write to the parameter or to its copy.

        Host synchronization: a few per parameter.
        """
        for param, copy in self.copies.items():
            if self._seen[param] == _Look.of(param, copy) and not has_equal_values(param, copy):
                return param
        return None

    def clear(self, set_to_none: bool) -> None:
        clear_gradients([*self.copies, *self.copies.values()], set_to_none)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Update the CPU copies of parameters that other code wrote, because the model may have been loaded before.

        Masters are not loaded here: the transform of the precision mode loads them afterwards.
        """
        self._refresh()


class _Look(NamedTuple):
    """The memory and the version counters of an offloaded parameter and its copy, by which writes are detected."""

    param: tuple[int, int, tuple[int, ...]]
    copy: int

    @classmethod
    def of(cls, param: Tensor, copy: Tensor) -> _Look:
        return cls((param.data_ptr(), param._version, param.stride()), copy._version)


def _buckets(params: Sequence[Tensor], streams: dict[torch.device, TransferStreams]) -> Iterator[HostBucket]:
    """Yield buckets of up to `BUCKET_BYTES` of gradients, each with parameters of one device, dtype and gradient dtype."""
    kinds: dict[tuple[torch.device, torch.dtype, torch.dtype], list[Tensor]] = {}
    for param in params:
        kinds.setdefault((param.device, param.dtype, gradient_dtype(param)), []).append(param)
    for (device, _, dtype), members in kinds.items():
        if device.type == "cuda" and device not in streams:
            streams[device] = TransferStreams(device)
        numels = {index: param.numel() for index, param in enumerate(members)}
        for layout in flat_buckets(numels, 1, BUCKET_BYTES // dtype.itemsize)[::-1]:
            yield HostBucket([members[index] for index in layout.indices], dtype, streams.get(device))


def offloaded(numels: Sequence[int], fraction: float) -> list[int]:
    """Return the indices of the parameters that a rank offloads, before other ranks add replicas of their choices.

    Parameters are visited from the largest to the smallest. A parameter stays on the device if it fits into the rest of
    ``1 - fraction`` of all elements; otherwise it is offloaded.
    """
    room = (1 - fraction) * sum(numels)
    chosen = []
    for index in sorted(range(len(numels)), key=lambda i: (-numels[i], i)):
        if numels[index] <= room:
            room -= numels[index]
        else:
            chosen.append(index)
    return sorted(chosen)


class Piece(NamedTuple):
    """A stepped tensor, in a form that ranks compare.

    ``slot`` is the index of the logical parameter in ``ReductionPlan.parameter_names``; it is equal on all tied stages.
    ``shard`` has this rank's coordinates on the axes that shard the parameter, and ``start`` and ``stop`` are the first
    element and the end of the tensor in this shard. Tensors of two ranks have common elements if ``slot`` and ``shard``
    are equal and the ranges overlap.
    """

    slot: int
    shard: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def of(cls, at: ParamPosition, plan: ReductionPlan) -> Piece:
        axes = plan.entries[at.index].spec.resolve(plan.topology).sharded_axes
        shard = tuple(plan.coordinate[axis] for axis in axes)
        return cls(plan.parameter_slots[at.index], shard, at.offset, at.offset + at.tensor.numel())


def offloaded_on_all_ranks(by_rank: Sequence[Sequence[tuple[Piece, bool]]]) -> set[Piece]:
    """Return the pieces to offload, so that all replicas of an element are offloaded or none is.

    These are the pieces that any rank chose, and all pieces that share elements with them, directly or through other
    pieces. ``by_rank`` has for each rank its non-empty pieces that may be offloaded, each with True if the rank chose it.
    """
    clusters, end = list[list[Piece]](), 0  # pieces that are connected by common elements
    for piece in sorted({piece for of_rank in by_rank for piece, _ in of_rank}):
        last = clusters[-1][-1] if clusters else None
        if last is None or (piece.slot, piece.shard) != (last.slot, last.shard) or piece.start >= end:
            clusters.append([])
            end = 0
        clusters[-1].append(piece)
        end = max(end, piece.stop)
    chosen = {piece for of_rank in by_rank for piece, is_chosen in of_rank if is_chosen}
    return {piece for cluster in clusters if not chosen.isdisjoint(cluster) for piece in cluster}
