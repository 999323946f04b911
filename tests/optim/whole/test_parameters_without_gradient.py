"""Full-tensor optimizers and parameters without a gradient in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshstep.optim import (
    LAMB,
    SOAP,
    Adafactor,
    Muon,
    Offloaded,
    ParallelOptimizer,
    Shampoo,
)
from meshstep.optim.whole import whole
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, declare, shard, unshard
from torch import Tensor, nn
from world import World

SHAPE = (8, 6)
STEPS = 4
Make = Callable[[Any], Any]

OPTIMIZERS: dict[str, Make] = {
    "Muon": lambda params: Muon(params, lr=0.05, weight_decay=0.1),
    "LAMB": lambda params: LAMB(params, lr=0.05, weight_decay=0.1),
    "Adafactor": lambda params: Adafactor(params, lr=0.05, weight_decay=0.1),
    "SOAP": lambda params: SOAP(params, lr=0.05, weight_decay=0.1),
    "Shampoo": lambda params: Shampoo(params, lr=0.05, weight_decay=0.1),
    "whole(AdamW)": lambda params: whole(torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)),
}
# The topology, the layout of both parameters, and the options of the optimizer. No gradient is averaged over ranks, because
# a missing gradient would then count as zeros (see docs/reference/LIMITS.md).
LAYOUTS: dict[str, tuple[Topology, P, dict[str, Any]]] = {
    "one rank": (Topology(), P(), {}),
    "shards": (Topology(tensor=2), P("tensor"), {}),
    "columns": (Topology(tensor=2, pipe=1), P(None, "tensor"), {}),
    "grid": (Topology(row=2, col=2), P("row", "col"), {}),
    "experts": (Topology(expert=2, roles={"expert": "data"}), P("expert"), {}),
    "offloaded": (Topology(tensor=2), P("tensor"), {"states": Offloaded()}),
}


class Twice(nn.Module):
    """Two parameters with constant gradients; the second one is used in some steps only."""

    def __init__(self, spec: P | None = None, registry: ProcessGroupRegistry | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        draw = [torch.randn(SHAPE, generator=generator) for _ in range(4)]
        if spec is not None and registry is not None:
            draw = [shard(full, spec, registry) for full in draw]
        self.used, self.idle = nn.Parameter(draw[0]), nn.Parameter(draw[1])
        self.gradients: list[Tensor] = draw[2:]
        if spec is not None:
            declare(self, {"*": spec})

    def forward(self, with_idle: bool) -> Tensor:
        loss = (self.used * self.gradients[0]).sum()
        return loss + (self.idle * self.gradients[1]).sum() if with_idle else loss


def is_idle(step: int, first: bool) -> bool:
    return step == (0 if first else 2)


def dense(name: str, first: bool) -> list[Tensor]:
    """Train with the optimizer alone, which does not step parameters without gradients. Return the weights."""
    model = Twice()
    optimizer = OPTIMIZERS[name](model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        model(not is_idle(step, first)).backward()
        optimizer.step()
    return [model.used.detach(), model.idle.detach()]


def parallel(name: str, layout: str, first: bool) -> tuple[list[Tensor], bool]:
    """Train on several ranks. Return the full weights, and whether the idle step left the idle parameter unchanged."""
    topology, spec, options = LAYOUTS[layout]
    with ProcessGroupRegistry(topology) as registry:
        model = Twice(spec, registry)
        inner = OPTIMIZERS[name](model.named_parameters())
        optimizer = ParallelOptimizer(inner, registry, max_norm=None, **options)
        # The optimizer divides gradients by the number of data ranks, here the expert ranks; the factor cancels this.
        factor = registry.size("expert") if "expert" in topology.axes else 1
        kept = True
        for step in range(STEPS):
            optimizer.zero_grad()
            before = model.idle.detach().clone()
            optimizer.backward(factor * model(not is_idle(step, first)))
            optimizer.step()
            if is_idle(step, first):
                kept = torch.equal(before, model.idle)
        return [unshard(param.detach(), spec, registry) for param in (model.used, model.idle)], kept


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("first", [False, True], ids=["third step", "first step"])
def test_parameter_without_gradient_on_any_rank_is_not_stepped(world: World, layout: str, first: bool) -> None:
    for name in OPTIMIZERS:
        expected = dense(name, first)
        for found, kept in world.run(LAYOUTS[layout][0].world_size, parallel, name, layout, first):
            assert kept, name
            for one, other in zip(found, expected, strict=True):
                assert torch.allclose(one, other, rtol=2e-5, atol=2e-5), name


def steps_of_shards(busy: int | None) -> list[float]:
    """Return the step count of this rank's shard after two steps; in the second only the rank ``busy`` has a gradient."""
    with ProcessGroupRegistry(Topology(tensor=3)) as registry:
        full = torch.ones(2, 6)
        weight = nn.Parameter(shard(full, P("tensor"), registry, uneven=True))  # empty on rank 2
        annotate(weight, P("tensor"), "weight", full_shape=(2, 6))
        optimizer = ParallelOptimizer(LAMB([weight], lr=0.1), registry, max_norm=None)
        optimizer.backward(weight.sum())
        optimizer.step()
        optimizer.zero_grad()
        idle = torch.zeros((), requires_grad=True)
        optimizer.backward(weight.sum() if registry.global_rank == busy else idle * 1.0)
        optimizer.step()
        return [float(state["step"]) for state in optimizer.optimizer.state.values()]


@pytest.mark.parametrize(("busy", "steps"), [(0, 2.0), (1, 2.0), (None, 1.0)])
def test_step_count_of_an_empty_shard_equals_that_of_the_other_shards(
    world: World, busy: int | None, steps: float
) -> None:
    assert world.run(3, steps_of_shards, busy) == [[steps]] * 3
