"""Collectives and host synchronization of a step, schedulers, hooks and state dicts."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from meshstep.optim import ParallelOptimizer
from meshstep.optim.step.update import steps_on_device
from meshstep.parallel import ProcessGroupRegistry, Topology
from optimizers import OPTIMIZERS, optimizer_for
from probes import HostReadError, collectives, no_host_reads
from scenarios import SCENARIOS, backward, batch
from torch import nn
from world import World

# Collectives and host synchronization ---------------------------------------------------------------------------------


def count_collectives(name: str, options: dict[str, Any]) -> list[Counter[str]]:
    with ProcessGroupRegistry(SCENARIOS[name].topology) as registry:
        model, optimizer = optimizer_for(name, registry, **options)
        counts = []
        for step in range(3):
            optimizer.zero_grad()
            backward(SCENARIOS[name], model, optimizer, batch(step))
            with collectives() as seen:
                optimizer.step()
            counts.append(seen)
        return counts


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("tensor", {}, {"all_reduce": 1}),
        ("tensor", {"max_norm": 0.3, "per_parameter_norms": True}, {"all_reduce": 1}),
        ("tensor", {"norm_type": float("inf")}, {"all_gather_single": 1}),
        (
            "grid, bias on row 0",
            {"max_norm": 1.0},
            {"all_reduce": 2},
        ),  # for the partial gradient of the table and for the norm
        (
            "data x tensor",
            {"max_norm": 0.3, "check_replicas": True},
            {"all_reduce": 3},
        ),  # over data for sharded and for replicated gradients, and for the norm
        (
            "data x sequence parallel",
            {},
            {"all_reduce": 3},
        ),  # over data, over data x tensor for partial gradients, and for the norm
    ],
)
def test_step_needs_one_collective_in_addition_to_gradient_reductions(
    world: World, name: str, options: dict[str, Any], expected: dict[str, int]
) -> None:
    for counts in world.run(SCENARIOS[name].topology.world_size, count_collectives, name, options):
        assert counts[1:] == [expected, expected]


def step_without_reading(name: str, kind: str, fused: bool, options: dict[str, Any]) -> bool:
    with ProcessGroupRegistry(SCENARIOS[name].topology) as registry:
        model, optimizer = optimizer_for(name, registry, kind, fused, **options)
        for step in range(20):  # more steps than the delay of the skip monitor
            optimizer.zero_grad()
            backward(SCENARIOS[name], model, optimizer, batch(step))
            if step == 0:
                optimizer.step()
                continue
            try:
                with no_host_reads():
                    optimizer.step()
            except HostReadError:
                return False
        return True


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_fused_step_needs_no_host_synchronization(world: World, kind: str) -> None:
    fused = {"adagrad": torch.optim.Adagrad}.get(kind, torch.optim.AdamW)([nn.Parameter(torch.ones(1))], fused=True)
    if not getattr(fused, "_step_supports_amp_scaling", False):
        pytest.skip(
            f"torch {torch.__version__}'s fused {type(fused).__name__} lacks the skip flag and reads on the host"
        )
    assert all(world.run(2, step_without_reading, "tensor", kind, True, {"max_norm": 0.3}))


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{}, {"clip_value": 0.01}, {"norm_type": float("inf"), "max_norm": 0.1}, {"per_parameter_norms": True}]
)
def test_step_with_clip_and_norm_options_needs_no_host_synchronization(world: World, options: dict[str, Any]) -> None:
    assert all(world.run(4, step_without_reading, "data x sequence parallel", "adamw", True, options))


def test_step_of_unfused_optimizer_synchronizes_with_host(world: World) -> None:
    assert not any(world.run(2, step_without_reading, "tensor", "adamw", False, {}))


# Schedulers, hooks, state dicts ---------------------------------------------------------------------------------------


def small() -> tuple[nn.Linear, ProcessGroupRegistry]:
    torch.manual_seed(5)
    return nn.Linear(4, 3), ProcessGroupRegistry(Topology())


def test_parallel_optimizer_supports_schedulers_hooks_and_isinstance() -> None:
    model, registry = small()
    optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=1.0, fused=True), registry, max_norm=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    calls = []
    before = optimizer.register_step_pre_hook(lambda opt, args, kwargs: calls.append(("pre", opt)))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: calls.append(("post", opt)))
    rates = []
    for _ in range(4):
        optimizer.zero_grad()
        optimizer.backward(model(torch.ones(2, 4)).square().sum())
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
        before.remove()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert rates == pytest.approx([1.0, 0.1, 0.1, 0.01])
    assert calls == [("pre", optimizer)] + [("post", optimizer)] * 4
    assert optimizer.state is optimizer.optimizer.state
    assert "max_norm=0.5" in repr(optimizer)
    assert optimizer.grad_norm is not None
    assert optimizer.grad_norm > 0.5


def test_optimizer_resumes_bitwise_from_state_dict() -> None:
    model, registry = small()

    def make(module: nn.Module) -> ParallelOptimizer:
        return ParallelOptimizer(torch.optim.AdamW(module.parameters(), lr=0.1, fused=True), registry, max_norm=0.5)

    def train(module: nn.Module, opt: ParallelOptimizer, value: float) -> None:
        opt.zero_grad()
        opt.backward(module(torch.full((2, 4), value)).square().sum())
        opt.step()

    optimizer = make(model)
    train(model, optimizer, 1.0)
    train(model, optimizer, torch.nan)
    twin = copy.deepcopy(model)
    resumed = make(twin)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.skipped_steps == optimizer.skipped_steps == 1
    for value in (2.0, 3.0):
        train(model, optimizer, value)
        train(twin, resumed, value)
    assert torch.equal(model.weight, twin.weight)
    resumed.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
    assert resumed.skipped_steps == 0


class WithoutSkipFlag(torch.optim.SGD):
    """SGD with a group that says ``fused=True``, in a subclass that does not promise to read ``found_inf``."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)
        self.param_groups[0]["fused"] = True


def test_host_skips_step_of_fused_optimizer_that_ignores_found_inf() -> None:
    model, registry = small()
    inner = WithoutSkipFlag(model.parameters())
    assert not steps_on_device(inner)
    assert steps_on_device(torch.optim.SGD(model.parameters(), lr=1.0, fused=True))
    optimizer = ParallelOptimizer(inner, registry, max_norm=0.5)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.backward(model(torch.full((1, 4), torch.inf)).sum())
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_check_state_dict_loads_nothing_and_rejects_invalid_state() -> None:
    model, registry = small()
    optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9), registry)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.check_state_dict(state)
    state["param_groups"][0]["lr"] = 3.0
    optimizer.check_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 1.0
    state["meshstep"]["skipped_steps"] = -1
    with pytest.raises(ValueError, match="skipped_steps"):
        optimizer.check_state_dict(state)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [([1, 1], "groups have 2 parameters, but the optimizer's have 1, 1:"), ([1], "optimizer's have 1:")],
)
def test_check_state_dict_rejects_other_param_groups(sizes: list[int], text: str) -> None:
    def made(sizes: list[int]) -> ParallelOptimizer[Any]:
        groups = [{"params": [torch.nn.Parameter(torch.ones(2)) for _ in range(size)]} for size in sizes]
        return ParallelOptimizer(torch.optim.SGD(groups, lr=1.0), ProcessGroupRegistry(Topology()))

    with pytest.raises(ValueError, match=text):
        made(sizes).check_state_dict(made([2]).state_dict())


def test_check_state_dict_rejects_state_of_other_optimizer_order() -> None:
    first, second = ([torch.nn.Parameter(torch.ones(2))] for _ in range(2))
    parts = [torch.optim.SGD(first), torch.optim.AdamW(second)]
    optimizer = ParallelOptimizer(parts, ProcessGroupRegistry(Topology()))
    state = optimizer.state_dict()
    state["param_groups"].reverse()
    with pytest.raises(ValueError, match="belong to the optimizers with the indices"):
        optimizer.check_state_dict(state)
