"""torch's parallelize_module: tensor and sequence parallelism of DTensor parameters, stepped as the dense model is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import arguments
from dtensors import Axes, randn, registry_of
from meshstep.optim import ParallelOptimizer, clip_grad_norm_, global_norm, sync_gradients
from meshstep.parallel import P, ProcessGroupRegistry, declare
from torch import Tensor, nn
from world import World

GRID = (("data", 2), ("tensor", 2))
RULES = {"norm.*": P(partial="tensor"), "*": P()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return out


def parallel_block(registry: ProcessGroupRegistry) -> Block:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(2)
    plan: Any = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    block = Block().double()
    parallelize_module(block, registry.device_mesh("tensor"), plan)
    return block


def train_block(
    axes: Axes, functional: bool, options: dict[str, Any], rules: dict[str, P] = RULES
) -> tuple[list[float], list[Tensor]]:
    with registry_of(axes) as registry:
        block = parallel_block(registry)
        declare(block, rules)
        inner = torch.optim.SGD(block.parameters(), lr=0.5, fused=True)
        optimizer = ParallelOptimizer(inner, registry, **arguments(max_norm=0.4, **options))
        norms = []
        for step in range(5):
            x = randn(2, 4, 6, seed=step)
            data = registry.size("data") if len(axes) > 1 else 1
            if data > 1:
                x = x.chunk(data)[registry.coordinate["data"]]
            optimizer.zero_grad()
            optimizer.backward(block(x.chunk(2, 1)[registry.coordinate["tensor"]]).square().sum() * data)
            if functional:  # complete, measure and clip without the optimizer
                sync_gradients(block.parameters(), registry)
                norms.append(float(clip_grad_norm_(block.parameters(), 0.4, registry).total_norm))
                with torch.no_grad():
                    for param in block.parameters():
                        param.add_(param.grad, alpha=-0.5)  # type: ignore[arg-type]
            else:
                stats = optimizer.step()
                assert stats is not None
                norms.append(float(stats.total_norm))
        return norms, [param.full_tensor().detach() for param in block.parameters()]  # type: ignore[attr-defined]


def dense_block() -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(2)
    block = Block().double()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.5)
    norms = []
    for step in range(5):
        optimizer.zero_grad()
        block(randn(2, 4, 6, seed=step)).square().sum().backward()
        norms.append(float(nn.utils.clip_grad_norm_(block.parameters(), 0.4)))
        optimizer.step()
    return norms, [param.detach() for param in block.parameters()]


def assert_trained(found: tuple[list[float], list[Tensor]]) -> None:
    norms, params = dense_block()
    assert found[0] == pytest.approx(norms, rel=1e-9)
    for one, other in zip(found[1], params, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("axes", [(("tensor", 2),), GRID])
def test_parallelize_module(world: World, axes: Axes, functional: bool) -> None:
    for found in world.run(2 * len(axes), train_block, axes, functional, {}):
        assert_trained(found)


@pytest.mark.parametrize(
    "options",
    [
        {"shard_states": "data"},
        {"shard_states": "data", "shard_gradients": True},
        {"offload": 0.5},
        {"check_replicas": True, "per_parameter_norms": True, "reduction": "per_group"},
    ],
)
def test_other_ways_to_step_dtensors(world: World, options: dict[str, Any]) -> None:
    for found in world.run(4, train_block, GRID, False, options):
        assert_trained(found)


def misdeclared(kind: str) -> str:
    with registry_of((("tensor", 2),)) as registry:
        block = parallel_block(registry)
        if kind == "complete":
            declare(block, {"norm.*": P(partial="tensor"), "down.bias": P(partial="tensor"), "*": P()})
        elif kind == "measured":
            declare(block, {"norm.*": P(partial="tensor"), "*": P()})
        else:
            declare(block, {"*": P()})
        block(randn(2, 2, 6)).sum().backward()
        try:
            if kind in ("measured", "pending"):
                global_norm(block.parameters(), registry)
            else:
                ParallelOptimizer(torch.optim.SGD(block.parameters()), registry).step()
        except ValueError as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "pending",
            "the gradient of norm.weight is Partial(sum) over 'tensor', but the parameter is Replicate(): declare it",
        ),
        ("complete", "down.bias is declared partial over 'tensor', but its gradient is complete"),
        ("measured", "the gradient of norm.weight (P(partial='tensor')) is still a pending sum over tensor"),
    ],
)
def test_pending_sums_must_be_declared(world: World, kind: str, message: str) -> None:
    for found in world.run(2, misdeclared, kind):
        assert message in found


def loaded() -> str:
    """Loading into DTensors must not be undone by master weights."""
    with registry_of((("tensor", 2),)) as registry:
        block = parallel_block(registry).bfloat16()
        declare(block, {"norm.*": P(partial="tensor"), "*": P()})
        optimizer = ParallelOptimizer(torch.optim.SGD(block.parameters(), lr=0.5), registry, precision="bf16")
        with torch.no_grad():
            block.up.weight.mul_(2)
        block(randn(2, 2, 6).bfloat16()).sum().backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)
        return str(dist.get_rank())


def test_weights_that_were_changed_are_noticed(world: World) -> None:
    for found in world.run(2, loaded):
        assert found.startswith("up.weight was changed since the last step")
