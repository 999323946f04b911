"""What of an optimizer's state belongs to the elements of a parameter, and what is one number of all of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

SCALAR_STATE = ("step", "mu", "mu_product", "eta")  # one number a parameter in torch's optimizers, whatever its shape


def is_half_kept(key: str, value: Any, param: Tensor) -> bool:
    """Whether a state may be kept in half precision between steps: not a number that all elements share, of which a
    rounded value would be wrong for all of them alike.

    Args:
        param: Whose state ``value`` is, under ``key``.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point() or key in SCALAR_STATE:
        return False
    return value.dim() > 0 or param.dim() == 0
