"""A model computed in float64 for a while, whatever dtype it has and asks for: differences of losses need the digits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_is_leaf, tree_map

from ...parallel.interop.local import has_dtensors

_LOWER = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = ("float", "half", "bfloat16")


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Within it, parameters and buffers of ``model`` are float64, in place, and so is everything that torch's functions
    make of them; casts to a lower dtype are left out. Afterwards it has its own tensors again, and their gradients.

    Raises:
        TypeError: A parameter is a DTensor that is not float64.
    """
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.dtype in _LOWER]
    if not tensors:
        yield
        return
    if has_dtensors(tensors):
        raise TypeError(
            "DTensors can't be computed in another dtype for a while: build the model in float64 "
            "(torch.set_default_dtype), or prove it as it is, with dtype=None"
        )
    before = [_Before(tensor) for tensor in tensors]
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        for tensor in tensors:
            tensor.grad = None
            tensor.data = tensor.data.double()
            if tensor.grad_dtype != torch.float64:  # as main grads have
                tensor.grad_dtype = None
        with _AllInFloat64():
            yield
    finally:
        torch.set_default_dtype(default)
        for one in before:
            one.put_back()


class _Before:
    """A tensor as it is now."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._data, self._gradient, self._grad_dtype = tensor, tensor.data, tensor.grad, tensor.grad_dtype

    def put_back(self) -> None:
        self._tensor.grad = None
        self._tensor.data = self._data
        if self._tensor.grad_dtype != self._grad_dtype:
            self._tensor.grad_dtype = self._grad_dtype
        self._tensor.grad = self._gradient


class _AllInFloat64(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":  # an attribute, which most calls are
            return func(*args, **(kwargs or {}))
        if name in _CASTS:
            return args[0].double()
        if not name.endswith("_"):  # what is changed in place stays what it is
            args = tuple(map(_raised_within, args))
            kwargs = {key: _raised_within(value) for key, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _raised_within(value: object) -> object:
    """Of what holds others, each. A tree of one leaf costs more than most functions that it is made for."""
    if value is None or isinstance(value, (int, float, str)):
        return value
    return (
        _raised(value) if isinstance(value, (Tensor, torch.dtype)) or tree_is_leaf(value) else tree_map(_raised, value)
    )


def _raised(value: object) -> object:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _LOWER else value
    if isinstance(value, Tensor) and value.dtype in _LOWER:
        with torch._C.DisableTorchFunctionSubclass():
            return value.double()
    return value
