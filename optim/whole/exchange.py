"""Exchange of sharded matrices between ranks.

Each matrix has an owner rank. The ranks send it their shards of the matrix. It computes the result, and sends each rank
its shard of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...amp.casting import copy_each_
from ...parallel.layout.shard import Box, Shape, narrowed
from . import batching
from .batching import grouped, values_of
from .tensors import LogicalTensor, WholeTensors

# Flat communication buffers -------------------------------------------------------------------------------------------


class Buffers:
    """Flat buffers for communication and for received matrices, one per key.

    The next request with the same key invalidates a buffer.

    On a CPU a buffer is kept and grows to the longest request, which avoids the page faults of new memory. On other
    devices no buffer is kept: torch's caching allocator keeps the memory, and other code can use it between two steps.
    """

    def __init__(self) -> None:
        self._kept: dict[object, Tensor] = {}

    def flat(self, use: object, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized 1-dim tensor from the buffer with the hashable key ``use``."""
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        numbytes = numel * dtype.itemsize
        kept = self._kept.get(use)
        if kept is None or kept.numel() < numbytes:
            kept = self._kept[use] = torch.empty(numbytes, dtype=torch.uint8, device=device)
        return kept[:numbytes].view(dtype)


# Matrices, and the rounds in which they are exchanged -----------------------------------------------------------------


@dataclass(frozen=True)
class Matrix:
    """A part of a full tensor for which one rank, its owner rank, computes the result, such as the update.

    The part is an expert of a stack, a block of a fused weight, an attention head, or the entire tensor.

    Args:
        tensor: The full tensor.
        number: Index of the matrix among the matrices of ``tensor``.
        box: The rectangle of the full tensor that is the matrix.
        home: The owner rank.
        sources: {rank: rectangles of the full tensor that this rank contributes to the matrix}. Each element of the
            matrix comes from exactly one rank. The owner rank contributes all elements that it holds.
        holders: {rank: rectangles of the full tensor that this rank holds within the matrix}. The rank gets the results
            of these rectangles.
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
"""A function ``compute(matrix, tensors)`` that returns the result of a matrix, in the shape and dtype of ``tensors``.

``tensors`` is a list of full tensors of the matrix's shape, such as its weights and its gradient. The result must not
share memory with them, because their memory is reused.
"""

ComputeStack = Callable[[Sequence[Matrix], list[Tensor]], Iterable[Tensor]]
"""A function ``compute(matrices, stacks)`` that returns the result of each matrix, for n matrices of equal shapes.

``stacks`` is a list of tensors of n matrices each, such as the weights and the gradients. Results are as in `Compute`.
"""


def each(compute: Compute) -> ComputeStack:
    """Return a function that calls ``compute`` for one matrix after the other."""

    def of_stack(matrices: Sequence[Matrix], stacks: list[Tensor]) -> Iterator[Tensor]:
        for row, matrix in enumerate(matrices):
            yield compute(matrix, [stack[row] for stack in stacks])

    return of_stack


class OwnStack(NamedTuple):
    """This rank's own matrices of one shape in a round.

    ``numbers`` are their indices in the round. ``tensors`` has one tensor [matrices, ...] per tensor that is exchanged
    per matrix, such as the weights and the gradients.
    """

    numbers: Sequence[int]
    tensors: list[Tensor]


class TransferSlice(NamedTuple):
    """A rectangle of a matrix, and its place in the flat buffer that is sent or received.

    ``matrix`` is the index of the matrix in its round, ``which`` the index among the tensors that are exchanged per matrix
    (such as 0: weights, 1: gradient). ``box`` is in indices of the full tensor. ``begin`` is the index of its first element
    in the flat buffer; None if this rank has both the shard and the matrix, so that its elements are not sent.
    """

    matrix: int
    which: int
    box: Box
    begin: int | None

    def view_in(self, flat: Tensor) -> Tensor:
        """Return the view of the rectangle in the flat buffer."""
        assert self.begin is not None
        return flat[self.begin : self.begin + prod(self.box.sizes)].view(self.box.sizes)


@dataclass(frozen=True)
class Transfer:
    """One direction of a round: the elements of this rank's shards and matrices, and the sizes of the all-to-all.

    The flat buffer has the elements that this rank exchanges with the first other rank, then with the second, and so on.
    For each rank, they are ordered by matrix, then by tensor of the matrix, then by rectangle.

    Args:
        of_shards: The rectangles of this rank's shards, by the position of the stepped shard over all param groups.
        of_matrices: The rectangles of other ranks' shards in the matrices that this rank owns, by index of the matrix.
        sent: Number of elements that this rank sends to each rank of the round.
        received: Number of elements that this rank receives from each rank of the round.
        is_needed: False if no rank of the round sends elements to another rank; equal on all of these ranks.
    """

    of_shards: Mapping[int, Sequence[TransferSlice]]
    of_matrices: Mapping[int, Sequence[TransferSlice]]
    sent: list[int]
    received: list[int]
    is_needed: bool


class Round:
    """A group of matrices that are exchanged in the same all-to-alls.

    Their full tensors have the same dtype, and ``ranks`` step shards of them. ``matrices`` are in the same order on all
    of these ranks. ``lists`` is the number of tensors per matrix that are sent to its owner rank. Elements are sent in
    ``dtype`` in both directions. Rounds with the same ``buffer_index`` share buffers on a CPU: a round no longer needs
    a buffer when the next round with this index writes to it.

    Attributes:
        ranks, matrices: The arguments.
        own: The matrices that this rank owns.
        positions: The positions, over all param groups, of this rank's shards of the tensors that contain the matrices.
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
        self._me, self.matrices, self._dtype = tensors.rank, matrices, dtype
        self._buffer_index, self._buffers = buffer_index, buffers
        self._own = [index for index, matrix in enumerate(matrices) if matrix.home == self._me]
        self.own = [matrices[index] for index in self._own]
        # matrices of equal shapes are next to each other in memory, so that they can be computed together
        self._by_shape = list(grouped(self._own, lambda index: matrices[index].shape).values())
        self._there = self._transfer(lambda m: m.sources, lists, to_owner=True)
        self._back = self._transfer(lambda m: m.holders, 1, to_owner=False)
        self.positions = sorted({at for matrix in matrices for at in tensors.positions(matrix.tensor)})

    def _transfer(self, boxes: Callable[[Matrix], Mapping[int, Sequence[Box]]], lists: int, to_owner: bool) -> Transfer:
        """Return the direction to the owner ranks (``to_owner``), or the direction of the results that they send back.

        ``boxes`` is `Matrix.sources` for the direction to the owner ranks, else `Matrix.holders`. ``lists`` is the number
        of tensors per matrix in this direction.
        """
        counts: dict[tuple[int, int], int] = {}  # by (sending rank, receiving rank)
        for matrix in self.matrices:
            for rank, those in boxes(matrix).items():
                if rank != matrix.home:
                    ranks = (rank, matrix.home) if to_owner else (matrix.home, rank)
                    counts[ranks] = counts.get(ranks, 0) + lists * sum(prod(box.sizes) for box in those)
        sent = [counts.get((self._me, rank), 0) for rank in self.ranks]
        received = [counts.get((rank, self._me), 0) for rank in self.ranks]
        of_shards: dict[int, list[TransferSlice]] = {}
        at = 0
        for home in self.ranks:
            for number, matrix in enumerate(self.matrices):
                for which in range(lists) if matrix.home == home else ():
                    for box in boxes(matrix).get(self._me, ()):
                        place = TransferSlice(number, which, box, None if home == self._me else at)
                        for position in self._tensors.positions_of(matrix.tensor, box):  # one position
                            of_shards.setdefault(position, []).append(place)
                        at += 0 if home == self._me else prod(box.sizes)
        of_matrices: dict[int, list[TransferSlice]] = {number: [] for number in self._own}
        at = 0
        for rank in self.ranks:
            for number in self._own if rank != self._me else ():
                for which in range(lists):
                    for box in boxes(self.matrices[number]).get(rank, ()):
                        of_matrices[number].append(TransferSlice(number, which, box, at))
                        at += prod(box.sizes)
        return Transfer(of_shards, of_matrices, sent, received, bool(counts))

    # To the owner rank ----------------------------------------------------------------------------------------------

    def send(self, values: Sequence[Mapping[int, Tensor]], device: torch.device) -> Callable[[], list[OwnStack]]:
        """Start sending this rank's elements of the matrices to the owner ranks.

        Each mapping in ``values`` maps the position of a stepped shard to a tensor of the shard's shape. Return a
        function that waits for the all-to-all, and returns the full tensors of the matrices in `own`, on ``device``.
        """
        stacks = self._empty_stacks(device)
        # {index of an own matrix in this round: its full tensors}
        wholes = {
            number: [s[row] for s in tensors] for numbers, tensors in stacks for row, number in enumerate(numbers)
        }
        flat = self._buffer("sent", sum(self._there.sent), device)
        for positions in _portions(self._there.of_shards, device):
            copies: list[tuple[Tensor, Tensor]] = []
            for index, of_list in enumerate(values):
                for position, value in values_of(of_list, positions).items():
                    places = self._there.of_shards[position]
                    parts = self._parts(position, value, places)
                    for place in (place for place in places if place.which == index):
                        is_own = place.begin is None
                        target = self._view(wholes[place.matrix][index], place) if is_own else place.view_in(flat)
                        copies.append((target, parts[place.box]))
            _copy(copies)
        arrived = self._exchange("arrived", self._there, flat, device)

        def finish() -> list[OwnStack]:
            elements = arrived()
            places = (place for of_matrix in self._there.of_matrices.values() for place in of_matrix)
            _copy([(self._view(wholes[place.matrix][place.which], place), place.view_in(elements)) for place in places])
            wholes.clear()
            return stacks

        return finish

    def _empty_stacks(self, device: torch.device) -> list[OwnStack]:
        """Return stacks of uninitialized tensors for the matrices in `own`."""
        flat = self._buffer("whole", self._lists * sum(prod(matrix.shape) for matrix in self.own), device)
        stacks, at = list[OwnStack](), 0
        for numbers in self._by_shape:
            shape = (self._lists, len(numbers), *self.matrices[numbers[0]].shape)
            stacks.append(OwnStack(numbers, list(flat[at : at + prod(shape)].view(shape).unbind())))
            at += prod(shape)
        return stacks

    # Back to the ranks with shards ----------------------------------------------------------------------------------

    def send_back(
        self,
        stacks: Sequence[OwnStack],
        compute: ComputeStack,
        results: dict[int, Tensor],
        device: torch.device,
    ) -> Callable[[], Iterator[list[int]]]:
        """Compute this rank's own matrices, and start sending the results to the ranks that hold shards of the matrices.

        ``stacks`` are from the function that `send` returned. Return a function that returns an iterator.
        The iterator waits for the all-to-all, writes this rank's shards into ``results`` by position, in the full tensors'
        dtype, and yields the positions of the shards that it has written.
        """
        flat = self._buffer("sent back", sum(self._back.sent), device)
        stays: dict[int, Tensor] = {}
        for numbers, tensors in stacks:
            copies: list[tuple[Tensor, Tensor]] = []
            found = compute([self.matrices[number] for number in numbers], tensors)
            for number, made in zip(numbers, found, strict=True):
                # contiguous, because copies of parts of a transposed matrix are slow
                stays[number] = made = made.contiguous()
                copies += ((place.view_in(flat), self._view(made, place)) for place in self._back.of_matrices[number])
            _copy(copies)
        arrived = self._exchange("arrived back", self._back, flat, device)

        def finish() -> Iterator[list[int]]:
            elements = arrived()
            for positions in _portions(self.positions, device):
                copies: list[tuple[Tensor, Tensor]] = []
                for position in positions:  # includes empty shards, which need a result tensor too
                    places = self._back.of_shards.get(position, ())
                    if position not in results:
                        shape, dtype = self._tensors.piece_shape(position), self._tensors.tensors[position].dtype
                        results[position] = torch.empty(shape, dtype=dtype, device=device)
                    parts = self._parts(position, results[position], places)
                    for place in places:
                        is_own = place.begin is None
                        part = self._view(stays[place.matrix], place) if is_own else place.view_in(elements)
                        copies.append((parts[place.box], part))
                _copy(copies)
                yield positions
            stays.clear()

        return finish

    # Both directions ------------------------------------------------------------------------------------------------

    def _view(self, whole: Tensor, place: TransferSlice) -> Tensor:
        """Return the view of a rectangle in ``whole``, a full tensor of its matrix."""
        return narrowed(whole, place.box, self.matrices[place.matrix].box.offsets)

    def _parts(self, position: int, value: Tensor, places: Sequence[TransferSlice]) -> dict[Box, Tensor]:
        """Return {rectangle: view of its elements in ``value``} for the rectangles in ``places``."""
        return dict(self._tensors.views(position, value, {place.box for place in places}))

    def _buffer(self, use: str, numel: int, device: torch.device) -> Tensor:
        return self._buffers.flat((use, self._buffer_index), numel, self._dtype, device)

    def _exchange(self, use: str, transfer: Transfer, flat: Tensor, device: torch.device) -> Callable[[], Tensor]:
        """Start an all-to-all of ``flat`` among `ranks`, unless no rank sends elements.

        Return a function that waits for the all-to-all, and returns the received elements on ``device``, ordered by sending
        rank. Without an all-to-all it returns ``flat``.
        """
        if not transfer.is_needed:
            return lambda: flat
        registry = self._tensors.registry
        assert registry is not None
        flat = flat.to(registry.device)
        arrived = self._buffer(use, sum(transfer.received), registry.device)
        group = self._tensors.group(self.ranks)
        work: Any = dist.all_to_all_single(arrived, flat, transfer.received, transfer.sent, group=group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            nonlocal flat
            flat = flat.new_empty(0)
            return arrived.to(device)

        return finish


def _portions(positions: Iterable[int], device: torch.device) -> list[list[int]]:
    """Return lists of positions whose tensors are copied together: one list on a GPU, one per position on a CPU."""
    return [list(positions)] if batching.batches_on(device) else [[position] for position in positions]


def _copy(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    if copies:
        copy_each_([target for target, _ in copies], [source for _, source in copies])


def in_flight(
    rounds: Sequence[Round], values: Sequence[Mapping[int, Tensor]], compute: ComputeStack, device: torch.device
) -> Iterator[dict[int, Tensor]]:
    """Run all rounds, and yield {position: this rank's shard of the result} when shards are complete.

    While one round computes, the shards of the next round and the results of the previous round are in transit.
    ``rounds`` are in the same order on all of their ranks. ``values`` is as in `Round.send`.
    """
    last = {position: index for index, one in enumerate(rounds) for position in one.positions}
    results: dict[int, Tensor] = {}
    returning: list[Callable[[], Iterator[list[int]]]] = []

    def there(index: int) -> Iterator[dict[int, Tensor]]:
        for positions in returning.pop(0)():
            if complete := [position for position in positions if last[position] == index]:
                yield {position: results.pop(position) for position in complete}

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

# The owner rank is one of the ranks with shards of the matrix; the choice balances the cost between ranks. All ranks
# compute the same communication plan once, without communication. Matrices are grouped into rounds, so that one round
# computes while the next round is sent.

ROUND_BYTES = 64 * 2**20


class Homes:
    """The owner rank of each matrix, and the exchanges between owner ranks and the ranks that hold shards.

    Args:
        tensors: The full tensors.
        boxes: Returns the rectangles of a full tensor that are its matrices. They must tile the tensor. An empty list:
            the tensor is not exchanged.
        cost: Returns the approximate time for a matrix of the given shape, in any unit. The choice of owner ranks
            balances the sum of these times between ranks.
        lists: Number of tensors per matrix that are sent to the owner rank, such as 2 for weights and gradient.
            Default: 1.
        dtype: Dtype of the elements that are sent, in both directions. None: the tensor's dtype.
        round_bytes: Largest size in bytes of the full matrices that one owner rank receives in one round, over all
            ``lists``, counted in the tensors' own dtype. A single matrix may be larger. Default: 64 MiB.
        settled: {(tensor name, matrix number): rank that already has the matrix's state}. That rank stays the owner
            rank if it still holds part of the matrix. None: no matrix has a state.

    Attributes:
        own: The matrices that this rank owns.
        load: {rank: sum of the costs of the matrices that it owns}, for ranks that own a matrix.
        buffers: The communication buffers.

    Collectives: none in the constructor.
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
        # {(tensor name, owner rank): {rank: boxes that it contributes}}; the owner rank contributes all that it holds
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
        self.buffers, self._lists = Buffers(), lists
        self._rounds = self._rounds_of(
            (ranks, matrices)
            for ranks in sorted(by_ranks)
            if tensors.rank in ranks
            for matrices in _rounds(by_ranks[ranks], lists, round_bytes)
        )
        self.own = [matrix for one in self._rounds for matrix in one.own]

    def _rounds_of(self, shares: Iterable[tuple[tuple[int, ...], Sequence[Matrix]]]) -> list[Round]:
        return [
            Round(
                self.tensors,
                ranks,
                matrices,
                self._lists,
                self._dtype or matrices[0].tensor.dtype,
                index % 2,
                self.buffers,
            )
            for index, (ranks, matrices) in enumerate(shares)
        ]

    def map(
        self, values: Sequence[Mapping[int, Tensor]], compute: Compute, device: torch.device | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Compute every matrix on its owner rank, and yield (position, this rank's shard of the result).

        A position is the index of a stepped tensor over all param groups. You must consume the entire iterator: it
        starts communication that other ranks wait for.

        Args:
            values: One mapping per tensor to send, such as the weights and the gradients; ``lists`` mappings in all.
                Each maps a position to a contiguous tensor of the stepped tensor's shape. Under `ParallelOptimizer`, a
                mapping must have every position whose full tensor has matrices. A tensor is read once per round, when
                its elements are sent, so the mapping may compute it lazily. In a single process without
                `ParallelOptimizer`, positions that are not in the mapping are skipped.
            compute: Called on the owner rank only, for each matrix in `own`.
            device: Device of the computation. None: the device of the first value, or the CPU without values. A single
                process without `ParallelOptimizer` computes on the device of each value; if you give a GPU there, all
                values must be on it.
        Returns:
            An iterator of (position, shard of the result in the full tensor's dtype). Replicas are bitwise identical.

        Collectives: per round, at most two all-to-alls of the ranks that step its tensors. The first one is omitted if
            every owner rank already holds its full matrices. Both are omitted if no other rank holds a part of them.
        Host synchronization: none if all tensors and the process groups are on one GPU, apart from that of ``compute``.
            Otherwise, elements are copied between the CPU and the GPU.
        Memory: the full matrices of two rounds, the results of two rounds, and the communication buffers of two rounds.
            On a CPU, the matrices and buffers are kept for the next call.
        """
        for found in self.map_stacks(values, each(compute), device):
            yield from found.items()

    def map_stacks(
        self, values: Sequence[Mapping[int, Tensor]], compute: ComputeStack, device: torch.device | None
    ) -> Iterator[dict[int, Tensor]]:
        """Compute matrices of equal shapes together, and yield {position: this rank's shard of the result}.

        Args:
            values: As in `map`.
            compute: Called on the owner rank only, for each set of matrices in `own` with equal shapes in a round. Without
                `ParallelOptimizer`, it is called for one matrix at a time, unless ``device`` is a GPU.
            device: As in `map`.
        Returns:
            An iterator of {position: shard of the result in the full tensor's dtype}: on a GPU at most one dict per
                round, on a CPU one per position.

        Collectives, host synchronization, memory: as in `map`.
        """
        if self.tensors.registry is not None:
            if device is None:
                device = next((value.device for value in values[0].values()), torch.device("cpu"))
            return in_flight(self._rounds, values, compute, device)
        if device is None or not batching.batches_on(device):
            return self._alone(values, compute)
        present = [
            (one.ranks, [matrix for matrix in one.matrices if self.tensors.positions(matrix.tensor)[0] in values[0]])
            for one in self._rounds
        ]
        return in_flight(self._rounds_of([one for one in present if one[1]]), values, compute, device)

    def _alone(self, values: Sequence[Mapping[int, Tensor]], compute: ComputeStack) -> Iterator[dict[int, Tensor]]:
        """Compute the matrices in a single process, and yield {position: result}; skip positions without a value."""
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
                stacks = [narrowed(value, matrix.box).unsqueeze(0) for value in given]
                (made,) = compute([matrix], stacks)
                narrowed(result, matrix.box).copy_(made)
            yield {position: result}


def _common(held: Sequence[Box], box: Box) -> list[Box]:
    return [one.common(box) for one in held if one.overlaps(box)]


def _rounds(matrices: Sequence[Matrix], lists: int, round_bytes: int) -> list[list[Matrix]]:
    """Divide the matrices into rounds, each with matrices of one dtype.

    Per owner rank, a round has full matrices of at most ``round_bytes`` bytes, or a single larger matrix. Each matrix
    counts ``lists`` times.
    """
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
