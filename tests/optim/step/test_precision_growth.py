"""Updates in steps in which the loss scale grows."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import ProcessGroupRegistry, spec_of, unshard
from optimizers import stepped
from precision_modes import DYNAMIC, MODES, make
from scenarios import SCENARIOS, Full, Scenario, batch, dense_loss
from torch import Tensor, nn
from world import World

STEPS, LEARNING_RATE = 4, 1e-2  # as in "plain sgd", whose update is proportional to the gradient


class Step(NamedTuple):
    """A step compared with the dense step from the same weights; errors are relative."""

    grew: bool
    update_error: float
    norm_error: float


def whole(model: nn.Module, optimizer: ParallelOptimizer) -> Full:
    """Return the full weights that the optimizer steps; master weights if there are any."""
    names = [name for name, _ in model.named_parameters()]
    pairs = zip(names, stepped(optimizer), strict=True)
    return {name: unshard(param.detach(), spec_of(param), optimizer.registry) for name, param in pairs}


def flat(tensors: Full) -> Tensor:
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def dense_step(scenario: Scenario, start: Full, max_norm: float) -> tuple[Tensor, float]:
    """Return torch's update and norm in float64."""
    params = {name: value.double().requires_grad_() for name, value in start.items()}
    dense_loss(scenario, params, batch(0)).backward()
    norm = nn.utils.clip_grad_norm_(list(params.values()), max_norm)
    grads = {name: param.grad for name, param in params.items() if param.grad is not None}
    return -LEARNING_RATE * flat(grads), float(norm)


def grow(name: str, mode: str, clip: bool, update_first: bool) -> list[Step]:
    """Run steps in which the loss scale grows after every second step. ``update_first`` plants a bug: the scale is
    updated before the step."""
    scenario = SCENARIOS[name]
    with ProcessGroupRegistry(scenario.topology) as registry:
        model, optimizer = make(scenario, registry, MODES[mode], "plain sgd")
        scale = optimizer.loss_scale
        assert scale is not None
        scale.load_state_dict({**scale.state_dict(), "scale": 2.0**10, "growth_interval": 2})
        bound = float("inf")
        if clip:
            bound = 0.9 * dense_step(scenario, whole(model, optimizer), bound)[1]
            optimizer.max_norm = bound
        report = []
        for _ in range(STEPS):
            start, used = whole(model, optimizer), float(scale.scale)
            update, norm = dense_step(scenario, start, bound)
            optimizer.zero_grad()
            optimizer.backward(model(batch(0)))
            if update_first:
                scale.update(torch.zeros(()))
            with mock.patch.object(scale, "update") if update_first else nullcontext():
                stats = optimizer.step()
            assert stats is not None
            found = flat(whole(model, optimizer)) - flat(start)
            error = float((found - update).norm() / update.norm())
            report.append(Step(float(scale.scale) == 2 * used, error, abs(float(stats.total_norm) / norm - 1)))
        return report


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(("name", "mode"), [*(("tensor", mode) for mode in DYNAMIC), ("grid, bias on all", "O2")])
def test_update_in_step_with_growing_loss_scale_matches_dense_update(
    world: World, name: str, mode: str, clip: bool
) -> None:
    for steps in world.run(SCENARIOS[name].topology.world_size, grow, name, mode, clip, False):
        assert [step.grew for step in steps] == [False, True, False, True]
        for step in steps:
            assert step.update_error < 1e-2
            assert step.norm_error < 2e-3


@pytest.mark.parametrize("clip", [False, True])
def test_loss_scale_updated_before_step_gives_wrong_update_and_norm(world: World, clip: bool) -> None:
    for steps in world.run(2, grow, "tensor", "fp16", clip, True):
        assert [step.grew for step in steps] == [False, True, False, True]
        for step in steps:
            assert (step.update_error > 0.4) == step.grew
            assert (step.norm_error > 0.4) == step.grew
