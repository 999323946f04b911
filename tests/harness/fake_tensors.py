"""Make torch's fake tensors more than twice as fast by caching the results of operator calls.

`FakeTensorMode` has a cache too, but its lookup hashes twenty attributes of each tensor, and it does not cache calls
with tensor lists or ``out`` arguments, which are most calls of an optimizer. This cache distinguishes the strided
tensors of an optimizer by dtype, device, shape and strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_PLAIN = {bool, int, float, complex, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format}
_DEVICE = torch.ops.prim.device.default
VIEWS = (
    "detach alias view split select slice unbind expand as_strided squeeze unsqueeze t transpose permute "
    "split_with_sizes"
)
_OF_ONE = {getattr(torch.ops.aten, name) for name in VIEWS.split()}

# One result tensor of an operator: either an index into the list of the arguments' tensors, or shape, strides, dtype and
# device of a new tensor.
_Made = int | tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
_MADE: dict[tuple[Any, ...], tuple[Callable[[Sequence[Tensor]], Any], list[_Made]]] = {}


class QuickFakeTensorMode(FakeTensorMode):
    """A `FakeTensorMode` with a faster cache; an operator that raises is not cached and raises again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and (told := told_device(args[0])):
            return told
        if not isinstance(func, OpOverload):
            return self.dispatch(func, types, args, kwargs)
        if func.namespace == "profiler":  # marks a profiler region; no tensors
            return func(*args, **kwargs)
        if func.overloadpacket in _OF_ONE and type(args[0]) is FakeTensor and args[0].constant is None:
            return self._view(func, args, kwargs)
        key: list[Any] = [func, torch.get_default_dtype()]
        tensors: list[FakeTensor] = []
        if not _described((args, kwargs), key, tensors) or torch.Tag.inplace_view in func.tags:
            return self.dispatch(func, types, args, kwargs)
        known = _MADE.get(tuple(key))
        if known is not None:
            join, made = known
            return join([tensors[one] if isinstance(one, int) else self._new(*one) for one in made])
        result = self.dispatch(func, types, args, kwargs)
        _keep(tuple(key), result, tensors, (args, kwargs))
        return result

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator of `VIEWS`, computed on the fake tensor's meta tensor."""
        device = args[0].fake_device
        with in_kernel_invocation_manager(self):
            views = func(*args, **kwargs)
        if isinstance(views, Tensor):
            return FakeTensor(self, views, device)
        return [FakeTensor(self, view, device) for view in views]

    def _new(self, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> FakeTensor:
        return FakeTensor(self, torch.empty_strided(shape, strides, dtype=dtype, device="meta"), device)


def tensors_of(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return tensors_of(tuple(tree.values()))
    if isinstance(tree, (list, tuple)):
        return [tensor for branch in tree for tensor in tensors_of(branch)]
    return []


def told_device(tensor: Tensor) -> torch.device | None:
    """Return the device that a fake tensor reports without calling dispatch modes; None if it would call them."""
    if isinstance(tensor, FakeTensor) and not tensor.fake_mode.in_kernel_invocation:
        return tensor.fake_device
    return None


def device_of(tensor: Tensor) -> torch.device:
    """Return the device of a tensor; for a fake tensor without calling dispatch modes where possible."""
    return tensor.fake_device if type(tensor) is FakeTensor else tensor.device


def _described(tree: Any, key: list[Any], tensors: list[FakeTensor]) -> bool:
    """Return whether the cache key can describe every value of ``tree``; tensors are appended to ``tensors``."""
    for leaf in tree:
        kind = type(leaf)
        if kind is FakeTensor:
            if leaf.constant is not None:  # torch may compute with this constant, which the key does not contain
                return False
            key += (leaf.dtype, leaf.fake_device, leaf.shape, leaf.stride())
            tensors.append(leaf)
        elif kind in _PLAIN:
            key += (kind, leaf)  # the type is part of the key: 1 equals 1.0 and True
        elif isinstance(leaf, Mapping):
            key += (kind, *leaf)
            if not _described(leaf.values(), key, tensors):
                return False
        elif kind is list or kind is tuple:
            key += (kind, len(leaf))
            if not _described(leaf, key, tensors):
                return False
        else:
            return False
    return True


def _keep(key: tuple[Any, ...], result: Any, tensors: list[FakeTensor], arguments: Any) -> None:
    """Cache the result, unless the operator changed a shape or returned anything but its arguments and new tensors."""
    given: list[Any] = [result] if isinstance(result, Tensor) else [] if result is None else result
    after: list[Any] = [*key[:2]]
    if not isinstance(given, (list, tuple)) or not _described(arguments, after, []) or tuple(after) != key:
        return
    places = {id(tensor): index for index, tensor in enumerate(tensors)}
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    made: list[_Made] = []
    for one in given:
        if type(one) is not FakeTensor or one.constant is not None:
            return
        if id(one) in places:
            made.append(places[id(one)])
            continue
        storage = one.untyped_storage()._cdata
        if storage in storages:
            return
        storages.add(storage)
        made.append((one.shape, one.stride(), one.dtype, one.fake_device))
    join = _first if isinstance(result, Tensor) else _nothing if result is None else list
    _MADE[key] = join, made


def _first(results: Sequence[Tensor]) -> Tensor:
    return results[0]


def _nothing(results: Sequence[Tensor]) -> None:
    pass
