"""Helpers of tests of DTensor parameters: parameters, meshes without stale caches in torch, and a log of collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.tensor._redistribute
from cases import slice_of
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

Axes = tuple[tuple[str, int], ...]


def registry_of(axes: Axes) -> ProcessGroupRegistry:
    """Return a registry. Clear torch's caches first, or DTensor would reuse an equal mesh of a closed registry."""
    clear_mesh_caches()
    return ProcessGroupRegistry(Topology(roles=None, **dict(axes)))


def clear_mesh_caches() -> None:
    """Clear torch's caches of DTensor specs. They return equal meshes whose process groups were destroyed."""
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    redistribute: Any = torch.distributed.tensor._redistribute
    for name, method in (("_gen_transform_infos", "cache_clear"), ("_planner_cache", "clear")):
        getattr(getattr(redistribute, name, None), method, lambda: None)()


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, or a plain tensor unchanged."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


class LocalOperations(TorchDispatchMode):
    """Log the names of collectives and raise on any operation on a DTensor itself."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert DTensor not in types, f"{func} of DTensors"
        namespace, name = func._schema.name.split("::")
        if "c10d" in namespace:
            self.collectives.append(name)
        return func(*args, **(kwargs or {}))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mixed(registry: ProcessGroupRegistry) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return DTensors (uneven, with empty shards) and a plain parameter with gradients, and the dense gradients."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    grid, tensor = registry.device_mesh("data", "tensor"), registry.device_mesh("tensor")
    params: list[nn.Parameter] = []
    dense = [randn(5, 4, seed=1), randn(3, 6, seed=2), randn(1, 3, seed=3), randn(7, seed=4), randn(4, 2, seed=5)]
    for full, mesh, placements in (
        (dense[0], grid, (Shard(0), Shard(1))),
        (dense[1], tensor, (Shard(1),)),
        (dense[2], grid, (Replicate(), Shard(0))),
        (dense[3], tensor, (Replicate(),)),
    ):
        param = nn.Parameter(distribute_tensor(torch.zeros_like(full), mesh, placements))
        param.grad = distribute_tensor(full, mesh, placements)
        params.append(param)
    plain = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    plain.grad = slice_of(dense[4], P("tensor"), registry.topology, registry.global_rank)
    annotate(plain, P("tensor"))
    return [*params, plain], dense
