"""Optimizers on a GPU: results compared with the CPU, skipped steps, and host synchronizations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshstep.optim import (
    CAME,
    LAMB,
    LARS,
    SOAP,
    Adafactor,
    Lion,
    Muon,
    ParallelOptimizer,
    Shampoo,
    StableAdamW,
)
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from on_gpu import nobody_waits
from precision_modes import differences, snapshot
from torch import nn

SHAPES = [(48, 32), (48, 32), (32, 48), (16, 16), (64,), (7,), (3, 8, 16)]
# Shapes for SOAP. For a matrix that is not square, the Gram matrix of the long side is singular, and the eigenvectors of
# its null space, along which SOAP updates too, are arbitrary.
SQUARE = [(32, 32), (32, 32), (48, 48), (64,), (7,), (3, 16, 16)]
MAKE: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "Muon": lambda params: Muon(params, lr=0.01, weight_decay=0.1),
    "SOAP": lambda params: SOAP(params, lr=0.01),
    "Shampoo": lambda params: Shampoo(params, lr=0.01),
    "LAMB": lambda params: LAMB(params, lr=0.01, weight_decay=0.1),
    "LARS": lambda params: LARS(params, lr=0.1, weight_decay=0.1),
    "StableAdamW": lambda params: StableAdamW(params, lr=0.01, weight_decay=0.1),
    "Adafactor": lambda params: Adafactor(params, lr=0.01),
    "CAME": lambda params: CAME(params, lr=0.01),
    "Lion": lambda params: Lion(params, lr=0.01, weight_decay=0.1),
}
# torch's eigenvalue solver checks its result on the host.
SOLVES_EIGENVALUES = ("SOAP", "Shampoo")


class Run:
    """Steps with planted gradients."""

    def __init__(self, name: str, device: torch.device, precision: Any = "fp32") -> None:
        generator = torch.Generator().manual_seed(1)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        drawn = [torch.randn(shape, generator=generator) for shape in (SQUARE if name == "SOAP" else SHAPES)]
        self.model = nn.ParameterList([nn.Parameter(value.to(device, dtype)) for value in drawn])
        declare(self.model, {"*": P()})
        inner = MAKE[name](list(self.model))
        registry = ProcessGroupRegistry(Topology())
        self.optimizer = ParallelOptimizer(inner, registry, max_norm=0.7, precision=precision)

    def plant(self, number: int, bad: bool = False) -> None:
        generator = torch.Generator().manual_seed(100 + number)
        for param in self.model:
            gradient = torch.randn(param.shape, generator=generator)
            param.grad = gradient.to(param.device, getattr(param, "grad_dtype", None) or param.dtype)
        if bad:
            self.model[1].grad[3, 4] = torch.nan

    def step(self, number: int, bad: bool = False) -> None:
        self.plant(number, bad)
        self.optimizer.step()


@pytest.mark.parametrize("name", MAKE)
def test_optimizer_on_device_matches_optimizer_on_host_within_rounding(device: torch.device, name: str) -> None:
    run, expected = Run(name, device), Run(name, torch.device("cpu"))
    starts = [param.detach().clone() for param in expected.model]
    for number in range(6):
        run.step(number)
        expected.step(number)
    for found, wanted, start in zip(run.model, expected.model, starts, strict=True):
        change = (wanted - start).norm()
        assert change > 0
        assert (found.cpu() - wanted).norm() < 0.02 * change


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MAKE)
def test_skipped_step_of_optimizer_leaves_all_tensors_bitwise_identical(
    device: torch.device, name: str, precision: str
) -> None:
    run = Run(name, device, precision)
    for number in range(3):
        run.step(number)
    before = snapshot(run.model, run.optimizer)
    run.step(3, bad=True)
    assert differences(before, snapshot(run.model, run.optimizer)) == []
    run.step(4)
    assert differences(before, snapshot(run.model, run.optimizer)) != []


@pytest.mark.parametrize("name", [name for name in MAKE if name not in SOLVES_EIGENVALUES])
def test_fourth_step_of_optimizer_causes_no_host_synchronization(device: torch.device, name: str) -> None:
    run = Run(name, device)
    for number in range(3):
        run.step(number)
    run.plant(3)
    with nobody_waits(device):
        run.optimizer.step()
