"""Checks of values from a file, a state dict or an argument: numbers, strings, tensors, and containers of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isnan
from numbers import Real
from typing import Any

from torch import Tensor

MAX_COUNT = 2**53
"""Largest valid count: float64 represents every integer from 0 to 2^53 exactly."""

_A_NUMBER = "a number in the range of float64 that is not NaN"

Check = Callable[[object, str], None]
"""A function ``check(value, field)``. If ``value`` is not valid, it raises a ValueError that contains ``field``."""


def wrong(field: str, value: object, expected: str) -> ValueError:
    """Return a ValueError ``{field} is {value}; expected {expected}``, for the caller to raise."""
    return ValueError(f"{field} is {_shown(value)}; expected {expected}")


def check_count(value: object, field: str) -> None:
    """Raise ValueError unless ``value`` is an int from 0 to `MAX_COUNT`, and not a bool."""
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise wrong(field, value, f"an integer from 0 to {MAX_COUNT}")


def check_number(value: object, field: str) -> None:
    """Raise ValueError unless `is_number` returns True for ``value``."""
    if not is_number(value):
        raise wrong(field, value, _A_NUMBER)


def is_number(value: object) -> bool:
    """Return True for an int in the range of float64 and for a float that is not NaN. Return False for a bool."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return not isnan(float(value))
    except OverflowError:
        return False


def check_text(value: object, field: str) -> None:
    if not isinstance(value, str):
        raise wrong(field, value, "a string")


def check_finite(value: object, field: str, shape: Sequence[int] | None = None) -> None:
    """Raise ValueError unless ``value`` is a finite floating-point tensor of this shape. Host synchronization: yes."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise wrong(field, value, "a tensor of finite floats")
    if not bool(value.isfinite().all()):
        raise ValueError(f"{field} contains NaN or infinity; all values must be finite")
    if shape is not None and tuple(value.shape) != tuple(shape):
        raise wrong(field, value, f"shape {tuple(shape)}")


def anything(value: object, field: str) -> None:
    """Accept every value: a `Check` that never raises."""


def list_of(check: Check, *, least: int = 0) -> Check:
    """Return a check for a list or tuple of at least ``least`` items, all of which pass ``check``."""

    def check_list(value: object, field: str) -> None:
        if not isinstance(value, (list, tuple)) or len(value) < least:
            raise wrong(field, value, "a list" + (f" of at least {least} items" if least else ""))
        for index, item in enumerate(value):
            check(item, f"{field}[{index}]")

    return check_list


def items(*checks: Check) -> Check:
    """Return a check for a list or tuple with as many items as there are ``checks``. Item i must pass check i."""

    def check_items(value: object, field: str) -> None:
        if not isinstance(value, (list, tuple)) or len(value) != len(checks):
            raise wrong(field, value, f"a list of {len(checks)} items")
        for index, (item, check) in enumerate(zip(value, checks, strict=True)):
            check(item, f"{field}[{index}]")

    return check_items


def dict_of(check: Check, *, key: Check = check_text) -> Check:
    """Return a check for a dict whose keys all pass ``key`` (default: strings), and whose values all pass ``check``."""

    def check_dict(value: object, field: str) -> None:
        if not isinstance(value, Mapping):
            raise wrong(field, value, "a dict")
        for name, item in value.items():
            key(name, f"a key of {field}")
            check(item, f"{field}[{_shown(name)}]")

    return check_dict


def fields(checks: Mapping[str, Check]) -> Check:
    """Return a check for a dict that has at least the keys of ``checks``, and whose values pass the check of their key."""

    def check_fields(value: object, field: str) -> None:
        if not isinstance(value, Mapping):
            raise wrong(field, value, "a dict")
        for name, check in checks.items():
            if name not in value:
                raise ValueError(f"{field} has no key {name!r}; expected a dict with this key")
            check(value[name], f"{field}[{name!r}]")

    return check_fields


def _check_of(like: object) -> Check:
    return lambda value, field: check_like(value, like, field)


def check_like(value: object, like: object, field: str) -> None:
    """Raise ValueError if ``value`` can't replace ``like``, because its type, shape or keys do not fit:

        like                                  accepted value
        bool                                  a bool or None
        None                                  any value except a dict; numbers, alone or in a list, must be valid
        number, or tensor of one element      a valid number, or a tensor with one valid number; also NaN if like is NaN
        string                                a string
        tensor                                a tensor of the same shape
        dict with string keys                 a dict with at least these keys; each value is checked against the value
                                              of like at this key; numbers at keys that like lacks must be valid
        any other dict                        a dict; the key and the value of an item whose key is not in like are
                                              checked against the first item of like
        list or tuple                         a list or tuple of the same length; item i is checked against item i
        any other type                        an object of the same type

    A number of NumPy in ``like`` counts as a Python number. A number is valid if `is_number` is True.

    Host synchronization: yes, if ``value`` or ``like`` has a tensor of one element on a device.
    """
    like = python_number(like)
    if isinstance(like, bool):
        if not (value is None or isinstance(value, bool)):
            raise wrong(field, value, "True, False or None")
    elif like is None:
        if isinstance(value, Mapping):
            raise wrong(field, value, "a number, a string, True, False, None or a list of these")
        _check_plain(value, field)
    elif isinstance(like, (int, float)) or (isinstance(like, Tensor) and like.numel() == 1):
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if not is_number(number) and not (_is_nan(number) and _is_nan(like)):
            raise wrong(field, value, _A_NUMBER)
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
            raise ValueError(f"{field} lacks {', '.join(map(repr, missing))}; give a dict with these keys")
    elif isinstance(like, Sequence) and not isinstance(like, bytes):
        items(*map(_check_of, like))(value, field)
    elif type(value) is not type(like):
        raise wrong(field, value, f"a {type(like).__name__}")


def python_numbers(value: Any) -> Any:
    """Return ``value`` with Python numbers in place of NumPy's numbers, which ``torch.load(weights_only=True)`` rejects."""
    if type(value) is dict:
        return {key: python_numbers(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(python_numbers, value))
    return python_number(value)


def python_number(value: Any) -> Any:
    """Return the value of a NumPy number as a Python number; return any other ``value``, also a tensor, unchanged."""
    is_number = getattr(value, "shape", None) == () and hasattr(value, "item") and not isinstance(value, Tensor)
    return value.item() if is_number else value


def _check_plain(value: object, field: str) -> None:
    """Raise ValueError if ``value`` is or contains a number that `is_number` rejects, such as NaN."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        check_number(value, field)
    elif isinstance(value, (list, tuple)):
        list_of(_check_plain)(value, field)
    elif isinstance(value, Mapping):
        dict_of(_check_plain, key=anything)(value, field)


def _is_nan(value: Any) -> bool:
    is_single = isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1)
    return is_single and bool(value != value)


def _shown(value: object) -> str:
    """Return a text of up to 80 characters for ``value`` in an error; for a tensor, return its shape and dtype."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {str(value.dtype)[6:]}"
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # raised for an int with too many digits, or for deeply nested lists
        text = f"a {type(value).__name__} that is too large to be shown"
    return text if len(text) <= 80 else text[:77] + "..."


# Types of numeric arguments: strings and bools are rejected, although ``float()`` accepts them ------------------------


def check_scalar(value: object, name: str, write: str = "a number") -> None:
    """Raise TypeError unless ``value`` is a 0-dim tensor, which is not read, or a `numbers.Real` and not a bool."""
    if isinstance(value, Tensor):
        if value.dim():
            shape = tuple(value.shape)
            raise TypeError(f"{name}=a tensor of shape {shape}: give {write}, not a tensor of one or more dims")
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r}: give {write}, not a {type(value).__name__}")


def is_whole(value: object, least: int) -> bool:
    """Return True if ``value`` is an int of at least ``least``, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
