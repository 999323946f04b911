"""Differentiable collectives over mesh axes, for the activations and small parameters of parallel layers.

Each function applies a linear map over the ranks of ``registry.group(*axes)`` to a tensor. Its backward is the adjoint
map for the use case in this table:

    function            forward                   backward                 use case
    copy_to             identity                  all-reduce               a replicated tensor enters sharded computation
    reduce_from         all-reduce                identity                 partial sums become a replicated tensor
    gather_from         all-gather                take own shard           shards become a replicated tensor
    scatter_to          take own shard            all-gather               a replicated tensor is sharded
    all_gather_to       all-gather                reduce-scatter           shards enter a different computation per rank
    reduce_scatter_to   reduce-scatter            all-gather               partial sums become shards
    broadcast_from      broadcast from one rank   reduce to that rank      all ranks need the tensor of one rank
    all_to_all          all-to-all                reverse all-to-all       parts of shards move to other ranks

Choose between `gather_from` and `all_gather_to` by the computation on the gathered tensor. If the computation is the
same on every rank, each rank computes the full gradient and keeps its shard of it: use `gather_from`. If the
computation differs between ranks, each rank computes a partial gradient, which must be summed: use `all_gather_to`.

* Every rank of the group must call the function. The tensors must have the same shape on all ranks, except uneven
  shards and the tensors of `all_to_all`.
* The tensor must require grad on all ranks of the group, or on none.
* The backward consists of maps of the table, so it can be differentiated again.
* Over a group of size 1 the functions return the tensor itself (with ``uneven=True`` or ``length=`` a view of it), and
  ``torch.distributed`` need not be initialized.
* The dtype is unchanged, also under autocast: sums are computed in the dtype of the tensor.
* Over several axes, shards are in the order of the group: row-major over the axes in the order of the topology.
* By default shards have equal shapes. With ``uneven=True`` or ``length=`` shards are the chunks of `torch.chunk` over
  one axis.
* No function synchronizes with the host.
* ``axes`` are names of axes or aliases. A function raises ValueError if ``axes`` is empty, has an unknown name, or
  names an axis twice.
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

# Each map is a plain function. `_LinearMap` is one autograd function for all pairs of a map and its adjoint.


@dataclass(frozen=True)
class Over:
    """The arguments of a linear map other than the tensor.

    The map splits or concatenates along ``dim`` (>= 0). ``root`` is the index of the root rank in the group, for
    `broadcast` and `reduce_to_root`. The error of a failed collective contains ``call``, the name of the public call that
    applies the map, or the name of a public call around it.
    """

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
        """Return the length of one rank's shard of ``tensor`` along `dim`; raise ValueError if the dim is not divisible."""
        length = tensor.size(self.dim)
        if length % self.size:
            raise ValueError(
                f"dim {self.dim} of a tensor of shape {tuple(tensor.shape)} has length {length}, which is not a multiple "
                f"of {self.size}, the size of {_mesh_axes(self.axes)}; pad the dim to a multiple of {self.size}"
            )
        return length // self.size


Map = Callable[[Tensor, Over], Tensor]
Map_ = TypeVar("Map_", bound=Callable[..., Tensor])


def _collective(function: Map_) -> Map_:
    """Decorate a map, so that it runs in a `track_call` block named ``over.call``, unless torch.compile traces it."""

    @wraps(function)
    def call(tensor: Tensor, over: Over, **options: Any) -> Tensor:
        # The counter of `track_call` changes in each call, so torch.compile would compile each call again.
        if torch.compiler.is_compiling():
            return function(tensor, over, **options)
        with track_call(over.call, over.registry):
            return function(tensor, over, **options)

    return cast(Map_, call)


@dataclass(frozen=True)
class Cut:
    """Lengths of the sections of one tensor dim, one section per rank in the order of the group."""

    dim: int
    sizes: list[int]


# `apply` makes these maps differentiable, and calls them only for groups of more than one rank. A map returns a new
# tensor, except that the results of `identity`, of `own_slice` and of `broadcast` on the root may share memory with the
# argument.


def identity(tensor: Tensor, over: Over) -> Tensor:
    return tensor.view_as(tensor)


@_collective
def all_reduce(tensor: Tensor, over: Over) -> Tensor:
    """Return the sum of ``tensor`` over the ranks of the group, with the shape of ``tensor``."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=over.group)
    return total


@_collective
def all_gather(tensor: Tensor, over: Over) -> Tensor:
    """Concatenate the shards of all ranks along ``over.dim``: [..., length, ...] -> [..., size * length, ...]."""
    pieces = tensor.new_empty((over.size, *tensor.shape))
    # Flat views are passed, because gloo rejects buffers with the extra dim.
    all_gather_flat(pieces.view(-1), tensor.contiguous().view(-1), over.group)
    return pieces.movedim(0, over.dim).flatten(over.dim, over.dim + 1)


@_collective
def reduce_scatter(tensor: Tensor, over: Over) -> Tensor:
    """Return this rank's shard along ``over.dim`` of the sum of ``tensor`` over the group.

    Shapes: [..., size * length, ...] -> [..., length, ...].
    """
    length = over.piece(tensor)
    before, after = tensor.shape[: over.dim], tensor.shape[over.dim + 1 :]
    pieces = tensor.reshape(*before, over.size, length, *after).movedim(over.dim, 0).contiguous()
    own = tensor.new_empty(pieces.shape[1:])
    reduce_scatter_flat(own.view(-1), pieces.view(-1), over.group)
    return own


def own_slice(tensor: Tensor, over: Over) -> Tensor:
    """Return this rank's shard along ``over.dim``, without a collective."""
    length = over.piece(tensor)
    return tensor.narrow(over.dim, over.rank * length, length).contiguous()


@_collective
def broadcast(tensor: Tensor, over: Over) -> Tensor:
    """Return the root's tensor on every rank. Other ranks pass a tensor of the same shape and dtype with any values."""
    if over.rank == over.root:
        # A result that is not detached would have the parameter's `grad_dtype` (dtype of its gradient), on the root only.
        received = tensor.detach().contiguous()
    else:
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    dist.broadcast(received, group_src=over.root, group=over.group)
    return received


@_collective
def reduce_to_root(tensor: Tensor, over: Over) -> Tensor:
    """Return the sum of ``tensor`` over the group on the root rank, and zeros on other ranks."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.reduce(total, group_dst=over.root, group=over.group)
    return total if over.rank == over.root else total.zero_()


@_collective
def exchange(tensor: Tensor, over: Over, cut: Cut, joined: Cut) -> Tensor:
    """Send section i of ``tensor`` to rank i of the group, and concatenate the received sections.

    ``cut`` has the dim to split, and the length of the section for each receiving rank. ``joined`` has the dim along which
    received sections are concatenated, and the length along this dim of the section that each rank sends.
    """
    sent = tensor.split(cut.sizes, cut.dim)
    own = sent[over.rank].shape
    shapes = [(*own[: joined.dim], length, *own[joined.dim + 1 :]) for length in joined.sizes]
    numels = [prod(shape) for shape in shapes]
    received = tensor.new_empty(sum(numels))
    packed = torch.cat([piece.reshape(-1) for piece in sent])
    dist.all_to_all_single(received, packed, numels, [piece.numel() for piece in sent], group=over.group)
    return torch.cat([flat.view(s) for flat, s in zip(received.split(numels), shapes, strict=True)], joined.dim)


class _LinearMap(torch.autograd.Function):
    """Autograd function that applies ``forward_map``, and ``backward_map`` in backward; differentiable twice."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward_map: Map, backward_map: Map, over: Over) -> Tensor:
        ctx.forward_map, ctx.backward_map, ctx.over = forward_map, backward_map, over
        return forward_map(tensor, over)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return apply(grad, ctx.backward_map, ctx.forward_map, ctx.over), None, None, None


def apply(tensor: Tensor, forward_map: Map, backward_map: Map, over: Over) -> Tensor:
    """Return ``forward_map(tensor, over)``, with ``backward_map`` in backward. For a group of size 1, return ``tensor``."""
    if over.size == 1:
        return tensor
    result: Tensor = _LinearMap.apply(tensor, forward_map, backward_map, over)
    return result


def _mesh_axes(axes: tuple[str, ...]) -> str:
    return f"mesh {'axis' if len(axes) == 1 else 'axes'} {' x '.join(axes)}"


def along(tensor: Tensor, registry: ProcessGroupRegistry, axes: tuple[str, ...], dim: int, call: str) -> Over:
    """Return the `Over` of a map that splits or concatenates ``tensor`` along ``dim``, which may be negative."""
    if not -tensor.dim() <= dim < tensor.dim():
        dims = f"a dim from {-tensor.dim()} to {tensor.dim() - 1}" if tensor.dim() else "a tensor of one or more dims"
        raise ValueError(f"dim {dim} is out of range for a tensor of shape {tuple(tensor.shape)}; give {dims}")
    return Over(registry, axes, dim=dim % tensor.dim(), call=call)


# Collectives ----------------------------------------------------------------------------------------------------------


def copy_to(tensor: Tensor, registry: ProcessGroupRegistry, *axes: str) -> Tensor:
    """Return a replicated tensor unchanged, and sum its gradient over ``axes`` in backward.

    Use it where a replicated tensor enters a computation that is sharded over ``axes``.

        hidden = copy_to(hidden, registry, "tensor")    # before a column-parallel matmul

    Args:
        tensor: A tensor of any shape and dtype, equal on all ranks of the group.
        registry: Provides the process group.
        axes: Mesh axes of the group, at least one.
    Returns:
        A view of ``tensor``; ``tensor`` itself if the group has size 1.
    Raises:
        ValueError: ``axes`` is empty, has an unknown name, or names an axis twice.
    Collectives: none in forward, one all-reduce in backward.
    Host synchronization: none.
    """
    return apply(tensor, identity, all_reduce, Over(registry, axes, call="copy_to"))


def reduce_from(tensor: Tensor, registry: ProcessGroupRegistry, *axes: str) -> Tensor:
    """Sum ``tensor`` over ``axes`` and return the sum on every rank.

        output = reduce_from(partial_output, registry, "tensor")    # after a row-parallel matmul

    Args:
        tensor: This rank's term of the sum; the shape and dtype are equal on all ranks.
        registry: Provides the process group.
        axes: Mesh axes of the group, at least one.
    Returns:
        The sum, a new tensor; ``tensor`` itself if the group has size 1.
    Raises:
        ValueError: ``axes`` is empty, has an unknown name, or names an axis twice.
    Collectives: one all-reduce in forward, none in backward.
    Host synchronization: none.
    """
    return apply(tensor, all_reduce, identity, Over(registry, axes, call="reduce_from"))


def _concatenate(tensor: Tensor, backward_map: Map, over: Over, length: int | None) -> Tensor:
    """All-gather the shards of all ranks along ``over.dim``, with ``backward_map`` in backward.

    If ``length`` is not None, shards may be uneven: the shard is padded before the all-gather, and the result narrowed to
    ``length``.
    """
    if length is None:
        return apply(tensor, all_gather, backward_map, over)
    chunk, piece = _chunk(length, over)
    if tensor.size(over.dim) != piece:
        raise ValueError(
            f"dim {over.dim} of a tensor of shape {tuple(tensor.shape)} has length {tensor.size(over.dim)}, but this "
            f"rank's shard of length={length} over mesh axis {over.axes[0]}={over.size} has length {piece}; give the "
            "length of the full dim, and the shard that shard(uneven=True) or scatter_to(uneven=True) returns"
        )
    return apply(_pad(tensor, over, chunk), all_gather, backward_map, over).narrow(over.dim, 0, length)


def _split(tensor: Tensor, forward_map: Map, over: Over, uneven: bool) -> Tensor:
    """Apply a map that splits ``over.dim`` over the ranks, with an all-gather in backward.

    If ``uneven``, the dim is padded before the map, and the result narrowed.
    """
    if not uneven:
        return apply(tensor, forward_map, all_gather, over)
    chunk, piece = _chunk(tensor.size(over.dim), over)
    padded = _pad(tensor, over, chunk * over.size)
    return apply(padded, forward_map, all_gather, over).narrow(over.dim, 0, piece)


def _chunk(length: int, over: Over) -> tuple[int, int]:
    """Return the length of the first chunk, and of this rank's chunk, of a dim that `torch.chunk` splits over the group."""
    if len(over.axes) != 1:
        raise ValueError(
            f"uneven=True and length= need exactly one mesh axis, found {' x '.join(over.axes) or 'none'}; call the "
            "function once per axis: in the order of the topology's axes to split a tensor, in the reverse order to "
            "concatenate shards"
        )
    chunk = -(-length // over.size)
    return chunk, max(min(chunk, length - over.rank * chunk), 0)


def _pad(tensor: Tensor, over: Over, length: int) -> Tensor:
    missing = length - tensor.size(over.dim)
    if not missing:
        return tensor
    return F.pad(tensor, (*(0, 0) * (tensor.dim() - 1 - over.dim), 0, missing))


def gather_from(
    tensor: Tensor, registry: ProcessGroupRegistry, *axes: str, dim: int, length: int | None = None
) -> Tensor:
    """Concatenate the shards of all ranks along ``dim``, for a computation that is the same on every rank.

    In backward each rank keeps its shard of its own gradient. If the computation differs between ranks, use
    `all_gather_to`.

        logits = gather_from(logits, registry, "tensor", dim=-1)

    Args:
        tensor: This rank's shard; any dtype.
        registry: Provides the process group.
        axes: Mesh axes of the group, at least one; with ``length`` exactly one axis.
        dim: Tensor dim that is sharded over ``axes``; may be negative.
        length: Length of ``dim`` in the full tensor, if the shards are the chunks of `torch.chunk`. None: all shards
            have the same shape.
    Returns:
        The full tensor, on every rank.
    Raises:
        ValueError: ``axes`` is empty, has an unknown name, or names an axis twice; ``dim`` is out of range; ``length``
            is given, and there are several axes; or ``length`` is given, and the shard is not this rank's chunk of it.
    Collectives: one all-gather in forward, none in backward.
    Host synchronization: none.
    """
    return _concatenate(tensor, own_slice, along(tensor, registry, axes, dim, "gather_from"), length)


def scatter_to(tensor: Tensor, registry: ProcessGroupRegistry, *axes: str, dim: int, uneven: bool = False) -> Tensor:
    """Return this rank's shard along ``dim`` of a tensor that is replicated over ``axes``.

    In backward the gradients of all shards are concatenated.

        hidden = scatter_to(hidden, registry, "tensor", dim=-1)

    Args:
        tensor: A tensor of any shape and dtype, equal on all ranks of the group.
        registry: Provides the process group.
        axes: Mesh axes of the group, at least one; with ``uneven=True`` exactly one axis.
        dim: Tensor dim to shard; may be negative.
        uneven: True: shards are the chunks of `torch.chunk`. False: the length of the dim must be a multiple of the
            group size. Do not pass True for the batch dim, because ranks would average over different numbers of
            samples. Default: False.
    Returns:
        The shard. If the group has size 1: ``tensor`` itself, or with ``uneven=True`` a view of it.
    Raises:
        ValueError: ``axes`` is empty, has an unknown name, or names an axis twice; ``dim`` is out of range; ``uneven``
            is False, and the length of the dim is not a multiple of the group size; or ``uneven`` is True, and there
            are several axes.
    Collectives: none in forward, one all-gather in backward.
    Host synchronization: none.
    """
    return _split(tensor, own_slice, along(tensor, registry, axes, dim, "scatter_to"), uneven)


def all_gather_to(
    tensor: Tensor, registry: ProcessGroupRegistry, *axes: str, dim: int, length: int | None = None
) -> Tensor:
    """Concatenate the shards of all ranks along ``dim``, for a computation that differs between ranks.

    In backward the gradients are summed over ``axes``, and each rank receives its shard of the sum. If the computation
    is the same on every rank, use `gather_from`.

        hidden = all_gather_to(hidden, registry, "tensor", dim=1)    # sequence parallel, before a column-parallel matmul

    Args:
        tensor: This rank's shard; any dtype.
        registry: Provides the process group.
        axes: Mesh axes of the group, at least one; with ``length`` exactly one axis.
        dim: Tensor dim that is sharded over ``axes``; may be negative.
        length: Length of ``dim`` in the full tensor, if the shards are the chunks of `torch.chunk`. None: all shards
            have the same shape.
    Returns:
        The full tensor, on every rank.
    Raises:
        ValueError: ``axes`` is empty, has an unknown name, or names an axis twice; ``dim`` is out of range; ``length``
            is given, and there are several axes; or ``length`` is given, and the shard is not this rank's chunk of it.
    Collectives: one all-gather in forward, one reduce-scatter in backward.
    Host synchronization: none.
    """
    return _concatenate(tensor, reduce_scatter, along(tensor, registry, axes, dim, "all_gather_to"), length)


def reduce_scatter_to(
    tensor: Tensor, registry: ProcessGroupRegistry, *axes: str, dim: int, uneven: bool = False
) -> Tensor:
    """Sum ``tensor`` over ``axes`` and return this rank's shard of the sum along ``dim``.

        hidden = reduce_scatter_to(partial_hidden, registry, "tensor", dim=1)    # after a row-parallel matmul

    Args:
        tensor: This rank's term of the sum; the shape and dtype are equal on all ranks.
        registry: Provides the process group.
        axes: Mesh axes of the group, at least one; with ``uneven=True`` exactly one axis.
        dim: Tensor dim to shard; may be negative.
        uneven: True: shards are the chunks of `torch.chunk`. False: the length of the dim must be a multiple of the
            group size. Default: False.
    Returns:
        The shard. If the group has size 1: ``tensor`` itself, or with ``uneven=True`` a view of it.
    Raises:
        ValueError: ``axes`` is empty, has an unknown name, or names an axis twice; ``dim`` is out of range; ``uneven``
            is False, and the length of the dim is not a multiple of the group size; or ``uneven`` is True, and there
            are several axes.
    Collectives: one reduce-scatter in forward, one all-gather in backward.
    Host synchronization: none.
    """
    return _split(tensor, reduce_scatter, along(tensor, registry, axes, dim, "reduce_scatter_to"), uneven)


def broadcast_from(tensor: Tensor, registry: ProcessGroupRegistry, *axes: str, root: int = 0) -> Tensor:
    """Return the tensor of the root rank on every rank of the group over ``axes``.

    In backward the root receives the sum of the gradients of all ranks. Other ranks receive zeros.

        weight = broadcast_from(weight, registry, "row", root=0)

    Args:
        tensor: On the root, the tensor to send. On other ranks, any tensor of the same shape and dtype. It *must
            require grad if the root's tensor does*: otherwise these ranks do not call the reduce in backward, and the
            root waits.
        registry: Provides the process group.
        axes: Mesh axes of the group, at least one.
        root: Index of the root in the group. Default: the first rank.
    Returns:
        The root's tensor; ``tensor`` itself if the group has size 1.
    Raises:
        ValueError: ``axes`` is empty, has an unknown name, or names an axis twice; or ``root`` is not an index of the
            group.
    Collectives: one broadcast in forward, one reduce in backward.
    Host synchronization: none.
    """
    size = registry.size(*axes)
    if not 0 <= root < size:
        raise ValueError(
            f"root={root} is not an index in the group over {_mesh_axes(axes)}; give an index from 0 to {size - 1}, not a "
            "global rank"
        )
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
    """Split ``tensor`` along ``split_dim``, send one section to each rank, and concatenate the received sections.

        # Send tokens to the ranks of their experts:
        all_to_all(tokens, registry, "expert", split_dim=0, split_sizes=sent, concat_sizes=received)
        # Exchange all heads of this rank's tokens for some heads of all tokens:
        all_to_all(heads, registry, "cp", split_dim=1, concat_dim=2)

    Args:
        tensor: A tensor of any dtype. With ``concat_sizes`` its length along ``concat_dim`` may differ between ranks,
            and may be 0.
        registry: Provides the process group.
        axes: Mesh axes of the group, at least one.
        split_dim: Tensor dim to split; may be negative.
        concat_dim: Tensor dim along which received sections are concatenated; may be negative. None: ``split_dim``.
        split_sizes: Length along ``split_dim`` of the section for each rank, in the order of the group. None: equal
            sections. If ``concat_dim`` differs from ``split_dim``, all ranks must pass the same sizes.
        concat_sizes: Length along ``concat_dim`` of the section that each rank sends to this rank. None: all received
            sections are as long as the section that this rank keeps. Required if ``split_sizes`` is given for the same
            dim.
    Returns:
        The received sections, concatenated in the order of the group; ``tensor`` itself if the group has size 1.
    Raises:
        ValueError: ``axes`` is empty, has an unknown name, or names an axis twice; a dim is out of range; the number of
            sizes differs from the group size; a size is negative; ``split_sizes`` do not add up to the length of
            ``split_dim``; ``split_sizes`` is None, and this length is not a multiple of the group size;
            ``concat_sizes`` is missing although it is required; or its length for the section that this rank keeps is
            incorrect.
    Collectives: one all-to-all in forward, and one in backward, which sends the gradients of the sections back.
    Host synchronization: none.
    """
    over = along(tensor, registry, axes, split_dim, "all_to_all")
    target = over.dim if concat_dim is None else along(tensor, registry, axes, concat_dim, "all_to_all").dim
    sent = [over.piece(tensor)] * over.size if split_sizes is None else list(split_sizes)
    if concat_sizes is None and split_sizes is not None and target == over.dim:
        raise ValueError(
            "split_sizes is given without concat_sizes, so the lengths of the received sections are unknown; give "
            "concat_sizes too, one length per rank of the group"
        )
    own = sent[over.rank] if target == over.dim and len(sent) == over.size else tensor.size(target)
    received = [own] * over.size if concat_sizes is None else list(concat_sizes)
    for name, sizes in (("split_sizes", sent), ("concat_sizes", received)):
        if len(sizes) != over.size or min(sizes) < 0:
            raise ValueError(f"{name} is {sizes}; give one length >= 0 per rank of the group of {over.size} ranks")
    if sum(sent) != tensor.size(over.dim):
        raise ValueError(
            f"split_sizes {sent} add up to {sum(sent)}, but dim {over.dim} of a tensor of shape {tuple(tensor.shape)} has "
            f"length {tensor.size(over.dim)}; give lengths that add up to {tensor.size(over.dim)}"
        )
    if received[over.rank] != own:
        advice = "the lengths that the ranks of the group pass in split_sizes for this rank"
        if target != over.dim:
            advice = f"the lengths of the ranks' tensors along dim {target}"
        raise ValueError(
            f"concat_sizes[{over.rank}] is {received[over.rank]}, but the section that this rank keeps has length {own} "
            f"along dim {target}; give {advice}"
        )
    cut, joined = Cut(over.dim, sent), Cut(target, received)
    return apply(tensor, partial(exchange, cut=cut, joined=joined), partial(exchange, cut=joined, joined=cut), over)
