"""Python calls per parameter: a warm float32 step needs no more than torch's clipping and step, a step with master
weights at most four times as many, and construction is linear."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from function_calls import calls_of
from loops import using
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from torch import nn

FEW, MANY = 50, 150


def a_parameter(calls: Callable[[int], int]) -> float:
    """Return the additional calls per additional parameter."""
    return (calls(MANY) - calls(FEW)) / (MANY - FEW)


def weights(count: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.ones(4, dtype=dtype)) for _ in range(count)]
    for index, param in enumerate(params):
        annotate(param, P("tensor") if index % 2 else P(), f"layers.{index}.weight")
    return params


def give_gradients(params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad = torch.ones(4)


def warm(params: list[nn.Parameter], step: Callable[[], object]) -> int:
    """Return the number of Python and C calls in the third step."""
    for _ in range(2):
        give_gradients(params)
        step()
    give_gradients(params)
    return calls_of(step)


def torchs(count: int) -> int:
    params = weights(count)
    optimizer = torch.optim.AdamW(params, fused=True)

    @torch.no_grad()
    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return warm(params, step)


def ours(count: int, precision: Any = "fp32", topology: Topology = Topology(tensor=1)) -> int:  # noqa: B008 (frozen)
    params = weights(count, torch.float32 if precision == "fp32" else torch.bfloat16)
    adamw = torch.optim.AdamW(params, fused=True)
    with ProcessGroupRegistry(topology) as registry:
        optimizer = ParallelOptimizer(adamw, registry, max_norm=1.0, precision=precision, check_replicas=False)

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return warm(params, step)


@pytest.fixture(autouse=True)
def _the_loops() -> Iterator[None]:
    """Use the compiled loops, overriding the environment variable; torch's kernels need a few more calls."""
    with using("auto"):
        yield


def test_step_needs_no_more_python_calls_per_parameter_than_torch() -> None:
    assert a_parameter(ours) <= a_parameter(torchs)


def test_step_with_masters_needs_at_most_four_times_the_python_calls_of_torch() -> None:
    assert a_parameter(lambda count: ours(count, "bf16")) <= 4 * a_parameter(torchs)


def made(count: int) -> int:
    params = weights(count)
    adamw = torch.optim.AdamW(params, fused=True)
    with ProcessGroupRegistry(Topology(tensor=1)) as registry:
        return calls_of(lambda: ParallelOptimizer(adamw, registry, max_norm=1.0))


def test_python_calls_of_construction_grow_linearly_with_parameters() -> None:
    once, twice = made(200) - made(100), made(400) - made(200)
    assert twice < 2.05 * once
    assert once / 100 < 345
