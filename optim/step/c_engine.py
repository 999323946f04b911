"""The update engine of compiled C loops: torch's fused Adam, AdamW, SGD and Adagrad on a CPU, in one pass over memory.

    weight, states = formula(weight, states, gradient * factor, numbers)        each row, unless the step is skipped

A row is a parameter with its states, as addresses. Rows are cached from step to step and reused while their tensors are
unchanged. Whether a parameter becomes a row depends on that parameter alone, so all ranks with a replica choose alike.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...amp import by_bucket
from ..kernels.choice import chosen
from ..kernels.memory import (
    PLAIN,
    Signature,
    is_lazy,
    is_non_overlapping_and_dense,
    match_memory_format,
    match_memory_format_,
    resolve_,
    same_memory_format,
)
from ..kernels.native import DTYPES, NO_MEMORY, Kind, Native, PointerColumns
from .call_guard import has_step_hooks
from .update_request import LowPrecisionOut, UpdateRequest

# Supported torch optimizers -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FusedOptimizerSpec:
    """An optimizer of torch, in the order of the kernels.

    Args:
        kind: Its formula.
        hyper: The keys of its numbers in a param group; ``"betas"`` are two.
        states: Their names.
        last: The key in a param group without which there is no last state.
        counted: It counts the steps of each parameter.
    """

    kind: Kind
    hyper: tuple[str, ...]
    states: tuple[str, ...]
    last: str | None = None
    counted: bool = True


ADAM = FusedOptimizerSpec(
    Kind.ADAM,
    ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "amsgrad"),
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    last="amsgrad",
)
SUPPORTED_OPTIMIZERS: Mapping[type, FusedOptimizerSpec] = {
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
    torch.optim.SGD: FusedOptimizerSpec(
        Kind.SGD,
        ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
        ("momentum_buffer",),
        last="momentum",
        counted=False,
    ),
    torch.optim.Adagrad: FusedOptimizerSpec(Kind.ADAGRAD, ("lr", "lr_decay", "eps", "weight_decay"), ("sum",)),
}


def first_value(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], name: str) -> float:
    """Return what torch fills a new state of the parameter's shape with.

    Args:
        optimizer: One of torch's, or any other, whose states start from 0.
        group: The parameter's param group.
        name: The state's.
    """
    if isinstance(optimizer, torch.optim.Adagrad) and name == "sum":
        return float(optimizer.defaults["initial_accumulator_value"])  # also where the group has its own, as torch does
    if isinstance(optimizer, torch.optim.Rprop) and name == "step_size":
        return float(group["lr"])
    return 0.0


# Rows of tensors, cached from step to step ----------------------------------------------------------------------------

GRADIENTS = frozenset({torch.float32, torch.bfloat16, torch.float16})
STRIDED = frozenset({torch.strided})
State = Mapping[Tensor, dict[str, Any]]
Remainders = Mapping[Tensor, Tensor]
"""Of split weights, which are stepped as the float32 masters that both are."""
RowCache = dict[tuple[int, torch.device], "ParamRows"]
"""The rows of an optimizer's last step, by param group and device."""


class KernelCall(NamedTuple):
    """One call of the loops. Args: halves: Copies that it writes. alive: What its addresses belong to."""

    columns: PointerColumns
    grad_dtype: torch.dtype
    half_dtype: torch.dtype
    halves: list[Tensor]
    alive: list[Tensor]


class PointerTable:
    """Tensors to be stepped, a row each.

    Args:
        params: The tensors.
        fixed: Their addresses, those of three states each, and of their step counts, a column after another; 0: none.
        rests: The addresses of remainders; None: nowhere are any.
    """

    def __init__(self, params: Sequence[Tensor], fixed: Sequence[Sequence[int]], rests: Sequence[int] | None) -> None:
        self.params, self.fixed, self.rests = list(params), fixed, rests
        self.contiguous, self.numels = list(map(Tensor.is_contiguous, params)), list(map(Tensor.numel, params))
        self._flat, self._lengths = array("Q", chain.from_iterable(fixed)), array("q", self.numels)
        self._rests = None if rests is None else array("Q", rests)
        self._all_contiguous = all(self.contiguous)

    def call(self, grads: Sequence[Tensor], copies: LowPrecisionOut | None) -> KernelCall:
        """What steps all rows, one at least, by gradients of one dtype; and writes their half-precision copies."""
        rows = list(grads)
        if not self._all_contiguous or not all(map(Tensor.is_contiguous, rows)) or any(map(Tensor.is_neg, rows)):
            rows = [match_memory_format(grad, param) for grad, param in zip(grads, self.params, strict=True)]
        addresses = array("Q", map(Tensor.data_ptr, rows))
        if 0 in addresses:  # no elements, or zeros that torch has given no memory
            rows = [match_memory_format(grad, param) for grad, param in zip(grads, self.params, strict=True)]
            addresses = array("Q", map(Tensor.data_ptr, rows))
        halves = [] if copies is None else [copies.copies.get(param) for param in self.params]
        dtype = next((half.dtype for half in halves if half is not None), torch.bfloat16)
        for index, half in enumerate(halves):
            if half is not None:
                lies = self.contiguous[index] and half.is_contiguous() and half.numel() == self.numels[index]
                lies = lies and not half.is_neg()
                if (
                    half.dtype != dtype
                    or type(half) not in PLAIN
                    or not (lies or same_memory_format(half, self.params[index]))
                ):
                    halves[index] = None
        written = [half for half in halves if half is not None]
        at = array("Q", [0 if half is None else half.data_ptr() for half in halves]) if written else None
        return KernelCall(
            PointerColumns(self._flat, addresses, self._lengths, at, self._rests), grads[0].dtype, dtype, written, rows
        )


class ParamRows:
    """What the loops step of one param group.

    Args:
        whole, state: All parameters of the group; the optimizer's state.
        names: As `states_in` says, the step counts' last.
        table, remainders: The rows, and theirs.
        waiting, others: Those that have had no gradient; those that have had one, and are no rows.
    """

    def __init__(
        self,
        whole: Sequence[Tensor],
        state: State,
        names: Sequence[str],
        table: PointerTable,
        remainders: Remainders,
        waiting: Sequence[Tensor],
        others: Sequence[Tensor],
    ) -> None:
        self.table, self.others, self._waiting = table, list(others), list(waiting)
        self._whole, self._names, self._of_params = list(whole), tuple(names), list(state.values())
        self._states = [state[param] for param in table.params] if names else []
        self._rests = [remainders.get(param) for param in table.params]
        self._there = [*table.params, *(rest for rest in self._rests if rest is not None)]
        self._values, self._addresses, self._signature = list[Any](), list[int](), Signature([])
        self._have_only_names = False

    def keep(self) -> ParamRows:
        """Note what `are_still` compares with. Returns the rows."""
        # All values of a state are read at once, unless there are others than the kernels' among them.
        self._have_only_names = all(state.keys() == set(self._names) for state in self._states)
        self._values = self._values_now()
        self._addresses, self._signature = list(map(Tensor.data_ptr, self._values)), Signature(self._there)
        return self

    def _values_now(self) -> list[Any]:
        if self._have_only_names:
            return [*self._there, *chain.from_iterable(map(dict.values, self._states))]
        return [*self._there, *(held.get(name) for name in self._names for held in self._states)]

    def are_still(self, params: Sequence[Tensor], state: State, names: Sequence[str], remainders: Remainders) -> bool:
        """Whether all is as it was: parameters, states and remainders, by address, parameters and remainders also by dtype,
        shape and strides, and no first gradient. Of a state those change with the tensor or its address."""
        now = self._values_now()
        return (
            len(params) == len(self._whole)
            and all(map(is_, params, self._whole))
            and self._names == tuple(names)
            and len(state) == len(self._of_params)
            and all(map(is_, state.values(), self._of_params))
            and self._have_still(remainders)
            and len(now) == len(self._values)
            and all(map(is_, now, self._values))
            and list(map(Tensor.data_ptr, now)) == self._addresses
            and self._signature.fits(self._there)
            and all(param.grad is None for param in self._waiting)
        )

    def _have_still(self, remainders: Remainders) -> bool:
        none = not remainders and self.table.rests is None
        return none or all(map(is_, map(remainders.get, self.table.params), self._rests))

    def calls(self, copies: LowPrecisionOut | None) -> list[KernelCall] | None:
        """What steps all rows; None where not all have gradients that the loops read, of one dtype."""
        grads: list[Any] = [param.grad for param in self.table.params]
        if not grads:
            return []
        if {*map(type, grads)} - PLAIN:
            return None
        dtypes, layouts = {grad.dtype for grad in grads}, {grad.layout for grad in grads}
        if len(dtypes) > 1 or dtypes - GRADIENTS or layouts - STRIDED:
            return None
        return [self.table.call(grads, copies)]


def rows_as_before(
    optimizer: Optimizer, device: torch.device, remainders: Remainders, cache: RowCache
) -> list[ParamRows | None]:
    """Of each param group what kernels on this device stepped of it in the last step; None where that has changed."""
    known, of_groups = SUPPORTED_OPTIMIZERS[type(optimizer)], {} if by_bucket.holders else cache
    found = list[ParamRows | None]()
    for index, group in enumerate(optimizer.param_groups):
        rows, names = of_groups.get((index, device)), states_in(group, known)
        still = rows is not None and rows.are_still(group["params"], optimizer.state, names, remainders)
        found.append(rows if still else None)
    return found


def step_rows(
    loops: Native, optimizer: Optimizer, calls: Sequence[Sequence[KernelCall]], request: UpdateRequest
) -> None:
    """Make the calls of each param group. Args: request: Its ``skip`` and ``factor`` are on the CPU."""
    known, copies = SUPPORTED_OPTIMIZERS[type(optimizer)], request.low_precision_out
    times = 1.0 if request.factor is None else number(request.factor)
    hypers = [numbers_in(group, known) for group in optimizer.param_groups]
    for group, of_group, hyper in zip(optimizer.param_groups, calls, hypers, strict=True):
        signed = -times if group["maximize"] else times
        for call in of_group:
            update_by_loops(
                loops, known.kind, call.columns, hyper, signed, request.skip, call.grad_dtype, call.half_dtype
            )
            if copies is not None and call.halves:
                copies.written += call.halves
                torch.autograd.graph.increment_version(call.halves)


def update_by_loops(
    loops: Native,
    kind: Kind,
    columns: PointerColumns,
    hyper: Sequence[float],
    factor: float,
    found_inf: Tensor,
    grad_dtype: torch.dtype,
    half_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """`Native.update`, of arrays. Args: factor: Of gradients of ``grad_dtype``; negative to maximize. found_inf: 0-dim
    float32, on the CPU. half_dtype: Of the half-precision copies."""
    arrays = columns.fixed, columns.grads, columns.halves, columns.rests, columns.numels, array("d", hyper)
    *tables, numbers = (None if values is None else values.buffer_info()[0] for values in arrays)
    dtypes, flag, threads = (DTYPES[grad_dtype], DTYPES[half_dtype]), found_inf.data_ptr(), torch.get_num_threads()
    if loops.update(kind, len(columns.numels), *tables, *dtypes, numbers, factor, flag, threads):
        raise MemoryError(NO_MEMORY)


def number(value: float | Tensor) -> float:
    """A hyper-parameter as a number; of a tensor on the CPU it is read where it lies, and nobody waits."""
    if not isinstance(value, Tensor):
        return float(value)
    if not (is_number(value) and value.is_cpu):
        return float(value)
    types = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}
    return float(types[value.dtype].from_address(value.data_ptr()).value)


def numbers_in(group: Mapping[str, Any], known: FusedOptimizerSpec) -> list[float]:
    """The numbers of a param group, in the order of the kernels."""
    values = [group[key] if key == "betas" else (group[key],) for key in known.hyper]
    return [number(value) for pair in values for value in pair]


def states_in(group: Mapping[str, Any], known: FusedOptimizerSpec) -> tuple[str, ...]:
    """The names of the states that a param group has, in the order of the kernels, and of its step counts."""
    states = known.states if known.last is None or group[known.last] else known.states[:-1]
    return (*states, "step") if known.counted else states


def loops_for(optimizer: Optimizer, *numbers: Tensor | None) -> Native | None:
    """The loops, if they step what this optimizer steps, see `is_known`; and if what they would read of a step are None,
    or plain ``numbers`` on the CPU."""

    def is_read(value: Tensor) -> bool:
        return is_number(value) and value.is_cpu

    if not all(value is None or is_read(value) for value in numbers):
        return None
    loops = chosen.native
    return loops if loops is not None and is_known(optimizer, is_read) else None


def is_known(optimizer: Optimizer, is_read: Callable[[Tensor], bool]) -> bool:
    """Whether it is one of torch's own classes, fused, without anybody's hooks in its step, and all tensors in its param
    groups are such as kernels read."""
    if type(optimizer) not in SUPPORTED_OPTIMIZERS or "step" in vars(optimizer):
        return False
    if has_step_hooks(optimizer):
        return False
    groups = optimizer.param_groups
    numbers = (value for group in groups for value in group.values() if isinstance(value, Tensor))
    return all(group.get("fused") and not group["differentiable"] for group in groups) and all(map(is_read, numbers))


def is_number(value: Tensor) -> bool:
    """Whether kernels know what its memory holds."""
    return type(value) in PLAIN and value.dtype in (torch.float32, torch.float64) and not is_lazy(value)


# Stepping by the loops ------------------------------------------------------------------------------------------------


def step_cached_rows(optimizer: Optimizer, request: UpdateRequest, cache: RowCache) -> bool:
    """Step by the rows of the last step, and return True; False, and nothing changed, where the loops can't step all of it.

    Args:
        request: Without split weights.
        cache: The rows of the last step.
    """
    loops = loops_for(optimizer, request.skip, request.factor)
    if loops is None or any(rows.others for rows in cache.values()):
        return False
    calls = list[list[KernelCall]]()
    for rows in rows_as_before(optimizer, request.skip.device, {}, cache):
        if rows is None:
            return False
        of_group = rows.calls(request.low_precision_out)
        if of_group is None:  # some have no gradient, or gradients of other dtypes
            of_group, left = split_supported(rows, request.low_precision_out)
            if left:
                return False
        calls.append(of_group)
    step_rows(loops, optimizer, calls, request)
    return True


def step_by_loops(loops: Native, optimizer: Optimizer, request: UpdateRequest, cache: RowCache) -> list[list[Tensor]]:
    """Step all rows; where ``request.skip`` is 1 nothing changes, except that states are made.

    Args:
        loops: `loops_for` the optimizer.
        request: Its ``skip`` and ``factor`` are on the CPU.
        cache: The rows of the last step, which are replaced by those of this one.
    Returns:
        For each param group the parameters with gradients that are left for torch.
    Collectives, host synchronization: none.
    """
    groups = rows_of(optimizer, request.skip.device, request.remainders, cache)
    taken = [split_supported(rows, request.low_precision_out) for rows in groups]
    step_rows(loops, optimizer, [calls for calls, _ in taken], request)
    rows = [param for of_group in groups if of_group.table.rests is not None for param in of_group.table.params]
    if split := [param for param in rows if param.grad is not None and param in request.remainders]:
        torch.autograd.graph.increment_version(split)
    return [left for _, left in taken]


def rows_of(optimizer: Optimizer, device: torch.device, remainders: Remainders, cache: RowCache) -> list[ParamRows]:
    """Return the rows of each param group for kernels on this device; cached ones where they are unchanged. States are made
    as torch makes them, where a parameter has its first gradient."""
    known, found = SUPPORTED_OPTIMIZERS[type(optimizer)], list[ParamRows]()
    before = rows_as_before(optimizer, device, remainders, cache)
    for index, (group, rows) in enumerate(zip(optimizer.param_groups, before, strict=True)):
        if rows is None:
            names = states_in(group, known)
            first = {name: first_value(optimizer, group, name) for name in names}
            rows = _rows(group["params"], optimizer.state, first, device, remainders)
            if not by_bucket.holders:  # buckets hold copies that are thrown away after it
                cache[index, device] = rows.keep()
        found.append(rows)
    return found


def _rows(
    whole: Sequence[Tensor],
    state: State,
    first: Mapping[str, float],
    device: torch.device,
    remainders: Remainders,
) -> ParamRows:
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
    table = PointerTable(params, columns, rests if any(rests) else None)
    return ParamRows(whole, state, names, table, remainders, waiting, others)


def _is_stepped(param: Tensor, device: torch.device, remainder: Tensor | None) -> bool:
    if param.device != device or type(param) not in PLAIN or not is_non_overlapping_and_dense(param):
        return False
    resolve_(param)
    if remainder is None:
        return param.dtype == torch.float32
    match_memory_format_(remainder, param)
    return param.dtype == torch.bfloat16 and same_memory_format(remainder, param)


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
            match_memory_format_(state[name], param)
    return all(
        state[name].dtype == torch.float32
        and state[name].device == param.device
        and (name == "step" or (type(state[name]) in PLAIN and same_memory_format(state[name], param)))
        for name in first
    )


def split_supported(rows: ParamRows, copies: LowPrecisionOut | None) -> tuple[list[KernelCall], list[Tensor]]:
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
    calls = list[KernelCall]()
    for dtype in dtypes:
        chosen = read
        if len(dtypes) > 1:
            chosen = [here and grad is not None and grad.dtype == dtype for here, grad in zip(read, grads, strict=True)]
        if any(chosen):
            of_dtype = table if all(chosen) else _only(table, chosen)
            calls.append(of_dtype.call([grad for grad in compress(grads, chosen) if grad is not None], copies))
    return calls, [param for param in rows.others if param.grad is not None] + strange


def _only(table: PointerTable, chosen: Sequence[bool]) -> PointerTable:
    """With these of its rows."""
    rests = None if table.rests is None else list(compress(table.rests, chosen))
    return PointerTable(list(compress(table.params, chosen)), [list(compress(c, chosen)) for c in table.fixed], rests)
