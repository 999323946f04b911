"""Experts without tokens: no gradient or a zero gradient, on some or all of the ranks that replicate them."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
import torch
from meshstep.optim import ParallelOptimizer, Sharded
from meshstep.parallel import P, ProcessGroupRegistry, Topology
from small_models import parameter
from world import World

ROLES: dict[str, Any] = {"expert": "data"}
# In the second step, only the second expert of the first data coordinate may have tokens. Per case: the factor of the
# expert's loss term on all other ranks, and on the rank of that expert.
SAID = {"one data coordinate": (0.0, 8.0), "no rank": (0.0, 0.0)}


def stepped(copies: int, idle: str, zeros: bool, options: dict[str, Any]) -> tuple[float, list[float], list[float]]:
    """Return the norm, the expert and the router after two steps with momentum; all experts have tokens in the
    first step."""
    with ProcessGroupRegistry(Topology(roles=ROLES, data=copies, expert=4 // copies)) as registry:
        expert, router = parameter("expert", 2, P("expert"), value=1.0), parameter("router", 2, value=1.0)
        sgd = torch.optim.SGD([expert, router], lr=1.0, momentum=0.5)
        optimizer = ParallelOptimizer(sgd, registry, max_norm=4.0, **options)
        optimizer.backward((expert + router).sum())
        optimizer.step()
        optimizer.zero_grad()
        busy = registry.rank("data") == 0 and registry.rank("expert") == 1
        said = SAID[idle][busy]
        optimizer.backward(2 * router.sum() + (said * expert.sum() if zeros or said else 0.0))
        stats = optimizer.step()
        assert stats is not None
        return float(stats.total_norm), expert.tolist(), router.tolist()


@pytest.mark.parametrize("options", [{}, {"states": Sharded("data")}, {"states": Sharded("data", gradients=True)}])
@pytest.mark.parametrize("idle", SAID)
@pytest.mark.parametrize("zeros", [False, True])
def test_replicated_expert_without_gradient_is_stepped_with_zero_gradient(
    world: World, idle: str, zeros: bool, options: dict[str, Any]
) -> None:
    # First step: each expert gets 1/4 of each rank's gradient of 1, summed over two replicas; the router gets 1.
    found = world.run(4, stepped, 2, idle, zeros, options)
    said = sum(SAID[idle]) / 4
    norm = sqrt(2 * said**2 + 2 * 2.0**2)
    for rank, (total, expert, router) in enumerate(found):
        assert total == pytest.approx(norm, rel=1e-6)
        coef = min(1.0, 4.0 / (norm + 1e-6))
        own = said if rank % 2 else 0.0
        assert expert == pytest.approx([1 - 0.5 - (0.5 * 0.5 + own * coef)] * 2, rel=1e-6)
        assert router == pytest.approx([1 - 1 - (0.5 * 1 + 2 * coef)] * 2, rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"states": Sharded("data")}])
@pytest.mark.parametrize("idle", SAID)
def test_experts_without_replicas_are_all_stepped_if_any_has_a_gradient(
    world: World, idle: str, options: dict[str, Any]
) -> None:
    """The experts are shards of one tensor. If one shard has a gradient, the momentum moves the weights of all shards."""
    found = world.run(4, stepped, 1, idle, False, options)
    said = SAID[idle][1] / 4
    norm = sqrt(2 * said**2 + 2 * 2.0**2)
    coef = min(1.0, 4.0 / (norm + 1e-6))
    for rank, (total, expert, router) in enumerate(found):
        assert total == pytest.approx(norm, rel=1e-6)
        moved = 0.5 * 0.25 + (said * coef if rank == 1 else 0.0) if said else 0.0
        assert expert == pytest.approx([1 - 0.25 - moved] * 2, rel=1e-6)
        assert router == pytest.approx([1 - 1 - (0.5 * 1 + 2 * coef)] * 2, rel=1e-6)
