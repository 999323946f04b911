"""Gradients that one replica of a parameter lacks: an error between model-parallel ranks, zeros between data ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from meshstep.optim import ParallelOptimizer, Sharded
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from small_models import parameter
from torch import nn
from world import World

STEPS = 20  # an error may come 16 steps late

WAYS: dict[str, dict[str, Any]] = {
    "step reduces": {},
    "overlap": {"overlap": True},
    "ZeRO-1": {"states": Sharded("data")},
    "ZeRO-2": {"states": Sharded("data", gradients=True)},
    "fixed order": {"sum_order": "fixed", "accumulation_steps": 1},
    "masters": {"precision": "bf16"},
    "no replica check": {"check_replicas": False},
}


class Outcome(NamedTuple):
    """A rank's outcome: the error, the second parameter after each step, and the number of skipped steps."""

    error: str
    weights: list[list[float]]
    skipped: int


def trained(sizes: dict[str, Any], options: dict[str, Any], without: set[int], spec: P, start: int) -> Outcome:
    """Train two parameters; from step ``start`` on, the ranks in ``without`` do not use the second one.

    With ``spec`` partial over an axis, each rank's gradient is a summand.
    """
    with ProcessGroupRegistry(Topology(**sizes)) as registry:
        w, v = parameter("w", 3, value=2.0), nn.Parameter(torch.ones(4))
        annotate(v, spec, "v")
        if options.get("precision") == "bf16":
            w.data, v.data = w.data.bfloat16(), v.data.bfloat16()
        optimizer = ParallelOptimizer(torch.optim.SGD([w, v], lr=0.01), registry, max_norm=0.5, **options)
        weights: list[list[float]] = []
        try:
            for step in range(STEPS):
                loss = w.float().square().sum()
                if step < start or registry.global_rank not in without:
                    loss = loss + v.float().square().sum()
                optimizer.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                weights.append(v.tolist())
            optimizer.poll()
        except RuntimeError as error:
            return Outcome(str(error), weights, optimizer.skipped_steps)
        return Outcome("", weights, optimizer.skipped_steps)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("without", [{1}, {1, 3}])
def test_gradient_missing_on_one_tensor_rank_is_an_error_on_every_rank(
    world: World, way: str, without: set[int]
) -> None:
    results = world.run(4, trained, {"data": 2, "tensor": 2}, WAYS[way], without, P(), 2)
    for result in results:
        assert "the gradient of v at data=0 is present on rank 0 and missing on rank 1" in result.error
        assert ("at data=1 is present on rank 2 and missing on rank 3" in result.error) == (3 in without)
        assert "P(partial=...)" in result.error
        assert result.weights[1:] == [result.weights[1]] * len(result.weights[1:])  # nothing was stepped since
        assert result.weights == results[0].weights
        assert result.skipped == len(result.weights) - 1


def test_gradient_missing_in_the_first_step_is_found_without_the_replica_check(world: World) -> None:
    for result in world.run(2, trained, {"tensor": 2}, {"check_replicas": False}, {1}, P(), 0):
        assert "the gradient of v is present on rank 0 and missing on rank 1" in result.error
        assert {*map(tuple, result.weights)} <= {(1.0, 1.0, 1.0, 1.0)}


# Missing gradients without an error: (mesh, ranks without a gradient, spec)
ALLOWED: dict[str, tuple[dict[str, int], set[int], P]] = {
    "on both tensor ranks of one data rank": ({"data": 2, "tensor": 2}, {2, 3}, P()),
    "on one data rank": ({"data": 4}, {3}, P()),
    "on all ranks": ({"data": 2, "tensor": 2}, {0, 1, 2, 3}, P()),
    "partial over the tensor axis": ({"data": 2, "tensor": 2}, {1}, P(partial="tensor")),
    "a shard": ({"data": 2, "tensor": 2}, {1}, P("tensor")),
    "on one pipeline stage": ({"pipe": 2, "tensor": 2}, {2, 3}, P()),
}


@pytest.mark.parametrize("way", ["step reduces", "overlap", "ZeRO-2"])
@pytest.mark.parametrize("allowed", ALLOWED)
def test_missing_gradient_is_no_error_unless_model_parallel_replicas_disagree(
    world: World, allowed: str, way: str
) -> None:
    sizes, without, spec = ALLOWED[allowed]
    if "data" not in sizes and way != "step reduces":
        pytest.skip("no data axis to reduce gradients over")
    results = world.run(4, trained, sizes, WAYS[way], without, spec, 2)
    assert {result.error for result in results} == {""}
    assert {result.skipped for result in results} == {0}
    if "tensor" not in spec.sharded_axes and "pipe" not in sizes:
        assert all(result.weights == results[0].weights for result in results)


def abandoned() -> tuple[str, list[float]]:
    """Abandon a window in which one tensor rank got a gradient of ``v``, then train without ``v`` on both."""
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        w, v = parameter("w", 3, value=2.0), parameter("v", 3, value=1.0)
        optimizer = ParallelOptimizer(torch.optim.SGD([w, v], lr=0.01), registry, overlap=True)
        try:
            for step in range(STEPS):
                loss = w.square().sum()
                if step == 2 and registry.rank("tensor"):
                    optimizer.backward(loss + v.square().sum())
                    optimizer.zero_grad()
                    loss = w.square().sum()
                elif step == 2:
                    optimizer.backward(w.square().sum())
                    optimizer.zero_grad()
                elif step < 2:
                    loss = loss + v.square().sum()
                optimizer.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.poll()
        except RuntimeError as error:
            return str(error), []
        return "", w.tolist()


def test_gradients_of_an_abandoned_window_do_not_count_as_present(world: World) -> None:
    results = world.run(4, abandoned)
    assert results == [results[0]] * 4
    assert results[0][0] == ""
