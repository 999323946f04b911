"""Memory formats of tensors, for kernels that receive addresses and read memory linearly.

The tensors that such a kernel combines (parameter, gradient, optimizer states, half-precision copy) must store their
elements in the same order. Their memory must contain their values. A tensor with torch's negative bit, for example,
stores the negated values.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense

TensorGuards: Any
try:
    from torch._C._dynamo import guards

    TensorGuards = guards.TensorGuards
except (ImportError, AttributeError):  # the class is private: another torch version may not have it
    TensorGuards = None

# For `map`: reads an attribute of many tensors without Python code per tensor, such as in {*map(DTYPE, tensors)}.
DTYPE, LAYOUT, DEVICE = attrgetter("dtype"), attrgetter("layout"), attrgetter("device")

PLAIN = frozenset({Tensor, nn.Parameter})
"""Tensor classes whose memory contains the values, unless a tensor is lazy (`is_lazy`). Subclasses may store other data."""


class Signature:
    """Class, dtype, device, shape, strides and laziness (`is_lazy`) of each tensor in a list, but not its address.

    `fits` compares with torch's guards in C++, which also compare ``requires_grad``. If this torch version has no such
    guards, `fits` compares in Python, which is much slower.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._count, self._guards = len(tensors), _guards_of(tensors)
        self._described = list(map(_describe, tensors)) if self._guards is None else []

    def fits(self, tensors: Sequence[Tensor | None]) -> bool:
        """Return True if ``tensors`` have this signature, in the same order; False if an item is None."""
        if len(tensors) != self._count:
            return False
        if self._guards is not None:
            return bool(self._guards.check(*tensors))
        return list(map(_describe, tensors)) == self._described


def _guards_of(tensors: Sequence[Tensor]) -> Any:
    if TensorGuards is None:
        return None
    try:
        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)  # all sizes are static
    except TypeError:  # another torch version has other arguments
        return None


def _describe(tensor: Tensor | None) -> tuple[object, ...]:
    if tensor is None:
        return (None,)
    layout = tensor.shape, tensor.stride() if tensor.layout is torch.strided else None
    return type(tensor), tensor.dtype, tensor.device, tensor.layout, *layout, is_lazy(tensor)


def is_lazy(tensor: Tensor) -> bool:
    """Return True if the tensor's memory does not contain its values.

    This holds for a lazily negated or conjugated tensor, and for a zero tensor of autograd, which has no memory.
    """
    return tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor()


def resolve_(tensor: Tensor) -> None:
    """Write the values of a lazy plain tensor to new memory. The tensor object remains the same."""
    if type(tensor) in PLAIN and is_lazy(tensor):
        tensor.data = torch.empty_like(tensor, requires_grad=False).copy_(tensor.detach())


def is_non_overlapping_and_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or is_dense(tensor)


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return the elements in memory order as a contiguous 1-dim tensor: a view of a dense tensor, otherwise a copy."""
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(by_stride).reshape(-1).contiguous()


def same_memory_format(tensor: Tensor, param: Tensor) -> bool:
    """Return True if ``tensor`` is not lazy, has the shape of ``param``, and equal strides unless both are contiguous.

    ``param`` must be dense and not lazy. Empty tensors need equal strides, which torch's fused CUDA kernels compare.
    """
    contiguous = tensor.is_contiguous() and param.is_contiguous() and param.numel() > 0
    same = contiguous or tensor.stride() == param.stride()
    return tensor.shape == param.shape and same and not is_lazy(tensor)


def match_memory_format(tensor: Tensor, param: Tensor) -> Tensor:
    """Return ``tensor`` if it passes `same_memory_format`, else a copy with strides and device of the dense ``param``."""
    if same_memory_format(tensor, param):
        return tensor
    return _empty_like(param, tensor.dtype, param.device).copy_(tensor)


def match_memory_format_(tensor: Tensor, param: Tensor) -> None:
    """Give a plain ``tensor`` the element order of the dense ``param`` of equal shape. It stays the same object."""
    if type(tensor) in PLAIN and tensor.shape == param.shape and not same_memory_format(tensor, param):
        tensor.data = _empty_like(param, tensor.dtype, tensor.device).copy_(tensor)


def _empty_like(param: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided(param.shape, param.stride(), dtype=dtype, device=device)
