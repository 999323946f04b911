"""torch's fused Adam, AdamW, SGD and Adagrad on a CPU, stepped by the compiled loops on torch's own states: which
parameters are rows for them, and which of these have gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress

import torch
from torch import Tensor

from ...amp import by_bucket
from ..kernels.memory import PLAIN, alike, lay_out_, lies_densely, resolve_
from ..kernels.native import Native
from . import half_copies, split_weights
from .again import GRADIENTS, STRIDED, Call, Remainders, Rows, State, Table, kept, rows_as_before, states_in, step_rows
from .half_copies import HalfCopies
from .known import KNOWN, first_value


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
    copies, weights = half_copies.offered_copies.get(), split_weights.offered_weights.get()
    remainders = {} if weights is None else weights.remainders
    groups = rows_of(optimizer, found_inf.device, remainders)
    taken = [taken_of(rows, copies) for rows in groups]
    step_rows(loops, optimizer, [calls for calls, _ in taken], found_inf, factor)
    rows = [param for of_group in groups if of_group.table.rests is not None for param in of_group.table.params]
    if split := [param for param in rows if param.grad is not None and param in remainders]:
        torch.autograd.graph.increment_version(split)
    return [left for _, left in taken]


def rows_of(optimizer: torch.optim.Optimizer, device: torch.device, remainders: Remainders) -> list[Rows]:
    """Of each param group what kernels on this device step of it; that of the last step, where it is still so. States are
    made as torch makes them, where a parameter has its first gradient."""
    known, found = KNOWN[type(optimizer)], list[Rows]()
    before = rows_as_before(optimizer, device, remainders)
    for index, (group, rows) in enumerate(zip(optimizer.param_groups, before, strict=True)):
        if rows is None:
            names = states_in(group, known)
            first = {name: first_value(optimizer, group, name) for name in names}
            rows = _rows(group["params"], optimizer.state, first, device, remainders)
            if not by_bucket.holders:  # buckets hold copies that are thrown away after it
                kept.setdefault(optimizer, {})[index, device] = rows.keep()
        found.append(rows)
    return found


def _rows(
    whole: Sequence[Tensor],
    state: State,
    first: Mapping[str, float],
    device: torch.device,
    remainders: Remainders,
) -> Rows:
    """Those parameters that the kernels step: dense float32 ones on their device with float32 states, and bfloat16 ones
    with remainders. The others are left for torch. States and remainders get the strides of their parameters.

    Args:
        first: By the names of the states, in the order of the kernels, what new ones are filled with.
    """
    names = tuple(first)
    params, waiting, others = list[Tensor](), list[Tensor](), list[Tensor]()
    for param in whole:
        if param.grad is None and param not in state:
            waiting.append(param)  # for its first gradient
        elif _is_stepped(param, device, remainders.get(param)) and _has_states(param, state, first):
            params.append(param)
        else:
            others.append(param)
    addresses = {name: [state[param][name].data_ptr() for param in params] for name in names}
    steps, none = addresses.pop("step", None), [0] * len(params)
    columns = [list(map(Tensor.data_ptr, params)), *addresses.values(), *[none] * (3 - len(addresses)), steps or none]
    rests = [0 if (rest := remainders.get(param)) is None else rest.data_ptr() for param in params]
    table = Table(params, columns, rests if any(rests) else None)
    return Rows(whole, state, names, table, remainders, waiting, others)


def _is_stepped(param: Tensor, device: torch.device, remainder: Tensor | None) -> bool:
    if param.device != device or type(param) not in PLAIN or not lies_densely(param):
        return False
    resolve_(param)
    if remainder is None:
        return param.dtype == torch.float32
    lay_out_(remainder, param)
    return param.dtype == torch.bfloat16 and alike(remainder, param)


def _has_states(param: Tensor, states: State, first: Mapping[str, float]) -> bool:
    """Makes those that are not there yet."""
    if not first:
        return True
    state = states[param]
    if "step" in first and "step" not in state:  # first, as torch does
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
    for name, value in first.items():
        if state.get(name) is None:
            state[name] = torch.full_like(param, value, dtype=torch.float32, memory_format=torch.preserve_format)
        elif name != "step":
            lay_out_(state[name], param)
    return all(
        state[name].dtype == torch.float32
        and state[name].device == param.device
        and (name == "step" or (type(state[name]) in PLAIN and alike(state[name], param)))
        for name in first
    )


def taken_of(rows: Rows, copies: HalfCopies | None) -> tuple[list[Call], list[Tensor]]:
    """The calls that step the rows that have gradients, one for each dtype of these; and the parameters with gradients
    that are left, because they or their gradients are nothing for the loops.

    Args:
        copies: Half-precision copies that are to be written.
    """
    table, grads = rows.table, [param.grad for param in rows.table.params]
    there = [grad for grad in grads if grad is not None]
    dtypes = dict.fromkeys(grad.dtype for grad in there)
    if {*map(type, there)} <= PLAIN and dtypes.keys() <= GRADIENTS and {grad.layout for grad in there} <= STRIDED:
        read, strange = [grad is not None for grad in grads], list[Tensor]()
    else:
        read = [
            grad is not None and type(grad) in PLAIN and grad.dtype in GRADIENTS and grad.layout in STRIDED
            for grad in grads
        ]
        strange = [param for param, here in zip(table.params, read, strict=True) if not here and param.grad is not None]
    calls = list[Call]()
    for dtype in dtypes:
        chosen = read
        if len(dtypes) > 1:
            chosen = [here and grad is not None and grad.dtype == dtype for here, grad in zip(read, grads, strict=True)]
        if any(chosen):
            of_dtype = table if all(chosen) else _only(table, chosen)
            calls.append(of_dtype.call([grad for grad in compress(grads, chosen) if grad is not None], copies))
    return calls, [param for param in rows.others if param.grad is not None] + strange


def _only(table: Table, chosen: Sequence[bool]) -> Table:
    """With these of its rows."""
    rests = None if table.rests is None else list(compress(table.rests, chosen))
    return Table(list(compress(table.params, chosen)), [list(compress(c, chosen)) for c in table.fixed], rests)
