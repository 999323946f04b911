"""Precision modes with a model of `scenarios` and its ParallelOptimizer, and all tensors that a step may change."""

from __future__ import annotations

from typing import Any

import torch
from arguments import arguments
from meshstep.amp import ApexFp16, Bf16, Fp32, NaiveFp16, Precision, TorchFp16
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import ProcessGroupRegistry
from optimizers import FOR_HALF_TYPES, stepped
from scenarios import Scenario, build
from torch import Tensor, nn

MODES: dict[str, Precision] = {
    "fp32": Fp32(),
    "fp16": TorchFp16(),
    "bf16": Bf16(),
    "bf16 stochastic": Bf16(stochastic_rounding=True),
    "fp16_naive": NaiveFp16(),
    "O0": ApexFp16("O0"),
    "O1": ApexFp16("O1"),
    "O2": ApexFp16("O2"),
    "O3": ApexFp16("O3", loss_scale=128.0),
}
DYNAMIC = ("fp16", "fp16_naive", "O1", "O2")


def make(
    scenario: Scenario, registry: ProcessGroupRegistry, mode: Precision, kind: str = "adamw", **options: Any
) -> tuple[nn.Module, ParallelOptimizer]:
    """Return the scenario's float32 model, prepared for the mode, and its optimizer."""
    model = build(scenario, registry, torch.float32)
    assert model is not None
    mode.prepare(model, registry)
    return model, ParallelOptimizer(
        FOR_HALF_TYPES[kind](model.parameters()), registry, **arguments(precision=mode, **options)
    )


def train_step(model: nn.Module, optimizer: ParallelOptimizer, ids: Tensor) -> float:
    optimizer.zero_grad()
    loss = model(ids)
    optimizer.backward(loss)
    optimizer.step()
    return float(loss.detach())


def snapshot(model: nn.Module, optimizer: ParallelOptimizer) -> dict[str, Tensor]:
    """Return copies of parameters, buffers, master weights (or their split-off low 16 bits) and optimizer states."""
    found = {f"model {name}": value for name, value in model.state_dict().items()}
    for index, (param, state) in enumerate(zip(stepped(optimizer), optimizer._chain.states(), strict=True)):
        found[f"stepped {index}"] = param
        found |= {f"state {index} {key}": value for key, value in state.items()}
    return {name: value.detach().clone() for name, value in found.items()}


def differences(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Return names of the entries that differ in a value (NaN equals nothing, -0 equals 0) or in the dtype; missing or
    added entries differ."""
    names = sorted(first.keys() | second.keys())
    both = first.keys() & second.keys()
    return [n for n in names if n not in both or first[n].dtype != second[n].dtype or not first[n].equal(second[n])]
