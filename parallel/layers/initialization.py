"""Full initial weights, drawn as torch's dense layers draw theirs, and the piece of them that a rank keeps.

Every rank draws the whole tensor from the same seed and keeps its piece: then the full weights, and the state of the
random generator afterwards, depend on neither the topology nor the kind of parallelism, and equal those of the dense
torch layer built in the same place (same seed, dtype and device). The price is the full tensor in memory for a moment.
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
    """Weight [out_features, in_features] and bias [out_features], uniform in +-1/sqrt(in_features) as `nn.Linear`."""
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
    """Table [num_embeddings, embedding_dim] of standard normals, as `nn.Embedding`."""
    return torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype).normal_(generator=generator)


def kept_piece(full: Tensor, spec: P, registry: ProcessGroupRegistry) -> nn.Parameter:
    """This rank's piece of full weights as a parameter that says how it is laid out; what doesn't divide is cut as
    `torch.chunk` does.

    Raises:
        ValueError: On every rank, where some rank's piece would be empty; blocks don't divide.
    """
    _check_pieces(full, spec, registry.topology)
    param = nn.Parameter(shard(full, spec, registry, uneven=True))
    annotate(param, spec, full_shape=tuple(full.shape))
    return param


def owned_piece(full: Tensor, spec: P, registry: ProcessGroupRegistry) -> nn.Parameter | None:
    """`kept_piece` on the ranks that the spec lets hold it; None on the others."""
    if spec.holds(registry.coordinate, registry.topology):
        return kept_piece(full, spec, registry)
    _check_pieces(full, spec, registry.topology)
    return None


def held_or_placeholder(param: Tensor | None, *shape: int, like: Tensor) -> Tensor:
    """An owner's parameter on its way to the ranks that don't hold it, or on these what stands for it: of ``shape``, and of
    the dtype and device of ``like``.

    It requires grad on every rank, also where the owner's is frozen, of which the others can't know: the reduction in
    backward needs all of them.
    """
    if param is None:
        return like.new_empty(shape).requires_grad_()
    return param if param.requires_grad else param.detach().requires_grad_()


def depth_axes(depth: str | None, registry: ProcessGroupRegistry) -> tuple[str, ...]:
    """Return the axes over which the gradients of a 2.5-D layer's parameters must still be summed; () if depth is None.

    Raises:
        ValueError: The topology has no such axis.
    """
    return () if depth is None else registry.topology.atoms(depth)


def sizes_of(registry: ProcessGroupRegistry, *axes: str) -> str:
    """What a layer's repr says of its axes: ``row=2, col=2``."""
    return ", ".join(f"{axis}={registry.size(axis)}" for axis in axes)


def _check_pieces(full: Tensor, spec: P, topology: Topology) -> None:
    last = {axis: topology.size(axis) - 1 for axis in topology.axes}  # has the smallest piece
    for dim, length in enumerate(local_shape(full.shape, spec, topology, last)):
        if not length:
            over = " x ".join(f"{axis}={topology.size(axis)}" for axis in spec.dim_axes(dim))
            raise ValueError(
                f"{spec}: dim {dim} of shape {tuple(full.shape)}, cut over {over or 'nothing'} as torch.chunk cuts it, "
                "leaves nothing for the last rank; make the layer larger or the axis smaller"
            )
