"""Optimizer states created by the library, compared with those created by torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from kernel_steps import close
from loops import using
from meshstep.optim import ParallelOptimizer, Sharded, TorchStates, load_checkpoint, save_checkpoint
from meshstep.optim.kernels.choice import Kernels
from meshstep.optim.step.missing_shards import MissingShards
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, declare
from torch import Tensor, nn
from world import World


def step(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, number: int) -> None:
    for param in params:
        param.grad = torch.arange(1.0, 1 + param.numel()).view(param.shape) * (1 + number)
    optimizer.step()


def adagrad(params: list[nn.Parameter]) -> torch.optim.Adagrad:
    return torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.7, fused=True)


def added_states(registry: ProcessGroupRegistry, options: dict[str, Any]) -> list[Tensor]:
    """Return a stepped parameter that was added later, and an equal one that torch stepped from the start."""
    first, later, alone = (nn.Parameter(torch.ones(2, 3)) for _ in range(3))
    declare(nn.ParameterList([first, later]), {"*": P()})
    optimizer = ParallelOptimizer(adagrad([first]), registry, **options)
    optimizer.add_param_group({"params": [later]})
    expected = adagrad([alone])
    for number in range(2):
        step([first, later], optimizer, number)
        step([alone], expected, number)
    return [later.detach(), alone.detach()]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_adagrad_state_of_added_parameter_starts_at_initial_accumulator_value(kernels: Kernels) -> None:
    with using(kernels):
        close(*added_states(ProcessGroupRegistry(Topology()), {}))


def added_on_ranks() -> list[Tensor]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        return added_states(registry, {"states": Sharded("data")})


def test_adagrad_state_of_added_parameter_with_zero1_starts_at_initial_accumulator_value(world: World) -> None:
    for found in world.run(2, added_on_ranks):
        close(*found)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop", "Adadelta"])
def test_states_created_for_saving_do_not_change_first_update(name: str) -> None:
    """`TorchStates` creates states before the first step."""
    found = []
    for makes in (True, False):
        param = nn.Parameter(torch.ones(2, 3))
        declare(nn.ParameterList([param]), {"*": P()})
        options = (
            {"momentum": 0.9}
            if name == "SGD"
            else {"amsgrad": True}
            if name.startswith("Adam") and name != "Adamax"
            else {}
        )
        inner = getattr(torch.optim, name)([param], lr=0.1, **options)
        optimizer = ParallelOptimizer(inner, ProcessGroupRegistry(Topology()))
        if makes:
            TorchStates(optimizer)
        for number in range(2):
            step([param], optimizer, number)
        found.append(param.detach())
    close(*found)


def idle_piece(path: Path, ranks: int) -> list[Tensor]:
    """Return the step sizes of a parameter in two shards, one of which had no gradient before the checkpoint.

    Version 0.2 wrote such checkpoints: it stepped only the shard with a gradient.
    """
    topology = Topology(tensor=ranks)
    without_counts = mock.patch.object(MissingShards, "field", return_value={})
    with ProcessGroupRegistry(topology) as registry, without_counts:
        model = nn.Linear(3, 4 // ranks, bias=False)
        annotate(model.weight, P("tensor"), "weight")
        optimizer = ParallelOptimizer(torch.optim.Rprop(model.parameters(), lr=0.3), registry)
        if ranks == 2:
            for _ in range(2):
                model.weight.grad = torch.ones(2, 3) if registry.global_rank == 0 else None
                optimizer.step()
            save_checkpoint(path, model, optimizer)
        else:
            with pytest.warns(UserWarning, match="different numbers"):
                load_checkpoint(path, model, optimizer)
        return [state["step_size"] for state in optimizer.state.values()]


def test_rprop_state_of_idle_shard_is_initialized_on_another_mesh(world: World, tmp_path: Path) -> None:
    (busy,), idle = world.run(2, idle_piece, tmp_path, 2)
    assert idle == []
    ((whole,),) = world.run(1, idle_piece, tmp_path, 1)
    close(whole, torch.cat([busy, torch.full((2, 3), 0.3)]))


class Counting(torch.optim.Optimizer):
    """SGD with momentum, whose state also has the number of steps as an int and as a text."""

    elementwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state.setdefault("moment", torch.zeros_like(param))
                state["count"] = state.get("count", 0) + 1
                state["text"] = f"after {state['count']} steps"
                state["moment"].mul_(0.5).add_(param.grad)
                param.data.add_(state["moment"], alpha=-group["lr"])


def continued(states: Any, precision: Any) -> tuple[list[Tensor], list[dict[str, Any]], list[Tensor]]:
    """Make two steps of a torch optimizer, two more with `ParallelOptimizer`, and four steps of torch alone."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        params, alone = ([nn.Parameter(torch.ones(3, 5) * k) for k in (1, 2)] for _ in range(2))
        declare(nn.ParameterList(params), {"*": P()})
        inner, expected = Counting(params), Counting(alone)
        for number in range(2):
            step(params, inner, number)
            step(alone, expected, number)
        optimizer: Any = ParallelOptimizer(inner, registry, states=states, precision=precision)
        for number in range(2, 4):
            optimizer.zero_grad()
            step(alone, expected, number)
            losses = [(param * cast(Tensor, plain.grad)).sum() for param, plain in zip(params, alone, strict=True)]
            optimizer.backward(losses[0] + losses[1])
            optimizer.step()
        values = [value.clone() for value in (param.detach() for param in params)]
        return values, [dict(state) for state in inner.state.values()], [param.detach() for param in alone]


@pytest.mark.default_cases(3)
@pytest.mark.parametrize(
    "states", [(), Sharded("data"), Sharded("data", gradients=True)], ids=["whole", "ZeRO-1", "ZeRO-2"]
)
def test_states_of_earlier_torch_steps_are_moved_to_the_stepped_tensors(world: World, states: Any) -> None:
    for values, moved, expected in world.run(2, continued, states, "fp32"):
        for value, alone in zip(values, expected, strict=True):
            close(value, alone)
        assert moved
        assert all((state["count"], state["text"]) == (4, "after 4 steps") for state in moved)
