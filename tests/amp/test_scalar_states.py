"""Scalar optimizer states, such as step counts, are shared by all elements and never rounded to half precision."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshstep.amp import Bf16, StochasticRounding
from meshstep.optim import HalfStates, ParallelOptimizer
from meshstep.parallel import ProcessGroupRegistry, Topology
from torch import Tensor, nn

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
KINDS: dict[str, Make] = {
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=1e-2, t0=2),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
}
SHARED = ("step", "mu", "mu_product", "eta")
# (precision, states) of each option that keeps states in half precision.
HALF: dict[str, tuple[Any, Any]] = {
    "stochastic rounding": (Bf16(stochastic_rounding=True), ()),
    "half states": ("fp32", HalfStates()),
}


def shared(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    return [{key: float(state[key]) for key in SHARED if key in state} for state in optimizer.state.values()]


def gradient(step: int, param: Tensor) -> Tensor:
    return torch.randn(param.shape, generator=torch.Generator().manual_seed(step)).to(param.dtype)


def params_of(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 2, dtype=dtype)), nn.Parameter(torch.ones((), dtype=dtype))]


def reference(kind: str, steps: int) -> list[dict[str, float]]:
    """Return the scalar states of a float32 run."""
    params = params_of(torch.float32)
    optimizer = KINDS[kind](params)
    for step in range(steps):
        for param in params:
            param.grad = gradient(step, param)
        optimizer.step()
    return shared(optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_scalar_optimizer_states_with_stochastic_rounding_reload_and_equal_float32_run(kind: str) -> None:
    def built() -> tuple[list[nn.Parameter], torch.optim.Optimizer, StochasticRounding]:
        params = params_of(torch.bfloat16)
        optimizer = KINDS[kind](params)
        return params, optimizer, StochasticRounding(optimizer)

    def train(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, rounding: StochasticRounding) -> None:
        for step in range(rounding.steps, rounding.steps + 3):
            for param in params:
                param.grad = gradient(step, param)
            rounding.step(optimizer.step)

    params, optimizer, rounding = built()
    train(params, optimizer, rounding)
    assert shared(optimizer) == reference(kind, 3)
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), rounding.state_dict()], file)
    file.seek(0)
    saved = torch.load(file)
    params, optimizer, rounding = built()
    optimizer.load_state_dict(saved[0])
    rounding.load_state_dict(saved[1])
    assert shared(optimizer) == reference(kind, 3)
    train(params, optimizer, rounding)
    assert shared(optimizer) == reference(kind, 6)


@pytest.mark.parametrize("how", HALF)
@pytest.mark.parametrize("kind", KINDS)
def test_scalar_optimizer_states_with_bfloat16_moments_reload_and_equal_float32_run(how: str, kind: str) -> None:
    precision, states = HALF[how]
    with ProcessGroupRegistry(Topology()) as registry:

        def built() -> ParallelOptimizer:
            params = params_of(torch.bfloat16 if precision != "fp32" else torch.float32)
            return ParallelOptimizer(KINDS[kind](params), registry, precision=precision, states=states)

        def train(optimizer: ParallelOptimizer, first: int) -> None:
            for step in range(first, first + 3):
                for group in optimizer.param_groups:
                    for param in group["params"]:
                        param.grad = gradient(step, param)
                optimizer.step()

        one = built()
        train(one, 0)
        other = built()
        other.load_state_dict(one.state_dict())
        assert shared(other.optimizer) == shared(one.optimizer) == reference(kind, 3)
        train(other, 3)
        assert shared(other.optimizer) == reference(kind, 6)
        moments = {
            value.dtype
            for state in other.state.values()
            for key, value in state.items()
            if key not in SHARED and isinstance(value, Tensor)
        }
        assert moments == {torch.bfloat16}
