"""The linear layer in 8 bits with a scale for each row of an operand, so that an outlier costs its own row only.

    y  = Q4(x) Q4(w)^T             a scale for each token of x, and for each output feature of w
    dx = Q5(dy) Q4(w^T)^T          for each token of dy, and each input feature of w
    dw = Q5(dy^T) Q4(x^T)^T        for each output feature of dy, and each input feature of x

Every product has scales of its own, because they must be the same along the features or tokens that it sums over. So the
operands are kept for backward in the dtype that they have, and rounded there once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ...parallel.mesh.registry import ProcessGroupRegistry
from .linear import fits, product
from .tensor import E4M3, E5M2, check_dtypes
from .weights import KeptWeight, kept, round_both


@dataclass(frozen=True)
class Fp8RowMatmul:
    """As `Fp8Matmul`, but with a scale for each row; what a layer's ``matmul`` is under ``Fp8(scales="row")``.

    The scales are those of the logical tensors here too. A row is on several ranks where what is summed over is split:
    input features in forward, output features for the gradient of the input, samples for that of the weight.

    Args:
        registry: Where the pieces are; None: the tensors are whole.
        in_axes, out_axes: The axes that split the weight's input and output features.
        batch_axes: The axes that split the samples, and over which scales are agreed.

    Shapes: as `Fp8Matmul`.
    Collectives: one all-reduce (MAX) of a number for each row of both operands, over in_axes in forward, over out_axes and
        over batch_axes in backward; none over one rank. Host reads: none. Differentiable once.
    """

    registry: ProcessGroupRegistry | None = None
    in_axes: tuple[str, ...] = ()
    out_axes: tuple[str, ...] = ()
    batch_axes: tuple[str, ...] = ()

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not fits(weight):
            return F.linear(input, weight, bias)
        check_dtypes(input, weight)
        rows = input.reshape(-1, input.size(-1))
        output: Tensor = _Fp8RowLinear.apply(rows, weight, self, kept(weight))
        output = output.reshape(*input.shape[:-1], weight.size(0))
        return output if bias is None else output + bias.to(output.dtype)


class _Fp8RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, matmul: Fp8RowMatmul, weight_kept: KeptWeight | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.matmul, ctx.kept = matmul, weight_kept
        return _product(rows, weight, E4M3, rows.dtype, matmul.registry, matmul.in_axes, weight_kept, "rows")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weight = ctx.saved_tensors
        how: Fp8RowMatmul = ctx.matmul
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = _product(grad, weight.t(), E5M2, rows.dtype, how.registry, how.out_axes, ctx.kept, "columns")
        if ctx.needs_input_grad[1]:
            grad_weight = _product(grad.t(), rows.t(), E5M2, torch.float32, how.registry, how.batch_axes)
        return grad_rows, grad_weight, None, None


def _product(
    a: Tensor,
    b: Tensor,
    format: torch.dtype,
    dtype: torch.dtype,
    registry: ProcessGroupRegistry | None,
    axes: tuple[str, ...],
    b_kept: KeptWeight | None = None,
    which: str = "",
) -> Tensor:
    """``a @ b.T``, [m, k] x [n, k] -> [m, n]; ``a`` in the given format, ``b`` in e4m3; k is split over ``axes``.

    Args:
        b_kept, which: Where b may be kept, and as which side of the weight.
    """
    return product(*round_both(a, format, b, b_kept, (which, registry, axes), registry, axes, by_row=True), dtype)
