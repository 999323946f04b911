"""The elements of a full tensor that a rank holds, as rectangles. This module uses only arithmetic and tensor views.

A rank holds one shard of a parameter: a rectangle, or one rectangle per block of a fused weight. Of an optimizer state a
rank may hold only a contiguous run of the flattened (row-major) shard. A run is a stack of rectangles too: the end of
a row, complete rows, and the start of a row. Because every layout consists of rectangles, a checkpoint can be loaded with
another layout.
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
    """A rectangle of a tensor: its offset and its size per dim."""

    offsets: Shape
    sizes: Shape

    def overlaps(self, other: Box) -> bool:
        """Return True if the boxes have a common element."""
        sides = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(max(a, b) < min(a + length, b + width) for a, length, b, width in sides)

    def common(self, other: Box) -> Box:
        """Return the intersection with ``other``, which must overlap this box."""
        sides = list(zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True))
        begins = tuple(max(a, b) for a, _, b, _ in sides)
        ends = [min(a + length, b + width) for a, length, b, width in sides]
        return Box(begins, tuple(end - begin for begin, end in zip(begins, ends, strict=True)))


@dataclass(frozen=True)
class Region:
    """The elements of a full tensor that a rank holds: a run of one flattened shard.

        region = Region.of_shard((8, 4), (4, 4), P("tensor"), topology, topology.coordinate(1))
        region.offsets, region.shape    # (4, 0), (4, 4)
        region.of(full)                 # full[4:8]

    Args:
        full_shape: Shape of the full tensor.
        spans: Per dim, the (offset, length) spans of the shard's elements, in the order of the shard. A dim has several
            spans if it consists of blocks.
        start: First element of the run in the flattened shard.
        stop: Element after the run. The run is the complete shard if it is 0 to the number of the shard's elements.
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
        """Return the region of the complete shard that the rank at ``coordinate`` holds.

        A dim that is not a multiple of the axes' sizes is sharded as `torch.chunk` does, axis by axis.

        Args:
            full: Shape of the full tensor.
            shape: Shape of the rank's shard.
            spec: Layout of the tensor.
            topology: Provides the sizes of the axes.
            coordinate: Index per axis of the rank.
            name: Name of the tensor in errors.
        Raises:
            ValueError: ``spec`` gives a shard with another shape than ``shape``; or a block is not a multiple of the axes'
                sizes.
        """
        try:
            spans = tuple(spec.spans(dim, length, topology, coordinate) for dim, length in enumerate(full))
        except ValueError as problem:
            raise ValueError(f"{name}: {problem}") from None
        region = cls(tuple(full), spans, 0, prod(shape))
        if region.shape != tuple(shape):
            raise ValueError(
                f"{name}: the shard has shape {tuple(shape)}, but {spec} gives this rank a shard of shape {region.shape} "
                f"of the full shape {tuple(full)}; declare the spec by which the tensor was sharded"
            )
        return region

    @cached_property
    def shape(self) -> Shape:
        """Return the shape of the shard."""
        return tuple(sum(length for _, length in spans) for spans in self.spans)

    @property
    def offsets(self) -> Shape:
        """Return the offset of the shard's first element in the full tensor, per dim."""
        return tuple(spans[0][0] for spans in self.spans)

    @property
    def numel(self) -> int:
        """Return the number of elements of the run."""
        return self.stop - self.start

    def of(self, full: Tensor) -> Tensor:
        """Return the complete shard of the full tensor, regardless of ``start`` and ``stop``.

        The result is a view of ``full`` if no dim consists of several blocks, else a copy.
        """
        for dim, spans in enumerate(self.spans):
            parts = [full.narrow(dim, offset, length) for offset, length in spans]
            full = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        return full

    def run(self, start: int, numel: int) -> Region:
        """Return the region of ``numel`` elements from element ``start`` of this run."""
        return replace(self, start=self.start + start, stop=self.start + start + numel)

    def parts(self, tensor: Tensor) -> dict[Shape, Tensor]:
        """Split ``tensor``, which has this region's elements, into rectangles of the full tensor.

        Args:
            tensor: The shard in its shape, or the run in any shape, row-major.
        Returns:
            Rectangle per offset in the full tensor. The rectangles are views if ``tensor`` is contiguous.
        """
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
        """Split the tensor ``part`` with the elements of ``box``, a rectangle of the shard, into rectangles of the full
        tensor by offset."""
        by_dim = []
        for spans, first, length in zip(self.spans, box.offsets, box.sizes, strict=True):
            found, at = [], -first  # start of the span, relative to the box
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
        """Return the rectangles of the full tensor whose union is this region."""
        parts = self.parts(torch.empty(self.numel, device="meta"))
        return [Box(offsets, tuple(part.shape)) for offsets, part in parts.items()]

    def overlaps(self, other: Region) -> bool:
        """Return True if the regions have a common element of the full tensor."""
        return any(box.overlaps(other_box) for box in self.boxes() for other_box in other.boxes())

    def __str__(self) -> str:
        """Return offsets and lengths as short text: ``0,4+8,4``.

        A run has its start and stop added, ``0,4+8,4:3-9``; spans of blocks are separated, ``0|8,4+4|4,4``.
        """
        run = "" if self.numel == prod(self.shape) else f":{self.start}-{self.stop}"
        offsets, lengths = (
            ",".join("|".join(str(span[which]) for span in spans) for spans in self.spans) for which in (0, 1)
        )
        return f"{offsets}+{lengths}{run}"


def joined_in_order(tensor: Tensor, dim: int, pieces: Iterable[Sequence[Span]]) -> Tensor:
    """Reorder the elements of a dim that consists of concatenated shards into the order of the full tensor.

    Differentiable.

    Args:
        tensor: Its dim ``dim`` has the elements of all shards, one shard after the other.
        dim: The tensor dim.
        pieces: Per shard, its spans of the full dim.
    Returns:
        The reordered tensor; ``tensor`` itself if its elements are in order.
    """
    runs, at = [], 0
    for offset, length in (span for spans in pieces for span in spans):
        runs.append((offset, at, length))
        at += length
    if runs == sorted(runs):
        return tensor
    return torch.cat([tensor.narrow(dim, at, length) for _, at, length in sorted(runs)], dim)


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Iterate over the rectangles of elements ``start`` to ``stop`` of a flattened tensor, at most 2 * dims - 1 of them.

    Elements 2 to 9 of shape [3, 4] are three rectangles: ``..## / #### / #...``

    Args:
        shape: Shape of the tensor.
        start: First element.
        stop: Element after the last.
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield Box((start,) if shape else (), (stop - start,) if shape else ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # complete rows
    if first > last:  # the run is inside row `last`
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
