"""From a full tensor to this rank's piece and back, as a spec lays it out.

The piece of a dim that is sharded over axes (a, b) is number ``coordinate[a] * size(b) + coordinate[b]`` of
``size(a) * size(b)`` equal chunks: the axis named first is the slowest. Of a dim in blocks it is that chunk of every
block, one after the other. A dim that doesn't divide is cut as `torch.chunk` does, over a and each of these over b, where
that is asked for. `tied` and `partial` don't matter here: they say who else contributes to a gradient, not what a piece is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from ..mesh.collectives import Over, all_gather, broadcast
from ..mesh.registry import ProcessGroupRegistry
from ..mesh.topology import Topology
from .regions import Region, joined_in_order
from .spec import P, Span, cut_spans, owner_of, owns


def local_shape(
    full_shape: Sequence[int], spec: P, topology: Topology, coordinate: Mapping[str, int] | None = None
) -> tuple[int, ...]:
    """The shape of a piece of a tensor of ``full_shape`` on a rank that holds one. Pure arithmetic.

    Args:
        coordinate: Of the rank whose piece it is. A dim that doesn't divide is then cut as `torch.chunk` does, late pieces
            being smaller or empty; without it all pieces must be of one shape.
    Raises:
        ValueError: A dim doesn't divide over its axes and there is no coordinate; blocks don't divide; the spec names an
            unknown axis or has too many entries.
    """
    spec.validate(len(full_shape), topology)
    spec = spec.on(topology)
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
                f"{spec}: dim {dim} of shape {tuple(full_shape)} has length {length}, which doesn't divide over "
                f"{sizes}; make it a multiple of {parts}"
            )
        shape.append(length // parts)
        spec.spans(dim, length, topology, dict.fromkeys(axes, 0))  # its blocks divide too
    return tuple(shape)


def full_shape(local_shape: Sequence[int], spec: P, topology: Topology) -> tuple[int, ...]:
    """The shape of the tensor whose pieces all have ``local_shape``; the inverse of `local_shape`. Pure arithmetic.

    Raises:
        ValueError: The spec names an unknown axis or has too many entries.
    """
    spec.validate(len(local_shape), topology)
    return tuple(length * topology.size(*spec.dim_axes(dim)) for dim, length in enumerate(local_shape))


def shard(full: Tensor, spec: P, registry: ProcessGroupRegistry, *, uneven: bool = False) -> Tensor:
    """This rank's piece of a full tensor, in memory of its own; not differentiable.

    Where the spec is ``owned`` and this rank isn't an owner there is no piece: an empty tensor of shape (0,) comes
    back, and a layer registers None there.

    Args:
        uneven: A dim that doesn't divide is cut as `torch.chunk` does. For parameters and features; ranks with unequal
            parts of a batch have means that don't average to the batch's.
    Raises:
        ValueError: A dim doesn't divide over its axes, and ``uneven`` isn't said; the spec names an unknown axis or has too
            many entries.
    Collectives: none. Host reads: none.
    """
    shape = local_shape(full.shape, spec, registry.topology, registry.coordinate if uneven else None)
    if not owns(spec.owned, registry.coordinate):
        return full.new_empty(0)
    region = Region.of_shard(full.shape, shape, spec, registry.topology, registry.coordinate)
    return region.of(full.detach()).clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def unshard(local: Tensor | None, spec: P, registry: ProcessGroupRegistry) -> Tensor:
    """The full tensor on every rank, from every rank's piece: a parameter, or its gradient. Not differentiable.

    For checkpoints and checks, not for the training step. What a rank gives that doesn't own a piece is ignored; None
    will do. All ranks of the world must call. Pieces may be uneven, as `shard` makes them.

    Raises:
        ValueError: An owner gives None; the pieces are not of the sizes that the spec makes of a tensor; the spec names an
            unknown axis or has too many entries.
    Collectives: two all-gathers over the sharded axes, of shapes and of pieces; where the spec is ``owned``, first a
    broadcast of shape and dtype and one of the piece, over the owned axes. Host reads: yes.
    """
    spec = spec.on(registry.topology)
    if spec.owned:
        local = _from_owner(local, spec, registry)
    if local is None:
        raise ValueError(f"{spec}: every rank holds a piece; give this rank's instead of None")
    spec.validate(local.dim(), registry.topology)
    axes = tuple(axis for axis in registry.topology.axes if axis in spec.sharded_axes)
    if not axes or registry.size(*axes) == 1:
        return local.detach().clone(memory_format=torch.contiguous_format)
    over = Over(registry, axes, call="unshard")
    found = all_gather(torch.tensor([local.shape], device=local.device), over)
    if (found == found[0]).all():
        return _join(all_gather(local.detach().unsqueeze(0), over), axes, spec, registry)
    padded = local.new_zeros(found.amax(0).tolist())
    padded[tuple(map(slice, local.shape))] = local.detach()
    pieces, shapes = all_gather(padded.unsqueeze(0), over), map(tuple, found.tolist())
    trimmed = [piece[tuple(map(slice, shape))] for piece, shape in zip(pieces, shapes, strict=True)]
    coordinates = [registry.topology.coordinate(rank) for rank in registry.ranks(*axes)]
    return _join_uneven(trimmed, coordinates, spec, axes, registry.topology)


@torch.no_grad()
def join(pieces: Sequence[Tensor | None], spec: P, topology: Topology) -> Tensor:
    """The full tensor, from all pieces; the inverse of `shard` on every rank. Not differentiable.

    Of a small model all pieces may come in one `gather_objects`, on the CPU; `unshard` takes collectives for each tensor.

    Args:
        pieces: By global rank; None where a rank gives none. Of replicas the first one is taken. May be uneven.
    Raises:
        ValueError: A piece is missing; they have several dtypes or numbers of dims; they are not of the sizes that the spec
            makes of a tensor; the spec names an unknown axis or has too many entries.
    Collectives: none. Host reads: none.
    """
    if len(pieces) != topology.world_size:
        raise ValueError(f"{len(pieces)} pieces for {topology.world_size} ranks; give None for a rank without one")
    spec.validate(len(spec.entries), topology)
    spec = spec.on(topology)
    axes = tuple(axis for axis in topology.axes if axis in spec.sharded_axes)
    found: dict[tuple[int, ...], tuple[Tensor, dict[str, int]]] = {}
    for rank, piece in enumerate(pieces):
        coordinate = topology.coordinate(rank)
        if piece is not None and owns(spec.owned, coordinate):
            found.setdefault(tuple(coordinate[axis] for axis in axes), (piece.detach(), coordinate))
    if len(found) < topology.size(*axes):
        at = next(at for at in product(*(range(topology.size(axis)) for axis in axes)) if at not in found)
        where = ", ".join(f"{axis}={index}" for axis, index in zip(axes, at, strict=True)) or "any rank that holds it"
        raise ValueError(f"{spec}: there is no piece of {where}; give all that are different")
    some, coordinates = zip(*found.values(), strict=True)
    kinds = sorted({f"{piece.dim()} dims of {piece.dtype}" for piece in some})
    if len(kinds) > 1:
        raise ValueError(f"{spec}: pieces of one tensor have {' and '.join(kinds)}; give them as `shard` makes them")
    spec.validate(some[0].dim(), topology)
    return _join_uneven(some, coordinates, spec, axes, topology)


def local_index(index: Tensor, length: int, registry: ProcessGroupRegistry, axis: str) -> tuple[Tensor, Tensor]:
    """Indices into a dim of ``length`` that is sharded over ``axis`` -> indices into this rank's piece of it.

    Args:
        index: Integers in 0..length-1, any shape.
    Returns:
        The local indices, 0 where the element lies on another rank; and a bool mask of those elsewhere. An index that
        is outside the full dim stays outside the piece, on every rank, so that the lookup fails as a dense one does.
    """
    ((start, piece),) = cut_spans(((0, length),), registry.size(axis), registry.rank(axis), (1,))
    elsewhere = ((index >= 0) & (index < start)) | ((index >= start + piece) & (index < length))
    return (index - start).masked_fill(elsewhere, 0), elsewhere


def _from_owner(local: Tensor | None, spec: P, registry: ProcessGroupRegistry) -> Tensor | None:
    """The owner's piece, on every rank along the owned axes."""
    spec.validate(len(spec.entries), registry.topology)
    axes = tuple(axis for axis, _ in spec.owned)
    if registry.size(*axes) == 1:
        return local
    owner = registry.topology.rank(**{**registry.coordinate, **owner_of(spec.owned, registry.coordinate)})
    over = Over(registry, axes, root=registry.ranks(*axes).index(owner), call="unshard")
    # None from the owner travels too: all ranks then raise, none waits.
    header: list[Any] = [None if local is None else (local.shape, local.dtype)]
    dist.broadcast_object_list(header, group_src=over.root, group=over.group, device=registry.device)
    if header[0] is None:
        return None
    shape, dtype = header[0]
    if not owns(spec.owned, registry.coordinate) or local is None:
        local = torch.empty(shape, dtype=dtype, device=registry.device)
    return broadcast(local.detach(), over)


def _join(pieces: Tensor, axes: tuple[str, ...], spec: P, registry: ProcessGroupRegistry) -> Tensor:
    """[group, *local] -> full; the group is row-major over ``axes``.

    For P(("col", "row"), None) over (row, col) the pattern reads ``(row col) d0 d1 -> (col row d0) d1``.
    """
    names = {axis: f"a{number}" for number, axis in enumerate(registry.topology.axes)}
    dims = range(pieces.dim() - 1)
    gathered = " ".join(names[axis] for axis in axes)
    local = " ".join(f"d{dim}" for dim in dims)
    full = " ".join("(" + " ".join([*(names[axis] for axis in spec.dim_axes(dim)), f"d{dim}"]) + ")" for dim in dims)
    sizes = {names[axis]: registry.size(axis) for axis in axes}
    joined = rearrange(pieces, f"({gathered}) {local} -> {full}", **sizes)
    for dim, length in enumerate(joined.shape):
        joined = joined_in_order(joined, dim, spans_of_pieces(length, dim, spec, registry.topology))
    return joined.contiguous()


def _join_uneven(
    pieces: Sequence[Tensor],
    coordinates: Sequence[Mapping[str, int]],
    spec: P,
    axes: tuple[str, ...],
    topology: Topology,
) -> Tensor:
    """The full tensor of the pieces over ``axes``; a dim's length is the sum of theirs along its axes."""
    shape = []
    for dim in range(pieces[0].dim()):
        others = [axis for axis in axes if axis not in spec.dim_axes(dim)]
        along = zip(pieces, coordinates, strict=True)
        shape.append(sum(piece.size(dim) for piece, at in along if all(at[axis] == 0 for axis in others)))
    full = pieces[0].new_empty(shape)
    for piece, coordinate in zip(pieces, coordinates, strict=True):
        region = Region.of_shard(shape, piece.shape, spec, topology, coordinate)
        for offsets, part in region.parts(piece).items():
            where = zip(offsets, part.shape, strict=True)
            full[tuple(slice(offset, offset + length) for offset, length in where)] = part
    return full


def spans_of_pieces(length: int, dim: int, spec: P, topology: Topology) -> Iterator[tuple[Span, ...]]:
    """Which elements of a dim of ``length`` each of its pieces has, in the order of their numbers."""
    axes = spec.on(topology).dim_axes(dim)
    for where in product(*(range(topology.size(axis)) for axis in axes)):
        yield spec.spans(dim, length, topology, dict(zip(axes, where, strict=True)))
