"""Count the bytes that an operator reads and writes, from its arguments and its schema.

Each tensor argument is read once, and each result is written once. A tensor that is written in place is also read, unless
the operator overwrites it (``copy_``, ``fill_``, ``out=``). Elements of an expanded tensor count once. Caches and
intermediate results within a kernel are ignored, so the count is a lower limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from fake_tensors import tensors_of
from torch import Tensor

_OVERWRITES = tuple(
    f"aten.{name}" for name in ("copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_", "random_", "uniform_")
)


def bytes_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the number of bytes that one call of the operator ``func`` reads and writes, on any device."""
    overwrites = str(func).startswith(_OVERWRITES)
    count, written = 0, set[int]()
    for (is_written, is_out), value in _with_roles(func, args, kwargs):
        for tensor in tensors_of(value):
            count += _size(tensor) * (2 if is_written and not is_out and not overwrites else 1)
            if is_written:
                written.add(id(tensor))
    return count + sum(_size(tensor) for tensor in tensors_of(result) if id(tensor) not in written)


def _with_roles(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[tuple[bool, bool], Any]]:
    by_position, by_name = _roles(func)
    return [*zip(by_position, args, strict=False), *((by_name[name], value) for name, value in kwargs.items())]


@cache
def _roles(func: Any) -> tuple[list[tuple[bool, bool]], dict[str, tuple[bool, bool]]]:
    """Return (is written, is an ``out`` argument) per argument of the operator, by position and by name."""
    arguments = func._schema.arguments
    roles = [(bool(one.alias_info and one.alias_info.is_write), bool(one.is_out)) for one in arguments]
    return roles, {one.name: role for one, role in zip(arguments, roles, strict=True)}


def _size(tensor: Tensor) -> int:
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride or not size else 1
    return numel * tensor.element_size()
