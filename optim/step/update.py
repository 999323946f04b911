"""Step a torch optimizer with one factor on the gradients, or skip: on the device where the optimizer can, and count it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from ...amp.by_bucket import holding
from ...amp.casting import is_half
from ..gradients.in_place import scale_gradients, widen_gradients
from .captured_update import capturable
from .counted_once import CountedOnce
from .native_update import loops_for, step_by_loops
from .rows import laid_out, lies_densely
from .several import asks_other_ranks, parts_of
from .split_weights import SplitWeights, offered
from .triton_update import step_by_triton, triton_for


def steps_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer takes ``grad_scale`` and ``found_inf`` tensors itself: Adam, AdamW, SGD, Adagrad, fused; and
    those of `meshstep.optim.whole`.

    Not before its first step for a fused SGD with dampening: torch makes the first momentum buffer from the gradient
    alone and has no such buffer yet if that step is skipped on the device. And not for half-precision parameters on a CPU
    where torch's fused SGD loses their updates (2.12 and 2.13). Of several optimizers all must.
    """
    if (parts := parts_of(optimizer)) != [optimizer]:
        return all(map(steps_on_device, parts))
    if asks_other_ranks(optimizer):
        return True
    fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    groups = optimizer.param_groups
    if not fused or not all(group.get("fused") for group in groups):
        return False
    if _is_miscomputed(optimizer):
        return False
    return not any(
        group.get("momentum") and group.get("dampening") and _without_momentum(optimizer, group) for group in groups
    )


def check_steps_without_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError for an optimizer that can't step with the gradients that are there (`torch.optim.LBFGS`)."""
    for part in parts_of(optimizer):
        closure = signature(part.step).parameters.get("closure")
        if closure is None or closure.default is not Parameter.empty:
            continue
        raise TypeError(
            f"{type(part).__name__} evaluates the loss itself, several times a step, by a closure, whose gradients "
            "nobody would complete, measure and clip: take an optimizer that steps without"
        )


def apply_update(optimizer: torch.optim.Optimizer, found_inf: Tensor, factor: Tensor | None) -> None:
    """Multiply all gradients by ``factor`` and step, unless ``found_inf`` is 1: then change nothing.

    Args:
        optimizer: The wrapped optimizer.
        found_inf: 0-dim float32, 0 or 1.
        factor: 0-dim, or None for 1. On a CPU the compiled loops multiply by it as they step (`native_update`), and leave
            gradients as they are; so do Triton's kernels on a GPU, if they were chosen (`triton_update`). torch's fused
            kernels divide by its inverse in float32 (and leave the scaled gradient in ``.grad``); float64 parameters and
            other optimizers are multiplied in a pass of their own.
    Split weights that are offered (`split_weights`) are stepped as float32 masters, of each optimizer by itself.

    Collectives: none. Host reads: one, unless `steps_on_device`; of several optimizers one for all.
    """
    if (weights := offered()) is None:
        _apply(optimizer, found_inf, factor)
        return
    for part in parts_of(optimizer):
        _update_split(part, weights, found_inf, factor)


def _update_split(
    optimizer: torch.optim.Optimizer, weights: SplitWeights, found_inf: Tensor, factor: Tensor | None
) -> None:
    """By the loops in one pass, which join, step and split; what they leave by float32 copies, bucket by bucket."""
    update = partial(_apply, optimizer, found_inf, factor)
    loops = loops_for(optimizer, found_inf, factor) if steps_on_device(optimizer) else None
    if loops is None:
        weights.step(optimizer, update)
        return
    left = step_by_loops(loops, optimizer, found_inf, factor)
    if any(left):
        with holding(optimizer, left):
            weights.step(optimizer, update)


def _apply(optimizer: torch.optim.Optimizer, found_inf: Tensor, factor: Tensor | None) -> None:
    parts = parts_of(optimizer)
    on_host = [part for part in parts if not steps_on_device(part)]
    for part in parts:
        if part not in on_host:
            _update_on_device(part, found_inf, factor)
    if on_host and not bool(found_inf):
        for part in on_host:
            widen_gradients(params_of(part))
            if factor is not None:
                scale_gradients(params_of(part), factor)
            if any(group.get("fused") for group in part.param_groups):
                lay_out_gradients(params_of(part))
            _step_rightly(part)


def _update_on_device(optimizer: torch.optim.Optimizer, found_inf: Tensor, factor: Tensor | None) -> None:
    left: list[list[Tensor]] = []
    if (kernels := triton_for(optimizer, found_inf, factor)) is not None:
        left = step_by_triton(kernels, optimizer, found_inf, factor)
    elif (loops := loops_for(optimizer, found_inf, factor)) is not None:
        left = step_by_loops(loops, optimizer, found_inf, factor)
    else:
        _update_by_torch(optimizer, found_inf, factor)
    if any(left):
        with holding(optimizer, left):
            _update_by_torch(optimizer, found_inf, factor)


def _update_by_torch(optimizer: torch.optim.Optimizer, found_inf: Tensor, factor: Tensor | None) -> None:
    params = params_of(optimizer)
    widen_gradients(params)
    if factor is not None and torch.float64 in {param.dtype for param in params}:
        scale_gradients(params, torch.where(found_inf > 0, torch.ones_like(factor), factor))
        factor = None
    _start_momentum(optimizer)
    lay_out_gradients(params)
    fused: Any = optimizer
    fused.found_inf = found_inf
    fused.grad_scale = None if factor is None else torch.reciprocal(factor, out=torch.empty_like(found_inf))
    try:
        with capturable(optimizer), CountedOnce(optimizer, found_inf) if found_inf.is_cuda else nullcontext():
            step_within(optimizer)
    finally:
        del fused.found_inf, fused.grad_scale


def lay_out_gradients(params: Sequence[Tensor]) -> None:
    """Give gradients on a CPU the order of memory of their parameters: torch's fused kernels there walk through both as
    they lie, and would step elements by gradients of others."""
    for param in params:
        grad = param.grad
        if grad is not None and param.is_cpu and (ordered := laid_out(grad, param)) is not grad:
            param.grad = ordered


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All that its param groups hold."""
    return [param for group in optimizer.param_groups for param in group["params"]]


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
    groups = optimizer.param_groups if _is_miscomputed(optimizer) or _starts_late(optimizer) else []
    fused = [group["fused"] for group in groups]
    try:
        for group in groups:
            group["fused"] = False
        step_within(optimizer)
    finally:
        for group, value in zip(groups, fused, strict=True):
            group["fused"] = value


def _starts_late(optimizer: torch.optim.Optimizer) -> bool:
    """Whether some parameters of a fused SGD have momentum and others get theirs only now, which its kernel can't do."""
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    for group in optimizer.param_groups:
        if group.get("fused") and group["momentum"] and group["dampening"]:
            with_gradient = sum(param.grad is not None for param in group["params"])
            if 0 < len(_without_momentum(optimizer, group)) < with_gradient:
                return True
    return False


def _is_miscomputed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch's fused kernels would step a parameter on a CPU wrongly: one whose elements do not lie densely, where
    they write between them; a half-precision one of SGD's."""
    sgd = isinstance(optimizer, torch.optim.SGD)
    for group in optimizer.param_groups:
        if group.get("fused"):
            params = [param for param in group["params"] if param.is_cpu]
            if not all(map(lies_densely, params)):
                return True
            if sgd and any(map(is_half, params)) and _fused_sgd_is_wrong():
                return True
    return False


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
    with _no_global_hooks():
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
