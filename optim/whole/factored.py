"""Second moments of matrices, kept as the means of their rows and of their columns.

A tensor of two dims or more is a stack of matrices, its last two dims; one of fewer is not factored. Rows and columns are
those of the logical tensor, whoever has parts of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from torch import Tensor

from ...parallel.layout.pieces import Shape
from .optimizer import Slot
from .tensors import Request, WholeTensors


def is_factored(shape: Shape) -> bool:
    """Whether a logical tensor has rows and columns."""
    return len(shape) >= 2


def row_and_column_sums(position: int, value: Tensor, shape: Shape) -> Iterator[Request]:
    """To ask for: [..., rows, 1] and [..., 1, columns]."""
    yield position, value, (len(shape) - 1,)
    yield position, value, (len(shape) - 2,)


def row_and_column_zeros(slot: Slot, shape: Shape) -> tuple[Tensor, Tensor]:
    """Of those shapes, in the parameter's dtype."""
    new_zeros = slot.param.new_zeros
    return new_zeros((*shape[:-1], 1)), new_zeros((*shape[:-2], 1, shape[-1]))


def total(position: int, value: Tensor, shape: Shape) -> Request:
    """To ask for: the sum of all elements."""
    return position, value, tuple(range(len(shape)))


def rms(sum_of_squares: Tensor, shape: Shape) -> Tensor:
    """0-dim."""
    return (sum_of_squares.sum() / max(prod(shape), 1)).sqrt()


def toward(old: Tensor, new: Tensor, rate: float | Tensor) -> Tensor:
    """``old``, moved to ``new`` by a rate, in its dtype."""
    return old + (new.to(old.dtype) - old) * rate


def outer(tensors: WholeTensors, slot: Slot, rows: Tensor, columns: Tensor) -> Tensor:
    """rows x columns, of the piece's shape."""
    left, right = tensors.of_whole(slot.position, rows), tensors.of_whole(slot.position, columns)
    return (left * right).reshape(slot.param.shape)
