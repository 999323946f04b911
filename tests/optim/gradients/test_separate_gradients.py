"""Gradients that share memory, because autograd gave two parameters views of one gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshstep.amp import Bf16
from meshstep.optim import ClipState, ParallelOptimizer, PerParameter, Sharded, clip_grad_norm_, scale_gradients_
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn
from world import World


class Sum(nn.Module):
    """The sum of two parameters. The gradient of each is the input of `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.arange(8.0))
        self.second = nn.Parameter(torch.ones(2, 4))
        declare(self, {"*": P()})

    def forward(self, x: Tensor) -> Tensor:
        return ((self.first.view(2, 4) + self.second.view(8).view(2, 4)) * x).sum()


def clip(model: nn.Module) -> None:
    clip_grad_norm_(model, 1.0, ProcessGroupRegistry(Topology()))


def scale(model: nn.Module) -> None:
    scale_gradients_(model, torch.tensor(1 / 8), ProcessGroupRegistry(Topology()))


def clip_each(model: nn.Module) -> None:
    clip_grad_norm_(model, ClipState(PerParameter(2**-0.5)), ProcessGroupRegistry(Topology()))


@pytest.mark.parametrize("change", [clip, clip_each, scale])
def test_gradients_that_share_memory_are_multiplied_once(change: Callable[[nn.Module], None]) -> None:
    model, x = Sum(), torch.full((2, 4), 2.0)
    model(x).backward()
    first, second = model.first.grad, model.second.grad
    assert first is not None
    assert second is not None
    assert first.data_ptr() == second.data_ptr(), "this torch gives each parameter its own memory: remove the copies"
    change(model)
    for param in (model.first, model.second):
        assert param.grad is not None
        assert param.grad.flatten().tolist() == pytest.approx([0.25] * 8)  # norm 8


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True, "accumulation_steps": 3},
    "ZeRO-1": {"states": Sharded("data"), "accumulation_steps": 3},
    "ZeRO-2": {"states": Sharded("data", gradients=True), "accumulation_steps": 3},
    "accumulation": {"accumulation_steps": 3},
    "bf16": {"precision": Bf16(), "accumulation_steps": 3},
    "bf16 gradients": {"precision": Bf16(main_grads=False)},
}


def steps(name: str, max_norm: float) -> list[Tensor]:
    """Make two SGD steps with learning rate 1, and return the sum of all updates per parameter."""
    options = OPTIONS[name]
    with ProcessGroupRegistry(Topology(data=dist.get_world_size())) as registry:
        model = Sum()
        if "precision" in options:
            model.bfloat16()
        before = [param.detach().clone() for param in model.parameters()]
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = ParallelOptimizer(sgd, registry, max_norm=max_norm, **options)
        for _ in range(2):
            for number in range(options.get("accumulation_steps", 1)):
                x = torch.full((2, 4), 1.0 + number + 2 * registry.rank("data"))
                optimizer.backward(model(x.to(before[0].dtype)))
            optimizer.step()
            optimizer.zero_grad()
        return [(param.detach() - start).flatten() for param, start in zip(model.parameters(), before, strict=True)]


@pytest.mark.default_cases(99)
@pytest.mark.parametrize(("ranks", "max_norm"), [(1, 0.5), (2, 1e3)])
@pytest.mark.parametrize("name", OPTIONS)
def test_parameters_whose_gradients_share_memory_get_the_clipped_mean_gradient(
    world: World, name: str, ranks: int, max_norm: float
) -> None:
    mean = (2.0 if "accumulation_steps" in OPTIONS[name] else 1.0) + (ranks - 1)  # all 16 elements are equal
    expected = -2 * min(mean, max_norm / 4)
    for updates in world.run(ranks, steps, name, max_norm):
        for update in updates:
            assert update.tolist() == pytest.approx([expected] * 8, rel=1e-5)
