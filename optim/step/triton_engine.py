"""The update engine of Triton kernels: the same optimizers as in `c_engine`, with parameters and states on a GPU.

One launch steps all param groups. The host reads neither the factor, the skip flag, the step counts, nor learning rates in
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...amp.capture import is_captured
from ..kernels.choice import triton_on
from .c_engine import SUPPORTED_OPTIMIZERS, RowCache, is_number, is_supported, numbers_in, rows_of, split_supported
from .update_request import UpdateRequest

if TYPE_CHECKING:
    from ..kernels.triton import Triton


def triton_for(optimizer: torch.optim.Optimizer, found_inf: Tensor, factor: Tensor | None) -> Triton | None:
    """Return the Triton kernels if they were chosen and support the optimizer; None otherwise.

    During the capture of a CUDA graph they are not used, because the kernels' tables are copied from the host.

    Args:
        optimizer: The optimizer.
        found_inf: 0-dim skip flag; its device is the kernels' device.
        factor: 0-dim factor on gradients on the same device; None: 1.
    """
    device = found_inf.device
    kernels = triton_on(device)
    if kernels is None or is_captured():
        return None

    def is_read(value: Tensor) -> bool:
        return is_number(value) and (value.is_cpu or value.device == device)

    if not all(is_number(value) and value.device == device for value in (found_inf, factor) if value is not None):
        return None
    if any(
        isinstance(value, Tensor) and key != "lr" for group in optimizer.param_groups for key, value in group.items()
    ):
        return None
    return kernels if is_supported(optimizer, is_read) else None


def step_by_triton(
    kernels: Triton, optimizer: torch.optim.Optimizer, request: UpdateRequest, cache: RowCache
) -> list[list[Tensor]]:
    """Step all rows. If ``request.skip`` is 1, nothing changes except that states are created.

    Args:
        kernels: The result of `triton_for` for the optimizer.
        optimizer: The optimizer.
        request: Its ``skip`` and ``factor`` are on the kernels' device.
        cache: The rows of the last step; they are replaced by the rows of this step.
    Returns:
        For each param group the parameters with gradients that are left for torch.
    Collectives: none. Host synchronization: none.
    """
    from ..kernels.triton import KernelLaunch

    spec, copies, left = SUPPORTED_OPTIMIZERS[type(optimizer)], request.low_precision_out, list[list[Tensor]]()
    parts, alive, halves = list[KernelLaunch](), list[Tensor](), list[Tensor]()
    device = request.skip.device
    for group, rows in zip(optimizer.param_groups, rows_of(optimizer, device, {}, cache), strict=True):
        rate = _rate_on(device, group)
        hyper = numbers_in(group if rate is None else {**group, "lr": 0.0}, spec)
        calls, leftover = split_supported(rows, copies)
        for call in calls:
            parts.append(KernelLaunch(call.columns, hyper, rate, group["maximize"], call.grad_dtype, call.half_dtype))
            alive += call.alive
            halves += call.halves
        left.append(leftover)
    kernels.update(spec.kind, parts, request.skip, request.factor)
    if copies is not None and halves:
        copies.written += halves
        torch.autograd.graph.increment_version(halves)
    return left


def _rate_on(device: torch.device, group: Mapping[str, Any]) -> Tensor | None:
    rate = group["lr"]
    return rate if isinstance(rate, Tensor) and rate.device == device else None
