"""torch's fused optimizers on a GPU, stepped by kernels in Triton on torch's own states, if these were chosen.

As `c_engine`, but for all param groups at once; and nothing of factor, skip flag, step counts and learning rates that
are tensors is read by the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...amp.capture import is_captured
from ..kernels.choice import triton_on
from .c_engine import SUPPORTED_OPTIMIZERS, RowCache, is_known, is_number, numbers_in, rows_of, split_supported
from .update_request import UpdateRequest

if TYPE_CHECKING:
    from ..kernels.triton import Triton


def triton_for(optimizer: torch.optim.Optimizer, found_inf: Tensor, factor: Tensor | None) -> Triton | None:
    """The kernels, if they were chosen and step what this optimizer steps: what `loops_for` asks of it, on their device.

    In a CUDA graph that is being made it is None, and torch's kernels step: the kernels' tables come from the host.
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
    return kernels if is_known(optimizer, is_read) else None


def step_by_triton(
    kernels: Triton, optimizer: torch.optim.Optimizer, request: UpdateRequest, cache: RowCache
) -> list[list[Tensor]]:
    """Step all rows; where ``request.skip`` is 1 nothing changes, except that states are made.

    Args:
        kernels: `triton_for` the optimizer.
        request: Its ``skip`` and ``factor`` are on the kernels' device.
        cache: The rows of the last step, which are replaced by those of this one.
    Returns:
        For each param group the parameters with gradients that are left for torch.
    Collectives, host synchronization: none.
    """
    from ..kernels.triton import KernelLaunch

    known, copies, left = SUPPORTED_OPTIMIZERS[type(optimizer)], request.low_precision_out, list[list[Tensor]]()
    parts, alive, halves = list[KernelLaunch](), list[Tensor](), list[Tensor]()
    device = request.skip.device
    for group, rows in zip(optimizer.param_groups, rows_of(optimizer, device, {}, cache), strict=True):
        rate = _rate_on(device, group)
        hyper = numbers_in(group if rate is None else {**group, "lr": 0.0}, known)
        calls, others = split_supported(rows, copies)
        for call in calls:
            parts.append(KernelLaunch(call.columns, hyper, rate, group["maximize"], call.grad_dtype, call.half_dtype))
            alive += call.alive
            halves += call.halves
        left.append(others)
    kernels.update(known.kind, parts, request.skip, request.factor)
    if copies is not None and halves:
        copies.written += halves
        torch.autograd.graph.increment_version(halves)
    return left


def _rate_on(device: torch.device, group: Mapping[str, Any]) -> Tensor | None:
    rate = group["lr"]
    return rate if isinstance(rate, Tensor) and rate.device == device else None
