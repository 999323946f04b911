"""torch's fused Adam, AdamW, SGD and Adagrad on a CPU, stepped by the compiled loops on torch's own states.

Whether a parameter is stepped by them depends on the parameter alone, not on others or on gradients: ranks that hold copies
of it choose alike.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...amp import by_bucket
from ..kernels.choice import chosen
from ..kernels.native import PLAIN, Kind, Native
from . import half_copies, split_weights
from .rows import Rows

Hyper = Mapping[str, Any]


@dataclass(frozen=True)
class Known:
    """An optimizer of torch, in the order of the loops.

    Args:
        kind: Its formula.
        hyper: The keys of its numbers in a param group; ``"betas"`` are two.
        states: Their names.
        last: The key in a param group without which there is no last state.
    """

    kind: Kind
    hyper: tuple[str, ...]
    states: tuple[str, ...]
    last: str | None = None

    def states_in(self, group: Hyper) -> tuple[str, ...]:
        """The names of the states that a param group has."""
        return self.states if self.last is None or group[self.last] else self.states[:-1]

    def numbers_in(self, group: Hyper) -> list[float]:
        """The numbers of a param group."""
        found = list[float]()
        for key in self.hyper:
            if key == "betas":
                first, second = group[key]
                found += (number(first), number(second))
            else:
                found.append(number(group[key]))
        return found


ADAM = Known(
    Kind.ADAM,
    ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "amsgrad"),
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    last="amsgrad",
)
KNOWN: Mapping[type, Known] = {
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
    torch.optim.SGD: Known(
        Kind.SGD, ("lr", "momentum", "dampening", "weight_decay", "nesterov"), ("momentum_buffer",), last="momentum"
    ),
    torch.optim.Adagrad: Known(Kind.ADAGRAD, ("lr", "lr_decay", "eps", "weight_decay"), ("sum",)),
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
    loops = chosen.native
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
    """Of each param group what kernels on this device step of it; that of the last step, where it is still so.

    Args:
        remainders: Of split weights, as `Rows` has them.
    """
    known, found = KNOWN[type(optimizer)], list[Rows]()
    before = rows_as_before(optimizer, device, remainders)
    for index, (group, rows) in enumerate(zip(optimizer.param_groups, before, strict=True)):
        if rows is None:
            states, counted = known.states_in(group), known.kind != Kind.SGD
            rows = Rows(group["params"], optimizer.state, states, counted, device, remainders)
            if not by_bucket.holders:  # buckets hold copies that are thrown away after it
                _kept.setdefault(optimizer, {})[index, device] = rows
        found.append(rows)
    return found


def rows_as_before(
    optimizer: torch.optim.Optimizer, device: torch.device, remainders: Mapping[Tensor, Tensor]
) -> list[Rows | None]:
    """Of each param group that of the last step; None where there is none, or something has changed."""
    known, kept = KNOWN[type(optimizer)], {} if by_bucket.holders else _kept.get(optimizer, {})
    states = [known.states_in(group) for group in optimizer.param_groups]
    found = list[Rows | None]()
    for index, (group, names) in enumerate(zip(optimizer.param_groups, states, strict=True)):
        rows = kept.get((index, device))
        still = rows is not None and rows.are_still(group["params"], optimizer.state, names, remainders)
        found.append(rows if still else None)
    return found


@overload
def step_by_loops(
    loops: Native, optimizer: torch.optim.Optimizer, found_inf: Tensor, factor: Tensor | None
) -> list[list[Tensor]]: ...
@overload
def step_by_loops(
    loops: Native,
    optimizer: torch.optim.Optimizer,
    found_inf: Tensor,
    factor: Tensor | None,
    *,
    as_before: bool,
) -> list[list[Tensor]] | None: ...
def step_by_loops(
    loops: Native,
    optimizer: torch.optim.Optimizer,
    found_inf: Tensor,
    factor: Tensor | None,
    *,
    as_before: bool = False,
) -> list[list[Tensor]] | None:
    """Step what the loops step; nothing changes where ``found_inf`` is 1, but that states are made.

    Args:
        loops: `loops_for` the optimizer.
        found_inf: 0-dim float32, on the CPU.
        factor: Of the gradients, 0-dim; None for 1.
        as_before: Do nothing and return None unless they step all of it, and did so in the last step: then nobody else is
            to be asked how.
    Returns:
        Of each param group the parameters with gradients that are left for torch.
    Collectives, host reads: none.
    """
    if as_before and any(rows.others for rows in _kept.get(optimizer, {}).values()):
        return None
    known, groups, device = KNOWN[type(optimizer)], optimizer.param_groups, found_inf.device
    copies, weights = half_copies.offered.get(), split_weights.offered.get()
    remainders = {} if weights is None else weights.remainders
    hypers, times = [known.numbers_in(group) for group in groups], 1.0 if factor is None else number(factor)
    before = rows_as_before(optimizer, device, remainders) if as_before else rows_of(optimizer, device, remainders)
    rows = list[Rows]()
    for of_group in before:
        if of_group is None:
            return None
        rows.append(of_group)
    left, written = list[list[Tensor]](), list[Tensor]()
    for group, hyper, of_group in zip(groups, hypers, rows, strict=True):
        calls, others = of_group.taken(copies)
        signed = -times if group["maximize"] else times
        for call in calls:
            loops.update(known.kind, call.columns, hyper, signed, found_inf, call.grad_dtype, call.half_dtype)
        left.append(others)
        for weight in of_group.split:
            if weight.grad is not None:
                written.append(weight)
    if copies is not None:
        written += copies.written
    if written:
        torch.autograd.graph.increment_version(written)
    return left
