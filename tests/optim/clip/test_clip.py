"""Explicit clipping, clipping by value, per-group thresholds, and norms per group and parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from arguments import arguments
from meshstep.optim import ByNorm, ParallelOptimizer, clip_grad_value_
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from torch import nn
from world import World


def small() -> tuple[nn.Linear, ProcessGroupRegistry]:
    torch.manual_seed(5)
    return nn.Linear(4, 3), ProcessGroupRegistry(Topology())


def test_explicit_clip_before_step_is_not_repeated_in_step() -> None:
    model, registry = small()
    optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), registry, max_norm=100.0)
    optimizer.backward(model(torch.ones(2, 4)).square().sum() * 30)
    stats = optimizer.clip_grad_by_norm(0.25)
    assert stats is not None
    grads = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    assert torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads])) == pytest.approx(0.25, rel=1e-4)
    before = [param.detach().clone() for param in model.parameters()]
    assert optimizer.step() is stats
    for old, new, grad in zip(before, model.parameters(), grads, strict=True):
        torch.testing.assert_close(new, old - grad)


def test_clip_by_value_reports_norm_before_clipping() -> None:
    model, registry = small()
    optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), registry)
    optimizer.backward(model(torch.ones(2, 4)).square().sum() * 30)
    true = torch.nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
    stats = optimizer.clip_grad_by_value(0.01)
    assert stats is not None
    assert stats.total_norm == pytest.approx(float(true), rel=1e-6)
    assert all(param.grad is not None and param.grad.abs().max() <= 0.01 for param in model.parameters())
    with_option = ParallelOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), registry, **arguments(clip_value=0.005)
    )
    before = model.bias.detach().clone()
    with_option.step()
    assert float((before - model.bias.detach()).abs().max()) == pytest.approx(0.005, rel=1e-3)


def group_norms() -> tuple[list[float], dict[str, float], float, list[float]]:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
        third = nn.Parameter(torch.zeros(1))
        for param, spec, name in ((first, P("tensor"), "first"), (second, P(), "second"), (third, P(), "third")):
            annotate(param, spec, name)
        groups: Any = [{"params": [first]}, {"params": [second], "max_norm": 2.0}]
        optimizer = ParallelOptimizer(
            torch.optim.SGD(groups, lr=1.0, fused=True), registry, **arguments(max_norm=2.5, per_parameter_norms=True)
        )
        optimizer.add_param_group({"params": [third]})
        first.grad = torch.tensor([3.0, 0.0]) if registry.global_rank == 0 else torch.tensor([0.0, 4.0])
        second.grad, third.grad = torch.tensor([0.0, 6.0, 8.0]), torch.zeros(1)
        stats = optimizer.step()
        assert stats is not None
        norms = {name: float(value) for name, value in stats.parameter_norms.items()}
        steps = [float(first.abs().max()), float(second.abs().max())]
        return stats.group_norms.tolist(), norms, float(stats.total_norm), steps


def test_group_norms_include_empty_param_groups() -> None:
    model, registry = small()
    groups: Any = [{"params": []}, {"params": [*model.parameters()]}, {"params": []}, {"params": [], "max_norm": 0.5}]
    optimizer = ParallelOptimizer(torch.optim.SGD(groups, lr=1.0), registry, max_norm=1.0)
    optimizer.backward(model(torch.ones(2, 4)).square().sum())
    stats = optimizer.step()
    assert stats is not None
    norm = float(stats.total_norm)
    assert stats.group_norms.tolist() == pytest.approx([0.0, norm, 0.0, 0.0])
    assert float(stats.clip_coef) == pytest.approx(min(1.0, 1 / norm), rel=1e-5)


def test_param_groups_are_clipped_by_own_thresholds_and_norms_are_reported(world: World) -> None:
    for rank, (groups, parameters, total, (first, second)) in enumerate(world.run(2, group_norms)):
        assert groups == pytest.approx([5.0, 10.0, 0.0])
        assert parameters == pytest.approx({"first": 5.0, "second": 10.0, "third": 0.0})
        assert total == pytest.approx(125**0.5)
        # The norm of the group without its own threshold is 5, so the clip coefficient is 2.5 / 5.
        assert first == pytest.approx((3.0, 4.0)[rank] * 0.5, rel=1e-5)
        # The norm of the second group is 10, so the clip coefficient is 2 / 10.
        assert second == pytest.approx(8.0 * 0.2, rel=1e-5)


def test_clip_grad_value_of_sparse_gradient_raises_before_any_change() -> None:
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))]
    params[0].grad = torch.full((3,), 5.0)
    params[1].grad = torch.ones(3).to_sparse()
    with pytest.raises(TypeError, match="sparse"):
        clip_grad_value_(params, 1.0)
    assert params[0].grad.tolist() == [5.0] * 3


@pytest.mark.parametrize("clip", [1.5, ByNorm(1.5, norm_type=1.0), ByNorm(lambda steps: 1 / steps), None])
def test_max_norm_property_returns_max_norm_argument_of_optimizer(clip: Any) -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        sgd = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
        assert ParallelOptimizer(sgd, registry, max_norm=clip).max_norm == clip
