"""One exchange there and back: pieces of some matrices to their homes, and the results to all that have some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.layout.regions import Box, Shape
from .layout import LogicalTensor
from .tensors import WholeTensors, narrowed

# Flat memory for what travels between ranks, kept from one step to the next -------------------------------------------


class Buffers:
    """One flat tensor for each use, as long as the longest that was asked for, until the next asks for the same use.

    Only on a CPU, where fresh memory costs a page fault for each 4 KiB that is written, more than what is written there. A
    GPU's allocator keeps memory itself, and lends it to whoever needs it between two steps.
    """

    def __init__(self) -> None:
        self._kept: dict[object, Tensor] = {}

    def flat(self, use: object, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[numel], with anything in it."""
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        numbytes = numel * dtype.itemsize
        kept = self._kept.get(use)
        if kept is None or kept.numel() < numbytes:
            kept = self._kept[use] = torch.empty(numbytes, dtype=torch.uint8, device=device)
        return kept[:numbytes].view(dtype)

    @property
    def numbytes(self) -> int:
        """What is kept."""
        return sum(kept.numel() for kept in self._kept.values())


# Rounds ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matrix:
    """A part of a logical tensor that is computed by itself: all of it, an expert, a block of a fused weight, a head.

    Args:
        tensor: The logical tensor.
        number: Which of the tensor's it is.
        box: Where in the tensor.
        home: The rank that computes it.
        sources: By rank the elements that it sends there.
        holders: By rank the elements that come back to it.
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
"""From a matrix and its elements in each list, whole, the result of its shape and dtype."""


class TravellingPlace(NamedTuple):
    """Where elements of this rank's pieces are on their way to a home or back.

    Args:
        matrix: By its number in the round.
        which: Of the lists.
        box: In the logical tensor; within one rectangle of one piece.
        begin: In what is sent or has arrived, flat; None: the home is here.
    """

    matrix: int
    which: int
    box: Box
    begin: int | None


class Round:
    """Matrices of tensors that one set of ranks shares, of one dtype, which travel together.

    Args:
        tensors: The logical tensors.
        ranks: The set.
        matrices: The same on all of them.
        lists: How many tensors of each matrix travel to its home.
        dtype: Of what travels.
        turn: Rounds of equal ``turn`` are never on their way at once, and take the same memory.
        buffers: The memory.

    Attributes:
        own: The matrices whose home this rank is.
        positions: Those of this rank that have some of the matrices.
    """

    def __init__(
        self,
        tensors: WholeTensors,
        ranks: tuple[int, ...],
        matrices: Sequence[Matrix],
        lists: int,
        dtype: torch.dtype,
        turn: int,
        buffers: Buffers,
    ) -> None:
        self._tensors, self.ranks, self._lists = tensors, ranks, lists
        self._me, self._matrices, self._dtype = tensors.rank, matrices, dtype
        self._turn, self._buffers = turn, buffers
        self._own = [index for index, matrix in enumerate(matrices) if matrix.home == self._me]
        self.own = [matrices[index] for index in self._own]
        # Elements from one rank to another, there and back.
        self._there = self._counts(lambda m: m.sources, lists)
        self._back = self._counts(lambda m: m.holders, 1)
        self._sent = self._places(lambda m: m.sources, lists)
        self._returned = self._places(lambda m: m.holders, 1)
        self.positions = sorted({at for matrix in matrices for at in tensors.positions(matrix.tensor)})

    def _counts(self, boxes: Callable[[Matrix], Mapping[int, Sequence[Box]]], lists: int) -> dict[tuple[int, int], int]:
        """By (other rank, home), without what stays where it is."""
        found: dict[tuple[int, int], int] = {}
        for matrix in self._matrices:
            for rank, those in boxes(matrix).items():
                if rank != matrix.home:
                    count = lists * sum(prod(box.sizes) for box in those)
                    found[rank, matrix.home] = found.get((rank, matrix.home), 0) + count
        return found

    def _places(
        self, boxes: Callable[[Matrix], Mapping[int, Sequence[Box]]], lists: int
    ) -> dict[int, list[TravellingPlace]]:
        """By position those of this rank's elements; what is for one home lies by matrix, list and box."""
        found: dict[int, list[TravellingPlace]] = {}
        at = 0
        for home in self.ranks:
            for number, matrix in enumerate(self._matrices):
                if matrix.home != home:
                    continue
                for index in range(lists):
                    for box in boxes(matrix).get(self._me, ()):
                        place = TravellingPlace(number, index, box, None if home == self._me else at)
                        for position in self._tensors.positions_of(matrix.tensor, box):  # one
                            found.setdefault(position, []).append(place)
                        at += 0 if home == self._me else prod(box.sizes)
        return found

    # There ----------------------------------------------------------------------------------------------------------

    def send(
        self, values: Sequence[Mapping[int, Tensor]], device: torch.device
    ) -> Callable[[], dict[int, list[Tensor]]]:
        """Start to bring this rank's elements to their homes; what finishes it returns the whole matrices of `own`."""
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
        """For each of `own`, by number, its lists."""
        numels = [prod(matrix.shape) for matrix in self.own]
        flat = self._buffers.flat(("whole", self._turn), self._lists * sum(numels), self._dtype, device)
        parts = iter(flat.split([numel for numel in numels for _ in range(self._lists)]))
        return {
            number: [next(parts).view(matrix.shape) for _ in range(self._lists)]
            for number, matrix in zip(self._own, self.own, strict=True)
        }

    # Back -----------------------------------------------------------------------------------------------------------

    def send_back(
        self,
        wholes: dict[int, list[Tensor]],
        compute: Compute,
        results: dict[int, Tensor],
        device: torch.device,
    ) -> Callable[[], Iterator[int]]:
        """Compute, and start to bring the results to all that have pieces; what finishes it puts them into ``results``, of
        the tensors' dtype, one position after another."""
        flat, out, into = self._flat("sent back", self._back, False, device)
        begins = self._begins()
        stays: dict[int, Tensor] = {}
        for number in self._own:
            matrix = self._matrices[number]
            # Parts of what is transposed would take long to copy.
            stays[number] = made = compute(matrix, wholes.pop(number)).contiguous()
            for rank in self.ranks:
                for box in matrix.holders.get(rank, ()) if rank != self._me else ():
                    begin = begins[number, rank, box]
                    part = narrowed(made, box, matrix.box.offsets)
                    flat[begin : begin + prod(box.sizes)].view(box.sizes).copy_(part)
        arrived = self._exchange("arrived back", self._back, flat, out, into, device)

        def finish() -> Iterator[int]:
            elements = arrived()
            for position in self.positions:  # those too that have no element
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
        """By matrix, rank and box where the result's elements for that rank begin in what is sent."""
        found, at = {}, 0
        for rank in self.ranks:
            for number in self._own if rank != self._me else ():
                for box in self._matrices[number].holders.get(rank, ()):
                    found[number, rank, box] = at
                    at += prod(box.sizes)
        return found

    # Both -----------------------------------------------------------------------------------------------------------

    def _parts(self, position: int, value: Tensor, places: Sequence[TravellingPlace]) -> dict[Box, Tensor]:
        """The elements of boxes in a piece; views of it."""
        return dict(self._tensors.views(position, value, {place.box for place in places}))

    def _flat(
        self, use: str, counts: Mapping[tuple[int, int], int], towards_home: bool, device: torch.device
    ) -> tuple[Tensor, list[int], list[int]]:
        """Memory for what this rank sends; to each rank how many elements, and from each."""
        me = self._me
        out = [counts.get((me, rank) if towards_home else (rank, me), 0) for rank in self.ranks]
        into = [counts.get((rank, me) if towards_home else (me, rank), 0) for rank in self.ranks]
        return self._buffers.flat((use, self._turn), sum(out), self._dtype, device), out, into

    def _exchange(
        self,
        use: str,
        counts: Mapping[tuple[int, int], int],
        flat: Tensor,
        out: list[int],
        into: list[int],
        device: torch.device,
    ) -> Callable[[], Tensor]:
        """Start an all-to-all; what finishes it returns what has come, by rank one after another."""
        if not counts:
            return lambda: flat
        registry = self._tensors.registry
        assert registry is not None
        flat = flat.to(registry.device)
        arrived = self._buffers.flat((use, self._turn), sum(into), self._dtype, registry.device)
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
    """One round computes while the next one travels there and the one before back: results, as they are there."""
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


# Homes ----------------------------------------------------------------------------------------------------------------

# Matrices computed whole at one rank each: pieces travel to their home, and the results back to all that have pieces.
#
# A home is one of the ranks that have some of the matrix, chosen so that all have about the same to compute. Which
# elements travel where is settled once, by arithmetic that is the same on all ranks; a step packs, exchanges and unpacks.
# Matrices go in rounds, so that one round computes while the next one travels.

ROUND_BYTES = 64 * 2**20


class Homes:
    """Where each matrix is computed, and the exchanges around it.

    Args:
        tensors: The logical tensors.
        boxes: For a logical tensor the parts of it that are computed each by itself; none where none is. They tile it.
        cost: About how long a matrix of a shape takes, in any unit.
        lists: How many tensors of each matrix travel to its home.
        dtype: Of what travels, there and back; None: the tensor's.
        round_bytes: Of whole matrices at one home in one round, at most, where one matrix is not larger.
        settled: By tensor and number the homes of those that have one already, with a state there.

    Attributes:
        own: The matrices whose home this rank is.
        buffers: What is kept of what travels, on a CPU.
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
        spoken: dict[tuple[str, int], dict[int, list[Box]]] = {}  # of a tensor, where a rank speaks for all that it has
        parts = [
            (tensor, number, box) for tensor in tensors.everything.values() for number, box in enumerate(boxes(tensor))
        ]
        for tensor, number, box in sorted(parts, key=lambda part: (-cost(part[2].sizes), part[0].name, part[1])):
            holders = {rank: held for rank in tensor.ranks if (held := _common(tensor.held[rank], box))}
            home = (settled or {}).get((tensor.name, number), -1)
            if home not in holders:
                home = min(holders, key=lambda rank: (load.get(rank, 0.0), rank))
            load[home] = load.get(home, 0.0) + cost(box.sizes)
            if (tensor.name, home) not in spoken:
                spoken[tensor.name, home] = tensor.sources(home)
            sources = {rank: own for rank, said in spoken[tensor.name, home].items() if (own := _common(said, box))}
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
        """``compute`` of each matrix at its home; positions with the results' pieces, one after another as they are there.

        Take all of them: what is taken starts what the other ranks wait for.

        Args:
            values: For each list by position a contiguous tensor of the piece's shape. A position is asked for when it sets
                out, in each round that has some of its matrices: see `OnDemand`.
            compute: Called at home alone, for each of `own`.
            device: Where matrices are computed; None: that of the first value.
        Returns:
            Pieces of the tensor's dtype: the same bits on all ranks that have copies.
        Collectives: for each round two all-to-alls of the ranks that share its tensors (one where every home has all that
        it needs, none where nobody else has any). Host reads: none. Memory: three rounds of whole matrices at most; on a
        CPU what has travelled in two of them is kept for the next step.
        """
        if device is None:
            device = next((value.device for value in values[0].values()), torch.device("cpu"))
        if self.tensors.registry is None:
            return self._alone(values, compute)
        return in_flight(self._rounds, values, compute, device)

    def _alone(self, values: Sequence[Mapping[int, Tensor]], compute: Compute) -> Iterator[tuple[int, Tensor]]:
        """On one rank, where some parameters may not be stepped."""
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
    """In each round every home has about as much."""
    rounds: list[list[Matrix]] = []
    filled: dict[int, tuple[int, int]] = {}  # by home: its round, the bytes there
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
