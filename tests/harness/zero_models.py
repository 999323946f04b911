"""Models and helpers for the tests of sharded optimizer states."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from meshstep.optim import ParallelOptimizer
from meshstep.optim.norm.param_table import SteppedTensor
from meshstep.optim.states import sharded as zero
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from scenarios import VOCAB
from torch import Tensor, nn

Axes = tuple[tuple[str, int], ...]
DATA2: Axes = (("data", 2), ("tensor", 1))
DATA4: Axes = (("data", 4), ("tensor", 1))
BOTH: Axes = (("data", 2), ("tensor", 2))
REPLICAS: Axes = (("replica", 2), ("data", 2), ("tensor", 1))
ZERO1: dict[str, Any] = {"shard_states": "data"}
ZERO2: dict[str, Any] = {"shard_states": "data", "shard_gradients": True}


def rows(step: int, count: int = 8) -> Tensor:
    """Return token ids, as in `scenarios.batch`, with any number of rows."""
    return torch.randint(VOCAB, (count, 5), generator=torch.Generator().manual_seed(100 + step))


def size_of(axes: Axes) -> int:
    return Topology(roles=None, **dict(axes)).world_size


def small_buckets(nbytes: int = 1024) -> Any:
    """Use small buckets, so that small models have many buckets, and some parameters have a bucket of their own."""
    return mock.patch.object(zero, "BUCKET_BYTES", nbytes)


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference, relative to the largest element of each tensor."""
    assert found.keys() == expected.keys()
    return max((float((found[k] - v).abs().max() / v.abs().max()) for k, v in expected.items()), default=0.0)


class Odd(nn.Module):
    """Parameters of several kinds: 0-dim, not contiguous, frozen, unused on some ranks, and one that is sharded over
    ``data`` if ``registry`` has several data ranks."""

    def __init__(self, registry: ProcessGroupRegistry | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(5)
        data = 1 if registry is None or "data" not in registry.topology.axes else registry.size("data")
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.sometimes = nn.Parameter(torch.randn(33))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.expert = nn.Parameter(torch.randn(4 // data, 6))
        self.head = nn.Linear(45, 8)
        self.to(dtype)
        declare(self, {"*": P(), **({"expert": P("data", None)} if data > 1 else {})})

    def forward(self, x: Tensor, use: bool = True) -> Tensor:
        x = self.head(self.conv(x).flatten(1) * self.gain).square().mean() + self.expert.sum() ** 2 * 1e-3
        return x + (self.sometimes.square().sum() * 0.1 if use else 0.0) + self.frozen.sum() * 0.1


def inputs(step: int, rank: int) -> Tensor:
    """Return a batch for `Odd`, different on each data rank."""
    return torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(1000 * rank + step))


def odd_steps(
    model: Odd, optimizer: ParallelOptimizer, registry: ProcessGroupRegistry, steps: range, first_rank_uses: bool = True
) -> None:
    """Run some steps. Only data rank 0 uses the parameter ``sometimes``; with ``first_rank_uses=False``, all ranks do."""
    dtype = model.gain.dtype
    for step in steps:
        optimizer.zero_grad()
        x = inputs(step, registry.coordinate["data"]).to(dtype)
        optimizer.backward(model(x, use=registry.coordinate["data"] == 0 or not first_rank_uses))
        optimizer.step()


def pieces(optimizer: ParallelOptimizer) -> list[SteppedTensor]:
    return optimizer.stepped_tensors()


def wide_model() -> nn.Module:
    """Return a model large enough to measure the memory of its states."""
    torch.manual_seed(1)
    layers = [nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 96), nn.GELU(), nn.Linear(96, 64), nn.LayerNorm(64)]
    model = nn.Sequential(*layers)
    declare(model, {"*": P()})
    return model
