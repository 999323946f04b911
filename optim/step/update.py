"""Step a torch optimizer with one factor on the gradients, or not at all: on the device where the optimizer can."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ...amp.casting import is_half
from ..gradients.in_place import scale_gradients


def steps_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer takes ``grad_scale`` and ``found_inf`` tensors itself: Adam, AdamW, SGD, Adagrad, fused.

    Not before its first step for a fused SGD with dampening: torch makes the first momentum buffer from the gradient
    alone and has no such buffer yet if that step is skipped on the device. And not for half-precision parameters on a CPU
    where torch's fused SGD loses their updates (2.12 and 2.13).
    """
    fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    groups = optimizer.param_groups
    if not fused or not all(group.get("fused") for group in groups):
        return False
    if _is_miscomputed(optimizer):
        return False
    return not any(
        group.get("momentum") and group.get("dampening") and _without_momentum(optimizer, group) for group in groups
    )


def apply_update(optimizer: torch.optim.Optimizer, found_inf: Tensor, factor: Tensor | None) -> None:
    """Multiply all gradients by ``factor`` and step, unless ``found_inf`` is 1: then change nothing.

    Args:
        optimizer: The wrapped optimizer.
        found_inf: 0-dim float32, 0 or 1.
        factor: 0-dim, or None for 1. A fused optimizer divides by its inverse in float32 (and leaves the scaled gradient in
            ``.grad``); float64 parameters and other optimizers are multiplied in a pass of their own.
    Collectives: none. Host reads: one, unless `steps_on_device`; one where parameters are on the CPU and the rest is not.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if found_inf.is_cuda and any(param.is_cpu for param in params):
        # A fused optimizer copies them to the devices of its parameters without waiting: from a GPU to the CPU, that is,
        # it would read what has not arrived.
        found_inf, factor = found_inf.cpu(), None if factor is None else factor.cpu()
    if not steps_on_device(optimizer):
        if bool(found_inf):
            return
        if factor is not None:
            scale_gradients(params, factor)
        _step_rightly(optimizer)
        return
    if factor is not None and torch.float64 in {param.dtype for param in params}:
        scale_gradients(params, torch.where(found_inf > 0, torch.ones_like(factor), factor))
        factor = None
    _start_momentum(optimizer)
    fused: Any = optimizer
    fused.found_inf = found_inf
    fused.grad_scale = None if factor is None else factor.reciprocal().float()
    try:
        optimizer.step()
    finally:
        del fused.found_inf, fused.grad_scale


def _without_momentum(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[Tensor]:
    return [
        param
        for param in group["params"]
        if param.grad is not None and optimizer.state.get(param, {}).get("momentum_buffer") is None
    ]


def _start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give a fused SGD zeros to start from: torch would keep uninitialised memory when its first step is skipped.

    Without dampening the first update from zeros is the same as from nothing.
    """
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            for param in _without_momentum(optimizer, group) if group["momentum"] else ():
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


def _step_rightly(optimizer: torch.optim.Optimizer) -> None:
    """Step, without fused kernels where those are wrong."""
    groups = optimizer.param_groups if _is_miscomputed(optimizer) else []
    fused = [group["fused"] for group in groups]
    try:
        for group in groups:
            group["fused"] = False
        optimizer.step()
    finally:
        for group, value in zip(groups, fused, strict=True):
            group["fused"] = value


def _is_miscomputed(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.SGD) and any(
        group.get("fused")
        and any(is_half(param) and param.is_cpu for param in group["params"])
        and _fused_sgd_is_wrong()
        for group in optimizer.param_groups
    )


@cache
def _fused_sgd_is_wrong() -> bool:
    """Whether fused SGD on a CPU leaves most of a half-precision parameter as it was (pytorch issue 191763)."""
    weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16, device="cpu"))
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5, fused=True).step()
    return bool((weight != 0.5).any())
