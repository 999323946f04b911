"""The first step raises if all shards of a parameter and of its gradient are bitwise equal.

Exceptions: cases in which equality proves nothing, and ``check_replicas=False``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshstep.optim import ParallelOptimizer, Sharded
from meshstep.optim.norm.plan import ReductionPlan
from meshstep.optim.norm.replicas import EqualShards
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from torch import nn
from world import World

VARYING = [0.5, -1.0, 2.0, 0.25, 3.0, -0.125, 1.5, 0.75]


def first_step(weights: Any, gradients: Any, spec: P, options: dict[str, Any]) -> str:
    """Run the first step of parameter "w" on data=2, tensor=2. Return the error message, "" if there is none.

    ``weights`` and ``gradients`` have values of "w" per coordinate of the tensor axis.
    """
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        at = registry.coordinate["tensor"]
        param, other = nn.Parameter(torch.tensor(weights[at])), nn.Parameter(torch.ones(3))
        annotate(param, spec, "w")
        annotate(other, P(), "other")
        optimizer = ParallelOptimizer(torch.optim.SGD([other, param], lr=1.0), registry, **options)
        optimizer.backward((param * torch.tensor(gradients[at])).sum() + other.sum())
        try:
            optimizer.step()
        except ValueError as error:
            assert torch.equal(param, torch.tensor(weights[at])), "the failed step changed the parameter"
            return str(error)
        return ""


ZEROS, OTHER, FOUR = [0.0] * 8, [value + 1 for value in VARYING], VARYING[:4]
SPLIT = P("tensor")
COPIES: dict[str, tuple[Any, Any, P, dict[str, Any]]] = {
    "replicated": ([VARYING] * 2, [OTHER] * 2, SPLIT, {}),
    "zeros as weights": ([ZEROS] * 2, [OTHER] * 2, SPLIT, {}),
    "four elements": ([FOUR] * 2, [FOUR] * 2, SPLIT, {}),
    "ZeRO-1": ([VARYING] * 2, [OTHER] * 2, SPLIT, {"states": Sharded("data")}),
    "in every step": ([VARYING] * 2, [OTHER] * 2, SPLIT, {"check_replicas": True}),
}
RIGHT: dict[str, tuple[Any, Any, P, dict[str, Any]]] = {
    "other weights": ([VARYING, OTHER], [OTHER] * 2, SPLIT, {}),
    "other gradients": ([VARYING] * 2, [OTHER, VARYING], SPLIT, {}),
    "constant gradients": ([VARYING] * 2, [[1.0] * 8] * 2, SPLIT, {}),
    "zeros as gradients": ([VARYING] * 2, [ZEROS] * 2, SPLIT, {}),
    "NaN": ([VARYING] * 2, [[float("nan"), *VARYING[1:]]] * 2, SPLIT, {}),
    "three elements": ([VARYING[:3]] * 2, [VARYING[:3]] * 2, SPLIT, {}),
    "four elements, zeros": ([ZEROS[:4]] * 2, [FOUR] * 2, SPLIT, {}),
    "uneven": ([VARYING, VARYING[:7]], [OTHER, OTHER[:7]], SPLIT, {}),
    "empty": ([VARYING, []], [OTHER, []], SPLIT, {}),
    "replica": ([VARYING] * 2, [OTHER] * 2, P(), {}),
    "not compared": ([VARYING] * 2, [OTHER] * 2, SPLIT, {"check_replicas": False}),
}


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("case", COPIES)
def test_replica_declared_as_sharded_raises_on_every_rank(world: World, case: str) -> None:
    for error in world.run(4, first_step, *COPIES[case]):
        assert error.startswith("w is declared sharded along axis 'tensor', but all 2 shards are bitwise equal")
        assert "without 'tensor': P()" in error
        assert "turn the comparison off: check_replicas=False" in error


@pytest.mark.parametrize("case", RIGHT)
def test_first_step_accepts_unequal_inconclusive_or_uncompared_shards(world: World, case: str) -> None:
    assert world.run(4, first_step, *RIGHT[case]) == [""] * 4


def owned_experts() -> str:
    """Give each tensor rank an expert with equal values, sharded over data by its spec. Return "stepped"."""
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        param = nn.Parameter(torch.tensor(VARYING))
        rank = registry.coordinate["tensor"]
        annotate(param, P("data", owned={"tensor": rank}), f"expert {rank}")
        optimizer = ParallelOptimizer(torch.optim.SGD([param], lr=1.0), registry)
        optimizer.backward((param * torch.tensor(OTHER)).sum())
        optimizer.step()
    return "stepped"


def test_owner_only_parameters_are_not_compared_as_shards(world: World) -> None:
    assert world.run(4, owned_experts) == ["stepped"] * 4


def test_equal_shards_check_ignores_parameters_compared_on_no_rank() -> None:
    topology = Topology(tensor=2)
    plan = ReductionPlan(topology, 0, (), (), parameter_names=("equal", "unheld", "different"))
    totals = torch.tensor([[0.0, 0.0, 2.0], [0.0, 0.0, 0.0], [0.0, 3.0, 2.0]], dtype=torch.float64)
    check = EqualShards(plan, [], torch.device("cpu"))
    assert check.find(totals.view(-1)) == [("equal", "tensor")]
