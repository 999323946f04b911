"""Gradients changed in place, and what is remembered of them: that a pending sum has been made."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gradient_dtype(param: Tensor) -> torch.dtype:
    """What backward adds up in: the parameter's dtype, or float32 where a half-precision one has main grads."""
    return param.grad_dtype or param.dtype


def scale_gradients(params: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply the gradients that are there by a 0-dim tensor, in place: one multi-tensor pass a device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    complete = [param for param in params if is_complete(param)]
    for param in params:
        if param.grad is not None:
            kinds.setdefault((param.grad.device, param.grad.dtype), []).append(param.grad)
    for (device, _), grads in kinds.items():
        torch._foreach_mul_(grads, factor.to(device, torch.float32 if grads[0].dtype != torch.float64 else None))
    for param in complete:
        mark_complete(param)


def clamp_gradients(params: Sequence[Tensor], clip_value: float) -> None:
    """Clamp the gradients that are there to [-clip_value, clip_value], in place."""
    grads = [param.grad for param in params if param.grad is not None]
    complete = [param for param in params if is_complete(param)]
    if grads:
        torch._foreach_clamp_min_(grads, -clip_value)
        torch._foreach_clamp_max_(grads, clip_value)
    for param in complete:
        mark_complete(param)


def clear_gradients(params: Sequence[Tensor], set_to_none: bool) -> None:
    """Forget the gradients, as torch's optimizers do."""
    for param in params:
        if set_to_none:
            param.grad = None
        elif param.grad is not None:
            param.grad.zero_()


def mark_complete(param: Tensor) -> None:
    """Remember that the gradient, as it is now, is no pending sum."""
    if param.grad is not None:
        param._meshstep_complete = (param.grad.data_ptr(), param.grad._version)  # type: ignore[attr-defined]


def is_complete(param: Tensor) -> bool:
    """Whether nothing has written to the gradient since `mark_complete`."""
    grad = param.grad
    return grad is None or getattr(param, "_meshstep_complete", None) == (grad.data_ptr(), grad._version)
