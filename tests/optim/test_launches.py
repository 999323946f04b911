"""Kernel launches of a warm step, counted on fake CUDA tensors."""

from __future__ import annotations

import importlib
from math import inf
from typing import Any

import pytest
import torch
from fake_cuda import Log, fake_cuda
from meshstep.amp import Bf16, NaiveFp16
from meshstep.optim import ByNorm, ByValue, HalfStates, ParallelOptimizer, PerParameter
from meshstep.parallel import ProcessGroupRegistry, Topology
from set_gradients import setting_gradients
from torch import nn

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
    pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch built with CUDA for the fake GPU"),
]


def weights(count: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Return alternating matrices and biases."""
    return [nn.Parameter(torch.ones((64, 64) if i % 2 else (64,), device="cuda", dtype=dtype)) for i in range(count)]


def give_gradients(params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad = torch.ones_like(param, dtype=getattr(param, "grad_dtype", None) or param.dtype)


def ours(count: int, precision: Any = "fp32", dtype: torch.dtype = torch.float32, **options: Any) -> Log:
    log = Log()
    with fake_cuda(collectives_on=CPU) as logging:
        params = weights(count, dtype)
        optimizer = ParallelOptimizer(
            torch.optim.AdamW(params, fused=True),
            ProcessGroupRegistry(Topology()),
            precision=precision,
            **{"max_norm": 1.0, "check_replicas": False, **options},
        )
        for _ in range(3):
            with setting_gradients(optimizer):
                give_gradients(params)
            with logging() as log:
                optimizer.step()
            optimizer.zero_grad()
    return log


def torchs(count: int) -> Log:
    log = Log()
    with fake_cuda(collectives_on=CPU) as logging:
        params = weights(count)
        optimizer = torch.optim.AdamW(params, fused=True)
        for _ in range(3):
            give_gradients(params)
            with logging() as log:
                torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
                optimizer.step()
    return log


@pytest.mark.long
def test_step_of_thousand_parameters_launches_no_more_kernels_than_torch() -> None:
    assert ours(1000).kernels <= torchs(1000).kernels


@pytest.mark.parametrize(
    "options",
    [
        {"max_norm": ByNorm(1.0, norm_type=inf)},
        {"check_replicas": False, "per_parameter_norms": True},
        {"max_norm": ByValue(0.5)},
    ],
    ids=["p = inf", "per parameter", "by value"],
)
def test_launches_for_inf_norm_clip_value_and_parameter_norms_are_independent_of_parameter_count(
    options: dict[str, Any],
) -> None:
    assert ours(4, **options).launches == ours(100, **options).launches


def test_clipping_per_parameter_launches_one_kernel_per_parameter() -> None:
    few, many = (ours(count, max_norm=PerParameter(1.0)).launches for count in (4, 100))
    assert many.count("aten._foreach_mul_.Tensor") == 100
    assert len(many) - len(few) == 96


@pytest.mark.parametrize(
    ("mode", "precision", "dtype", "decisions"),
    [
        ("fp32", "fp32", torch.float32, 19),
        ("bf16", "bf16", torch.bfloat16, 20),
        ("fp16", NaiveFp16(), torch.float16, 36),
    ],
)
def test_step_runs_at_most_19_operators_in_fp32_20_in_bf16_and_36_in_fp16(
    mode: str, precision: Any, dtype: torch.dtype, decisions: int
) -> None:
    """The number of operators does not depend on the number of parameters."""
    few, many = ours(4, precision, dtype), ours(100, precision, dtype)
    assert few.launches == many.launches
    assert len(few.launches) <= decisions


@pytest.mark.parametrize(
    ("precision", "dtype", "options"),
    [(Bf16(stochastic_rounding=True), torch.bfloat16, {}), ("fp32", torch.float32, {"states": HalfStates()})],
    ids=["bf16", "half states"],
)
def test_stochastic_rounding_launches_one_random_kernel_per_parameter(
    precision: Any, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """The generator is seeded for each parameter, so that replicas draw equal numbers. All other kernels process all
    parameters together."""
    few, many = (ours(count, precision, dtype, **options).launches for count in (4, 100))
    drawn = [name for name in many if "random" in name]
    assert len(drawn) == 100
    assert [name for name in few if "random" not in name] == [name for name in many if "random" not in name]


@pytest.mark.long
@pytest.mark.parametrize("name", ["Muon", "LAMB", "LARS", "StableAdamW", "Adafactor", "CAME", "SOAP", "Shampoo"])
def test_number_of_launches_of_full_tensor_optimizer_is_independent_of_parameter_count(name: str) -> None:
    benchmark: Any = importlib.import_module("benchmarks.launches")
    few, many = (benchmark.count(benchmark.CASES[name], width=16, layers=layers)[0] for layers in (2, 6))
    assert few.launches == many.launches
    assert few.waits == many.waits == []


if __name__ == "__main__":
    for count in (4, 100, 1000):
        found = {
            "torch": torchs(count),
            "fp32": ours(count),
            "bf16": ours(count, "bf16", torch.bfloat16),
            "fp16": ours(count, NaiveFp16(), torch.float16),
            "rounded": ours(count, Bf16(stochastic_rounding=True), torch.bfloat16),
        }
        print(count, {name: (log.kernels, len(log.launches)) for name, log in found.items()})
