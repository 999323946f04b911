"""One exchange there and back: pieces of some matrices to their homes, and the results to all that have some of them."""

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


class Round:
    """Matrices of tensors that one set of ranks shares, of one dtype, which travel together.

    Args:
        tensors: The logical tensors.
        ranks: The set.
        matrices: The same on all of them.
        lists: How many tensors of each matrix travel to its home.
        dtype: Of what travels.
    """

    def __init__(
        self, tensors: WholeTensors, ranks: tuple[int, ...], matrices: Sequence[Matrix], lists: int, dtype: torch.dtype
    ) -> None:
        self._tensors, self.ranks = tensors, ranks
        self._me, self._matrices, self._dtype = tensors.rank, matrices, dtype
        self.own = [matrix for matrix in matrices if matrix.home == self._me]
        # Elements from one rank to another, there and back.
        self._there = self._counts(lambda m: m.sources, lists)
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
            [torch.empty(m.shape, dtype=self._dtype, device=self._device(values)) for _ in values] for m in self.own
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
            for position in self._tensors.positions(matrix.tensor):
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
            for box in self._order(matrix, rank)
        ]
        arrived = self._exchange(sent, self._back, towards_home=False, like=values)

        def finish() -> None:
            by_rank = arrived()
            for home in self.ranks:
                at = 0
                for matrix in self._matrices:
                    if matrix.home != home or home == self._me:
                        continue
                    for _, part in self._parts(matrix, results, self._order(matrix, self._me)):
                        part.copy_(by_rank[home][at : at + part.numel()].view(part.shape))
                        at += part.numel()

        return finish

    def _order(self, matrix: Matrix, rank: int) -> Sequence[Box]:
        return matrix.holders.get(rank, ())

    # Both -----------------------------------------------------------------------------------------------------------

    def _parts(
        self, matrix: Matrix, by_position: Mapping[int, Tensor], boxes: Sequence[Box]
    ) -> list[tuple[Box, Tensor]]:
        """Boxes of the matrix in this rank's pieces, in the order of ``boxes``: each lies in one rectangle of one piece."""
        found = []
        for box in boxes:
            for position in self._tensors.positions(matrix.tensor):
                found += list(self._tensors.views(position, by_position[position], [box]))
        return found

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
        dtype, device = self._dtype, self._device(like)
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
