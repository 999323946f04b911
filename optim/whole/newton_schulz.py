"""The orthogonal matrix nearest to another, by five steps of a polynomial: all singular values go to about 1."""

from __future__ import annotations

import torch
from torch import Tensor

from ...parallel.layout.pieces import Shape

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's: the steepest slope at 0, and a spread of singular values between 0.7 and 1.2 at the end."""


def newton_schulz(
    matrix: Tensor, coefficients: tuple[float, float, float] = COEFFICIENTS, steps: int = 5, eps: float = 1e-7
) -> Tensor:
    """X <- a X + (b A + c A A) X with A = X X^T, from X = matrix / |matrix|, on its short side.

    Args:
        matrix: [rows, columns], of the dtype to compute in.
    """
    a, b, c = coefficients
    tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.mT if tall else matrix
    x = x / x.norm().clamp(min=eps)
    # Memory is taken once: fresh one in each step would cost as much again.
    after, gram, polynomial = x.new_empty(x.shape), x.new_empty(2 * x.shape[:1]), x.new_empty(2 * x.shape[:1])
    for _ in range(steps):
        torch.mm(x, x.mT, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        x, after = torch.addmm(x, polynomial, x, beta=a, out=after), x
    return x.mT if tall else x


def flops(shape: Shape) -> float:
    """Of one step, about: what a matrix costs relative to others."""
    short, long = sorted(shape)
    return 4.0 * short * short * long + 2.0 * short**3
