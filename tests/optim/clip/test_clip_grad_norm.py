"""`clip_grad_norm_` and `global_norm` as functions: arguments, changing parameter lists, and collectives."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from dense import collectives
from meshstep.optim import ClipState, ParallelOptimizer, PerParameter, clip_grad_norm_, global_norm
from meshstep.optim.norm.measure import Reduction
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from torch import Tensor, nn
from world import World


def split_weight(bad: float | None, rank: int) -> Tensor:
    """Return a weight with this rank's half of the gradient [3, 4, 12, 84]; ``bad`` replaces the 12 on rank 1."""
    weight = nn.Parameter(torch.zeros(2))
    annotate(weight, P("tensor"), "weight")
    weight.grad = torch.tensor([[3.0, 4.0], [12.0, 84.0]][rank])
    if bad is not None and rank == 1:
        weight.grad[0] = bad
    return weight


def nonfinite(bad: float, error: bool) -> tuple[str, list[float], float]:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        weight = split_weight(bad, registry.global_rank)
        assert weight.grad is not None
        if not error:
            stats = clip_grad_norm_([weight], 0.5, registry)
            return "", weight.grad.tolist(), float(stats.found_inf)
        with pytest.raises(RuntimeError, match="error_if_nonfinite") as raised:
            clip_grad_norm_([weight], 0.5, registry, error_if_nonfinite=True)
        return str(raised.value), weight.grad.tolist(), 1.0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_error_if_nonfinite_raises_on_every_rank(world: World, bad: float) -> None:
    (first, gradient, _), (second, _, _) = world.run(2, nonfinite, bad, True)
    assert first == second
    assert f"norm of order 2.0 is {bad}" in first
    assert gradient == [3.0, 4.0]
    assert [found for *_, found in world.run(2, nonfinite, bad, False)] == [1.0, 1.0]


def finite() -> list[float]:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        weight = split_weight(None, registry.global_rank)
        stats = clip_grad_norm_([weight], 8.5, registry, error_if_nonfinite=True)
        assert float(stats.total_norm) == pytest.approx(math.sqrt(9 + 16 + 144 + 7056))
        assert weight.grad is not None
        return weight.grad.tolist()


def test_error_if_nonfinite_clips_gradients_with_finite_norm(world: World) -> None:
    first, second = world.run(2, finite)
    assert [*first, *second] == pytest.approx([0.3, 0.4, 1.2, 8.4], rel=1e-6)


@pytest.mark.parametrize("norm_type", [0.5, 0.99])
def test_norm_type_below_one_is_rejected_with_reason(norm_type: float) -> None:
    registry = ProcessGroupRegistry(Topology())
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    with pytest.raises(
        ValueError, match=rf"norm_type={norm_type}: give a number >= 1 .* below 1 the triangle inequality fails"
    ):
        clip_grad_norm_([weight], 1.0, registry, norm_type)
    with pytest.raises(ValueError, match="below 1 the triangle inequality fails"):
        global_norm([weight], registry, norm_type)
    assert weight.grad.tolist() == [1.0, 1.0]


# Parameter lists that change between calls ----------------------------------------------------------------------------


def lists_that_change_on_one_rank(reduction: Reduction, norm_type: float) -> list[float]:
    """Return the norms of three calls.

    The first two calls get the same parameter on rank 0, and a new parameter each on rank 1. The third gets none.
    """
    found = []
    with ProcessGroupRegistry(Topology(pipe=2)) as registry:
        kept = nn.Parameter(torch.zeros(2))
        annotate(kept, P(), "kept")
        kept.grad = torch.tensor([3.0, 4.0])
        for call in range(3):
            named = [("kept", kept)]
            if registry.global_rank == 1:
                new = nn.Parameter(torch.zeros(1))
                annotate(new, P(), f"new {call}")
                new.grad = torch.tensor([12.0 * (call + 1)])
                named = [(f"new {call}", new)]
            norm = global_norm(named if call < 2 else [], registry, norm_type, reduction=reduction).total_norm
            found.append(float(norm))
    return found


@pytest.mark.parametrize(
    ("norm_type", "expected"), [(2.0, [13.0, math.hypot(5, 24), 0.0]), (math.inf, [12.0, 24.0, 0.0])]
)
@pytest.mark.parametrize("reduction", ["packed", "per_group"])
def test_global_norm_allows_parameter_list_to_change_on_one_rank(
    world: World, reduction: Reduction, norm_type: float, expected: list[float]
) -> None:
    for found in world.run(2, lists_that_change_on_one_rank, reduction, norm_type):
        assert found == pytest.approx(expected)


def wrong_on_one_rank(norm_type: float) -> str:
    """Pass a complex gradient on rank 1 in the second call; the third call is valid again.

    Return the error of the second call; without an error, "skip" if it reports a non-finite norm, else "step".
    """
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        weight = split_weight(None, registry.global_rank)
        good = clip_grad_norm_([weight], 1e6, registry, norm_type)
        other = nn.Parameter(torch.zeros(2, dtype=torch.complex64 if registry.global_rank else torch.float32))
        annotate(other, P("tensor"), "other")
        other.grad = torch.ones_like(other)
        try:
            stats = clip_grad_norm_([weight, other], 0.5, registry, norm_type)
            said = "skip" if stats.found_inf else "step"
        except (TypeError, ValueError) as error:
            said = str(error)
        again = clip_grad_norm_([weight], 1e6, registry, norm_type)
        assert float(again.total_norm) == float(good.total_norm)
        return said


@pytest.mark.parametrize("norm_type", [2.0, 14.0, math.inf])
def test_complex_gradient_on_one_rank_raises_there_and_sets_found_inf_elsewhere(world: World, norm_type: float) -> None:
    first, second = world.run(2, wrong_on_one_rank, norm_type)
    assert first == "skip"
    assert "the gradient of other is complex" in second


# Collectives of a reduction -------------------------------------------------------------------------------------------


def step_of(params: list[nn.Parameter], registry: ProcessGroupRegistry, reduction: Reduction) -> Callable[[], Any]:
    optimizer = ParallelOptimizer(
        torch.optim.SGD(params, lr=0.0), registry, max_norm=1.0, reduction=reduction, check_replicas=False
    )
    return optimizer.step


def measured_by_each_function(reduction: Reduction) -> dict[str, tuple[float, dict[str, int]]]:
    """Measure a sharded weight and a replicated bias twice with each function.

    Return, per function, the second norm and the collectives of the second call.
    """
    found = {}
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        weight, bias = split_weight(None, registry.global_rank), nn.Parameter(torch.zeros(1))
        annotate(bias, P(), "bias")
        params: Any = [weight, bias]
        functions: dict[str, Callable[[], Any]] = {
            "global_norm": partial(global_norm, params, registry, reduction=reduction),
            "number": partial(clip_grad_norm_, params, 1000.0, registry, reduction=reduction),
            "state": partial(clip_grad_norm_, params, ClipState(PerParameter(1000.0)), registry, reduction=reduction),
            "step": step_of(params, registry, reduction),
        }
        for name, function in functions.items():
            for _ in range(2):
                weight.grad, bias.grad = split_weight(None, registry.global_rank).grad, torch.tensor([132.0])
                with collectives() as seen:
                    stats = function()
            found[name] = float(stats.total_norm), dict(seen)
    return found


@pytest.mark.parametrize(("reduction", "count"), [("packed", 1), ("per_group", 2)])
def test_norm_and_clip_functions_issue_collectives_of_chosen_reduction(
    world: World, reduction: Reduction, count: int
) -> None:
    """With "per_group", one all-reduce sums the powers of the sharded weight, and one sums the non-finite flags."""
    for found in world.run(2, measured_by_each_function, reduction):
        for name, (norm, seen) in found.items():
            assert norm == pytest.approx(157.0), name  # (3, 4, 12, 84, 132)
            assert seen == {"all_reduce": count}, name


def norm_beside_a_wrong_call(norm_type: float) -> str:
    """Measure twice; in the second call, rank 0 passes an empty tuple instead of a parameter.

    Return the norm of the second call, or its error.
    """
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        weight = nn.Parameter(torch.ones(3))
        annotate(weight, P(), "weight")
        weight.grad = torch.ones(3)
        global_norm([weight], registry, norm_type=norm_type)
        wrong: Any = [()] if registry.global_rank == 0 else [weight]
        try:
            return str(float(global_norm(wrong, registry, norm_type=norm_type).total_norm))
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 12.0, math.inf])
def test_wrong_parameters_on_one_rank_give_other_ranks_a_nan_norm(world: World, norm_type: float) -> None:
    error = "params has a tuple of 0 items; give (name, parameter) pairs"
    assert world.run(2, norm_beside_a_wrong_call, norm_type) == [error, "nan"]
