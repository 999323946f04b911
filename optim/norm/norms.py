"""What is measured of gradients: which norms, of what, and how they are reduced."""

from __future__ import annotations

from math import isnan
from typing import Literal, NamedTuple

from torch import Tensor

from .numbers import check_scalar

Reduction = Literal["packed", "per_group"]
Level = Literal["total", "groups", "parameters", "named", "units"]


class Norms(NamedTuple):
    """Global p-norms of gradients, device tensors of the accumulation dtype.

    Args:
        total: 0-dim.
        groups: [param groups].
        parameters: [logical parameters], or empty where they are not measured.
        extra: What travelled along.
        units: [units of all parameters], or empty.
        weights: Norms of the weights themselves, shaped as the gradients' at the level that was asked for; or empty.
        named: [named groups, and the others], or empty; see `Named`.
    """

    total: Tensor
    groups: Tensor
    parameters: Tensor
    extra: Tensor
    units: Tensor
    weights: Tensor
    named: Tensor


def checked_norm_type(norm_type: float) -> float:
    """``norm_type`` as a float.

    Raises:
        TypeError: It is no number.
        ValueError: It is below 1 or NaN.
    """
    check_scalar(norm_type, "norm_type", "a number >= 1 (2.0 is the usual norm) or float('inf')")
    value = float(norm_type)
    if 0 < value < 1:
        raise ValueError(
            f"norm_type={norm_type}: give a number >= 1 (2.0 is the usual norm) or float('inf'); below 1 it is no norm (a "
            "sum of two gradients could be longer than both together), and grows with the number n of elements so fast, as "
            f"n^{1 / value:.3g}, that a threshold means little"
        )
    if isnan(value) or value < 1:
        raise ValueError(f"norm_type={norm_type}: give a number >= 1 (2.0 is the usual norm) or float('inf')")
    return value


def checked_reduction(reduction: Reduction) -> Reduction:
    """``reduction``.

    Raises:
        ValueError: It is none of the two.
    """
    if reduction not in ("packed", "per_group"):
        raise ValueError(f"reduction={reduction!r}: give 'packed' or 'per_group'")
    return reduction
