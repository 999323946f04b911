"""What kernels step in one param group, as rows of addresses, which are kept as long as they are the same."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense

from ..kernels.native import PLAIN, Columns
from .half_copies import HalfCopies

GRADIENTS = frozenset({torch.float32, torch.bfloat16, torch.float16})
STRIDED = frozenset({torch.strided})
State = Mapping[Tensor, dict[str, Any]]


class Call(NamedTuple):
    """One call of the loops. Args: alive: What its addresses belong to."""

    columns: Columns
    grad_dtype: torch.dtype
    half_dtype: torch.dtype
    alive: list[Tensor]


class Rows:
    """Those parameters that the kernels step: dense float32 ones on their device with states of the same layout, and
    bfloat16 ones with remainders. The others are left for torch.

    States are made as torch makes them, where a parameter has its first gradient.

    Args:
        params: All of a param group.
        state: The optimizer's.
        names: Of the states, in the order of the kernels.
        counted: The optimizer counts the steps of each parameter.
        device: The kernels'.
        remainders: Of split weights, which are stepped as the float32 masters that both are.

    Attributes:
        split: The split weights among the rows.
        others: The parameters that have had a gradient and are no rows.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        state: State,
        names: Sequence[str],
        counted: bool,
        device: torch.device,
        remainders: Mapping[Tensor, Tensor],
    ) -> None:
        self._all, self._names = list(params), (*names, "step") if counted else tuple(names)
        self._params: list[Tensor] = []
        self._states: list[dict[str, Any]] = []
        self.others: list[Tensor] = []
        self._waiting: list[Tensor] = []
        for param in params:
            if param.grad is None and param not in state:
                self._waiting.append(param)  # for its first gradient
            elif not _is_stepped(param, device, remainders.get(param)):
                self.others.append(param)
            elif not self._names:
                self._params.append(param)
            elif _has_states(param, state[param], names, counted):
                self._params.append(param)
                self._states.append(state[param])
            else:
                self.others.append(param)
        self._contiguous = [param.is_contiguous() for param in self._params]
        self._values = self._values_now()
        self._addresses = self._addresses_now()
        self._known = list(map(id, state.values()))
        columns = dict(zip(("param", *self._names), self._addresses, strict=True))
        none = [0] * len(self._params)
        self._fixed = [columns["param"], *(columns[name] for name in names), *[none] * (3 - len(names))]
        self._fixed.append(columns.get("step", none))
        self._numels = [param.numel() for param in self._params]
        self._table, self._lengths = _flat(self._fixed), array("q", self._numels)
        rests = _rests_of(self._params, remainders)
        self.split = [param for param, rest in zip(self._params, rests, strict=True) if rest is not None]
        self._rests, self._rest_addresses = rests, _addresses_of(rests)

    def _values_now(self) -> list[list[Any]]:
        return [[state.get(name) for state in self._states] for name in self._names]

    def _addresses_now(self) -> list[list[int]]:
        return [list(map(Tensor.data_ptr, column)) for column in (self._params, *self._values)]

    def are_still(
        self, params: Sequence[Tensor], state: State, names: Sequence[str], remainders: Mapping[Tensor, Tensor]
    ) -> bool:
        """Whether all is where it was: parameters, states and remainders, at their addresses, of as many elements that lie
        as they lay, and no first gradient."""
        return (
            len(params) == len(self._all)
            and all(map(is_, params, self._all))
            and self._have_still(remainders)
            and self._names[: len(names)] == tuple(names)
            and list(map(id, state.values())) == self._known
            and all(all(map(is_, new, old)) for new, old in zip(self._values_now(), self._values, strict=True))
            and self._addresses_now() == self._addresses
            and list(map(Tensor.numel, self._params)) == self._numels
            and list(map(Tensor.is_contiguous, self._params)) == self._contiguous
            and all(param.grad is None for param in self._waiting)
        )

    def _have_still(self, remainders: Mapping[Tensor, Tensor]) -> bool:
        if not remainders and not self.split:
            return True
        rests = _rests_of(self._params, remainders)
        return all(map(is_, rests, self._rests)) and _addresses_of(rests) == self._rest_addresses

    def taken(self, copies: HalfCopies | None) -> tuple[list[Call], list[Tensor]]:
        """The calls that step the rows that have gradients, one for each dtype of these; and the parameters with gradients
        that are left, because they or their gradients are nothing for the loops.

        Args:
            copies: Half-precision copies that are to be written, which is noted there.
        """
        grads = [param.grad for param in self._params]
        chosen, kinds = _chosen(grads)
        calls = [self._call(grads, chosen, dtype, len(kinds) == 1, copies) for dtype in kinds]
        strange = [
            param
            for param, grad, here in zip(self._params, grads, chosen, strict=True)
            if not here and grad is not None
        ]
        return calls, [param for param in self.others if param.grad is not None] + strange

    def _call(
        self,
        grads: Sequence[Tensor | None],
        chosen: Sequence[bool],
        dtype: torch.dtype,
        only: bool,
        copies: HalfCopies | None,
    ) -> Call:
        if not only:
            chosen = [
                here and grad is not None and grad.dtype == dtype for here, grad in zip(chosen, grads, strict=True)
            ]
        params, contiguous = list(compress(self._params, chosen)), compress(self._contiguous, chosen)
        rows = [grad for grad in compress(grads, chosen) if grad is not None]
        rows = [
            grad if plain and grad.is_contiguous() else laid_out(grad, param)
            for grad, param, plain in zip(rows, params, contiguous, strict=True)
        ]
        addresses = array("Q", map(Tensor.data_ptr, rows))
        every = len(params) == len(self._params)
        table = self._table if every else _flat(compress(column, chosen) for column in self._fixed)
        lengths = self._lengths if every else array("q", compress(self._numels, chosen))
        halves, half_dtype = _halves(copies, params)
        rests = array("Q", compress(self._rest_addresses, chosen)) if self.split else None
        return Call(Columns(table, addresses, lengths, halves, rests), dtype, half_dtype, rows)


def _chosen(grads: Sequence[Tensor | None]) -> tuple[list[bool], set[torch.dtype]]:
    """Which of the gradients are there and can be read, and their dtypes."""
    if {*map(type, grads)} <= PLAIN and {grad.layout for grad in grads if grad is not None} <= STRIDED:
        dtypes = {grad.dtype for grad in grads if grad is not None}
        if dtypes <= GRADIENTS:
            return [True] * len(grads), dtypes
    chosen = [
        type(grad) in PLAIN and grad is not None and grad.dtype in GRADIENTS and grad.layout in STRIDED
        for grad in grads
    ]
    return chosen, {grad.dtype for grad in compress(grads, chosen) if grad is not None}


def _flat(columns: Iterable[Iterable[int]]) -> array[int]:
    table = array("Q")
    for column in columns:
        table.extend(column)
    return table


def _rests_of(params: Sequence[Tensor], remainders: Mapping[Tensor, Tensor]) -> list[Tensor | None]:
    return [remainders.get(param) for param in params] if remainders else [None] * len(params)


def _addresses_of(rests: Sequence[Tensor | None]) -> list[int]:
    return [0 if rest is None else rest.data_ptr() for rest in rests]


def _is_stepped(param: Tensor, device: torch.device, remainder: Tensor | None) -> bool:
    whole = param.dtype == torch.float32 if remainder is None else _alike(remainder, param)
    return whole and param.device == device and type(param) in PLAIN and lies_densely(param)


def lies_densely(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in whatever order."""
    return tensor.is_contiguous() or is_dense(tensor)


def _has_states(param: Tensor, state: dict[str, Any], names: Sequence[str], counted: bool) -> bool:
    """Makes those that are not there yet."""
    if counted and "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
    for name in names:
        if state.get(name) is None:
            state[name] = torch.zeros_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
    if counted and not _is_like(state["step"], param):
        return False
    values = [state[name] for name in names]
    return all(type(v) in PLAIN and _is_like(v, param) and _alike(v, param) for v in values)


def _is_like(tensor: Tensor, param: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device == param.device


def _alike(tensor: Tensor, param: Tensor) -> bool:
    """Whether their elements lie in memory in one order; ``param`` is dense."""
    return tensor.shape == param.shape and (
        (tensor.is_contiguous() and param.is_contiguous()) or tensor.stride() == param.stride()
    )


def laid_out(grad: Tensor, param: Tensor) -> Tensor:
    """The gradient, or a copy of it, with its elements in the parameter's order."""
    return grad if _alike(grad, param) else torch.empty_like(param, dtype=grad.dtype).copy_(grad)


def _halves(copies: HalfCopies | None, params: Sequence[Tensor]) -> tuple[array[int] | None, torch.dtype]:
    """The addresses of the copies of ``params``, of one dtype: that of the first."""
    found = [] if copies is None else [copies.halves.get(param) for param in params]
    dtype = next((half.dtype for half in found if half is not None), torch.bfloat16)
    if copies is None or not any(half is not None for half in found):
        return None, dtype
    halves = [
        half if half is not None and half.dtype == dtype and type(half) in PLAIN and _alike(half, param) else None
        for half, param in zip(found, params, strict=True)
    ]
    copies.written += [half for half in halves if half is not None]
    return array("Q", [0 if half is None else half.data_ptr() for half in halves]), dtype
