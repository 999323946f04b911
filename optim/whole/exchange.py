"""Exchange of matrices between ranks: shards are sent to owner ranks, which send results to all ranks with shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.layout.shard import Box, Shape
from .tensors import LogicalTensor, WholeTensors, narrowed

# Flat communication buffers, kept from one step to the next -----------------------------------------------------------


class Buffers:
    """Flat communication buffers, one per use. A buffer is valid until the next request for the same use.

    On a CPU a buffer is kept, and grows to the longest request, because page faults of new memory are slower than
    writing. On a GPU no buffer is kept: torch's caching allocator keeps the memory, and other code can use it between
    two steps.
    """

    def __init__(self) -> None:
        self._kept: dict[object, Tensor] = {}

    def flat(self, use: object, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised 1-dim tensor of ``numel`` elements.

        ``use`` is any hashable key. On a CPU, requests with the same key share memory.
        """
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        numbytes = numel * dtype.itemsize
        kept = self._kept.get(use)
        if kept is None or kept.numel() < numbytes:
            kept = self._kept[use] = torch.empty(numbytes, dtype=torch.uint8, device=device)
        return kept[:numbytes].view(dtype)

    @property
    def numbytes(self) -> int:
        """Return the number of bytes kept."""
        return sum(kept.numel() for kept in self._kept.values())


# Rounds ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matrix:
    """A matrix within a full tensor: all of it, an expert, a block of a fused weight, or a head.

    One rank, the owner rank, computes the update of the matrix.

    Args:
        tensor: The full tensor.
        number: Index among the tensor's matrices.
        box: The matrix's elements in the tensor.
        home: The owner rank.
        sources: For each rank, the boxes of the full tensor that the rank sends to the owner rank.
        holders: For each rank, the boxes of the full tensor whose results the rank receives.
    """

    tensor: LogicalTensor = field(repr=False)
    number: int
    box: Box
    home: int
    sources: Mapping[int, Sequence[Box]] = field(repr=False)
    holders: Mapping[int, Sequence[Box]] = field(repr=False)

    @property
    def shape(self) -> Shape:
        return self.box.sizes


Compute = Callable[[Matrix, list[Tensor]], Tensor]
"""``compute(matrix, tensors)``: returns the result of a matrix, in its shape, from its full tensors (one per list).

The result must not share memory with ``tensors``, whose memory is reused.
"""


class TransferSlice(NamedTuple):
    """A box of this rank's shards, and its place in the flat buffer that is sent or received.

    Args:
        matrix: Index of the matrix in the round.
        which: Index among the tensors that are exchanged per matrix.
        box: The elements in the full tensor; they lie in a single rectangle of one shard.
        begin: First element in the flat buffer; None if this rank is the owner rank.
    """

    matrix: int
    which: int
    box: Box
    begin: int | None


class Round:
    """Matrices that are exchanged together: their tensors are held by the same ranks and have the same dtype.

    Args:
        tensors: The full tensors.
        ranks: The ranks that hold them.
        matrices: The matrices, the same on all these ranks.
        lists: Number of tensors per matrix that are sent to the owner rank.
        dtype: Dtype of the sent elements.
        buffer_index: Index of the buffers. Rounds with the same index share buffers. A round no longer needs a buffer when
            the next round with this index writes to it.
        buffers: The buffers.

    Attributes:
        own: The matrices that this rank owns.
        positions: This rank's positions of the tensors that contain the matrices.
    """

    def __init__(
        self,
        tensors: WholeTensors,
        ranks: tuple[int, ...],
        matrices: Sequence[Matrix],
        lists: int,
        dtype: torch.dtype,
        buffer_index: int,
        buffers: Buffers,
    ) -> None:
        self._tensors, self.ranks, self._lists = tensors, ranks, lists
        self._me, self._matrices, self._dtype = tensors.rank, matrices, dtype
        self._buffer_index, self._buffers = buffer_index, buffers
        self._own = [index for index, matrix in enumerate(matrices) if matrix.home == self._me]
        self.own = [matrices[index] for index in self._own]
        # {(other rank, owner rank): number of elements}, to the owner rank and back from it
        self._there = self._counts(lambda m: m.sources, lists)
        self._back = self._counts(lambda m: m.holders, 1)
        self._sent = self._places(lambda m: m.sources, lists)
        self._returned = self._places(lambda m: m.holders, 1)
        self.positions = sorted({at for matrix in matrices for at in tensors.positions(matrix.tensor)})

    def _counts(self, boxes: Callable[[Matrix], Mapping[int, Sequence[Box]]], lists: int) -> dict[tuple[int, int], int]:
        """Return the number of elements that each (other rank, owner rank) pair exchanges."""
        found: dict[tuple[int, int], int] = {}
        for matrix in self._matrices:
            for rank, those in boxes(matrix).items():
                if rank != matrix.home:
                    count = lists * sum(prod(box.sizes) for box in those)
                    found[rank, matrix.home] = found.get((rank, matrix.home), 0) + count
        return found

    def _places(
        self, boxes: Callable[[Matrix], Mapping[int, Sequence[Box]]], lists: int
    ) -> dict[int, list[TransferSlice]]:
        """Return this rank's `TransferSlice` records by position.

        In the flat buffer, the elements for one owner rank are ordered by matrix, list and box.
        """
        found: dict[int, list[TransferSlice]] = {}
        at = 0
        for home in self.ranks:
            for number, matrix in enumerate(self._matrices):
                if matrix.home != home:
                    continue
                for index in range(lists):
                    for box in boxes(matrix).get(self._me, ()):
                        place = TransferSlice(number, index, box, None if home == self._me else at)
                        for position in self._tensors.positions_of(matrix.tensor, box):  # a single position
                            found.setdefault(position, []).append(place)
                        at += 0 if home == self._me else prod(box.sizes)
        return found

    # To the owner rank ----------------------------------------------------------------------------------------------

    def send(
        self, values: Sequence[Mapping[int, Tensor]], device: torch.device
    ) -> Callable[[], dict[int, list[Tensor]]]:
        """Start sending this rank's elements to the owner ranks.

        Args:
            values: Per list, the tensors to send by position.
            device: Device of the full matrices.
        Returns:
            A function that finishes the exchange and returns {index of the matrix in the round: its full tensors, one
                per list} for the matrices in `own`.
        """
        wholes = self._wholes(device)
        flat, out, into = self._flat("sent", self._there, True, device)
        for position, places in self._sent.items():
            for index, of_list in enumerate(values):
                parts = self._parts(position, of_list[position], places)
                for number, _, box, begin in (place for place in places if place.which == index):
                    if begin is None:
                        target = narrowed(wholes[number][index], box, self._matrices[number].box.offsets)
                    else:
                        target = flat[begin : begin + prod(box.sizes)].view(box.sizes)
                    target.copy_(parts[box])
        arrived = self._exchange("arrived", self._there, flat, out, into, device)

        def finish() -> dict[int, list[Tensor]]:
            elements, at = arrived(), 0
            for rank in self.ranks:
                for number in self._own if rank != self._me else ():
                    matrix = self._matrices[number]
                    for whole in wholes[number]:
                        for box in matrix.sources.get(rank, ()):
                            part, at = elements[at : at + prod(box.sizes)], at + prod(box.sizes)
                            narrowed(whole, box, matrix.box.offsets).copy_(part.view(box.sizes))
            return wholes

        return finish

    def _wholes(self, device: torch.device) -> dict[int, list[Tensor]]:
        """Return {index in the round: uninitialised full tensors, one per list} for the matrices in `own`."""
        numels = [prod(matrix.shape) for matrix in self.own]
        flat = self._buffers.flat(("whole", self._buffer_index), self._lists * sum(numels), self._dtype, device)
        parts = iter(flat.split([numel for numel in numels for _ in range(self._lists)]))
        return {
            number: [next(parts).view(self._matrices[number].shape) for _ in range(self._lists)] for number in self._own
        }

    # Back to the holders --------------------------------------------------------------------------------------------

    def send_back(
        self,
        wholes: dict[int, list[Tensor]],
        compute: Compute,
        results: dict[int, Tensor],
        device: torch.device,
    ) -> Callable[[], Iterator[int]]:
        """Compute the matrices of `own`, and start sending the results to all ranks that hold parts of them.

        Args:
            wholes: The full matrices that `send` returned; removed from the dict when they are computed.
            compute: Computes the result of a matrix.
            results: Receives this rank's shards of the results by position.
            device: Device of the results.
        Returns:
            A function that finishes the exchange: it writes the shards into ``results`` in the tensors' dtype, and
                yields their positions one by one.
        """
        flat, out, into = self._flat("sent back", self._back, False, device)
        begins = self._begins()
        stays: dict[int, Tensor] = {}
        for number in self._own:
            matrix = self._matrices[number]
            # contiguous, because copies of parts of a transposed tensor are slow
            stays[number] = made = compute(matrix, wholes.pop(number)).contiguous()
            for rank in self.ranks:
                for box in matrix.holders.get(rank, ()) if rank != self._me else ():
                    begin = begins[number, rank, box]
                    part = narrowed(made, box, matrix.box.offsets)
                    flat[begin : begin + prod(box.sizes)].view(box.sizes).copy_(part)
        arrived = self._exchange("arrived back", self._back, flat, out, into, device)

        def finish() -> Iterator[int]:
            elements = arrived()
            for position in self.positions:  # also stepped tensors without elements, which need a result too
                places = self._returned.get(position, [])
                if position not in results:
                    shape, dtype = self._tensors.piece_shape(position), self._tensors.tensors[position].dtype
                    results[position] = torch.empty(shape, dtype=dtype, device=device)
                parts = self._parts(position, results[position], places)
                for number, _, box, begin in places:
                    if begin is None:
                        part = narrowed(stays[number], box, self._matrices[number].box.offsets)
                    else:
                        part = elements[begin : begin + prod(box.sizes)].view(box.sizes)
                    parts[box].copy_(part)
                yield position
            stays.clear()

        return finish

    def _begins(self) -> dict[tuple[int, int, Box], int]:
        """Return where each result that this rank computed begins in the send buffer, in elements.

        The keys are (index of the matrix in the round, receiving rank, box).
        """
        found, at = {}, 0
        for rank in self.ranks:
            for number in self._own if rank != self._me else ():
                for box in self._matrices[number].holders.get(rank, ()):
                    found[number, rank, box] = at
                    at += prod(box.sizes)
        return found

    # Both directions ------------------------------------------------------------------------------------------------

    def _parts(self, position: int, value: Tensor, places: Sequence[TransferSlice]) -> dict[Box, Tensor]:
        """Return {box: view of its elements in ``value``} for the boxes of ``places``."""
        return dict(self._tensors.views(position, value, {place.box for place in places}))

    def _flat(
        self, use: str, counts: Mapping[tuple[int, int], int], towards_home: bool, device: torch.device
    ) -> tuple[Tensor, list[int], list[int]]:
        """Return the send buffer, and the numbers of elements sent to and received from each rank."""
        me = self._me
        out = [counts.get((me, rank) if towards_home else (rank, me), 0) for rank in self.ranks]
        into = [counts.get((rank, me) if towards_home else (me, rank), 0) for rank in self.ranks]
        return self._buffers.flat((use, self._buffer_index), sum(out), self._dtype, device), out, into

    def _exchange(
        self,
        use: str,
        counts: Mapping[tuple[int, int], int],
        flat: Tensor,
        out: list[int],
        into: list[int],
        device: torch.device,
    ) -> Callable[[], Tensor]:
        """Start an all-to-all; none if ``counts`` is empty.

        Returns:
            A function that waits for the all-to-all and returns the received elements, ordered by sending rank.
        """
        if not counts:
            return lambda: flat
        registry = self._tensors.registry
        assert registry is not None
        flat = flat.to(registry.device)
        arrived = self._buffers.flat((use, self._buffer_index), sum(into), self._dtype, registry.device)
        group = self._tensors.group(self.ranks)
        work: Any = dist.all_to_all_single(arrived, flat, into, out, group=group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            nonlocal flat
            flat = flat.new_empty(0)
            return arrived.to(device)

        return finish


def in_flight(
    rounds: Sequence[Round], values: Sequence[Mapping[int, Tensor]], compute: Compute, device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """Run the rounds, and yield (position, this rank's shard of the result) as results arrive.

    While one round computes, the shards of the next round and the results of the previous round are in transit.
    """
    last = {position: index for index, one in enumerate(rounds) for position in one.positions}
    results: dict[int, Tensor] = {}
    returning: list[Callable[[], Iterator[int]]] = []

    def there(index: int) -> Iterator[tuple[int, Tensor]]:
        for position in returning.pop(0)():
            if last[position] == index:
                yield position, results.pop(position)

    arriving = rounds[0].send(values, device) if rounds else None
    for index, one in enumerate(rounds):
        arrived, arriving = arriving, None
        if index + 1 < len(rounds):
            arriving = rounds[index + 1].send(values, device)
        assert arrived is not None
        returning.append(one.send_back(arrived(), compute, results, device))
        if len(returning) > 1:
            yield from there(index - 1)
    if rounds:
        yield from there(len(rounds) - 1)


# Owner ranks ----------------------------------------------------------------------------------------------------------

# Each matrix has an owner rank. Ranks send their shards to it; it computes the result and sends it to all ranks with
# shards.
#
# The owner rank is one of the ranks with shards of the matrix; the choice balances the cost between ranks. All ranks
# compute the same communication plan once, without communication. A step only packs, exchanges and unpacks. Matrices are
# grouped into rounds, so that one round computes while the next round is sent.

ROUND_BYTES = 64 * 2**20


class Homes:
    """The owner rank of each matrix, and the exchanges with it.

    Args:
        tensors: The full tensors.
        boxes: Returns the boxes of a full tensor's matrices. They tile the tensor, or the list is empty.
        cost: Returns the approximate time for a matrix of a shape, in any unit.
        lists: Number of tensors per matrix that are sent to the owner rank. Default: 1.
        dtype: Dtype of the elements that are sent in both directions. None: the tensor's dtype.
        round_bytes: Largest size in bytes of the full matrices on one owner rank in one round, in the tensors' own dtype
            and over all ``lists``; a single matrix may be larger.
        settled: {(tensor name, matrix number): rank that already has the matrix's state}. That rank stays the owner rank
            if it still holds part of the matrix. None: no matrix has a state.

    Attributes:
        own: The matrices that this rank owns.
        buffers: The communication buffers, which are kept on a CPU only.

    Collectives: none.
    """

    def __init__(
        self,
        tensors: WholeTensors,
        boxes: Callable[[LogicalTensor], Sequence[Box]],
        cost: Callable[[Shape], float],
        lists: int = 1,
        dtype: torch.dtype | None = None,
        round_bytes: int = ROUND_BYTES,
        settled: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        self.tensors, self._dtype = tensors, dtype
        load: dict[int, float] = {}
        by_ranks: dict[tuple[int, ...], list[Matrix]] = {}
        # {(tensor, owner rank): boxes that each rank sends}; the owner rank contributes all elements that it holds
        canonical_boxes: dict[tuple[str, int], dict[int, list[Box]]] = {}
        parts = [
            (tensor, number, box) for tensor in tensors.everything.values() for number, box in enumerate(boxes(tensor))
        ]
        for tensor, number, box in sorted(parts, key=lambda part: (-cost(part[2].sizes), part[0].name, part[1])):
            holders = {rank: held for rank in tensor.ranks if (held := _common(tensor.held[rank], box))}
            home = (settled or {}).get((tensor.name, number), -1)
            if home not in holders:
                home = min(holders, key=lambda rank: (load.get(rank, 0.0), rank))
            load[home] = load.get(home, 0.0) + cost(box.sizes)
            if (tensor.name, home) not in canonical_boxes:
                canonical_boxes[tensor.name, home] = tensor.sources(home)
            sources = {
                rank: own
                for rank, boxes_of in canonical_boxes[tensor.name, home].items()
                if (own := _common(boxes_of, box))
            }
            by_ranks.setdefault(tensor.ranks, []).append(Matrix(tensor, number, box, home, sources, holders))
        self.load = load
        shares = [
            (ranks, matrices)
            for ranks in sorted(by_ranks)
            if tensors.rank in ranks
            for matrices in _rounds(by_ranks[ranks], lists, round_bytes)
        ]
        self.buffers = Buffers()
        self._rounds = [
            Round(tensors, ranks, matrices, lists, dtype or matrices[0].tensor.dtype, index % 2, self.buffers)
            for index, (ranks, matrices) in enumerate(shares)
        ]
        self.own = [matrix for one in self._rounds for matrix in one.own]

    def map(
        self, values: Sequence[Mapping[int, Tensor]], compute: Compute, device: torch.device | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Compute every matrix on its owner rank, and yield this rank's shards of the results by position.

        Consume all results: communication that other ranks wait for starts during the iteration.

        Args:
            values: Per list, contiguous tensors of the stepped tensors' shapes by position. A tensor is read when its
                elements are sent, once per round that contains one of its matrices (see `LazyTensors`).
            compute: Called on the owner rank only, for each matrix in `own`.
            device: Device of the computation. None: the device of the first value, or the CPU without values. A single
                process ignores it and computes on the device of each value.
        Returns:
            An iterator of positions and shards in the tensor's dtype; replicas are bitwise identical.

        Collectives: per round, at most two all-to-alls of the ranks that hold its tensors. The first is omitted if
            every owner rank already holds its full matrices. Both are omitted if no other rank holds any part.
        Host synchronization: none, except to copy results from a GPU to ``device`` if that is the CPU.
        Memory: at most three rounds of full matrices; on a CPU the buffers of two rounds are kept for the next step.
        """
        if device is None:
            device = next((value.device for value in values[0].values()), torch.device("cpu"))
        if self.tensors.registry is None:
            return self._alone(values, compute)
        return in_flight(self._rounds, values, compute, device)

    def _alone(self, values: Sequence[Mapping[int, Tensor]], compute: Compute) -> Iterator[tuple[int, Tensor]]:
        """Compute matrices in a single process, and yield (position, result); skip positions without a value."""
        by_position: dict[int, list[Matrix]] = {}
        for matrix in self.own:
            (position,) = self.tensors.positions(matrix.tensor)
            by_position.setdefault(position, []).append(matrix)
        for position in sorted(by_position):
            if position not in values[0]:
                continue
            given = [of_list[position] for of_list in values]
            if self._dtype is not None:
                given = [value.to(self._dtype) for value in given]
            result = torch.empty_like(given[0], dtype=self.tensors.tensors[position].dtype)
            for matrix in by_position[position]:
                wholes = [narrowed(value, matrix.box) for value in given]
                narrowed(result, matrix.box).copy_(compute(matrix, wholes))
            yield position, result


def _common(held: Sequence[Box], box: Box) -> list[Box]:
    return [one.common(box) for one in held if one.overlaps(box)]


def _rounds(matrices: Sequence[Matrix], lists: int, round_bytes: int) -> list[list[Matrix]]:
    """Divide the matrices into rounds of one dtype, with at most ``round_bytes`` (or one matrix) per owner rank."""
    rounds: list[list[Matrix]] = []
    filled: dict[int, tuple[int, int]] = {}  # by owner rank: its last round, and the bytes in it
    for matrix in matrices:
        numbytes = prod(matrix.shape) * matrix.tensor.dtype.itemsize * lists
        index, held = filled.get(matrix.home, (0, 0))
        if held and held + numbytes > round_bytes:
            index, held = index + 1, 0
        filled[matrix.home] = index, held + numbytes
        while len(rounds) <= index:
            rounds.append([])
        rounds[index].append(matrix)
    return [
        [matrix for matrix in one if matrix.tensor.dtype == dtype]
        for one in rounds
        for dtype in sorted({matrix.tensor.dtype for matrix in one}, key=str)
    ]
