"""Small models that torch's functions shard in many ways, for tests without a registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8


class Net(nn.Module):
    """Layers that tensor parallelism shards, and parameters that it leaves plain."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH)
        self.gain, self.head = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(torch.relu(self.up(self.norm(x)))) * self.gain
        out: Tensor = self.head(x)
        return out


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch() -> Tensor:
    return torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def expert_gradient() -> Tensor:
    return torch.randn(4, WIDTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def shard_layers(model: Net, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def shard_experts(model: Net, mesh: Any, *placements: Any) -> None:
    from torch.distributed.tensor import distribute_tensor

    model.experts = nn.Parameter(distribute_tensor(model.experts.detach(), mesh, placements))
    model.experts.grad = distribute_tensor(expert_gradient(), mesh, placements)


def fully_sharded(model: Net, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh, ignored_params={model.experts})


Layout = Callable[[Net], int]
"""Shards the model, and returns the number of different batches. If this is less than the number of ranks, consecutive
ranks read the same batch."""


def fsdp(model: Net) -> int:
    from torch.distributed.tensor import Shard

    mesh = mesh_of((4,), ("fsdp",))
    shard_experts(model, mesh, Shard(0))
    fully_sharded(model, mesh)
    return 4


def tensor_parallel(model: Net) -> int:
    from torch.distributed.tensor import Shard

    mesh = mesh_of((4,), ("tp",))
    shard_layers(model, mesh)
    shard_experts(model, mesh, Shard(0))
    return 1


def sequence_parallel(model: Net) -> int:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = mesh_of((4,), ("sp",))
    rows = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),))
    parallelize_module(model, mesh, rows)
    plan = {"norm": SequenceParallel(sequence_dim=0), "up": ColwiseParallel(input_layouts=Shard(0))}
    parallelize_module(model, mesh, {**plan, "down": RowwiseParallel()})
    shard_experts(model, mesh, Shard(0))
    return 1


def fsdp_and_tensor_parallel(model: Net) -> int:
    from torch.distributed.tensor import Replicate, Shard

    mesh = mesh_of((2, 2), ("dp", "tp"))
    shard_layers(model, mesh["tp"])
    shard_experts(model, mesh, Shard(1), Replicate())
    fully_sharded(model, mesh["dp"])
    return 2


def hsdp(model: Net) -> int:
    from torch.distributed.tensor import Replicate, Shard

    mesh = mesh_of((2, 2), ("replicate", "shard"))
    shard_experts(model, mesh, Replicate(), Shard(0))
    fully_sharded(model, mesh)
    return 4


def experts_on_another_mesh(model: Net) -> int:
    from torch.distributed.tensor import Replicate, Shard

    mesh, experts = mesh_of((2, 2), ("dp", "tp")), mesh_of((1, 4), ("edp", "ep"))
    shard_layers(model, mesh["tp"])
    shard_experts(model, experts, Replicate(), Shard(0))
    fully_sharded(model, mesh["dp"])
    return 2


def flattened(model: Net) -> int:
    from torch.distributed.tensor import Shard

    mesh = mesh_of((2, 2), ("dp", "cp"))
    both = mesh["dp", "cp"]._flatten("dp_cp")
    shard_experts(model, mesh["cp"], Shard(2))
    fully_sharded(model, both)
    return 4


def equal_names(model: Net) -> int:
    """Shard the model over two meshes that call different dims ``shard``."""
    from torch.distributed.tensor import Replicate, Shard

    mesh, experts = mesh_of((2, 2), ("shard", "tp")), mesh_of((2, 2), ("other", "shard"))
    shard_layers(model, mesh["tp"])
    shard_experts(model, experts, Replicate(), Shard(0))
    fully_sharded(model, mesh["shard"])
    return 2


LAYOUTS: dict[str, Layout] = {
    of.__name__: of
    for of in (
        fsdp,
        tensor_parallel,
        sequence_parallel,
        fsdp_and_tensor_parallel,
        hsdp,
        experts_on_another_mesh,
        flattened,
        equal_names,
    )
}
