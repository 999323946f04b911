"""The linear maps over the ranks of a group that `collectives` is made of: what each does, and how autograd pairs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from math import prod
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .calls import track_call
from .flat_collectives import all_gather_flat, reduce_scatter_flat
from .registry import ProcessGroupRegistry


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
