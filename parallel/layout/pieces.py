"""Which part of a logical tensor a rank holds, as rectangles of it. Pure arithmetic, and views.

A rank holds one shard of a parameter: a rectangle. Of its optimizer state it may hold only a contiguous run of the
flattened (row-major) shard, which is a stack of rectangles again: the rest of a row, whole rows, the start of a row.
Rectangles of one tensor can be written and read whatever the layout of those who wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor

from ..mesh.topology import Topology
from .spec import P

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


@dataclass(frozen=True)
class Region:
    """What a rank holds of a logical tensor: elements ``start`` to ``stop`` of one flattened shard.

    Args:
        full_shape: Of the logical tensor.
        offsets, shape: Of the shard.
        start, stop: Of the run, which is all of the shard or a part of it.
    """

    full_shape: Shape
    offsets: Shape
    shape: Shape
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
            ValueError: That would make a shard of another shape.
        """
        offsets, lengths = [], []
        for dim, length in enumerate(full):
            offset = 0
            for axis in spec.dim_axes(dim):
                chunk = -(-length // topology.size(axis))
                start = min(coordinate[axis] * chunk, length)
                offset, length = offset + start, min(chunk, length - start)
            offsets.append(offset)
            lengths.append(length)
        if lengths != list(shape):
            raise ValueError(
                f"{name}: {spec} makes this rank's piece of {tuple(full)} {tuple(lengths)}, but it has {tuple(shape)}"
            )
        return cls(tuple(full), tuple(offsets), tuple(shape), 0, prod(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def of(self, full: Tensor) -> Tensor:
        """The shard of the full tensor; a view. The run, if it is not all of the shard, is of its flattened elements."""
        for dim, (offset, length) in enumerate(zip(self.offsets, self.shape, strict=True)):
            full = full.narrow(dim, offset, length)
        return full

    def run(self, start: int, numel: int) -> Region:
        """``numel`` elements of it from ``start`` on."""
        return replace(self, start=self.start + start, stop=self.start + start + numel)

    def parts(self, tensor: Tensor) -> dict[Shape, Tensor]:
        """``tensor``, which has this region's elements in their order, as rectangles; views where it is contiguous."""
        if tensor.shape == self.shape:
            return {self.offsets: tensor} if self.numel or not prod(self.full_shape) else {}
        found, flat, at = {}, tensor.reshape(-1), 0
        for box in self.boxes():
            found[box.offsets] = flat[at : at + prod(box.sizes)].view(box.sizes)
            at += prod(box.sizes)
        return found

    def boxes(self) -> Iterator[Box]:
        """The rectangles of the logical tensor that it is made of, in the order of its elements."""
        for box in boxes_of_run(self.shape, self.start, self.stop):
            yield Box(tuple(a + b for a, b in zip(self.offsets, box.offsets, strict=True)), box.sizes)

    def overlaps(self, other: Region) -> bool:
        """Whether some element of the logical tensor is in both."""
        return any(one.overlaps(two) for one in self.boxes() for two in other.boxes())

    def __str__(self) -> str:
        """Where it is, in a few characters: ``0,4+8,4`` for offsets and shape; a run has its ends added."""
        run = "" if self.numel == prod(self.shape) else f":{self.start}-{self.stop}"
        return f"{_joined(self.offsets)}+{_joined(self.shape)}{run}"


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


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
