"""A block under torch's tensor and sequence parallelism, compared with the dense block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from arguments import arguments
from dtensors import Axes, randn, registry_of
from meshstep.optim import ParallelOptimizer, clip_grad_norm_, sync_gradients
from meshstep.parallel import P, ProcessGroupRegistry, declare
from torch import Tensor, nn

GRID = (("data", 2), ("tensor", 2))
RULES = {"norm.*": P(partial="tensor"), "*": P()}


class Block(nn.Module):
    """down(gelu(up(norm(x))))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return out


def parallel_block(registry: ProcessGroupRegistry) -> Block:
    """Return a block sharded over ``tensor`` by torch's parallel styles, with the norm sharded along the sequence."""
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
    """Train for five steps on ``axes`` and return (norms, full parameters)."""
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
            if functional:  # reduce gradients, compute norms and clip without the optimizer
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
    """Return the expected result of `train_block`, computed in one process."""
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
