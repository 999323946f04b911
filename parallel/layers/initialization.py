"""Initial weights of parallel layers, which equal those of torch's dense layers, and a check of inputs.

Every rank draws the full tensor and keeps its shard, so the random generators of all ranks must have the same state. The
full weights, and the final state of the generator, then do not depend on the topology or the kind of parallelism. They
equal those of the dense torch layer with the same seed, dtype and device. Each rank needs memory for the full tensor until
its shard is copied.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..layout.annotation import annotate
from ..layout.shard import local_shape, shard
from ..layout.spec import P
from ..mesh.registry import ProcessGroupRegistry
from ..mesh.topology import Topology


def draw_linear(
    in_features: int,
    out_features: int,
    *,
    bias: bool,
    generator: torch.Generator | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Return weight [out_features, in_features] and bias [out_features] with the distribution of `nn.Linear`.

    The distribution is uniform in +-1/sqrt(in_features). With ``bias=False``, the second result is None.
    """
    weight = torch.empty(out_features, in_features, device=device, dtype=dtype)
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
    if not bias:
        return weight, None
    bound = 1 / math.sqrt(in_features)
    return weight, torch.empty(out_features, device=device, dtype=dtype).uniform_(-bound, bound, generator=generator)


def draw_embedding(
    num_embeddings: int,
    embedding_dim: int,
    *,
    generator: torch.Generator | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Tensor:
    """Return a table [num_embeddings, embedding_dim] of standard normal values, as in `nn.Embedding`."""
    return torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype).normal_(generator=generator)


def keep_shard(full: Tensor, spec: P, registry: ProcessGroupRegistry) -> nn.Parameter:
    """Return a new parameter with this rank's shard of a full weight, annotated with ``spec``.

    A dim that is not a multiple of its axes' sizes is sharded as `torch.chunk` does.

    Args:
        full: The full weight.
        spec: Its layout.
        registry: The process groups.
    Raises:
        ValueError: On every rank: a rank would get an empty shard, a block is not a multiple of the axes' sizes, or an
            axis is unknown.
    """
    _check_shards(full, spec, registry.topology)
    param = nn.Parameter(shard(full, spec, registry, uneven=True))
    annotate(param, spec, full_shape=tuple(full.shape))
    return param


def keep_owned_shard(full: Tensor, spec: P, registry: ProcessGroupRegistry) -> nn.Parameter | None:
    """Return ``keep_shard(full, spec, registry)`` on ranks that hold the parameter (see `P.holds`); None on other ranks."""
    if spec.holds(registry.coordinate, registry.topology):
        return keep_shard(full, spec, registry)
    _check_shards(full, spec, registry.topology)
    return None


def held_or_placeholder(param: Tensor | None, *shape: int, like: Tensor) -> Tensor:
    """Return ``param`` on an owner rank, and an uninitialized tensor of the same shape on other ranks.

    The result requires grad on every rank, even if the owner's parameter is frozen: all ranks must take part in the
    reduction in backward, and ranks without the parameter cannot detect that it is frozen.

    Args:
        param: The parameter on an owner rank; None on other ranks.
        shape: The parameter's shape.
        like: A tensor with the parameter's dtype and device.
    """
    if param is None:
        return like.new_empty(shape).requires_grad_()
    return param if param.requires_grad else param.detach().requires_grad_()


def depth_axes(depth: str | None, registry: ProcessGroupRegistry) -> tuple[str, ...]:
    """Return the axes over which the gradients of a 2.5-D layer's parameters are partial; () if depth is None.

    Raises:
        ValueError: The topology does not have this axis.
    """
    return () if depth is None else registry.topology.expand_aliases(depth)


def check_features(
    layer: nn.Module,
    input: Tensor,
    features: int,
    local_features: int,
    axis: str,
    registry: ProcessGroupRegistry,
    advice: str = "",
) -> None:
    """Raise ValueError if the last dim of ``input`` is not this rank's shard of the features.

    Args:
        layer: The layer, whose type is named in the message.
        input: The input of the layer.
        features, local_features: The number of features, in total and on this rank.
        axis: The mesh axis that shards the features.
        registry: The process groups.
        advice: Appended to the message. Default: nothing.
    """
    if input.shape[-1:] != (local_features,):
        raise ValueError(
            f"the input of {type(layer).__name__} has shape {tuple(input.shape)}, but its last dim must be "
            f"{local_features} ({features} features over {axis}={registry.size(axis)}); shard a full input with "
            f"scatter_to(input, registry, {axis!r}, dim=-1){advice}"
        )


def sizes_of(registry: ProcessGroupRegistry, *axes: str) -> str:
    """Return the sizes of the axes for a layer's repr: ``row=2, col=2``."""
    return ", ".join(f"{axis}={registry.size(axis)}" for axis in axes)


def _check_shards(full: Tensor, spec: P, topology: Topology) -> None:
    last = {axis: topology.size(axis) - 1 for axis in topology.axes}  # the last rank has the smallest shard of each dim
    for dim, length in enumerate(local_shape(full.shape, spec, topology, last)):
        if not length:
            over = " x ".join(f"{axis}={topology.size(axis)}" for axis in spec.dim_axes(dim))
            raise ValueError(
                f"the last rank would get no elements of dim {dim} of shape {tuple(full.shape)} with {spec}, sharded over "
                f"{over or 'no axis'} as torch.chunk does; make the layer larger or the axis smaller"
            )
