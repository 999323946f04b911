"""How elements lie in memory: what kernels that walk through memory linearly need to know, and how to give it to them.

A kernel gets addresses, so the tensors that it pairs (parameter, gradient, states, remainder, half-precision copy) must
have equal strides, and their memory must hold their values: a tensor with torch's negative bit holds the negated values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # a private name of torch
    TensorGuards = None  # type: ignore[assignment, misc]

PLAIN = frozenset({Tensor, nn.Parameter})
"""Classes whose memory holds their values: no subclass of them."""


class Signature:
    """Class, dtype, device, shape, strides and lazy bits of tensors.

    torch's guards compare them in C++, in 0.05 us per tensor; without those Python takes forty times as long. Addresses are
    not part of it.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._count, self._guards, self._described = len(tensors), _guards_of(tensors), list[tuple[object, ...]]()
        if self._guards is None:
            self._described = list(map(_describe, tensors))

    def fits(self, tensors: Sequence[Tensor | None]) -> bool:
        """Return whether these tensors have the same; False where one of them is None."""
        if len(tensors) != self._count:
            return False
        if self._guards is not None:
            return bool(self._guards.check(*tensors))
        return list(map(_describe, tensors)) == self._described


def _guards_of(tensors: Sequence[Tensor]) -> Any:
    if TensorGuards is None:
        return None
    try:
        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)  # none is dynamic
    except TypeError:  # another version's arguments
        return None


def _describe(tensor: Tensor | None) -> tuple[object, ...]:
    if tensor is None:
        return (None,)
    layout = tensor.shape, tensor.stride() if tensor.layout is torch.strided else None
    return type(tensor), tensor.dtype, tensor.device, tensor.layout, *layout, is_lazy(tensor)


def is_lazy(tensor: Tensor) -> bool:
    """Return whether the tensor's memory holds other values than its own: negated or conjugated ones, or none for zeros."""
    return tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor()


def resolve_(tensor: Tensor) -> None:
    """Give a plain tensor that `is_lazy` memory with its own values. The tensor stays the same object."""
    if type(tensor) in PLAIN and is_lazy(tensor):
        tensor.data = torch.empty_like(tensor, requires_grad=False).copy_(tensor.detach())


def is_non_overlapping_and_dense(tensor: Tensor) -> bool:
    """Return whether its elements fill a stretch of memory, in whatever order."""
    return tensor.is_contiguous() or is_dense(tensor)


def same_memory_format(tensor: Tensor, param: Tensor) -> bool:
    """Return whether the memory of both holds their elements in one order; ``param`` is dense and not lazy."""
    same = (tensor.is_contiguous() and param.is_contiguous()) or tensor.stride() == param.stride()
    return tensor.shape == param.shape and same and not is_lazy(tensor)


def match_memory_format(tensor: Tensor, param: Tensor) -> Tensor:
    """Return ``tensor``, or a copy of it, with its elements in the parameter's order."""
    return tensor if same_memory_format(tensor, param) else torch.empty_like(param, dtype=tensor.dtype).copy_(tensor)


def match_memory_format_(tensor: Tensor, param: Tensor) -> None:
    """Give a tensor of the shape of ``param``, which is dense, the strides of it. The tensor stays the same object."""
    if type(tensor) in PLAIN and tensor.shape == param.shape and not same_memory_format(tensor, param):
        tensor.data = torch.empty_like(param, dtype=tensor.dtype, device=tensor.device, requires_grad=False).copy_(
            tensor
        )
