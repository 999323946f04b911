"""SUMMA with 8-bit operands: what `Linear2D` multiplies with under the mode `Fp8`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...parallel.layers.summa import Grid, summa
from ...parallel.mesh.registry import ProcessGroupRegistry
from .linear import fits
from .tensor import E4M3, E5M2, Quantized, agreed_amax, check_dtypes, quantize
from .weights import kept, round_both


def fp8_summa(a: Tensor, b: Tensor, grid: Grid, inner: int | None = None, *, data_axes: tuple[str, ...] = ()) -> Tensor:
    """This rank's block [m, n] of ``A @ B`` with A, B and the gradient rounded as by `Fp8Matmul`.

    Every 8-bit value is a value of the operands' dtype too, so the blocks are rounded and then sent around and
    multiplied by `summa` in that dtype. The numbers are those of an 8-bit product, but that the sums are made in the
    dtype; time and traffic are those of the dtype. Where the dims of ``b`` aren't multiples of 16 nothing is rounded.

    Args:
        a, b: Blocks [m, k] and [k, n], both float32 or both bfloat16. In a model that `Fp8` has prepared ``b``, the
            weight, is rounded once a step.
        inner: As for `summa`.
        grid: The grid of ranks, over which the maxima of all three tensors are agreed.
        data_axes: Further axes to agree over.
    Raises:
        TypeError: a or b is float64.
    Collectives: those of `summa`, and an all-reduce (MAX) of two numbers in forward, of one in backward. Host reads:
        none. Differentiable once.
    """
    if not fits(b):
        return summa(a, b, grid, inner)
    check_dtypes(a, b)
    scales = _Scales(grid.registry, (grid.row, grid.col, *data_axes))
    how = "summa", grid.registry, scales.axes
    rounded = round_both(a, E4M3, b, kept(b), how, scales.registry, scales.axes)
    x, w = (_Round.apply(each, rounded[which], scales, which) for which, each in enumerate((a, b)))
    result: Tensor = _Descale.apply(summa(x, w, grid, inner), scales)
    return result


class _Scales:
    """The inverse scales of the two operands and, from the start of backward on, of the gradient."""

    def __init__(self, registry: ProcessGroupRegistry, axes: tuple[str, ...]) -> None:
        self.registry, self.axes = registry, axes
        self.operands: list[Tensor] = [torch.empty(()), torch.empty(())]
        self.grad = torch.empty(())


class _Round(torch.autograd.Function):
    """An operand's 8-bit values, not descaled, in its dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Quantized, scales: _Scales, which: int) -> Tensor:
        ctx.scales, ctx.which = scales, which
        values, scales.operands[which] = rounded
        return values.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        other = ctx.scales.operands[1 - ctx.which]
        return grad.float() * (ctx.scales.grad * other), None, None, None


class _Descale(torch.autograd.Function):
    """Multiplies by the operands' inverse scales; the backward hands the 8-bit values of the gradient to `summa`."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, scales: _Scales) -> Tensor:
        ctx.scales = scales
        first, second = scales.operands
        return (product.float() * (first * second)).to(product.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        scales: _Scales = ctx.scales
        (amax,) = agreed_amax((grad,), scales.registry, scales.axes)
        values, scales.grad = quantize(grad, E5M2, amax)
        return values.to(grad.dtype), None
