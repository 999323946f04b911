"""Which part of a logical tensor a rank holds, as rectangles of it. Pure arithmetic, and views.

A rank holds one shard of a parameter: a rectangle, or one of each block of a fused weight. Of its optimizer state it may
hold only a contiguous run of the flattened (row-major) shard, which is a stack of rectangles again: the rest of a row,
whole rows, the start of a row. Rectangles of one tensor can be written and read whatever the layout of those who wrote
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

import torch
from torch import Tensor

from ..mesh.topology import Topology
from .spec import P, Span

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A rectangle: where it begins, and its size, by dim."""

    offsets: Shape
    sizes: Shape

    def overlaps(self, other: Box) -> bool:
        """Whether some element is in both."""
        sides = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(max(a, b) < min(a + length, b + width) for a, length, b, width in sides)

    def common(self, other: Box) -> Box:
        """What is in both, which overlap."""
        sides = list(zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True))
        begins = tuple(max(a, b) for a, _, b, _ in sides)
        ends = [min(a + length, b + width) for a, length, b, width in sides]
        return Box(begins, tuple(end - begin for begin, end in zip(begins, ends, strict=True)))


@dataclass(frozen=True)
class Region:
    """What a rank holds of a logical tensor: elements ``start`` to ``stop`` of one flattened shard.

    Args:
        full_shape: Of the logical tensor.
        spans: Of each dim the (offset, length) of the elements that the shard has, in its order; several where the dim is
            cut in blocks.
        start, stop: Of the run, which is all of the shard or a part of it.
    """

    full_shape: Shape
    spans: tuple[tuple[Span, ...], ...]
    start: int
    stop: int

    @classmethod
    def of_shard(
        cls,
        full: Sequence[int],
        shape: Sequence[int],
        spec: P,
        topology: Topology,
        coordinate: Mapping[str, int],
        name: str = "a tensor",
    ) -> Region:
        """The region of the whole shard that the rank at ``coordinate`` holds.

        A dim that doesn't divide is cut as `torch.chunk` does, axis by axis.

        Raises:
            ValueError: That would make a shard of another shape; or blocks don't divide.
        """
        try:
            spans = tuple(spec.spans(dim, length, topology, coordinate) for dim, length in enumerate(full))
        except ValueError as problem:
            raise ValueError(f"{name}: {problem}") from None
        region = cls(tuple(full), spans, 0, prod(shape))
        if region.shape != tuple(shape):
            raise ValueError(
                f"{name}: {spec} makes this rank's piece of {tuple(full)} {region.shape}, but it has {tuple(shape)}; "
                "declare the spec that it was cut by"
            )
        return region

    @cached_property
    def shape(self) -> Shape:
        """Of the shard."""
        return tuple(sum(length for _, length in spans) for spans in self.spans)

    @property
    def offsets(self) -> Shape:
        """Where the shard begins."""
        return tuple(spans[0][0] for spans in self.spans)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def of(self, full: Tensor) -> Tensor:
        """The shard of the full tensor; a view where no dim is cut in blocks. The run, if it is not all of the shard, is of
        its flattened elements."""
        for dim, spans in enumerate(self.spans):
            parts = [full.narrow(dim, offset, length) for offset, length in spans]
            full = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        return full

    def run(self, start: int, numel: int) -> Region:
        """``numel`` elements of it from ``start`` on."""
        return replace(self, start=self.start + start, stop=self.start + start + numel)

    def parts(self, tensor: Tensor) -> dict[Shape, Tensor]:
        """``tensor``, which has this region's elements in their order, as rectangles; views where it is contiguous."""
        if tensor.shape == self.shape:
            if not self.numel:
                return {} if prod(self.full_shape) else {self.offsets: tensor}
            return dict(self._rectangles(Box((0,) * tensor.dim(), self.shape), tensor))
        found: dict[Shape, Tensor] = {}
        flat, at = tensor.reshape(-1), 0
        for box in boxes_of_run(self.shape, self.start, self.stop):
            found.update(self._rectangles(box, flat[at : at + prod(box.sizes)].view(box.sizes)))
            at += prod(box.sizes)
        return found

    def _rectangles(self, box: Box, part: Tensor) -> Iterator[tuple[Shape, Tensor]]:
        """A rectangle of the shard, whose elements ``part`` has, as rectangles of the full tensor, by their offsets."""
        by_dim = []
        for spans, first, length in zip(self.spans, box.offsets, box.sizes, strict=True):
            found, at = [], -first  # where a span begins, in the box
            for offset, numel in spans:
                start, stop = max(at, 0), min(at + numel, length)
                if start < stop:
                    found.append((offset + start - at, start, stop - start))
                at += numel
            by_dim.append(found)
        for places in product(*by_dim):
            rectangle = part
            for dim, (_, start, length) in enumerate(places):
                rectangle = rectangle.narrow(dim, start, length)
            yield tuple(offset for offset, _, _ in places), rectangle

    def boxes(self) -> list[Box]:
        """The rectangles of the logical tensor that it is made of."""
        parts = self.parts(torch.empty(self.numel, device="meta"))
        return [Box(offsets, tuple(part.shape)) for offsets, part in parts.items()]

    def overlaps(self, other: Region) -> bool:
        """Whether some element of the logical tensor is in both."""
        return any(one.overlaps(two) for one in self.boxes() for two in other.boxes())

    def __str__(self) -> str:
        """Where it is, in a few characters: ``0,4+8,4`` for offsets and shape; a run has its ends added, and blocks are
        told apart: ``0|8,4+4|4,4``."""
        run = "" if self.numel == prod(self.shape) else f":{self.start}-{self.stop}"
        offsets, lengths = (
            ",".join("|".join(str(span[which]) for span in spans) for spans in self.spans) for which in (0, 1)
        )
        return f"{offsets}+{lengths}{run}"


def joined_in_order(tensor: Tensor, dim: int, pieces: Iterable[Sequence[Span]]) -> Tensor:
    """``tensor``, along whose ``dim`` pieces lie one after the other, with that dim's elements where they belong.

    Args:
        pieces: The spans of each. Differentiable; a copy where they are not in order.
    """
    runs, at = [], 0
    for offset, length in (span for spans in pieces for span in spans):
        runs.append((offset, at, length))
        at += length
    if runs == sorted(runs):
        return tensor
    return torch.cat([tensor.narrow(dim, at, length) for _, at, length in sorted(runs)], dim)


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The rectangles that elements ``start`` to ``stop`` of a flattened tensor make, in their order; 2 * dims - 1 at most.

    [3, 4] from 2 to 9: ``..## / #### / #...``
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield Box((start,) if shape else (), (stop - start,) if shape else ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # it begins and ends within row `last`
        yield from _rows(last, boxes_of_run(shape[1:], start - last * row, stop - last * row))
        return
    if start < first * row:
        yield from _rows(first - 1, boxes_of_run(shape[1:], start - (first - 1) * row, row))
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _rows(last, boxes_of_run(shape[1:], 0, stop - last * row))


def _rows(index: int, boxes: Iterator[Box]) -> Iterator[Box]:
    for box in boxes:
        yield Box((index, *box.offsets), (1, *box.sizes))
