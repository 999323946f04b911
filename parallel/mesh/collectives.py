"""Differentiable collectives over mesh axes: what a parallel layer does to its activations and to small parameters.

Every one is a linear map over the ranks of ``registry.group(*axes)``, and its backward is the adjoint map:

    function            forward                   backward                 use it where
    copy_to             identity                  all-reduce               a replicated tensor enters split work
    reduce_from         all-reduce                identity                 partial sums become a replicated tensor
    gather_from         all-gather                take own slice           pieces become a replicated tensor
    scatter_to          take own slice            all-gather               a replicated tensor is split
    all_gather_to       all-gather                reduce-scatter           pieces enter work that is split otherwise
    reduce_scatter_to   reduce-scatter            all-gather               partial sums become pieces
    broadcast_from      broadcast from one rank   reduce to that rank      one rank holds what all need
    all_to_all          all-to-all                all-to-all, back         pieces go to the ranks that work on them

`gather_from` and `all_gather_to` differ in what comes after: the same computation on every rank (each then has the
whole gradient already, and keeps its slice), or a different one (the gradients are terms of a sum).

The backward is made of the same maps, so it can be differentiated again. Over a group of size 1 nothing happens, the
tensor itself comes back, and torch.distributed need not be initialised. Dtypes pass through unchanged, under autocast
too: a sum is made in the dtype of the tensor. With several axes, pieces are in group order: row-major over the axes in
the order of the topology. None reads the host. Every rank of the group must call, with equal shapes (`all_to_all` takes
others), and with a tensor that requires grad on all of them or on none. Only where a dim is said to be ``uneven``, or how
long it is as a whole (``length``), its pieces are those of `torch.chunk`, over one axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from math import prod
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from .call_tracker import track_call
from .process_group_collectives import all_gather_flat, reduce_scatter_flat
from .registry import ProcessGroupRegistry

# Linear maps ----------------------------------------------------------------------------------------------------------

# The linear maps over the ranks of a group that `collectives` is made of: what each does, and how autograd pairs them.


@dataclass(frozen=True)
class Over:
    """Where a map acts: the axes, the tensor dim that is split or joined, and the index in the group of the root; and the
    name of the call that it is a part of, for the error of a rank that waits for the others in vain."""

    registry: ProcessGroupRegistry
    axes: tuple[str, ...]
    dim: int = 0
    root: int = 0
    call: str = "a collective of the model"

    @property
    def group(self) -> dist.ProcessGroup:
        return self.registry.group(*self.axes)

    @property
    def size(self) -> int:
        return self.registry.size(*self.axes)

    @property
    def rank(self) -> int:
        return self.registry.rank(*self.axes)

    def piece(self, tensor: Tensor) -> int:
        """The length of one rank's piece of ``tensor`` along the dim."""
        length = tensor.size(self.dim)
        if length % self.size:
            raise ValueError(
                f"dim {self.dim} of a tensor of shape {tuple(tensor.shape)} has length {length}, which doesn't divide "
                f"over {' x '.join(self.axes)} of size {self.size}; pad it to a multiple of {self.size}"
            )
        return length // self.size


Map = Callable[[Tensor, Over], Tensor]
Map_ = TypeVar("Map_", bound=Callable[..., Tensor])


def _collective(function: Map_) -> Map_:
    """Make a map a public call, which an error of a rank that waits in vain names."""

    @wraps(function)
    def call(tensor: Tensor, over: Over, **options: Any) -> Tensor:
        if torch.compiler.is_compiling():  # the compiler traces the collective alone
            return function(tensor, over, **options)
        with track_call(over.call, over.registry):
            return function(tensor, over, **options)

    return cast(Map_, call)


@dataclass(frozen=True)
class Cut:
    """A dim as pieces, one for each rank of a group, in its order."""

    dim: int
    sizes: list[int]


# The maps themselves: not differentiable, out of place, for groups of more than one rank.


def identity(tensor: Tensor, over: Over) -> Tensor:
    """The tensor, as a view, so that autograd has a tensor of its own to return."""
    return tensor.view_as(tensor)


@_collective
def all_reduce(tensor: Tensor, over: Over) -> Tensor:
    """The sum over the group, of the same shape."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=over.group)
    return total


@_collective
def all_gather(tensor: Tensor, over: Over) -> Tensor:
    """All pieces, joined along the dim: [..., length, ...] -> [..., size * length, ...]."""
    pieces = tensor.new_empty((over.size, *tensor.shape))
    # Flat: gloo refuses buffers with the extra dim.
    all_gather_flat(pieces.view(-1), tensor.contiguous().view(-1), over.group)
    return pieces.movedim(0, over.dim).flatten(over.dim, over.dim + 1)


@_collective
def reduce_scatter(tensor: Tensor, over: Over) -> Tensor:
    """This rank's piece of the sum over the group: [..., size * length, ...] -> [..., length, ...]."""
    length = over.piece(tensor)
    before, after = tensor.shape[: over.dim], tensor.shape[over.dim + 1 :]
    pieces = tensor.reshape(*before, over.size, length, *after).movedim(over.dim, 0).contiguous()
    own = tensor.new_empty(pieces.shape[1:])
    reduce_scatter_flat(own.view(-1), pieces.view(-1), over.group)
    return own


def own_slice(tensor: Tensor, over: Over) -> Tensor:
    """This rank's piece along the dim: [..., size * length, ...] -> [..., length, ...]; no collective."""
    length = over.piece(tensor)
    return tensor.narrow(over.dim, over.rank * length, length).contiguous()


@_collective
def broadcast(tensor: Tensor, over: Over) -> Tensor:
    """What the root has; the others give a tensor of its shape and dtype."""
    if over.rank == over.root:
        # Not the tensor itself: torch 2.13 would give its gradient the parameter's grad_dtype, on the root alone.
        received = tensor.detach().contiguous()
    else:
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    dist.broadcast(received, group_src=over.root, group=over.group)
    return received


@_collective
def reduce_to_root(tensor: Tensor, over: Over) -> Tensor:
    """The sum over the group on the root, zeros elsewhere."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.reduce(total, group_dst=over.root, group=over.group)
    return total if over.rank == over.root else total.zero_()


@_collective
def exchange(tensor: Tensor, over: Over, cut: Cut, joined: Cut) -> Tensor:
    """Piece i of the tensor, as ``cut`` says, goes to rank i; the pieces that come from all ranks, ``joined``."""
    sent = tensor.split(cut.sizes, cut.dim)
    shapes = [list(sent[over.rank].shape) for _ in range(over.size)]
    for shape, length in zip(shapes, joined.sizes, strict=True):
        shape[joined.dim] = length
    numels = [prod(shape) for shape in shapes]
    received = tensor.new_empty(sum(numels))
    packed = torch.cat([piece.reshape(-1) for piece in sent])
    dist.all_to_all_single(received, packed, numels, [piece.numel() for piece in sent], group=over.group)
    return torch.cat([flat.view(s) for flat, s in zip(received.split(numels), shapes, strict=True)], joined.dim)


class _LinearMap(torch.autograd.Function):
    """Applies ``forward_map``; the backward applies ``backward_map``, its adjoint, as another of these."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward_map: Map, backward_map: Map, over: Over) -> Tensor:
        ctx.forward_map, ctx.backward_map, ctx.over = forward_map, backward_map, over
        return forward_map(tensor, over)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return apply(grad, ctx.backward_map, ctx.forward_map, ctx.over), None, None, None


def apply(tensor: Tensor, forward_map: Map, backward_map: Map, over: Over) -> Tensor:
    """``forward_map`` of the tensor, whose adjoint is ``backward_map``; itself over a group of size 1."""
    if over.size == 1:
        return tensor
    result: Tensor = _LinearMap.apply(tensor, forward_map, backward_map, over)
    return result


def along(tensor: Tensor, registry: ProcessGroupRegistry, axes: tuple[str, ...], dim: int, call: str) -> Over:
    """Where a map acts that cuts or joins ``dim``. ValueError where the tensor has no such dim."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"dim {dim} is out of range for a tensor of shape {tuple(tensor.shape)}; give one of its {tensor.dim()} dims"
        )
    return Over(registry, axes, dim=dim % tensor.dim(), call=call)


# Collectives ----------------------------------------------------------------------------------------------------------


def copy_to(tensor: Tensor, registry: ProcessGroupRegistry, *axes: str) -> Tensor:
    """A replicated tensor on its way into work that is split over ``axes``; its gradient is summed over them.

    Collectives: none in forward, one all-reduce in backward.
    """
    return apply(tensor, identity, all_reduce, Over(registry, axes, call="copy_to"))


def reduce_from(tensor: Tensor, registry: ProcessGroupRegistry, *axes: str) -> Tensor:
    """The sum of every rank's ``tensor`` over ``axes``, on every rank.

    Collectives: one all-reduce in forward, none in backward.
    """
    return apply(tensor, all_reduce, identity, Over(registry, axes, call="reduce_from"))


def _joined(tensor: Tensor, forward_map: Map, backward_map: Map, over: Over, length: int | None) -> Tensor:
    """Pieces are joined; uneven ones as equal ones, the padding of which comes last."""
    if length is None:
        return apply(tensor, forward_map, backward_map, over)
    chunk, piece = _chunk(length, over)
    if tensor.size(over.dim) != piece:
        raise ValueError(
            f"dim {over.dim} of a tensor of shape {tuple(tensor.shape)} is no piece of length={length} over "
            f"{over.axes[0]}={over.size}: this rank's has {piece}; give the "
            "length of the whole dim, and the piece that shard or scatter_to(uneven=True) makes"
        )
    return apply(_padded(tensor, over, chunk), forward_map, backward_map, over).narrow(over.dim, 0, length)


def _cut(tensor: Tensor, forward_map: Map, backward_map: Map, over: Over, uneven: bool) -> Tensor:
    if not uneven:
        return apply(tensor, forward_map, backward_map, over)
    chunk, piece = _chunk(tensor.size(over.dim), over)
    padded = _padded(tensor, over, chunk * over.size)
    return apply(padded, forward_map, backward_map, over).narrow(over.dim, 0, piece)


def _chunk(length: int, over: Over) -> tuple[int, int]:
    """The length of all pieces but late ones, and of this rank's."""
    if len(over.axes) != 1:
        raise ValueError(
            f"uneven pieces over {' x '.join(over.axes)}: they are those of one axis; call once for each, the slowest "
            "axis first where a tensor is cut, and last where pieces are joined"
        )
    chunk = -(-length // over.size)
    return chunk, max(min(chunk, length - over.rank * chunk), 0)


def _padded(tensor: Tensor, over: Over, length: int) -> Tensor:
    missing = length - tensor.size(over.dim)
    if not missing:
        return tensor
    return F.pad(tensor, (*(0, 0) * (tensor.dim() - 1 - over.dim), 0, missing))


def gather_from(
    tensor: Tensor, registry: ProcessGroupRegistry, *axes: str, dim: int, length: int | None = None
) -> Tensor:
    """The pieces over ``axes`` joined along ``dim``, for work that every rank does alike.

    Args:
        length: Of the joined dim, where its pieces over one axis are uneven.
    Collectives: one all-gather in forward, none in backward.
    """
    return _joined(tensor, all_gather, own_slice, along(tensor, registry, axes, dim, "gather_from"), length)


def scatter_to(tensor: Tensor, registry: ProcessGroupRegistry, *axes: str, dim: int, uneven: bool = False) -> Tensor:
    """This rank's piece along ``dim`` of a tensor that is replicated over ``axes``.

    Args:
        uneven: The dim need not divide over the one axis. For features; a batch has unequal means then.
    Raises:
        ValueError: The dim doesn't divide over the axes, and ``uneven`` isn't said.
    Collectives: none in forward, one all-gather in backward.
    """
    return _cut(tensor, own_slice, all_gather, along(tensor, registry, axes, dim, "scatter_to"), uneven)


def all_gather_to(
    tensor: Tensor, registry: ProcessGroupRegistry, *axes: str, dim: int, length: int | None = None
) -> Tensor:
    """The pieces over ``axes`` joined along ``dim``, for work that is different on every rank.

    Args:
        length: As in `gather_from`.
    Collectives: one all-gather in forward, one reduce-scatter in backward.
    """
    return _joined(tensor, all_gather, reduce_scatter, along(tensor, registry, axes, dim, "all_gather_to"), length)


def reduce_scatter_to(
    tensor: Tensor, registry: ProcessGroupRegistry, *axes: str, dim: int, uneven: bool = False
) -> Tensor:
    """This rank's piece along ``dim`` of the sum of every rank's ``tensor`` over ``axes``.

    Args:
        uneven: As in `scatter_to`.
    Raises:
        ValueError: The dim doesn't divide over the axes, and ``uneven`` isn't said.
    Collectives: one reduce-scatter in forward, one all-gather in backward.
    """
    return _cut(tensor, reduce_scatter, all_gather, along(tensor, registry, axes, dim, "reduce_scatter_to"), uneven)


def broadcast_from(tensor: Tensor, registry: ProcessGroupRegistry, *axes: str, root: int = 0) -> Tensor:
    """The tensor of the rank with index ``root`` in the group over ``axes``, on every rank of it.

    The other ranks give any tensor of equal shape and dtype, which *requires grad if the root's does*, or they would
    stay away from the reduction in backward and leave the root waiting. There the root gets the sum of all gradients,
    the others zeros.

    Collectives: one broadcast in forward, one reduce in backward.
    """
    size = registry.size(*axes)
    if not 0 <= root < size:
        raise ValueError(f"root {root} is not in the group over {' x '.join(axes)}; give an index in 0..{size - 1}")
    return apply(tensor, broadcast, reduce_to_root, Over(registry, axes, root=root, call="broadcast_from"))


def all_to_all(
    tensor: Tensor,
    registry: ProcessGroupRegistry,
    *axes: str,
    split_dim: int,
    concat_dim: int | None = None,
    split_sizes: Sequence[int] | None = None,
    concat_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Cut along ``split_dim`` into a piece for each rank of the group over ``axes``; the pieces for this rank, from all of
    them, joined along ``concat_dim``.

        all_to_all(tokens, registry, "expert", split_dim=0, split_sizes=sent, concat_sizes=received)  # to their experts
        all_to_all(heads, registry, "cp", split_dim=1, concat_dim=2)  # from all heads of some tokens to some of all

    Args:
        tensor: Any dtype. Ranks may give tensors of different lengths along ``concat_dim``; none at all is a length, too.
        concat_dim: By default ``split_dim``.
        split_sizes: Lengths along ``split_dim`` of the pieces, in group order; by default equal ones. Where the two dims
            differ, every rank gives the same.
        concat_sizes: Lengths along ``concat_dim`` of the pieces that come, what their senders say; by default all as long
            as this rank's own. Ranks that don't know them send each other the numbers first.

    Raises:
        ValueError: Sizes are not one a rank, don't add up to the dim's length, or are missing; the dim doesn't divide.
    Collectives: one all-to-all in forward, one in backward, with the sizes changed about.
    """
    over = along(tensor, registry, axes, split_dim, "all_to_all")
    target = over.dim if concat_dim is None else along(tensor, registry, axes, concat_dim, "all_to_all").dim
    sent = [over.piece(tensor)] * over.size if split_sizes is None else list(split_sizes)
    if concat_sizes is None and split_sizes is not None and target == over.dim:
        raise ValueError("pieces of other sizes than equal ones: give concat_sizes too, what comes from each rank")
    own = sent[over.rank] if target == over.dim and len(sent) == over.size else tensor.size(target)
    received = [own] * over.size if concat_sizes is None else list(concat_sizes)
    for name, sizes in (("split_sizes", sent), ("concat_sizes", received)):
        if len(sizes) != over.size or min(sizes) < 0:
            raise ValueError(f"{name} is {sizes}; give a length >= 0 for each of the {over.size} ranks of the group")
    if sum(sent) != tensor.size(over.dim):
        raise ValueError(
            f"split_sizes {sent} don't add up to dim {over.dim} of a tensor of shape {tuple(tensor.shape)}; give "
            f"lengths that make up {tensor.size(over.dim)}"
        )
    if received[over.rank] != own:
        raise ValueError(
            f"concat_sizes says that this rank sends itself {received[over.rank]}, but its piece has {own}; give what "
            "each rank has for this one in its split_sizes"
        )
    cut, joined = Cut(over.dim, sent), Cut(target, received)
    return apply(tensor, partial(exchange, cut=cut, joined=joined), partial(exchange, cut=joined, joined=cut), over)
