"""Param groups added later: after parameters were frozen, and on ranks without parameters of the group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshstep.amp import Bf16
from meshstep.optim import Offloaded, ParallelOptimizer, StatePlacement
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from placements import EXCHANGES, ZERO1, ZERO2
from torch import Tensor, nn
from world import World

OPTIONS: dict[str, dict[str, Any]] = {
    **EXCHANGES,
    "offload": {"states": Offloaded(1.0)},
    "ZeRO-2, offload": {"states": (ZERO2, Offloaded(0.5))},
}


def frozen_then_added(how: str, mode: str) -> dict[str, Tensor]:
    """Freeze "b" after two steps, add "c", and step twice more. Return the weights, and "b" at the time of freezing."""
    precision = {"fp32": "fp32", "bf16": "bf16", "split": Bf16(split_masters=True)}[mode]
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        dtype = torch.float32 if mode == "fp32" else torch.bfloat16
        model = nn.ParameterDict({name: torch.linspace(0.5, 2, 6).to(dtype) for name in "abc"})
        declare(model, {"*": P()})
        adamw = torch.optim.AdamW([model["a"], model["b"]], lr=0.125, weight_decay=0.5)
        options: dict[str, Any] = {"precision": precision, **OPTIONS[how]}
        optimizer = ParallelOptimizer(adamw, registry, **options)

        def step(*names: str) -> None:
            optimizer.zero_grad()
            scale = registry.global_rank + 1
            optimizer.backward(sum((model[n].float().square().sum() for n in names), torch.zeros(())) * scale)
            optimizer.step()

        for _ in range(2):
            step("a", "b")
        optimizer.zero_grad()
        model["b"].requires_grad_(False)
        before = model["b"].detach().clone()
        optimizer.add_param_group({"params": [model["c"]]})
        for _ in range(2):
            step("a", "c")
        return {**{name: param.detach().float() for name, param in model.items()}, "before": before.float()}


@pytest.mark.parametrize("mode", ["fp32", "bf16", "split"])
@pytest.mark.parametrize("how", OPTIONS)
def test_added_param_group_is_stepped_and_frozen_parameter_is_unchanged(world: World, how: str, mode: str) -> None:
    a, c = (torch.linspace(0.5, 2, 6).requires_grad_() for _ in range(2))
    first, second = (torch.optim.AdamW([param], lr=0.125, weight_decay=0.5) for param in (a, c))
    for step in range(4):
        for param, dense in ((a, first), (c, second)) if step >= 2 else ((a, first),):
            param.grad = 2 * param.detach() * 1.5
            dense.step()
    for found in world.run(2, frozen_then_added, how, mode):
        assert torch.equal(found["b"], found["before"])
        for name, wanted in (("a", a), ("c", c)):
            torch.testing.assert_close(found[name], wanted.detach(), rtol=1e-5 if mode == "fp32" else 2**-6, atol=0)


def added_on_some(named: bool, starts_empty: bool, states: tuple[StatePlacement, ...]) -> dict[str, Tensor]:
    """Add a group that only the second of two stages holds; with ``starts_empty`` the second stage holds no first
    group.

    Return the parameters after a step.
    """
    with ProcessGroupRegistry(Topology(pipe=2, data=2)) as registry:
        model = nn.ParameterDict({name: torch.linspace(0.5, 2, 6) for name in "ac"})
        declare(model, {"*": P()})
        stage = registry.coordinate["pipe"]

        def given(name: str, here: bool) -> list[Any]:
            return ([(name, model[name])] if named else [model[name]]) if here else []

        first = given("a", stage == 0 or not starts_empty)
        sgd = torch.optim.SGD(first or [{"params": []}], lr=0.125)
        optimizer = ParallelOptimizer(sgd, registry, states=states)
        optimizer.add_param_group({"params": given("c", stage == 1), "lr": 0.25})
        used = [param for group in optimizer._groups for _, param in group]
        optimizer.backward(sum((param.square().sum() for param in used), torch.zeros(())))
        optimizer.step()
        assert all(("param_names" in group) == named for group in optimizer.param_groups if group["params"])
        return {name: param.detach() for name, param in model.items()}


@pytest.mark.parametrize("starts_empty", [False, True])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("states", [(), (ZERO1,), (ZERO2,)], ids=["whole", "ZeRO-1", "ZeRO-2"])
def test_param_group_can_be_added_on_a_single_pipeline_stage(
    world: World, named: bool, starts_empty: bool, states: tuple[StatePlacement, ...]
) -> None:
    start = torch.linspace(0.5, 2, 6)
    for rank, found in enumerate(world.run(4, added_on_some, named, starts_empty, states)):
        stage = rank // 2
        has_a, has_c = stage == 0 or not starts_empty, stage == 1
        torch.testing.assert_close(found["a"], start * 0.75 if has_a else start)
        torch.testing.assert_close(found["c"], start * 0.5 if has_c else start)


def test_added_param_group_may_be_a_single_tensor() -> None:
    with ProcessGroupRegistry(Topology(data=1)) as registry:
        first, added = (nn.Parameter(torch.ones(2, 3)) for _ in range(2))
        optimizer = ParallelOptimizer(torch.optim.SGD([first], lr=1.0), registry)
        optimizer.add_param_group({"params": added})
        optimizer.backward(first.sum() + added.sum())
        optimizer.step()
    assert torch.equal(added, torch.zeros(2, 3))
