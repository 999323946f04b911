from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from arguments import arguments
from meshstep.amp import precision_of
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, gather_from, shard
from torch import Tensor, nn

IN, HIDDEN, OUT = 6, 8, 4
SHAPES = {"up": (HIDDEN, IN), "up_bias": (HIDDEN,), "down": (OUT, HIDDEN), "down_bias": (OUT,), "gain": ()}
Axes = tuple[tuple[str, int], ...]
LAYOUTS: dict[Axes, dict[str, P]] = {
    (): {},
    (("data", 2),): {},
    (("data", 4),): {},
    (("tensor", 2),): {"up": P("tensor"), "up_bias": P("tensor"), "down": P(None, "tensor")},
    (("data", 2), ("tensor", 2)): {"up": P(None, "tensor"), "up_bias": P("tensor"), "down_bias": P("tensor")},
    (("row", 2), ("col", 2)): {
        "up": P("row", "col"),
        "up_bias": P(("col", "row")),
        "down": P("col", "row"),
        "down_bias": P("col"),
    },
}


class Split(nn.Module):
    """A model that holds shards. Forward gathers the full weights over the model axes, and each rank computes all
    features."""

    def __init__(self, axes: Axes, registry: ProcessGroupRegistry, seed: int = 5) -> None:
        super().__init__()
        self.registry = registry
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            spec = LAYOUTS[axes].get(name, P())
            full = torch.randn(shape, generator=generator) * 0.5
            self.register_parameter(name, nn.Parameter(shard(full, spec, registry)))
            annotate(self.get_parameter(name), spec, name)
        self.specs = {name: LAYOUTS[axes].get(name, P()) for name in SHAPES}

    def full(self, name: str) -> Tensor:
        tensor: Tensor = self.get_parameter(name)
        for dim in range(tensor.dim()):
            for axis in reversed(self.specs[name].dim_axes(dim)):
                tensor = gather_from(tensor, self.registry, axis, dim=dim)
        return tensor

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(F.linear(x, self.full("up"), self.full("up_bias")))
        return F.linear(hidden, self.full("down"), self.full("down_bias")) * self.full("gain")


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the batch of a step: x [8, in] and y [8, out], the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, IN, generator=generator)
    return x, torch.sin(x[:, :OUT] * 2)


class Run:
    """The model with AdamW and a learning rate schedule."""

    def __init__(self, axes: Axes, precision: str, seed: int = 5, **options: Any) -> None:
        self.registry = ProcessGroupRegistry(Topology(roles=None, **dict(axes)))
        self.model = Split(axes, self.registry, seed)
        mode = precision_of(precision)
        mode.prepare(self.model, self.registry)
        adamw = torch.optim.AdamW(self.model.parameters(), lr=2e-2, weight_decay=0.1, fused=True)
        self.optimizer = ParallelOptimizer(adamw, self.registry, **arguments(precision=mode, max_norm=0.5, **options))
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)

    def step(self, number: int) -> float:
        self.optimizer.zero_grad()
        x, y = (shard(part, P(self.registry.topology.data_axes), self.registry) for part in batch(number))
        loss = F.mse_loss(self.model(x).float(), y)
        self.optimizer.backward(loss)
        self.optimizer.step()
        self.schedule.step()
        return float(loss.detach())
