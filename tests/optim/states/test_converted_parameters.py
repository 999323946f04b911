"""A step after a parameter was converted to another dtype or device raises on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from meshstep.amp import Bf16
from meshstep.optim import Offloaded, ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from placements import EXCHANGES
from torch import nn
from world import World

OPTIONS: dict[str, dict[str, Any]] = {
    **EXCHANGES,
    "offload": {"states": Offloaded(1.0)},
}
MODES: dict[str, tuple[Any, torch.dtype, list[torch.dtype]]] = {
    "fp32": ("fp32", torch.float32, [torch.float64, torch.bfloat16, torch.float16]),
    "bf16": ("bf16", torch.bfloat16, [torch.float32, torch.float64, torch.float16]),
    "split": (Bf16(split_masters=True), torch.bfloat16, [torch.float32, torch.float64]),
    "stochastic": (Bf16(stochastic_rounding=True), torch.bfloat16, [torch.float32]),
}


def converted(mode: str, to: torch.dtype, fused: bool, part: bool, options: dict[str, Any]) -> tuple[str, bool]:
    """Return the error of the step or backward after a conversion, and whether the values are unchanged."""
    precision, dtype, _ = MODES[mode]
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 4)).to(dtype)
        declare(model, {"*": P()})
        adamw = torch.optim.AdamW(model.named_parameters(), lr=0.1, fused=fused)
        optimizer = ParallelOptimizer(adamw, registry, precision=precision, **options)
        for step in range(3 if part else 2):
            optimizer.zero_grad()
            if step:
                (model[1] if part else model).to(to)
                before = [param.detach().clone() for param in model.parameters()]
            x: torch.Tensor = torch.ones(2, 6)
            for layer in model:
                x = layer(x.to(next(layer.parameters()).dtype))
            try:
                optimizer.backward(x.float().sum())
                optimizer.step()
            except RuntimeError as error:
                return str(error), all(map(torch.equal, before, model.parameters()))
        return "no error", True


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_step_after_dtype_conversion_of_model_raises_and_names_parameter(world: World, how: str, mode: str) -> None:
    _, dtype, others = MODES[mode]
    for to in others:
        for fused in (True, False):
            for text, is_unchanged in world.run(2, converted, mode, to, fused, False, OPTIONS[how]):
                assert text.startswith(
                    f"0.weight was {dtype} when the optimizer was made, and is {to} now: convert and"
                )
                assert "make the torch optimizer and the ParallelOptimizer again" in text
                assert is_unchanged


@pytest.mark.parametrize("how", ["whole", "ZeRO-1", "ZeRO-2"])
def test_step_after_dtype_conversion_of_part_of_model_raises(world: World, how: str) -> None:
    for text, _ in world.run(2, converted, "fp32", torch.float64, True, True, OPTIONS[how]):
        assert text.startswith(("1.weight was torch.float32", "1.bias was torch.float32")), text


def test_step_after_move_to_other_device_raises_and_names_devices() -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        model = nn.Linear(3, 2)
        declare(model, {"*": P()})
        optimizer = ParallelOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1), registry)
        given = optimizer._chain.given
        given[0] = replace(given[0], device=torch.device("cuda:0"))  # as if `model.cpu()` had moved it here
        with pytest.raises(RuntimeError, match="weight was cuda:0 when the optimizer was made, and is cpu now"):
            optimizer.step()


@pytest.mark.parametrize("index", range(6))
def test_moved_parameter_raises_within_as_many_steps_as_there_are_parameters(index: int) -> None:
    """Each step checks the first and the last parameter, and another parameter in turn."""
    with ProcessGroupRegistry(Topology()) as registry:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
        declare(model, {"*": P()})
        optimizer = ParallelOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1), registry)
        for _ in range(2):  # get past the first step, which runs more checks
            optimizer.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
        given = optimizer._chain.given
        given[index] = replace(given[index], device=torch.device("cuda:0"))
        errors = []
        for _ in range(6):
            optimizer.backward(model(torch.ones(1, 2)).sum())
            try:
                optimizer.step()
            except RuntimeError as error:
                errors.append(str(error))
        assert errors
        assert all("was cuda:0 when the optimizer was made, and is cpu now" in text for text in errors)
