"""torch's fused Adam, AdamW, SGD and Adagrad on a CPU, stepped by the compiled loops on torch's own states.

Whether a parameter is stepped by them depends on the parameter alone, not on others or on gradients: ranks that hold copies
of it choose alike.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...amp.by_bucket import in_bucket
from ..kernels.choice import native
from ..kernels.native import PLAIN, Kind, Native
from . import half_copies, split_weights
from .rows import Rows

Hyper = Mapping[str, Any]


@dataclass(frozen=True)
class Known:
    """An optimizer of torch: its formula, the names of its states in the order of the loops, and its hyper-parameters."""

    kind: Kind
    states: Callable[[Hyper], tuple[str, ...]]
    hyper: Callable[[Hyper], list[float]]


def _adam_states(group: Hyper) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


def _adam_hyper(group: Hyper) -> list[float]:
    beta1, beta2 = group["betas"]
    flags = float(group["decoupled_weight_decay"]), float(group["amsgrad"])
    return [*map(number, (group["lr"], beta1, beta2, group["eps"], group["weight_decay"])), *flags]


ADAM = Known(Kind.ADAM, _adam_states, _adam_hyper)
KNOWN: Mapping[type, Known] = {
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
    torch.optim.SGD: Known(
        Kind.SGD,
        lambda group: ("momentum_buffer",) if group["momentum"] else (),
        lambda group: [
            *map(number, (group["lr"], group["momentum"], group["dampening"], group["weight_decay"])),
            float(group["nesterov"]),
        ],
    ),
    torch.optim.Adagrad: Known(
        Kind.ADAGRAD,
        lambda group: ("sum",),
        lambda group: [*map(number, (group["lr"], group["lr_decay"], group["eps"], group["weight_decay"]))],
    ),
}


def number(value: float | Tensor) -> float:
    """A hyper-parameter as a number; of a tensor on the CPU it is read where it lies, and nobody waits."""
    if not isinstance(value, Tensor):
        return float(value)
    types = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}
    return float(types[value.dtype].from_address(value.data_ptr()).value)


def loops_for(optimizer: torch.optim.Optimizer, *numbers: Tensor | None) -> Native | None:
    """The loops, if they step what this optimizer steps: one of torch's own classes, fused, without anybody's hooks in
    its step.

    Args:
        numbers: What they would read of a step: None, or plain tensors on the CPU, or it is nothing for them.
    """
    if not all(value is None or _is_read_here(value) for value in numbers):
        return None
    loops = native()
    return loops if loops is not None and is_known(optimizer, _is_read_here) else None


def is_known(optimizer: torch.optim.Optimizer, is_read: Callable[[Tensor], bool]) -> bool:
    """Whether it is one of torch's own classes, fused, without anybody's hooks in its step, and all tensors in its param
    groups are such as kernels read."""
    if type(optimizer) not in KNOWN or "step" in vars(optimizer):
        return False
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    groups = optimizer.param_groups
    numbers = (value for group in groups for value in group.values() if isinstance(value, Tensor))
    return all(group.get("fused") and not group["differentiable"] for group in groups) and all(map(is_read, numbers))


def _is_read_here(value: Tensor) -> bool:
    return is_number(value) and value.is_cpu


def is_number(value: Tensor) -> bool:
    """Whether kernels know what its memory holds."""
    return type(value) in PLAIN and value.dtype in (torch.float32, torch.float64)


# Of each optimizer, for as long as it lives: what was stepped of each param group in its last step.
_kept: WeakKeyDictionary[torch.optim.Optimizer, dict[tuple[int, torch.device], Rows]] = WeakKeyDictionary()


def rows_of(optimizer: torch.optim.Optimizer, device: torch.device, remainders: Mapping[Tensor, Tensor]) -> list[Rows]:
    """Of each param group what kernels on this device step of it; those of the last step, where they are still so.

    Args:
        remainders: Of split weights, as `Rows` has them.
    """
    known = KNOWN[type(optimizer)]
    # Buckets hold copies that are thrown away after it.
    kept: dict[tuple[int, torch.device], Rows] = {} if in_bucket() else _kept.setdefault(optimizer, {})
    found = []
    for index, group in enumerate(optimizer.param_groups):
        names, key = known.states(group), (index, device)
        rows = kept.get(key)
        if rows is None or not rows.are_still(group["params"], optimizer.state, names, remainders):
            counted = known.kind != Kind.SGD
            rows = kept[key] = Rows(group["params"], optimizer.state, names, counted, device, remainders)
        found.append(rows)
    return found


def step_by_loops(
    loops: Native, optimizer: torch.optim.Optimizer, found_inf: Tensor, factor: Tensor | None
) -> list[list[Tensor]]:
    """Step what the loops step; nothing changes where ``found_inf`` is 1, but that states are made.

    Args:
        loops: `loops_for` the optimizer.
        found_inf: 0-dim float32, on the CPU.
        factor: Of the gradients, 0-dim; None for 1.
    Returns:
        Of each param group the parameters with gradients that are left for torch.
    Collectives, host reads: none.
    """
    known, copies, left = KNOWN[type(optimizer)], half_copies.offered(), list[list[Tensor]]()
    weights, written = split_weights.offered(), list[Tensor]()
    times = 1.0 if factor is None else number(factor)
    remainders = {} if weights is None else weights.remainders
    for group, rows in zip(optimizer.param_groups, rows_of(optimizer, found_inf.device, remainders), strict=True):
        hyper, signed = known.hyper(group), -times if group["maximize"] else times
        calls, others = rows.taken(copies)
        for call in calls:
            loops.update(known.kind, call.columns, hyper, signed, found_inf, call.grad_dtype, call.half_dtype)
        left.append(others)
        written += [weight for weight in rows.split if weight.grad is not None]
    if copies is not None:
        written += copies.written
    if written:
        torch.autograd.graph.increment_version(written)
    return left
