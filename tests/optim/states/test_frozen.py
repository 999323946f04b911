"""Parameters frozen or unfrozen after the optimizer was made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from arguments import arguments
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import ProcessGroupRegistry, Topology
from small_models import parameter
from world import World
from zero_models import ZERO1, ZERO2

EVERYWHERE: list[dict[str, Any]] = [{}, ZERO1, ZERO2, {"offload": 1.0}]


def sgd(params: Any, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr)


def thaw(options: dict[str, Any]) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        w, b = parameter("w"), parameter("b", trained=False)
        optimizer = ParallelOptimizer(sgd([w, b]), registry, **arguments(**options))
        b.requires_grad_(True)
        optimizer.backward((w + b).sum())
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize("options", EVERYWHERE, ids=str)
def test_step_after_unfreezing_a_parameter_raises(world: World, options: dict[str, Any]) -> None:
    for text in world.run(2, thaw, options):
        assert "b was frozen when the optimizer was made" in text
        assert "optimizer.refresh()" in text


def freeze(options: dict[str, Any], precision: str) -> tuple[bool, bool]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        w, b = parameter("w", value=1.0), parameter("b", value=1.0)
        if precision == "bf16":
            w.data, b.data = w.data.bfloat16(), b.data.bfloat16()
        adamw = torch.optim.AdamW([w, b], lr=0.1, weight_decay=0.1)
        optimizer = ParallelOptimizer(adamw, registry, **arguments(precision=precision, **options))
        for step in range(4):
            before = w.detach().clone(), b.detach().clone()
            optimizer.zero_grad()
            optimizer.backward((w + b).float().sum())
            optimizer.step()
            if step == 0:
                b.requires_grad_(False)
        return torch.equal(w, before[0]), torch.equal(b, before[1])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", EVERYWHERE, ids=str)
def test_parameter_frozen_after_first_step_stays_unchanged(
    world: World, options: dict[str, Any], precision: str
) -> None:
    assert world.run(2, freeze, options, precision) == [(False, True)] * 2


def frozen_on_one() -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        params = [parameter("w"), parameter("b", trained=registry.rank("data") == 0), parameter("c", 6)]
        try:
            ParallelOptimizer(sgd(params), registry)
        except ValueError as error:
            return str(error)
        return "no error"


def test_constructing_optimizer_with_parameter_frozen_on_one_rank_raises_on_all_ranks(world: World) -> None:
    for text in world.run(2, frozen_on_one):
        assert "first in b" in text
        assert "param group 0, frozen]" in text
