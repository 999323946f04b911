"""Types of numbers that users give: text and bools are no numbers, though ``float`` takes them."""

from __future__ import annotations

from numbers import Real

from torch import Tensor


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
