"""The orthogonal matrix nearest to another, by five steps of a polynomial: all singular values go to about 1.

    X <- a X + (b A + c A A) X,  A = X X^T          on the matrix: each step reads and writes all of X, [short, long]
    X <- Q X,  Q = P_3 P_2 P_1                      on its Gram matrix: three steps of [short, short] alone,
       P_k = a I + b A_k + c A_k A_k                then one product with X
       A_1 = X X^T,  A_k+1 = P_k A_k P_k

Both are one polynomial of X, equal but for rounding. The second one takes fewer operations where X is long. After three
steps A is made of X anew: rounding makes small eigenvalues of it negative, and those grow by a^2 a step, 12-fold, away from
those of X X^T. Five steps on end are up to thousands of times their result off in bfloat16; three and two as little as
the first form, within a factor of 3 on random numbers and less than it where singular values fall.

Keller Jordan et al. (2024); the second form, and that it must begin anew: "Gram Newton-Schulz" (Dao AI Lab, 2026).
"""

from __future__ import annotations

from math import frexp

import torch
from torch import Tensor

from ...parallel.layout.pieces import Shape

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's: the steepest slope at 0, and a spread of singular values between 0.7 and 1.2 at the end."""

RUN = 3
"""Steps on a Gram matrix until it is made anew."""

WORTH, SMALLEST = 0.9, 128
"""On the Gram matrix where that takes at most so much of the other form's operations (of five steps: a matrix that is 1.9
times as long as it is short, or longer), and the short side is so long: below, it is calls that cost, of which there are
more."""


def newton_schulz(
    matrix: Tensor, coefficients: tuple[float, float, float] = COEFFICIENTS, steps: int = 5, eps: float = 0.0
) -> Tensor:
    """As above, from X = matrix / |matrix|, on its short side; in which form, its shape says alone.

    Args:
        matrix: [rows, columns], of the dtype to compute in.
        eps: The least norm that the matrix is divided by. 0: there is none; zeros stay zeros.
    """
    tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.mT if tall else matrix
    x = x / x.norm().clamp(min=eps) if eps else normalize(x)
    x = (on_gram if goes_on_gram(tuple(x.shape), steps) else on_matrix)(x, coefficients, steps)
    return x.mT if tall else x


def normalize(matrix: Tensor) -> Tensor:
    """Return ``matrix`` divided by its Frobenius norm, whatever its scale; zeros where it is zero. Host reads: none.

    It is multiplied by a power of two first, so that no square underflows or overflows. That is exact: where plain
    division is right, the bits are the same.
    """
    if not matrix.numel():
        return matrix.clone()
    largest = matrix.abs().amax().to(torch.promote_types(matrix.dtype, torch.float32))
    limit = frexp(torch.finfo(matrix.dtype).max)[1] - 1  # of the largest power of two that the dtype has
    exponent = torch.frexp(largest).exponent.clamp(-limit, limit)
    x = matrix * torch.ldexp(torch.ones_like(largest), -exponent).to(matrix.dtype)
    norm = x.norm()
    return x.div_(torch.where(norm > 0, norm, torch.ones_like(norm)))


def on_matrix(x: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Of X, [short, long], with singular values up to 1, whose memory is written to."""
    a, b, c = coefficients
    # Memory is taken once: fresh one in each step would cost as much again.
    after, gram, polynomial = x.new_empty(x.shape), x.new_empty(2 * x.shape[:1]), x.new_empty(2 * x.shape[:1])
    for _ in range(steps):
        torch.mm(x, x.mT, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        x, after = torch.addmm(x, polynomial, x, beta=a, out=after), x
    return x


def on_gram(x: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """As `on_matrix`."""
    a, b, c = coefficients
    after = x.new_empty(x.shape)
    gram, p, q, spare = (x.new_empty(2 * x.shape[:1]) for _ in range(4))
    for first in range(0, steps, RUN):
        torch.mm(x, x.mT, out=gram)
        for step in range(first, min(first + RUN, steps)):
            if step > first:
                torch.mm(torch.mm(p, gram, out=spare), p, out=gram)
            torch.addmm(gram, gram, gram, beta=b, alpha=c, out=p).diagonal().add_(a)
            if step > first:
                q, spare = torch.mm(p, q, out=spare), q
            else:
                q.copy_(p)
        x, after = torch.mm(q, x, out=after), x
    return x


def goes_on_gram(shape: Shape, steps: int = 5) -> bool:
    """Which form a matrix takes."""
    return min(shape) >= SMALLEST and _flops_on_gram(shape, steps) <= WORTH * _flops_on_matrix(shape, steps)


def flops(shape: Shape) -> float:
    """Of five steps, about: what a matrix costs relative to others."""
    return _flops_on_gram(shape, 5) if goes_on_gram(shape) else _flops_on_matrix(shape, 5)


def _flops_on_matrix(shape: Shape, steps: int) -> float:
    short, long = sorted(shape)
    return steps * (4.0 * short * short * long + 2.0 * short**3)


def _flops_on_gram(shape: Shape, steps: int) -> float:
    """Of each run the first product and the last; of each step A A; of each but a run's first one 3 products more."""
    short, long = sorted(shape)
    runs = -(-steps // RUN)
    return runs * 4.0 * short * short * long + (2.0 * steps + 6.0 * (steps - runs)) * short**3
