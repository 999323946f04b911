"""Checks of plain values that come from a file or a state dict: numbers, texts, and containers of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isnan
from numbers import Real
from typing import Any

from torch import Tensor

MAX_COUNT = 2**53
"""The largest count: float64, in which steps are counted on a device, has all integers up to it."""

Check = Callable[[object, str], None]
"""Raises ValueError, with the name of the field, where a value is not what is expected."""


def wrong(field: str, value: object, expected: str) -> ValueError:
    """Return the error of a field whose value is not what is expected."""
    return ValueError(f"{field} is {_shown(value)}; expected {expected}")


def check_count(value: object, field: str) -> None:
    """Raise ValueError where ``value`` is not an int from 0 to `MAX_COUNT`."""
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise wrong(field, value, f"an integer from 0 to {MAX_COUNT}")


def check_number(value: object, field: str) -> None:
    """Raise ValueError where ``value`` is not an int or float that float64 can hold, or is NaN."""
    if not is_number(value):
        raise wrong(field, value, "a number that is not NaN")


def is_number(value: object) -> bool:
    """Whether ``value`` is an int or float that float64 can hold, and not NaN; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return not isnan(float(value))
    except OverflowError:
        return False


def check_text(value: object, field: str) -> None:
    """Raise ValueError where ``value`` is not a str."""
    if not isinstance(value, str):
        raise wrong(field, value, "a text")


def check_finite(value: object, field: str, shape: Sequence[int] | None = None) -> None:
    """Raise ValueError where ``value`` is not a tensor of finite floats, of ``shape`` if it is given."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not bool(value.isfinite().all()):
        raise wrong(field, value, "a tensor of finite floats")
    if shape is not None and tuple(value.shape) != tuple(shape):
        raise wrong(field, value, f"shape {tuple(shape)}")


def anything(value: object, field: str) -> None:
    """Accept any value."""


def list_of(check: Check, *, least: int = 0) -> Check:
    """Return the check of a list or tuple of at least so many items."""

    def check_list(value: object, field: str) -> None:
        if not isinstance(value, (list, tuple)) or len(value) < least:
            raise wrong(field, value, "a list" + (f" of at least {least}" if least else ""))
        for index, item in enumerate(value):
            check(item, f"{field}[{index}]")

    return check_list


def items(*checks: Check) -> Check:
    """Return the check of a list or tuple with one item for each check."""

    def check_items(value: object, field: str) -> None:
        if not isinstance(value, (list, tuple)) or len(value) != len(checks):
            raise wrong(field, value, f"a list of {len(checks)}")
        for index, (item, check) in enumerate(zip(value, checks, strict=True)):
            check(item, f"{field}[{index}]")

    return check_items


def dict_of(check: Check, *, key: Check = check_text) -> Check:
    """Return the check of a dict, of its keys and its values."""

    def check_dict(value: object, field: str) -> None:
        if not isinstance(value, Mapping):
            raise wrong(field, value, "a dict")
        for name, item in value.items():
            key(name, f"a key of {field}")
            check(item, f"{field}[{_shown(name)}]")

    return check_dict


def fields(checks: Mapping[str, Check]) -> Check:
    """Return the check of a dict that has at least these keys."""

    def check_fields(value: object, field: str) -> None:
        if not isinstance(value, Mapping):
            raise wrong(field, value, "a dict")
        for name, check in checks.items():
            if name not in value:
                raise ValueError(f"{field} has no {name}")
            check(value[name], f"{field}[{name!r}]")

    return check_fields


def check_like(value: object, like: object, field: str) -> None:
    """Raise ValueError where ``value`` is of another kind than ``like``, the value that it is to replace.

    A number replaces a number (an int, a float or a tensor of one element), but NaN only NaN; a list one of the same
    length, item by item. A dict replaces one with the same texts for keys. None and a bool replace each other; None is
    also replaced by a number, a text or a list.
    """
    if isinstance(like, bool):
        if not (value is None or isinstance(value, bool)):
            raise wrong(field, value, "True or False")
    elif like is None:
        if isinstance(value, Mapping):
            raise wrong(field, value, "a number, a text, True, False, None or a list of these")
        _check_plain(value, field)
    elif isinstance(like, (int, float)) or (isinstance(like, Tensor) and like.numel() == 1):
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if not is_number(number) and not (_is_nan(number) and _is_nan(like)):
            raise wrong(field, value, "a number that is not NaN")
    elif isinstance(like, str):
        check_text(value, field)
    elif isinstance(like, Tensor):
        if not isinstance(value, Tensor) or value.shape != like.shape:
            raise wrong(field, value, f"a tensor of shape {tuple(like.shape)}")
    elif isinstance(like, Mapping):
        if not isinstance(value, Mapping):
            raise wrong(field, value, "a dict")
        for name, item in value.items():
            if name in like:
                check_like(item, like[name], f"{field}[{_shown(name)}]")
            elif not all(isinstance(key, str) for key in like):
                check_like(name, next(iter(like)), f"a key of {field}")
                check_like(item, next(iter(like.values())), f"{field}[{_shown(name)}]")
            else:
                _check_plain(item, f"{field}[{_shown(name)}]")
        if all(isinstance(key, str) for key in like) and (missing := sorted(like.keys() - value.keys())):
            raise ValueError(f"{field} has no {', '.join(missing)}")
    elif isinstance(like, Sequence):
        if not isinstance(value, (list, tuple)) or len(value) != len(like):
            raise wrong(field, value, f"a list of {len(like)}")
        for index, (item, other) in enumerate(zip(value, like, strict=True)):
            check_like(item, other, f"{field}[{index}]")
    elif type(value) is not type(like):
        raise wrong(field, value, f"a {type(like).__name__}")


def _check_plain(value: object, field: str) -> None:
    """Raise ValueError where ``value`` is, or has in it, a number that is NaN or too large."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        check_number(value, field)
    elif isinstance(value, (list, tuple)):
        list_of(_check_plain)(value, field)
    elif isinstance(value, Mapping):
        dict_of(_check_plain, key=anything)(value, field)


def _is_nan(value: Any) -> bool:
    return isinstance(value, (float, Tensor)) and bool(value != value)


def _shown(value: object) -> str:
    """A value in an error: short, and without control characters."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {str(value.dtype)[6:]}"
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an int of too many digits, or lists that are too deep
        text = f"a {type(value).__name__} that is too large to be shown"
    return text if len(text) <= 80 else text[:77] + "..."


# Types of numbers that users give: text and bools are no numbers, though ``float`` takes them -------------------------


def check_scalar(value: object, name: str, write: str = "a number") -> None:
    """Raise TypeError unless ``value`` is an int, a float, a NumPy number or a 0-dim tensor. Host reads: none.

    Args:
        name: The argument's.
        write: What to give in its place.
    """
    if isinstance(value, Tensor):
        is_number, shown = value.dim() == 0, f"a tensor of shape {tuple(value.shape)}"
    else:
        is_number, shown = isinstance(value, Real) and not isinstance(value, bool), repr(value)
    if not is_number:
        raise TypeError(f"{name}={shown}: give {write}, not a {type(value).__name__}")


def is_whole(value: object, least: int) -> bool:
    """Return whether ``value`` is an int, not a bool, of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
