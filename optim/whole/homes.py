"""Matrices computed whole at one rank each: pieces travel to their home, and the results back to all that have pieces.

A home is one of the ranks that have some of the matrix, chosen so that all have about the same to compute. Which elements
travel where is settled once, by arithmetic that is the same on all ranks; a step packs, exchanges and unpacks. Matrices
go in rounds, so that one round computes while the next one travels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.layout.pieces import Box, Shape
from .layout import LogicalTensor
from .tensors import WholeTensors, narrowed

ROUND_BYTES = 64 * 2**20


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


class Homes:
    """Where each matrix is computed, and the exchanges around it.

    Args:
        tensors: The logical tensors.
        boxes: For a logical tensor the parts of it that are computed each by itself; none where none is. They tile it.
        cost: About how long a matrix of a shape takes, in any unit.
        lists: How many tensors of each matrix travel to its home.
        round_bytes: Of whole matrices at one home in one round, at most, where one matrix is not larger.
        settled: By tensor and number the homes of those that have one already, with a state there.

    Attributes:
        own: The matrices whose home this rank is.
    Collectives: none.
    """

    def __init__(
        self,
        tensors: WholeTensors,
        boxes: Callable[[LogicalTensor], Sequence[Box]],
        cost: Callable[[Shape], float],
        lists: int = 1,
        round_bytes: int = ROUND_BYTES,
        settled: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        self.tensors, self.lists = tensors, lists
        self._positions: dict[str, list[int]] = {}
        for position, tensor in enumerate(tensors.tensors):
            self._positions.setdefault(tensor.name, []).append(position)
        self.load = load = dict[int, float]()
        by_ranks: dict[tuple[int, ...], list[Matrix]] = {}
        parts = [
            (tensor, number, box) for tensor in tensors.everything.values() for number, box in enumerate(boxes(tensor))
        ]
        for tensor, number, box in sorted(parts, key=lambda part: (-cost(part[2].sizes), part[0].name, part[1])):
            holders = {rank: held for rank in tensor.ranks if (held := _common(tensor.held[rank], box))}
            home = (settled or {}).get((tensor.name, number), -1)
            if home not in holders:
                home = min(holders, key=lambda rank: (load.get(rank, 0.0), rank))
            load[home] = load.get(home, 0.0) + cost(box.sizes)
            sources = {r: s for r, spoken in tensor.sources(home).items() if (s := _common(spoken, box))}
            by_ranks.setdefault(tensor.ranks, []).append(Matrix(tensor, number, box, home, sources, holders))
        self._rounds = [
            _Round(self, ranks, matrices)
            for ranks in sorted(by_ranks)
            if tensors.rank in ranks
            for matrices in _rounds(by_ranks[ranks], lists, round_bytes)
        ]
        self.own = [matrix for one in self._rounds for matrix in one.own]

    def map(self, values: Sequence[Mapping[int, Tensor]], compute: Compute) -> dict[int, Tensor]:
        """``compute`` of each matrix at its home; the results, as pieces, by position.

        Args:
            values: For each list by position a contiguous tensor of the piece's shape; of one dtype for one tensor.
            compute: Called at home alone, for each of `own`.
        Returns:
            By position the piece of the result: the same bits on all ranks that have copies.
        Collectives: for each round two all-to-alls of the ranks that share its tensors (one where every home has all that
        it needs, none where nobody else has any). Host reads: none. Memory: three rounds of whole matrices at most.
        """
        if self.tensors.registry is None:
            return self._alone(values, compute)
        results: dict[int, Tensor] = {}
        returning: list[Callable[[], None]] = []
        arriving = self._rounds[0].send(values) if self._rounds else None
        for index, one in enumerate(self._rounds):
            arrived, arriving = arriving, None
            if index + 1 < len(self._rounds):
                arriving = self._rounds[index + 1].send(values)
            assert arrived is not None
            returning.append(one.send_back(arrived(), compute, values, results))
            if len(returning) > 1:
                returning.pop(0)()
        for finish in returning:
            finish()
        return results

    def _alone(self, values: Sequence[Mapping[int, Tensor]], compute: Compute) -> dict[int, Tensor]:
        """On one rank, where some parameters may not be stepped."""
        results = {position: torch.empty_like(value) for position, value in values[0].items()}
        for matrix in self.own:
            (position,) = self.positions(matrix.tensor)
            if position in results:
                wholes = [narrowed(of_list[position], matrix.box) for of_list in values]
                narrowed(results[position], matrix.box).copy_(compute(matrix, wholes))
        return results

    def positions(self, tensor: LogicalTensor) -> list[int]:
        """Where this rank has pieces of it."""
        return self._positions.get(tensor.name, [])


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


class _Round:
    """Matrices of tensors that one set of ranks shares, of one dtype, which travel together."""

    def __init__(self, homes: Homes, ranks: tuple[int, ...], matrices: Sequence[Matrix]) -> None:
        self._homes, self._tensors, self.ranks = homes, homes.tensors, ranks
        self._me, self._matrices = homes.tensors.rank, matrices
        self.own = [matrix for matrix in matrices if matrix.home == self._me]
        # Elements from one rank to another, there and back.
        self._there = self._counts(lambda m: m.sources, homes.lists)
        self._back = self._counts(lambda m: m.holders, 1)

    def _counts(self, boxes: Callable[[Matrix], Mapping[int, Sequence[Box]]], lists: int) -> dict[tuple[int, int], int]:
        """By (other rank, home), without what stays where it is."""
        found: dict[tuple[int, int], int] = {}
        for matrix in self._matrices:
            for rank, those in boxes(matrix).items():
                if rank != matrix.home:
                    count = lists * sum(prod(box.sizes) for box in those)
                    found[rank, matrix.home] = found.get((rank, matrix.home), 0) + count
        return found

    # There ----------------------------------------------------------------------------------------------------------

    def send(self, values: Sequence[Mapping[int, Tensor]]) -> Callable[[], list[list[Tensor]]]:
        """Start to bring this rank's elements to their homes; what finishes it returns the whole matrices of `own`."""
        wholes = [
            [torch.empty(m.shape, dtype=m.tensor.dtype, device=self._device(values)) for _ in values] for m in self.own
        ]
        for matrix, lists in zip(self.own, wholes, strict=True):
            for whole, of_list in zip(lists, values, strict=True):
                for box, part in self._parts(matrix, of_list, matrix.sources.get(self._me, ())):
                    narrowed(whole, box, matrix.box.offsets).copy_(part)
        sent = [
            part.reshape(-1)
            for home in self.ranks
            for matrix in self._matrices
            if matrix.home == home != self._me
            for of_list in values
            for _, part in self._parts(matrix, of_list, matrix.sources.get(self._me, ()))
        ]
        arrived = self._exchange(sent, self._there, towards_home=True, like=values)

        def finish() -> list[list[Tensor]]:
            by_rank = arrived()
            for rank in self.ranks:
                at = 0
                for matrix, lists in zip(self.own, wholes, strict=True):
                    for whole in lists:
                        for box in matrix.sources.get(rank, ()) if rank != self._me else ():
                            part, at = by_rank[rank][at : at + prod(box.sizes)], at + prod(box.sizes)
                            narrowed(whole, box, matrix.box.offsets).copy_(part.view(box.sizes))
            return wholes

        return finish

    # Back -----------------------------------------------------------------------------------------------------------

    def send_back(
        self,
        wholes: list[list[Tensor]],
        compute: Compute,
        values: Sequence[Mapping[int, Tensor]],
        results: dict[int, Tensor],
    ) -> Callable[[], None]:
        """Compute, and start to bring the results to all that have pieces; what finishes it puts them into ``results``."""
        made = [compute(matrix, lists) for matrix, lists in zip(self.own, wholes, strict=True)]
        wholes.clear()
        for matrix in self._matrices:
            for position in self._homes.positions(matrix.tensor):
                if position not in results:
                    results[position] = torch.empty_like(values[0][position])
        for matrix, whole in zip(self.own, made, strict=True):
            for box, part in self._parts(matrix, results, matrix.holders[self._me]):
                part.copy_(narrowed(whole, box, matrix.box.offsets))
        sent = [
            narrowed(whole, box, matrix.box.offsets).reshape(-1)
            for rank in self.ranks
            if rank != self._me
            for matrix, whole in zip(self.own, made, strict=True)
            for box in matrix.holders.get(rank, ())
        ]
        arrived = self._exchange(sent, self._back, towards_home=False, like=values)

        def finish() -> None:
            by_rank = arrived()
            for home in self.ranks:
                at = 0
                for matrix in self._matrices:
                    if matrix.home != home or home == self._me:
                        continue
                    for _, part in self._parts(matrix, results, matrix.holders.get(self._me, ())):
                        part.copy_(by_rank[home][at : at + part.numel()].view(part.shape))
                        at += part.numel()

        return finish

    def _parts(
        self, matrix: Matrix, by_position: Mapping[int, Tensor], boxes: Sequence[Box]
    ) -> list[tuple[Box, Tensor]]:
        """Boxes of the matrix in this rank's pieces, in the order of ``boxes``: each lies in one rectangle of one piece."""
        positions, views = self._homes.positions(matrix.tensor), self._tensors.views
        return [part for box in boxes for at in positions for part in views(at, by_position[at], [box])]

    def _device(self, values: Sequence[Mapping[int, Tensor]]) -> torch.device:
        return next(iter(values[0].values())).device

    def _exchange(
        self, sent: Sequence[Tensor], counts: Mapping[tuple[int, int], int], towards_home: bool, like: Any
    ) -> Callable[[], dict[int, Tensor]]:
        """Start an all-to-all; what finishes it returns by rank what has come from it."""
        if not counts:
            return dict
        tensors, me = self._tensors, self._me
        assert tensors.registry is not None
        out = [counts.get((me, rank) if towards_home else (rank, me), 0) for rank in self.ranks]
        into = [counts.get((rank, me) if towards_home else (me, rank), 0) for rank in self.ranks]
        dtype, device = self._matrices[0].tensor.dtype, self._device(like)
        flat = torch.cat(list(sent)) if sent else torch.empty(0, dtype=dtype, device=device)
        flat = flat.to(tensors.registry.device)
        arrived = flat.new_empty(sum(into))
        work: Any = dist.all_to_all_single(arrived, flat, into, out, group=tensors.group(self.ranks), async_op=True)

        def finish() -> dict[int, Tensor]:
            work.wait()
            nonlocal flat
            flat = flat.new_empty(0)
            return dict(zip(self.ranks, arrived.to(device).split(into), strict=True))

        return finish
