"""Full-tensor optimizers with torch's `fully_shard`, alone and with tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dtensors import registry_of
from home_runs import adafactor, bare_adafactor, bare_shampoo, shampoo
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, annotate
from planted import LAYOUTS, SHAPES, start
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from whole_runs import Make, alone
from whole_table import OPTIMIZERS
from world import World

LAYOUT = LAYOUTS["data"]
STEPS = 7  # SOAP renews its preconditioners in the fourth and seventh step
SPLIT = {"up": 0, "down": 1, "bias": 0}
"""The dim over which each parameter is tensor-parallel."""
NAMES = [name for name, shape in SHAPES.items() if shape]  # fully_shard does not support scalars


class Given(nn.Module):
    """Parameters with given gradients: the loss is the sum of <parameter, gradient>."""

    def __init__(self, registry: ProcessGroupRegistry, tensor: int) -> None:
        super().__init__()
        self.rank = registry.rank("data")
        self.mesh: Any = registry.device_mesh("data", "tensor")["tensor"] if tensor > 1 else None
        for name in NAMES:
            self.register_parameter(name, nn.Parameter(self.laid_out(name, start((name, 0)))))

    def laid_out(self, name: str, full: Tensor) -> Tensor:
        if self.mesh is None or name not in SPLIT:
            return full
        return distribute_tensor(full, self.mesh, [Shard(SPLIT[name])])

    def forward(self, step: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for name, param in self.named_parameters():
            one = (param * self.laid_out(name, LAYOUT.share(name, self.rank, step))).sum()
            total = total + (one.full_tensor() if isinstance(one, DTensor) else one)
        return total


def trained(tensor: int, makes: dict[str, Make]) -> dict[str, dict[str, Tensor]]:
    """Return the full parameters after `STEPS` steps, by optimizer."""
    from torch.distributed.fsdp import fully_shard

    axes = {"data": 2, **({"tensor": tensor} if tensor > 1 else {})}
    found = {}
    with registry_of(tuple(axes.items())) as registry:
        for kind, make in makes.items():
            net = Given(registry, tensor)
            fully_shard(net, mesh=registry.device_mesh(*axes)["data"])
            for name, param in net.named_parameters():
                if tensor > 1 and name not in SPLIT:
                    annotate(param, P(), name)
            optimizer = ParallelOptimizer(make(net.named_parameters()), registry, data_parallel=net)
            for step in range(STEPS):
                optimizer.zero_grad()
                optimizer.backward(net(step))
                optimizer.step()
            params = {name: param.detach() for name, param in net.named_parameters()}
            found[kind] = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in params.items()}
    return found


@pytest.mark.long
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("tensor", [1, 2])
def test_full_tensor_optimizers_with_fully_shard_match_dense_update(world: World, tensor: int) -> None:
    by_rank = world.run(2 * tensor, trained, tensor, OPTIMIZERS)
    for kind, make in OPTIMIZERS.items():
        expected = alone(LAYOUT, make, STEPS)
        for found in by_rank:
            for name in NAMES:
                assert apart(found[kind][name], expected[name, 0]) <= 1e-12, (kind, name)
                assert torch.equal(found[kind][name], by_rank[0][kind][name]), (kind, name)


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def test_optimizers_that_treat_shards_as_full_tensors_differ_from_dense_update(world: World) -> None:
    for bare, make in ((bare_shampoo, shampoo), (bare_adafactor, adafactor)):
        found, expected = world.run(2, trained, 1, {"bare": bare})[0]["bare"], alone(LAYOUT, make, STEPS)
        assert max(apart(found[name], expected[name, 0]) for name in NAMES) > 1e-3
