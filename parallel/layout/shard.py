"""Shard a full tensor, and join shards: `shard`, `unshard`, `join`, the shapes of shards, and the elements of a shard.

A rank's shard of a parameter is a rectangle of the full tensor, or several rectangles if a dim consists of blocks, as
in a fused weight. A rank may hold only a *run* of an optimizer state: consecutive elements of the flattened (row-major)
shard. A run of a matrix consists of rectangles too: the end of a row, complete rows, and the start of a row. Because
all layouts consist of rectangles of the full tensor, a checkpoint can be loaded with another layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..mesh.collectives import Over, all_gather, broadcast
from ..mesh.registry import ProcessGroupRegistry
from ..mesh.topology import Topology
from .spec import P, Span, cut_spans, owner_of, owns

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A rectangle of a tensor: per dim, its first index (``offsets``) and its length (``sizes``)."""

    offsets: Shape
    sizes: Shape

    @classmethod
    def of_spans(cls, spans: Sequence[Span]) -> Box:
        """Return the box with the (first index, length) pair of each dim."""
        return cls(tuple(offset for offset, _ in spans), tuple(length for _, length in spans))

    def spans(self) -> Iterator[Span]:
        """Iterate over the dims, as (first index, length) pairs."""
        return zip(self.offsets, self.sizes, strict=True)

    def overlaps(self, other: Box) -> bool:
        """Return True if this box and ``other`` have a common element."""
        return all(begin < end for begin, end in self._common_ranges(other))

    def common(self, other: Box) -> Box:
        """Return the intersection of this box with ``other``. The boxes must overlap."""
        return Box.of_spans([(begin, end - begin) for begin, end in self._common_ranges(other)])

    def _common_ranges(self, other: Box) -> Iterator[tuple[int, int]]:
        """Yield per dim the first common index and the index after the last one; (begin, end <= begin) without any."""
        for (a, length), (b, width) in zip(self.spans(), other.spans(), strict=True):
            yield max(a, b), min(a + length, b + width)


def narrowed(tensor: Tensor, box: Box, offsets: Shape | None = None) -> Tensor:
    """Return a view of the elements of ``tensor``, or of each tensor of a stack, that are in ``box``.

    ``box`` is in indices of the full tensor. ``offsets`` is the index there of ``tensor``'s first element; None: zeros.
    """
    dims = len(box.sizes)
    for dim, (offset, size) in enumerate(box.spans()):
        tensor = tensor.narrow(dim - dims, offset - (offsets[dim] if offsets else 0), size)
    return tensor


@dataclass(frozen=True)
class Region:
    """The elements of a full tensor that a rank holds: a *run* of consecutive elements of the rank's flattened shard.

        region = Region.of_shard((8, 4), (4, 4), P("tensor"), topology, topology.coordinate(1))
        region.offsets, region.shape    # (4, 0), (4, 4)
        region.of(full)                 # full[4:8]

    Args:
        full_shape: Shape of the full tensor.
        spans: Per dim, the (offset, length) pairs of the elements of the full tensor that are in the shard, in the
            order of the shard. There are several pairs if the dim consists of blocks.
        start: Index of the first element of the run in the flattened shard.
        stop: Index after the last element of the run.
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
        """Return the region that is the entire shard of the rank at ``coordinate``.

        A dim whose length is not a multiple of the sizes of its axes is sharded as `torch.chunk` does.

        Args:
            full: Shape of the full tensor.
            shape: Shape of the rank's shard.
            spec: Layout of the tensor.
            topology: Provides the sizes of the axes.
            coordinate: The rank's index on each axis.
            name: Name of the tensor in errors. Default: ``"a tensor"``.
        Raises:
            ValueError: ``spec`` gives a shard with another shape than ``shape``; a dim has several blocks that its axes
                can't divide evenly; or ``spec`` does not fit ``topology``.
        """
        try:
            spans = tuple(spec.spans(dim, length, topology, coordinate) for dim, length in enumerate(full))
        except ValueError as problem:
            raise ValueError(f"{name}: {problem}") from None
        region = cls(tuple(full), spans, 0, prod(shape))
        if region.shape != tuple(shape):
            raise ValueError(
                f"{name}: the shard has shape {tuple(shape)}, but {spec} gives the rank at {dict(coordinate)} a shard of "
                f"shape {region.shape} of the full shape {tuple(full)}; declare the spec by which the tensor was sharded"
            )
        return region

    @cached_property
    def shape(self) -> Shape:
        """Return the shape of the rank's entire shard, of which the run may be only a part."""
        return tuple(sum(length for _, length in spans) for spans in self.spans)

    @property
    def offsets(self) -> Shape:
        """Return per dim the index in the full tensor at which the rank's shard begins."""
        return tuple(spans[0][0] for spans in self.spans)

    @property
    def numel(self) -> int:
        """Return the number of elements in the run, ``stop - start``."""
        return self.stop - self.start

    def of(self, full: Tensor) -> Tensor:
        """Return the entire shard of ``full``, not only the run from ``start`` to ``stop``.

        The result is a view of ``full`` if each dim of the region has one span, else a copy.
        """
        for dim, spans in enumerate(self.spans):
            parts = [full.narrow(dim, offset, length) for offset, length in spans]
            full = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        return full

    def run(self, start: int, numel: int) -> Region:
        """Return a part of this run as a region: ``numel`` elements from element ``start`` of this run on."""
        return replace(self, start=self.start + start, stop=self.start + start + numel)

    def parts(self, tensor: Tensor) -> dict[Shape, Tensor]:
        """Split a tensor with the elements of this region into rectangles of the full tensor.

        Args:
            tensor: Tensor with the shape of the shard, if the run is the entire shard; or a tensor of any shape that has
                the elements of the run in row-major order.
        Returns:
            Tensor per rectangle. The key is the index of the rectangle's first element in the full tensor. The tensors
            are views of ``tensor`` if it is contiguous. Usually a region without elements has no rectangles. But if the
            full tensor has no elements either, and ``tensor`` has the shape of the shard, ``tensor`` is the only
            rectangle.
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

    def elements(self, tensor: Tensor, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (indices in the flattened full tensor, elements), both 1-dim, for all elements of the region.

        Args:
            tensor: As for `parts`.
            most: Maximum number of elements that are yielded at a time.
        """
        for offsets, part in self.parts(tensor).items():
            for start, piece in _pieces(offsets, part, most):
                index = torch.zeros((), dtype=torch.int64, device=piece.device)
                for dim, first in enumerate(start):
                    stride = prod(self.full_shape[dim + 1 :])
                    along = torch.arange(first, first + piece.shape[dim], device=piece.device) * stride
                    index = index + along.view(-1, *[1] * (piece.dim() - dim - 1))
                yield index.reshape(-1), piece.reshape(-1)

    def _rectangles(self, box: Box, part: Tensor) -> Iterator[tuple[Shape, Tensor]]:
        """Split the rectangle ``box`` of the shard, with the elements ``part``, into rectangles of the full tensor.

        Yield (index of the first element in the full tensor, view of ``part``) pairs.
        """
        by_dim = []
        for spans, (first, length) in zip(self.spans, box.spans(), strict=True):
            found, at = [], -first  # `at` is the start of the span, relative to the box
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
        """Return the offsets and the lengths of the shard, each per dim, as a short text such as ``0,4+8,4``.

        If the run is not the entire shard, its start and stop follow: ``0,4+8,4:3-9``. If a dim has several spans,
        their offsets and lengths are separated by ``|``: ``0|8,4+4|4,4``.
        """
        run = "" if self.numel == prod(self.shape) else f":{self.start}-{self.stop}"
        offsets, lengths = (
            ",".join("|".join(str(span[which]) for span in spans) for spans in self.spans) for which in (0, 1)
        )
        return f"{offsets}+{lengths}{run}"


def joined_in_order(tensor: Tensor, spec: P, topology: Topology) -> Tensor:
    """Reorder shards, concatenated along the last dim of ``tensor``, into the full tensor; differentiable.

    The last dim of ``tensor`` is sharded as dim 0 of ``spec``. If it consists of blocks, each shard has elements of every
    block, so the concatenated shards have another order than the full tensor.
    """
    axes, runs, at = spec.resolve(topology).dim_axes(0), [], 0
    for indices in product(*(range(topology.size(axis)) for axis in axes)):
        coordinate = dict(zip(axes, indices, strict=True))
        for offset, length in spec.spans(0, tensor.size(-1), topology, coordinate):
            runs.append((offset, at, length))
            at += length
    if runs == sorted(runs):
        return tensor
    return torch.cat([tensor.narrow(-1, at, length) for _, at, length in sorted(runs)], -1)


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Split consecutive elements of a flattened tensor into rectangles of the tensor.

    Elements 2 to 8 of a tensor of shape [3, 4] are three rectangles, one per row: ``..## / #### / #...``. There are at
    most 2 * dims - 1 rectangles; a scalar is one. ``stop`` is the index after the last element.
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield Box((start,) if shape else (), (stop - start,) if shape else ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # the range of complete rows
    if first > last:  # all elements are in row `last`, which is not complete
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


# Full tensors and shards ----------------------------------------------------------------------------------------------

# A dim that is sharded over axes (a, b) is divided over a, and then each shard over b. Without blocks, a rank's shard is
# chunk number ``coordinate[a] * size(b) + coordinate[b]`` of ``size(a) * size(b)`` equal chunks. If the spec gives blocks
# for an axis, this axis divides each block, and the shard is the concatenation of one chunk per block; an axis without
# blocks divides the shard as one block. If a length is not a multiple of the number of chunks, shards are uneven:
# `torch.chunk` splits the dim over a, and then each chunk over b; several blocks can't be uneven. If a and b shard the
# dim jointly, one `torch.chunk` splits it over both. The `tied` and `partial` axes of a spec do not change the shards.


def local_shape(
    full_shape: Sequence[int], spec: P, topology: Topology, coordinate: Mapping[str, int] | None = None
) -> tuple[int, ...]:
    """Return the shape of a rank's shard of a tensor. ``owned`` and ``tied`` of the spec are ignored.

        local_shape((8, 6), P("row", "col"), Topology(row=2, col=3))    # (4, 2)

    Args:
        full_shape: Shape of the full tensor.
        spec: Layout of the tensor.
        topology: Provides the sizes of the axes.
        coordinate: Index per axis of the rank. If a coordinate is given, a dim may have any length: it is sharded as
            `torch.chunk` does, so that later shards can be smaller or empty. None: all shards must have the same shape,
            which is returned.
    Raises:
        ValueError: ``coordinate`` is None, and the length of a dim is not a multiple of the sizes of its axes; a dim
            has several blocks that its axes can't divide evenly; or `P.validate` rejects the spec, for example because
            of an unknown axis.
    """
    spec.validate(len(full_shape), topology)
    spec = spec.resolve(topology)
    if coordinate is not None:
        spans = (spec.spans(dim, length, topology, coordinate) for dim, length in enumerate(full_shape))
        return tuple(sum(length for _, length in pieces) for pieces in spans)
    shape = []
    for dim, length in enumerate(full_shape):
        axes = spec.dim_axes(dim)
        parts = topology.size(*axes)
        if length % parts:
            sizes = " x ".join(f"{axis}={topology.size(axis)}" for axis in axes)
            raise ValueError(
                f"{spec}: dim {dim} of shape {tuple(full_shape)} has length {length}, which is not divisible by {sizes}; "
                f"make the length a multiple of {parts}"
            )
        shape.append(length // parts)
        spec.spans(dim, length, topology, dict.fromkeys(axes, 0))  # raises if the axes can't divide a block evenly
    return tuple(shape)


def full_shape(local_shape: Sequence[int], spec: P, topology: Topology) -> tuple[int, ...]:
    """Return the shape of the full tensor whose shards all have the shape ``local_shape``.

        full_shape((4, 2), P("row", "col"), Topology(row=2, col=3))     # (8, 6)

    Args:
        local_shape: Shape of every shard.
        spec: Layout of the tensor.
        topology: Provides the sizes of the axes.
    Raises:
        ValueError: `P.validate` rejects the spec, for example because of an unknown axis.
    """
    spec.validate(len(local_shape), topology)
    return tuple(length * topology.size(*spec.dim_axes(dim)) for dim, length in enumerate(local_shape))


def shard(full: Tensor, spec: P, registry: ProcessGroupRegistry, *, uneven: bool = False) -> Tensor:
    """Return a copy of this rank's shard of a full tensor; not differentiable.

        weight = shard(full_weight, P("tensor", None), registry)

    Args:
        full: The full tensor, equal on all ranks.
        spec: Layout of the tensor.
        registry: Provides the topology and this rank's coordinate.
        uneven: True: a dim may have any length; it is sharded as `torch.chunk` does. False: the length of a dim must be
            a multiple of the sizes of its axes. Do not pass True for a sharded batch dim: the average of means over
            unequal batches is not the mean over all samples. Default: False.
    Returns:
        The shard, contiguous. An empty tensor of shape (0,) if the spec has owned axes, and this rank is not an owner.
    Raises:
        ValueError: ``uneven`` is False, and the length of a dim is not a multiple of the sizes of its axes; a dim has
            several blocks that its axes can't divide evenly; or `P.validate` rejects the spec, for example because
            of an unknown axis.
    Collectives: none.
    Host synchronization: none.
    """
    shape = local_shape(full.shape, spec, registry.topology, registry.coordinate if uneven else None)
    if not owns(spec.owned, registry.coordinate):
        return full.new_empty(0)
    region = Region.of_shard(full.shape, shape, spec, registry.topology, registry.coordinate)
    return region.of(full.detach()).clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def unshard(local: Tensor | None, spec: P, registry: ProcessGroupRegistry) -> Tensor:
    """Return the full tensor on every rank, from the shards that `shard` returned on all ranks; not differentiable.

    Every rank along the sharded and owned axes must call this function. Use it for checkpoints and checks, not in every
    training step.

        full_grad = unshard(weight.grad, P("tensor", None), registry)

    Args:
        local: This rank's shard of a parameter or gradient; shards may be uneven. If the spec has owned axes, ranks that
            are not owners may pass None; a tensor that such a rank passes is ignored.
        spec: Layout of the tensor.
        registry: Provides the process groups.
    Raises:
        ValueError: On all ranks along the sharded axes: ``local`` is None on a rank that must hold a shard, the shapes of
            the shards do not fit the spec, or shards have different dtypes or numbers of dims. On this rank: `P.validate`
            rejects the spec, for example because of an unknown axis.
        TypeError: ``local`` is neither a tensor nor None, on a rank that must hold a shard. The other ranks along the
            sharded and owned axes raise ValueError.
    Collectives: two all-gathers over the sharded axes: of the shapes, then of the shards. If the spec has owned axes,
    first three broadcasts over the owned axes: two of an object with the shard's shape and dtype, then one of the
    shard. None over groups of one rank.
    Host synchronization: yes, unless all these groups have one rank.
    """
    spec = spec.resolve(registry.topology)
    if spec.owned:
        local = _from_owner(local, spec, registry)
    axes = tuple(axis for axis in registry.topology.axes if axis in spec.sharded_axes)
    over = Over(registry, axes, call="unshard") if axes and registry.size(*axes) > 1 else None
    try:
        local = _checked_shard(local, spec, registry.topology)
    except Exception:
        if over is not None:  # the other ranks wait for this rank's shape
            _gather_shapes(None, over)
        raise
    if over is None:
        return local.detach().clone(memory_format=torch.contiguous_format)
    shapes = _gather_shapes(local, over)
    padded, largest = local.detach(), tuple(max(lengths) for lengths in zip(*shapes.values(), strict=True))
    if local.shape != largest:
        padded = local.new_empty(largest)
        padded[tuple(map(slice, local.shape))] = local.detach()
    pieces = zip(shapes.items(), all_gather(padded.unsqueeze(0), over), strict=True)
    trimmed = [(piece[tuple(map(slice, shape))], registry.topology.coordinate(rank)) for (rank, shape), piece in pieces]
    return _join(trimmed, spec, registry.topology)


@torch.no_grad()
def join(pieces: Sequence[Tensor | None], spec: P, topology: Topology) -> Tensor:
    """Return the full tensor from a list of the shards of all ranks, without communication; not differentiable.

    For a small model, gather the shards of all parameters with one call of `gather_objects`, then join each parameter.
    `unshard` would issue collectives for each parameter.

        by_rank = gather_objects({name: param.cpu() for name, param in model.named_parameters()}, registry)
        weight = join([shards["weight"] for shards in by_rank], P("tensor", None), registry.topology)

    Args:
        pieces: Shard per global rank; None for a rank without a shard. Shards may be uneven. If several ranks have
            replicas of a shard, the first replica is used.
        spec: Layout of the tensor.
        topology: Provides the axes.
    Raises:
        ValueError: ``pieces`` does not have one entry per rank; a shard is missing; shards have different dtypes or
            numbers of dims; their shapes do not fit the spec; or `P.validate` rejects the spec, for example because of
            an unknown axis.
    Collectives: none.
    Host synchronization: none.
    """
    if len(pieces) != topology.world_size:
        raise ValueError(
            f"the list of shards has length {len(pieces)}, but the world size is {topology.world_size}; give one entry per "
            "rank, None for a rank without a shard"
        )
    spec.validate(len(spec.entries), topology)
    spec = spec.resolve(topology)
    axes = tuple(axis for axis in topology.axes if axis in spec.sharded_axes)
    found: dict[tuple[int, ...], tuple[Tensor, dict[str, int]]] = {}
    for rank, piece in enumerate(pieces):
        coordinate = topology.coordinate(rank)
        if piece is not None and owns(spec.owned, coordinate):
            found.setdefault(tuple(coordinate[axis] for axis in axes), (piece.detach(), coordinate))
    if len(found) < topology.size(*axes):
        at = next(at for at in product(*(range(topology.size(axis)) for axis in axes)) if at not in found)
        where = ", ".join(f"{axis}={index}" for axis, index in zip(axes, at, strict=True))
        if not axes:
            raise ValueError(
                f"{spec}: the list has None for all ranks that hold this tensor; give the tensor of at least one such rank"
            )
        raise ValueError(
            f"{spec}: the list has no shard of a rank at {where}; give the shard of a rank with this coordinate"
        )
    distinct = list(found.values())
    kinds = sorted({f"{piece.dtype} with ndim={piece.dim()}" for piece, _ in distinct})
    if len(kinds) > 1:
        raise ValueError(
            f"{spec}: the list has shards of {' and '.join(kinds)}; give shards of one tensor, as `shard` returns them"
        )
    spec.validate(distinct[0][0].dim(), topology)
    return _join(distinct, spec, topology)


def _checked_shard(local: object, spec: P, topology: Topology) -> Tensor:
    """Return ``local``. Raise ValueError or TypeError if it is not a tensor that fits the spec."""
    if local is None and spec.owned:
        raise ValueError(
            f"{spec}: the owner rank of this shard passed no tensor to unshard; pass the shard on that rank"
        )
    if local is None:
        raise ValueError(f"{spec}: unshard got None on this rank; pass the shard on every rank")
    if not isinstance(local, Tensor):
        raise TypeError(f"{spec}: unshard got a {type(local).__name__} as the shard; give a tensor")
    spec.validate(local.dim(), topology)
    return local


_DTYPES = sorted((dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)), key=str)
_MAX_DIMS = 64


def _gather_shapes(local: Tensor | None, over: Over) -> dict[int, Shape]:
    """Return the shapes of the shards of all ranks of a group, by global rank in the order of the group.

    A rank without a valid shard passes None, and raises an error after this call. All other ranks raise ValueError then,
    or if shards have different dtypes or numbers of dims.

    Collectives: one all-gather. Host synchronization: yes.
    """
    own = [-1] * (_MAX_DIMS + 2)
    if local is not None:
        own[: local.dim() + 2] = _DTYPES.index(local.dtype), local.dim(), *local.shape
    device = over.registry.device if local is None else local.device
    rows = all_gather(torch.tensor([own], device=device), over).tolist()
    if local is None:  # the caller raises a more precise error
        return {}
    by_rank = dict(zip(over.registry.ranks(*over.axes), rows, strict=True))
    first, (first_number, first_dims, *_) = next(iter(by_rank.items()))
    for rank, (number, dims, *_) in by_rank.items():
        if dims < 0:
            raise ValueError(
                f"rank {rank} passed no shard that fits the spec to unshard; pass one on each rank along the sharded axes"
            )
        if (number, dims) != (first_number, first_dims):
            raise ValueError(
                f"the shard is {_DTYPES[number]} with ndim={dims} on rank {rank}, and {_DTYPES[first_number]} with "
                f"ndim={first_dims} on rank {first}; give shards of one tensor"
            )
    return {rank: tuple(lengths[:dims]) for rank, (_, dims, *lengths) in by_rank.items()}


def local_index(index: Tensor, length: int, registry: ProcessGroupRegistry, *axes: str) -> tuple[Tensor, Tensor]:
    """Convert indices of the elements of a dim that ``axes`` shard jointly to indices into this rank's shard.

    Return (indices, mask). The mask is True for elements in the shards of other ranks, whose index is 0. If a value of
    ``index`` is not in 0..length-1, the returned index is outside the shard on every rank, so that a lookup fails as in
    the dense model. ``length`` is the length of the full dim.
    """
    ((start, piece),) = cut_spans(((0, length),), registry.size(*axes), registry.rank(*axes), (1,))
    elsewhere = ((index >= 0) & (index < start)) | ((index >= start + piece) & (index < length))
    return (index - start).masked_fill(elsewhere, 0), elsewhere


def _from_owner(local: Tensor | None, spec: P, registry: ProcessGroupRegistry) -> Tensor | None:
    """Broadcast the shard of the owner rank over the owned axes, and return it on every rank.

    If the owner's shard is not a tensor, the owner rank returns it unchanged, and the other ranks return None.
    """
    spec.validate(len(spec.entries), registry.topology)
    axes = tuple(axis for axis, _ in spec.owned)
    if registry.size(*axes) == 1:
        return local
    owner = registry.topology.rank(**{**registry.coordinate, **owner_of(spec.owned, registry.coordinate)})
    over = Over(registry, axes, root=registry.ranks(*axes).index(owner), call="unshard")
    # The header is sent even if the owner's shard is not a tensor, so that the other ranks raise instead of waiting.
    header: list[Any] = [(local.shape, local.dtype) if isinstance(local, Tensor) else None]
    dist.broadcast_object_list(header, group_src=over.root, group=over.group, device=registry.device)
    if header[0] is None:
        return local if owns(spec.owned, registry.coordinate) else None
    shape, dtype = header[0]
    if not owns(spec.owned, registry.coordinate) or not isinstance(local, Tensor):
        local = torch.empty(shape, dtype=dtype, device=registry.device)
    return broadcast(local.detach(), over)


def _join(pieces: Sequence[tuple[Tensor, Mapping[str, int]]], spec: P, topology: Topology) -> Tensor:
    """Join shards, whose shapes may differ, into the full tensor.

    ``pieces`` has no replicas; each shard comes with the coordinate of a rank that holds it.
    """
    first, _ = pieces[0]
    shape = []
    for dim in range(first.dim()):
        others = [axis for axis in spec.sharded_axes if axis not in spec.dim_axes(dim)]
        shape.append(sum(piece.size(dim) for piece, at in pieces if all(at[axis] == 0 for axis in others)))
    full = first.new_empty(shape)
    for piece, coordinate in pieces:
        region = Region.of_shard(shape, piece.shape, spec, topology, coordinate)
        for offsets, part in region.parts(piece).items():
            narrowed(full, Box(offsets, tuple(part.shape))).copy_(part)
    return full


def _pieces(offsets: Shape, part: Tensor, most: int) -> Iterator[tuple[Shape, Tensor]]:
    """Divide a rectangle of a tensor into rectangles of at most ``most`` elements: (offsets, view) pairs."""
    if part.numel() <= most:
        if part.numel():
            yield offsets, part
        return
    dim = next(dim for dim, length in enumerate(part.shape) if length > 1)
    step = max(1, most * part.shape[dim] // part.numel())
    for start in range(0, part.shape[dim], step):
        length = min(step, part.shape[dim] - start)
        at = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
        yield from _pieces(at, part.narrow(dim, start, length), most)
