"""Warnings about parameters without a gradient on any rank in the first steps."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from meshstep.optim import Offloaded, ParallelOptimizer, Sharded
from meshstep.optim.step.first_window_checks import WINDOWS
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, declare
from torch import nn
from world import World

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ZeRO-1": {"states": Sharded("data")},
    "ZeRO-2": {"states": Sharded("data", gradients=True)},
    "overlap": {"overlap": True},
    "offloaded": {"states": Offloaded(1.0)},
    "bf16": {"precision": "bf16"},
    "accumulated": {"accumulation_steps": 2},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(x))
        return result


def warned(how: str, option: str, steps: int = 2 * WINDOWS + 2) -> list[tuple[int, str]]:
    options = OPTIONS[option]
    found = []
    with ProcessGroupRegistry(Topology(data=2)) as registry, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Net().to(torch.bfloat16 if option == "bf16" else torch.float32)
        declare(model, {"*": P()})
        optimizer = ParallelOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.01), registry, **options)
        if how == "replaced":
            model.head = nn.Linear(4, 2).to(model.body.weight.dtype)
        if how == "frozen later":
            model.head.requires_grad_(False)
        for step in range(steps):
            optimizer.zero_grad()
            for _ in range(options.get("accumulation_steps", 1)):
                x = torch.ones(3, 4, dtype=model.body.weight.dtype)
                # "rarely used": the head is used on the second rank in one step only.
                used = how != "rarely used" or (registry.global_rank == 1 and step == WINDOWS - 2)
                optimizer.backward((model(x) if used else model.body(x)).float().square().mean())
            optimizer.step()
            found += [(step, str(warning.message)) for warning in caught if "no rank had" in str(warning.message)]
            caught.clear()
    return found


@pytest.mark.parametrize("option", OPTIONS)
def test_parameters_of_replaced_module_warn_once(world: World, option: str) -> None:
    first, second = world.run(2, warned, "replaced", option)
    ((step, text),) = first
    assert step == WINDOWS - 1
    assert "no rank had a gradient for head.weight, head.bias: these parameters are not trained" in text
    assert "add_param_group" in text
    assert second == []


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("how", ["kept", "rarely used", "frozen later"])
def test_used_rarely_used_and_frozen_parameters_do_not_warn(world: World, how: str, option: str) -> None:
    assert world.run(2, warned, how, option) == [[], []]


def experts(used: bool) -> list[str]:
    """Train two experts, one owned by each tensor rank; the second one only if ``used``. Return the warnings."""
    with ProcessGroupRegistry(Topology(tensor=2)) as registry, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rank = registry.global_rank
        expert, shared = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        annotate(expert, P(owned={"tensor": rank}), f"expert {rank}")
        annotate(shared, P(), "shared")
        optimizer = ParallelOptimizer(torch.optim.SGD([shared, expert], lr=0.01), registry)
        for _ in range(WINDOWS):
            optimizer.zero_grad()
            optimizer.backward(shared.sum() + (expert.sum() if used or rank == 0 else 0.0))
            optimizer.step()
        return [str(warning.message) for warning in caught]


def test_expert_without_tokens_warns(world: World) -> None:
    assert world.run(2, experts, True) == [[], []]
    (text,), nothing = world.run(2, experts, False)
    assert "no rank had a gradient for expert 1: the" in text
    assert nothing == []


def test_parameters_of_replaced_module_warn_in_single_process() -> None:
    model = Net()
    optimizer = ParallelOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.01), ProcessGroupRegistry(Topology()))
    model.head = nn.Linear(4, 2)
    for _ in range(WINDOWS - 1):
        optimizer.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
    optimizer.backward(model(torch.ones(1, 4)).sum())
    with pytest.warns(UserWarning, match="no rank had a gradient for head.weight, head.bias"):
        optimizer.step()
