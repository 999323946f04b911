"""Initial weights of parallel layers, which equal the weights of torch's dense layers, and a check of inputs.

Every rank draws the full tensor and keeps a copy of its shard, so the random generators of all ranks must have the same
state. The full weights do not depend on the topology or the kind of parallelism: they equal the weights of the dense torch
layer with the same seed, dtype and device. Afterwards the generator has the same state as after the dense layer. Each rank
needs memory for the full tensor until its shard is copied.
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
    """Return the full initial weight [out_features, in_features] and bias [out_features] (or None) of `nn.Linear`."""
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
    """Return the initial full table [num_embeddings, embedding_dim] of `nn.Embedding`: standard normal values."""
    return torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype).normal_(generator=generator)


def keep_shard(full: Tensor, spec: P, registry: ProcessGroupRegistry) -> nn.Parameter:
    """Return a new parameter with this rank's shard of a full weight, annotated with ``spec``.

    The weight ``full`` must be equal on all ranks. A dim that is not a multiple of its axes' sizes is sharded as
    `torch.chunk` does.

    Raises:
        ValueError: On every rank: the last rank's shard would be empty, or a dim has several blocks that its axes can't
            divide evenly.
    """
    _check_shards(full, spec, registry.topology)
    param = nn.Parameter(shard(full, spec, registry, uneven=True))
    annotate(param, spec, full_shape=tuple(full.shape))
    return param


def keep_owned_shard(full: Tensor, spec: P, registry: ProcessGroupRegistry) -> nn.Parameter | None:
    """Return ``keep_shard(full, spec, registry)`` on ranks that hold the parameter by its spec; None on other ranks."""
    if spec.holds(registry.coordinate, registry.topology):
        return keep_shard(full, spec, registry)
    _check_shards(full, spec, registry.topology)
    return None


def held_or_placeholder(param: Tensor | None, *shape: int, like: Tensor) -> Tensor:
    """Return ``param``, or a view of it, on a rank that holds it, and an uninitialized tensor of its shape on other ranks.

    The result is for a broadcast, whose backward is a reduction in which all ranks must take part. It therefore requires
    grad on every rank, even if the parameter is frozen: ranks without the parameter cannot detect that it is frozen.
    ``like`` is a tensor with the parameter's dtype and device.
    """
    if param is None:
        return like.new_empty(shape).requires_grad_()
    return param if param.requires_grad else param.detach().requires_grad_()


def depth_axes(depth: str | None, registry: ProcessGroupRegistry) -> tuple[str, ...]:
    """Return the axes over which the gradients of a 2.5-D layer's parameters are partial: ``depth`` without aliases."""
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
    """Raise ValueError if the last dim of a layer's input is not this rank's shard, of ``local_features`` features."""
    if input.shape[-1:] != (local_features,):
        uneven = ", uneven=True" if features % registry.size(axis) else ""
        raise ValueError(
            f"the input of {type(layer).__name__} has shape {tuple(input.shape)}, but its last dim must be "
            f"{local_features} ({features} features over {axis}={registry.size(axis)}); shard a full input with "
            f"scatter_to(input, registry, {axis!r}, dim=-1{uneven}){advice}"
        )


def sizes_of(registry: ProcessGroupRegistry, *axes: str) -> str:
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
