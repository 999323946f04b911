"""Tensors whose memory differs from their values: torch's lazy negative bit, and zero tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel_steps import MAKE, close
from loops import using
from meshstep.amp import Bf16
from meshstep.optim import HalfStates, Offloaded, ParallelOptimizer, Sharded, clip_grad_norm_, clip_grad_value_
from meshstep.optim.checkpoint.contents import digest
from meshstep.optim.step.c_engine import number
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn
from world import World

LAZY: dict[str, Callable[[Tensor], Tensor]] = {
    "negative bit": lambda tensor: torch._neg_view(-tensor),
    "imaginary part": lambda tensor: torch.complex(tensor, -tensor).conj().imag,
}
MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "bf16 gradients": {"precision": Bf16(main_grads=False)},
    "split masters": {"precision": Bf16(split_masters=True)},
    "half states": {"states": HalfStates()},
    "offloaded": {"states": Offloaded()},
}
OTHERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "not fused": lambda params: torch.optim.AdamW(params, lr=0.01),
    "foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
}


@pytest.fixture(autouse=True, params=["auto", "torch"])
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    with using(request.param):
        yield


def values(step: int = 0) -> Tensor:
    return torch.arange(-3.0, 9.0).view(3, 4) + step


def made(name: str, options: dict[str, Any], weight: Tensor | None = None) -> tuple[nn.Parameter, Any]:
    dtype = torch.bfloat16 if "precision" in options else torch.float32
    param = nn.Parameter(values().to(dtype) if weight is None else weight)
    declare(nn.ParameterList([param]), {"*": P()})
    make = (MAKE | OTHERS)[name]
    return param, ParallelOptimizer(make([param]), ProcessGroupRegistry(Topology()), max_norm=0.7, **options)


@pytest.mark.long
@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*MAKE, *OTHERS])
def test_gradients_with_lazy_negative_bit_give_same_step_as_resolved_gradients(name: str, mode: str, kind: str) -> None:
    found = []
    for lazy in (True, False):
        param, optimizer = made(name, MODES[mode])
        for step in range(4):
            grad = values(step).to(param.grad_dtype or param.dtype)
            if lazy and step != 1 and not (kind == "imaginary part" and grad.dtype == torch.bfloat16):
                grad = LAZY[kind](grad)
                assert grad.is_neg()
            param.grad = grad
            optimizer.step()
        found.append(param.detach())
    close(*found)


def test_zero_gradient_without_memory_gives_same_step_as_zeros_in_memory() -> None:
    found = []
    for lazy in (True, False):
        param, optimizer = made("AdamW", {})
        for step in range(3):
            param.grad = values(step)
            if step == 1:
                param.grad = torch._efficientzerotensor(3, 4) if lazy else torch.zeros(3, 4)
            optimizer.step()
        found.append(param.detach())
    close(*found)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "not fused"])
def test_parameter_with_negative_bit_is_stepped_like_plain_parameter(name: str) -> None:
    found = []
    for lazy in (True, False):
        param, optimizer = made(name, {}, LAZY["negative bit"](values()) if lazy else values())
        for step in range(3):
            param.grad = values(step)
            optimizer.step()
        found.append(param.detach())
    close(*found)


def test_parameter_that_gets_negative_bit_between_steps_is_stepped_like_plain_parameter() -> None:
    with using("auto"):
        found = []
        for lazy in (True, False):
            param, optimizer = made("AdamW", {})
            for step in range(4):
                if step == 2 and lazy:
                    param.data = LAZY["negative bit"](param.data)
                param.grad = values(step)
                optimizer.step()
            found.append(param.detach())
        close(*found)


def test_state_with_negative_bit_is_updated_like_plain_state() -> None:
    found = []
    for lazy in (True, False):
        param, optimizer = made("SGD, Nesterov", {})
        for step in range(4):
            if step == 2 and lazy:
                state = optimizer.state[param]
                state["momentum_buffer"] = LAZY["negative bit"](state["momentum_buffer"])
            param.grad = values(step)
            optimizer.step()
        found.append(param.detach())
    close(*found)


def test_learning_rate_tensor_with_negative_bit_gives_same_step_as_plain_tensor() -> None:
    found = []
    for rate in (torch._neg_view(torch.tensor(-0.01)), torch.tensor(0.01)):
        param, optimizer = made("Adam, tensor rate", {})
        optimizer.param_groups[0]["lr"] = rate
        for step in range(3):
            param.grad = values(step)
            optimizer.step()
        found.append(param.detach())
    close(*found)
    assert [number(value) for value in (torch._neg_view(torch.tensor(-0.5)), torch.tensor(3), torch.tensor(0.5))] == [
        0.5,
        3.0,
        0.5,
    ]


def test_clipping_functions_clip_lazily_negated_gradients_like_resolved_gradients() -> None:
    registry = ProcessGroupRegistry(Topology())
    clips: list[Callable[[nn.Parameter], object]] = [
        lambda param: clip_grad_norm_([param], 0.7, registry),
        lambda param: clip_grad_value_([param], 0.7, registry),
    ]
    for clip in clips:
        found = []
        for lazy in (True, False):
            param = nn.Parameter(values())
            declare(nn.ParameterList([param]), {"*": P()})
            param.grad = LAZY["negative bit"](values()) if lazy else values()
            clip(param)
            found.append(param.grad)
        close(*found)


def test_norm_of_zero_gradient_without_memory_is_zero() -> None:
    registry = ProcessGroupRegistry(Topology())
    param = nn.Parameter(values())
    declare(nn.ParameterList([param]), {"*": P()})
    param.grad = torch._efficientzerotensor(3, 4)
    assert float(clip_grad_norm_([param], 0.7, registry).total_norm) == 0.0


def test_tensor_digest_uses_values_of_lazy_negative_tensor() -> None:
    tensor = values()
    assert digest(torch._neg_view(tensor)) == digest(-tensor) != digest(tensor)


def lazy_on_ranks(options: dict[str, Any]) -> float:
    """Return the distance of weights stepped with lazy gradients from weights stepped with resolved gradients."""
    found = []
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        for lazy in (True, False):
            params = [nn.Parameter(values()), nn.Parameter(torch.ones(5))]
            declare(nn.ParameterList(params), {"*": P()})
            optimizer = ParallelOptimizer(
                torch.optim.AdamW(params, lr=0.01, fused=True), registry, max_norm=0.7, **options
            )
            for step in range(3):
                optimizer.zero_grad()
                for param in params:
                    grad = torch.arange(1.0, 1 + param.numel()).view(param.shape) * (1 + step + registry.global_rank)
                    param.grad = LAZY["negative bit"](grad) if lazy else grad
                optimizer.step()
            found.append(torch.cat([param.detach().flatten() for param in params]))
    return float((found[0] - found[1]).abs().max())


@pytest.mark.parametrize("options", [{}, {"states": Sharded("data")}])
def test_lazily_negated_gradients_are_reduced_like_resolved_gradients(world: World, options: dict[str, Any]) -> None:
    assert world.run(2, lazy_on_ranks, options) == [0.0, 0.0]
