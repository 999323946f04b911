"""Matrices computed whole at one rank each: pieces travel to their home, and the results back to all that have pieces.

A home is one of the ranks that have some of the matrix, chosen so that all have about the same to compute. Which elements
travel where is settled once, by arithmetic that is the same on all ranks; a step packs, exchanges and unpacks. Matrices
go in rounds, so that one round computes while the next one travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from ...parallel.layout.pieces import Box, Shape
from .buffers import Buffers
from .layout import LogicalTensor
from .rounds import Compute, Matrix, Round, in_flight
from .tensors import WholeTensors, narrowed

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
