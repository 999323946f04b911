"""The update engine of compiled C loops: torch's fused Adam, AdamW, SGD and Adagrad, and `Lion`, on a CPU, in one pass.

    weight, states = formula(weight, states, gradient * factor, hyper)        for each row, unless the step is skipped

A row contains the addresses of one parameter and its states, for the compiled loops ("the loops") or the Triton
kernels. ``hyper`` are the hyper-parameters, such as the learning rate. Rows are cached, and reused while their tensors
are the same. torch steps the parameters that have no row. Whether a parameter gets a row does not depend on other
parameters, so all ranks with a replica of the parameter step it with the same kernel.
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
    DTYPE,
    LAYOUT,
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
from .update_request import LowPrecisionOut, UpdateRequest
from .wrapped_optimizer import has_step_hooks

# Supported torch optimizers -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FusedOptimizerSpec:
    """The description of a torch optimizer that the compiled C loops and the Triton kernels support.

    The kernels take ``hyper`` (param-group keys; ``"betas"`` has two numbers) and ``states`` (names) in this order.
    ``last`` is the param-group key that enables the last state (None: it always exists). ``counted`` is True if the
    optimizer counts the steps of each parameter. ``in_triton`` is True if the Triton kernels support the optimizer too.
    ``tensors`` is True if hyper-parameters may be tensors, such as ``lr``.
    """

    kind: Kind
    hyper: tuple[str, ...]
    states: tuple[str, ...]
    last: str | None = None
    counted: bool = True
    in_triton: bool = True
    tensors: bool = True


ADAM = FusedOptimizerSpec(
    Kind.ADAM,
    ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "amsgrad"),
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    last="amsgrad",
)
SUPPORTED_OPTIMIZERS: dict[type, FusedOptimizerSpec] = {
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
    """Return the initial value of all elements of a new optimizer state that has its parameter's shape."""
    if isinstance(optimizer, torch.optim.Adagrad) and name == "sum":
        return float(optimizer.defaults["initial_accumulator_value"])  # torch also ignores a param group's own value
    if isinstance(optimizer, torch.optim.Rprop) and name == "step_size":
        return float(group["lr"])
    return 0.0


# Rows of tensors, cached from step to step ----------------------------------------------------------------------------

GRADIENTS = frozenset({torch.float32, torch.bfloat16, torch.float16})
STRIDED = frozenset({torch.strided})
# Types of hyper-parameters. A set of types is compared without Python code per value.
NUMBERS: frozenset[type] = frozenset({float, int, bool})
NO_TENSORS = NUMBERS | {str, list, tuple, type(None)}
State = Mapping[Tensor, dict[str, Any]]
Group = Mapping[str, Any]
Remainders = Mapping[Tensor, Tensor]
"""A dict from bfloat16 weights to int16 remainders. `join_master` computes the float32 master weight from both."""
RowCache = dict[tuple[int, torch.device], "ParamRows"]
"""The rows of an optimizer's earlier steps, by (index of the param group, device)."""


class KernelCall(NamedTuple):
    """The arguments of one call of the compiled C loops or Triton kernels.

    ``columns`` has addresses, so ``alive`` keeps their tensors allocated during the call. The call also writes
    ``halves``, half-precision copies of stepped tensors.
    """

    columns: PointerColumns
    grad_dtype: torch.dtype
    half_dtype: torch.dtype
    halves: list[Tensor]
    alive: list[Tensor]


class PointerTable:
    """A table of memory addresses with one row per tensor that the kernels step.

    Args:
        fixed: Five columns of addresses, with one address per tensor: the tensor, its three states, and its step count.
            The address of a missing state or count is 0.
        rests: For each bfloat16 tensor that is stepped as a float32 master, the address of its int16 remainder; 0 for
            other tensors. None: no tensor has a remainder.
    """

    def __init__(self, params: Sequence[Tensor], fixed: Sequence[Sequence[int]], rests: Sequence[int] | None) -> None:
        self.params, self.fixed, self.rests = list(params), fixed, rests
        self.contiguous, self.numels = list(map(Tensor.is_contiguous, params)), list(map(Tensor.numel, params))
        self._flat, self._lengths = array("Q", chain.from_iterable(fixed)), array("q", self.numels)
        self._rests = None if rests is None else array("Q", rests)
        self._all_contiguous = all(self.contiguous)
        # The half-precision copies in the last call of `_writable`, their signature, and the result of that call.
        self._found, self._halves, self._writable_halves = list[Tensor | None](), Signature([]), list[Tensor | None]()

    def call(self, grads: Sequence[Tensor], copies: LowPrecisionOut | None) -> KernelCall:
        """Return the arguments of the kernel call that steps all rows and writes their half-precision copies.

        ``grads`` has at least one row, and one dtype. Gradients that are lazy, or whose element order differs from
        their parameter's, are copied.
        """
        rows = list(grads)
        addresses = array("Q", map(Tensor.data_ptr, rows))
        in_order = self._all_contiguous and all(map(Tensor.is_contiguous, rows)) and not any(map(Tensor.is_neg, rows))
        if not in_order or 0 in addresses:  # 0: empty tensors, or lazy zeros without memory
            rows = [match_memory_format(grad, param) for grad, param in zip(grads, self.params, strict=True)]
            addresses = array("Q", map(Tensor.data_ptr, rows))
        halves = self._writable(copies)
        written = [half for half in halves if half is not None]
        at = array("Q", [0 if half is None else half.data_ptr() for half in halves]) if written else None
        dtype = written[0].dtype if written else torch.bfloat16
        return KernelCall(
            PointerColumns(self._flat, addresses, self._lengths, at, self._rests), grads[0].dtype, dtype, written, rows
        )

    def _writable(self, copies: LowPrecisionOut | None) -> list[Tensor | None]:
        """Return each row's half-precision copy, or None if the kernels can't write it. Empty if ``copies`` is None."""
        if copies is None:
            return []
        found = [copies.copies.get(param) for param in self.params]
        given = [half for half in found if half is not None]
        if not self._halves.fits(given) or not all(map(is_, found, self._found)):
            dtype = given[0].dtype if given else None
            self._writable_halves = [
                half if half is not None and half.dtype == dtype and self._has_order_of(index, half) else None
                for index, half in enumerate(found)
            ]
            self._found, self._halves = found, Signature(given)
        return self._writable_halves

    def _has_order_of(self, index: int, half: Tensor) -> bool:
        if type(half) not in PLAIN:
            return False
        lies = (
            self.contiguous[index] and half.is_contiguous() and half.numel() == self.numels[index] and not half.is_neg()
        )
        return lies or same_memory_format(half, self.params[index])


class ParamRows:
    """The rows of one param group, and the group's parameters that have no row.

    ``without_grad`` are parameters that have neither a gradient nor a state. ``unsupported`` are parameters whose kind
    or states the kernels do not support.
    """

    def __init__(
        self,
        all_params: Sequence[Tensor],
        state: State,
        names: Sequence[str],
        table: PointerTable,
        remainders: Remainders,
        without_grad: Sequence[Tensor],
        unsupported: Sequence[Tensor],
    ) -> None:
        self.table, self.unsupported, self._without_grad = table, list(unsupported), list(without_grad)
        self._all_params, self._names, self._of_params = list(all_params), tuple(names), list(state.values())
        self._states = [state[param] for param in table.params] if names else []
        self._rests = [remainders.get(param) for param in table.params]
        self._there = [*table.params, *(rest for rest in self._rests if rest is not None)]
        self._values, self._addresses, self._signature = list[Any](), list[int](), Signature([])
        self._have_only_names = False

    def keep(self) -> ParamRows:
        """Record the present tensors and addresses, with which `is_valid_for` compares, and return self."""
        # If states have only these names, `_values_now` may call `dict.values`, which is faster than a look-up per name.
        self._have_only_names = all(state.keys() == set(self._names) for state in self._states)
        self._values = self._values_now()
        self._addresses, self._signature = list(map(Tensor.data_ptr, self._values)), Signature(self._there)
        return self

    def _values_now(self) -> list[Any]:
        if self._have_only_names:
            return [*self._there, *chain.from_iterable(map(dict.values, self._states))]
        return [*self._there, *(held.get(name) for name in self._names for held in self._states)]

    def is_valid_for(
        self, params: Sequence[Tensor], state: State, names: Sequence[str], remainders: Remainders
    ) -> bool:
        """Return True if the rows can be reused for a param group."""
        now = self._values_now()
        return (
            len(params) == len(self._all_params)
            and all(map(is_, params, self._all_params))
            and self._names == tuple(names)
            and len(state) == len(self._of_params)
            and all(map(is_, state.values(), self._of_params))
            and self._have_still(remainders)
            and len(now) == len(self._values)
            and all(map(is_, now, self._values))
            and list(map(Tensor.data_ptr, now)) == self._addresses
            and self._signature.fits(self._there)
            and all(param.grad is None for param in self._without_grad)
        )

    def _have_still(self, remainders: Remainders) -> bool:
        none = not remainders and self.table.rests is None
        return none or all(map(is_, map(remainders.get, self.table.params), self._rests))

    def calls(self, copies: LowPrecisionOut | None) -> list[KernelCall] | None:
        """Return the kernel calls that step all rows, with half-precision ``copies`` to write (None: no copies).

        Return None if a gradient is missing or unsupported, or if gradients have different dtypes.
        """
        grads: list[Any] = [param.grad for param in self.table.params]
        if not grads:
            return []
        if {*map(type, grads)} - PLAIN:
            return None
        dtypes, layouts = {*map(DTYPE, grads)}, {*map(LAYOUT, grads)}
        if len(dtypes) > 1 or dtypes - GRADIENTS or layouts - STRIDED:
            return None
        return [self.table.call(grads, copies)]


def find_valid_rows(
    optimizer: Optimizer, device: torch.device, remainders: Remainders, cache: RowCache
) -> list[tuple[Group, ParamRows | None]]:
    """Return each param group with its cached rows for kernels on ``device``; None if the rows can't be reused."""
    spec, of_groups = SUPPORTED_OPTIMIZERS[type(optimizer)], {} if by_bucket.holders else cache
    found = list[tuple[Group, ParamRows | None]]()
    for index, group in enumerate(optimizer.param_groups):
        rows, names = of_groups.get((index, device)), states_in(group, spec)
        still = rows is not None and rows.is_valid_for(group["params"], optimizer.state, names, remainders)
        found.append((group, rows if still else None))
    return found


def step_rows(
    loops: Native,
    optimizer: Optimizer,
    calls: Sequence[tuple[Group, Sequence[KernelCall]]],
    request: UpdateRequest,
) -> None:
    """Call the compiled loops with the calls of each param group, and record which half-precision copies they wrote.

    ``request.skip`` and ``request.factor`` must be on the CPU.
    """
    spec, copies = SUPPORTED_OPTIMIZERS[type(optimizer)], request.low_precision_out
    times = 1.0 if request.factor is None else number(request.factor)
    # All numbers are read before the first update, because a wrong one raises an error.
    for group, of_group, hyper in [(group, of_group, numbers_in(group, spec)) for group, of_group in calls]:
        signed = -times if group.get("maximize") else times
        for call in of_group:
            update_by_loops(
                loops, spec.kind, call.columns, hyper, signed, request.skip, call.grad_dtype, call.half_dtype
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
    """Update the tensors of ``columns`` in place, with one call of the loops.

    ``factor`` multiplies the gradients; it is negative to maximize. If ``found_inf``, 0-dim float32 on the CPU, is 1,
    the update is skipped.
    """
    arrays = columns.fixed, columns.grads, columns.halves, columns.rests, columns.numels, array("d", hyper)
    *tables, numbers = (None if values is None else values.buffer_info()[0] for values in arrays)
    dtypes, flag, threads = (DTYPES[grad_dtype], DTYPES[half_dtype]), found_inf.data_ptr(), torch.get_num_threads()
    if loops.update(kind, columns.count, *tables, *dtypes, numbers, factor, flag, threads):
        raise MemoryError(NO_MEMORY)


def number(value: float | Tensor) -> float:
    """Return a hyper-parameter as a float. A plain float tensor on the CPU is read from its address, which is faster.

    Host synchronization: one if ``value`` is a tensor on a device.
    """
    if not isinstance(value, Tensor) or not _is_cpu_number(value):
        return float(value)
    types = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}
    return float(types[value.dtype].from_address(value.data_ptr()).value)


def numbers_in(group: Mapping[str, Any], spec: FusedOptimizerSpec) -> list[float]:
    values = [group[key] for key in spec.hyper]
    if "betas" in spec.hyper:
        at = spec.hyper.index("betas")
        values[at : at + 1] = values[at]
    return values if NUMBERS.issuperset(map(type, values)) else list(map(number, values))


def states_in(group: Mapping[str, Any], spec: FusedOptimizerSpec) -> tuple[str, ...]:
    states = spec.states if spec.last is None or group[spec.last] else spec.states[:-1]
    return (*states, "step") if spec.counted else states


def loops_for(optimizer: Optimizer, *numbers: Tensor | None) -> Native | None:
    """Return the compiled loops if they are in use, support the optimizer and can read ``numbers``; None otherwise.

    ``numbers`` are 0-dim tensors that the loops must read, such as the skip flag; None is ignored. The loops can read
    plain float32 and float64 tensors on the CPU.
    """
    if not all(value is None or _is_cpu_number(value) for value in numbers):
        return None
    loops = chosen.native
    return loops if loops is not None and is_supported(optimizer, _is_cpu_number) else None


def is_supported(optimizer: Optimizer, is_read: Callable[[Tensor], bool]) -> bool:
    """Return True if the C loops or the Triton kernels can step the optimizer.

    It must be one of `SUPPORTED_OPTIMIZERS`, with ``fused=True`` in all param groups, without step hooks of other code and
    without a replaced `step`, and without tensors among the hyper-parameters if its
    `FusedOptimizerSpec.tensors` is False. ``is_read(tensor)``, which says whether the kernels can read a 0-dim tensor,
    must be True for every hyper-parameter that is a tensor, such as ``lr``.
    """
    if type(optimizer) not in SUPPORTED_OPTIMIZERS or "step" in vars(optimizer) or has_step_hooks(optimizer):
        return False
    may_have_tensors = SUPPORTED_OPTIMIZERS[type(optimizer)].tensors
    for group in optimizer.param_groups:
        if not group.get("fused") or group.get("differentiable"):
            return False
        if not NO_TENSORS.issuperset(map(type, group.values())):
            tensors = [value for value in group.values() if isinstance(value, Tensor)]
            if (tensors and not may_have_tensors) or not all(map(is_read, tensors)):
                return False
    return True


def is_number(value: Tensor) -> bool:
    """Return True if kernels can read the tensor from its memory: a plain float32 or float64 tensor that is not lazy."""
    return type(value) in PLAIN and value.dtype in (torch.float32, torch.float64) and not is_lazy(value)


def _is_cpu_number(value: Tensor) -> bool:
    return is_number(value) and value.is_cpu


# Stepping by the loops ------------------------------------------------------------------------------------------------


def step_cached_rows(optimizer: Optimizer, request: UpdateRequest, cache: RowCache) -> bool:
    """Step all parameters with the cached rows and return True; otherwise change nothing and return False.

    It is the fast path of `step_by_loops`. It returns False if the loops can't step all parameters, or if cached rows
    can't be reused. ``request`` must have no split weights.
    """
    loops = loops_for(optimizer, request.skip, request.factor)
    if loops is None or any(rows.unsupported for rows in cache.values()):
        return False
    calls = list[tuple[Group, list[KernelCall]]]()
    for group, rows in find_valid_rows(optimizer, request.skip.device, {}, cache):
        if rows is None:
            return False
        of_group = rows.calls(request.low_precision_out)
        if of_group is None:  # gradients are missing or unsupported, or their dtypes differ
            of_group, left = split_supported(rows, request.low_precision_out)
            if left:
                return False
        calls.append((group, of_group))
    step_rows(loops, optimizer, calls, request)
    return True


def step_by_loops(loops: Native, optimizer: Optimizer, request: UpdateRequest, cache: RowCache) -> list[list[Tensor]]:
    """Step all parameters that the compiled loops support, and return the parameters that torch must step.

    If ``request.skip`` is 1, no value changes; missing states are created. ``request.skip`` and ``request.factor`` must
    be on the CPU. Cached pointer rows (`ParamRows`) that can't be reused are replaced, except in bucket mode
    (`by_bucket.holding`). There is one returned list per param group.
    """
    groups = rows_of(optimizer, request.skip.device, request.remainders, cache)
    taken = [(group, *split_supported(rows, request.low_precision_out)) for group, rows in groups]
    step_rows(loops, optimizer, [(group, calls) for group, calls, _ in taken], request)
    rows = [param for _, of_group in groups if of_group.table.rests is not None for param in of_group.table.params]
    if split := [param for param in rows if param.grad is not None and param in request.remainders]:
        torch.autograd.graph.increment_version(split)
    return [left for *_, left in taken]


def rows_of(
    optimizer: Optimizer, device: torch.device, remainders: Remainders, cache: RowCache
) -> list[tuple[Group, ParamRows]]:
    """Return each param group with its rows for kernels on ``device``: cached rows if they can be reused, else new rows.

    New rows are stored in ``cache``, unless param groups hold only a bucket of the parameters (`by_bucket.holding`).
    For new rows, missing states of supported parameters with a gradient or some state are created: the step count is 0,
    and other states are filled with `first_value`.
    """
    spec, found = SUPPORTED_OPTIMIZERS[type(optimizer)], list[tuple[Group, ParamRows]]()
    for index, (group, rows) in enumerate(find_valid_rows(optimizer, device, remainders, cache)):
        if rows is None:
            names = states_in(group, spec)
            first = {name: first_value(optimizer, group, name) for name in names}
            rows = _rows(group["params"], optimizer.state, first, device, remainders)
            if not by_bucket.holders:  # the parameters of a bucket are temporary, so their rows are not cached
                cache[index, device] = rows.keep()
        found.append((group, rows))
    return found


def _rows(
    all_params: Sequence[Tensor],
    state: State,
    first: Mapping[str, float],
    device: torch.device,
    remainders: Remainders,
) -> ParamRows:
    """Return new rows of one param group.

    A parameter gets a row if it has a gradient or a state, is no instance of a subclass other than ``nn.Parameter``,
    has no gaps in memory, is on ``device``, has float32 states, and is float32, or bfloat16 with a remainder. Missing
    states of such parameters are created; ``first`` has their initial values by name, in the order of the kernels.
    Their states and remainders get the element order of the parameters.
    """
    names = tuple(first)
    params, without_grad, unsupported = list[Tensor](), list[Tensor](), list[Tensor]()
    for param in all_params:
        if param.grad is None and param not in state:
            without_grad.append(param)  # if it gets a gradient later, the cached rows are no longer valid
        elif _is_stepped(param, device, remainders.get(param)) and _has_states(param, state, first):
            params.append(param)
        else:
            unsupported.append(param)
    addresses = {name: [state[param][name].data_ptr() for param in params] for name in names}
    steps, none = addresses.pop("step", None), [0] * len(params)
    columns = [list(map(Tensor.data_ptr, params)), *addresses.values(), *[none] * (3 - len(addresses)), steps or none]
    rests = [0 if (rest := remainders.get(param)) is None else rest.data_ptr() for param in params]
    table = PointerTable(params, columns, rests if any(rests) else None)
    return ParamRows(all_params, state, names, table, remainders, without_grad, unsupported)


def _is_stepped(param: Tensor, device: torch.device, remainder: Tensor | None) -> bool:
    if param.device != device or type(param) not in PLAIN or not is_non_overlapping_and_dense(param):
        return False
    resolve_(param)
    if remainder is None:
        return param.dtype == torch.float32
    match_memory_format_(remainder, param)
    return param.dtype == torch.bfloat16 and same_memory_format(remainder, param)


def _has_states(param: Tensor, states: State, first: Mapping[str, float]) -> bool:
    """Create missing states, and give all states the strides of ``param``. Return True if kernels support the states."""
    if not first:
        return True
    state = states[param]
    if "step" in first and "step" not in state:  # created first, as torch's optimizers do
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
    """Return kernel calls for all rows with supported gradients, and the parameters that torch must step.

    There is one call per gradient dtype. Parameters without a gradient are neither in a call nor in the second list.
    """
    table, unsupported = rows.table, list[Tensor]()
    grads = [param.grad for param in table.params]
    there = [grad for grad in grads if grad is not None]
    are_plain = {*map(type, there)} <= PLAIN and {grad.layout for grad in there} <= STRIDED
    if not are_plain or not {grad.dtype for grad in there} <= GRADIENTS:
        unsupported = [param for param in table.params if param.grad is not None and not _is_supported(param.grad)]
        grads = [grad if grad is not None and _is_supported(grad) else None for grad in grads]
    calls = list[KernelCall]()
    for dtype in dict.fromkeys(grad.dtype for grad in grads if grad is not None):
        has_dtype = [grad is not None and grad.dtype == dtype for grad in grads]
        of_dtype = table if all(has_dtype) else _only(table, has_dtype)
        calls.append(of_dtype.call([grad for grad in grads if grad is not None and grad.dtype == dtype], copies))
    return calls, [param for param in rows.unsupported if param.grad is not None] + unsupported


def _is_supported(grad: Tensor) -> bool:
    return type(grad) in PLAIN and grad.dtype in GRADIENTS and grad.layout in STRIDED


def _only(table: PointerTable, chosen: Sequence[bool]) -> PointerTable:
    rests = None if table.rests is None else list(compress(table.rests, chosen))
    return PointerTable(list(compress(table.params, chosen)), [list(compress(c, chosen)) for c in table.fixed], rests)
