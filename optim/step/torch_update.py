"""torch's optimizers, stepped by torch: with factor and skip on the device, and around what is wrong in some kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from ...amp.casting import is_half
from ..gradients.in_place import scale_gradients, widen_gradients
from .call_guard import own_calls
from .captured_update import capturable
from .counted_once import CountedOnce
from .memory_order import lay_out_all


def update_by_torch(optimizer: torch.optim.Optimizer, found_inf: Tensor, factor: Tensor | None) -> None:
    """Step a fused optimizer by torch's kernels; arguments as for `meshstep.optim.step.update.Update`. Host reads:
    none."""
    params = params_of(optimizer)
    widen_gradients(params)
    if factor is not None and torch.float64 in {param.dtype for param in params}:
        scale_gradients(params, torch.where(found_inf > 0, torch.ones_like(factor), factor))
        factor = None
    _start_momentum(optimizer)
    lay_out_all(optimizer)
    fused: Any = optimizer
    fused.found_inf = found_inf
    fused.grad_scale = None if factor is None else torch.reciprocal(factor, out=torch.empty_like(found_inf))
    try:
        with capturable(optimizer), CountedOnce(optimizer, found_inf) if found_inf.is_cuda else nullcontext():
            step_within(optimizer)
    finally:
        del fused.found_inf, fused.grad_scale


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All that its param groups hold."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def without_momentum(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[Tensor]:
    """The parameters of a group that have a gradient and no momentum buffer."""
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
            for param in without_momentum(optimizer, group) if group["momentum"] else ():
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


def step_rightly(optimizer: torch.optim.Optimizer) -> None:
    """Step, without fused kernels where those are wrong."""
    groups = optimizer.param_groups if is_miscomputed(optimizer) else []
    fused = [group["fused"] for group in groups]
    try:
        for group in groups:
            group["fused"] = False
        step_within(optimizer)
    finally:
        for group, value in zip(groups, fused, strict=True):
            group["fused"] = value


def is_miscomputed(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether torch's fused SGD would step a half-precision parameter on a CPU wrongly."""
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    groups = [group for group in optimizer.param_groups if group.get("fused")]
    has_half = any(param.is_cpu and is_half(param) for group in groups for param in group["params"])
    return has_half and _fused_sgd_is_wrong()


@cache
def _fused_sgd_is_wrong() -> bool:
    """Whether fused SGD on a CPU leaves most of a half-precision parameter as it was (pytorch issue 191763)."""
    weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16, device="cpu"))
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5, fused=True).step()
    return bool((weight != 0.5).any())


# torch's global step hooks are to run once a step: around that of the optimizer that the user calls -------------------


def step_within(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step()``, around which only its own hooks run: it is a part of another optimizer's step."""
    with _no_global_hooks(), own_calls:
        optimizer.step()


@contextmanager
def _no_global_hooks() -> Iterator[None]:
    """Without the hooks of `register_optimizer_step_pre_hook` and ``..._post_hook``."""
    registries: list[Any] = [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    kept = [dict(hooks) for hooks in registries]
    for hooks in registries:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(registries, kept, strict=True):
            new = dict(hooks)
            hooks.clear()
            hooks.update({**before, **new})
