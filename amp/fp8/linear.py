"""The linear layer in 8 bits: e4m3 operands in forward, e5m2 output gradients in backward.

    y  = Q4(x) Q4(w)^T           Q4: to float8_e4m3fn, Q5: to float8_e5m2, each with one scale for the tensor
    dx = Q5(dy) Q4(w)            (straight through: the derivative of the rounding is taken as 1)
    dw = Q5(dy)^T Q4(x)

Products are exact and summed in float32, by the tensor cores on CUDA devices of capability 8.9 and up
(`torch._scaled_mm`), by a float32 matrix product elsewhere. Both see the same 8-bit operands; they differ in the order
of the sums, and in the bits that a GPU keeps of a running sum.

Reference: Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv:2209.05433.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ...parallel.mesh.registry import ProcessGroupRegistry
from .tensor import E4M3, E5M2, Quantized, agreed_amax, check_dtypes, quantize
from .weights import KeptWeight, kept, round_both

# What tensor cores need of the dims of 8-bit operands.
MULTIPLE = 16


@dataclass(frozen=True)
class Fp8Matmul:
    """`torch.nn.functional.linear` in 8 bits; what a layer's ``matmul`` is under the mode `Fp8`.

        output = Fp8Matmul()(input, weight, bias)

    The scales are those of the logical tensors: the maximum is agreed over the axes that hold their pieces, so that a
    layer split over ranks rounds to the same values as the whole one. Which axes these are follows from the layer: its
    weight's output features are split over the same axes as the gradient of its output, its input features over the
    same as its input.

    A weight whose dims aren't both multiples of 16 isn't multiplied in 8 bits: it is `linear` in the dtype it has. What
    counts is this rank's piece.

    Args:
        registry: Where the pieces are; None: the tensors are whole.
        forward_axes: The axes that split the weight or the input (which may be replicas over the other's axes).
        backward_axes: The axes that split the gradient of the output.

    Shapes:
        input [..., in], weight [out, in], bias [out] -> [..., out] in the dtype of the input, autocast or not.
        The gradient of the weight is made in float32 and cast to what the weight accumulates (`Tensor.grad_dtype`).
        For backward the operands are kept in 8 bits. In a model that `Fp8` has prepared the weight is, until the next
        step: it is rounded once in a window of micro-batches.
    Raises:
        TypeError: The input or the weight is float64.
    Collectives: one all-reduce (MAX) of two numbers over forward_axes in forward, one of one number over backward_axes
    in backward; none over one rank. Host reads: none. Differentiable once.
    """

    registry: ProcessGroupRegistry | None = None
    forward_axes: tuple[str, ...] = ()
    backward_axes: tuple[str, ...] = ()

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not fits(weight):
            return F.linear(input, weight, bias)
        check_dtypes(input, weight)
        rows = input.reshape(-1, input.size(-1))
        output: Tensor = _Fp8Linear.apply(rows, weight, self, kept(weight))
        output = output.reshape(*input.shape[:-1], weight.size(0))
        return output if bias is None else output + bias.to(output.dtype)


class Fp8Linear(nn.Linear):
    """`nn.Linear` whose product is in 8 bits; what the mode `Fp8` makes of an `nn.Linear`.

    Attributes:
        matmul: How; with its default the weight and the input are whole.
    """

    matmul: Callable[[Tensor, Tensor, Tensor | None], Tensor] = Fp8Matmul()

    def forward(self, input: Tensor) -> Tensor:
        return self.matmul(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if fits(self.weight) else ", not in 8 bits: dims must be multiples of 16")


def fits(weight: Tensor) -> bool:
    """Whether a matrix can be an operand in 8 bits: both dims are multiples of 16."""
    return all(size % MULTIPLE == 0 for size in weight.shape)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, matmul: Fp8Matmul, weight_kept: KeptWeight | None) -> Tensor:
        x, w = round_both(rows, E4M3, weight, weight_kept, matmul, matmul.registry, matmul.forward_axes)
        ctx.save_for_backward(*x, *w)
        ctx.matmul, ctx.dtype = matmul, rows.dtype
        return product(x, w, rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        saved = ctx.saved_tensors
        x, w = Quantized(*saved[:2]), Quantized(*saved[2:])
        (amax,) = agreed_amax((grad,), ctx.matmul.registry, ctx.matmul.backward_axes)
        g = quantize(grad, E5M2, amax)
        grad_rows = product(g, w.t(), ctx.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = product(g.t(), x.t(), torch.float32) if ctx.needs_input_grad[1] else None
        return grad_rows, grad_weight, None, None


def product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """``a @ b.T``, [m, k] x [n, k] -> [m, n] in ``dtype``, summed in float32. Both have one scale, or one for each row."""
    by_row, device = a.inverse_scale.dim() > 0, a.values.device
    if a.values.numel() and has_fp8(device):
        if not by_row or scales_rows(device):
            return scaled_mm(a, b, dtype)
        one = torch.ones((), device=device)
        total = scaled_mm(Quantized(a.values, one), Quantized(b.values, one), torch.float32)
    else:
        # Autocast would round the sums to half precision; TF32 would not round the operands, which have 4 bits.
        with torch.autocast(device.type, enabled=False):
            total = a.values.float() @ b.values.float().t()
    if by_row:
        return (total * a.inverse_scale * b.inverse_scale.t()).to(dtype)
    return (total * (a.inverse_scale * b.inverse_scale)).to(dtype)


def has_fp8(device: torch.device) -> bool:
    """Whether the device multiplies 8-bit matrices in hardware, in these formats."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def scales_rows(device: torch.device) -> bool:
    """Whether the product itself applies a scale for each row, whatever dtype it gives: cuBLAS 12.9 does, on Hopper."""
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return torch.cuda.get_device_capability(device) == (9, 0) and version >= (12, 9)


def scaled_mm(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """`product` by torch._scaled_mm, for n a multiple of 16; k is padded to one with zeros."""
    # It wants the first row-major and the second column-major.
    result: Tensor = torch._scaled_mm(
        row_major(a.values),
        row_major(b.values).t(),
        scale_a=a.inverse_scale,
        scale_b=b.inverse_scale.t(),
        out_dtype=dtype,
        use_fast_accum=False,
    )
    return result


def row_major(values: Tensor) -> Tensor:
    """The matrix with contiguous rows of a multiple of 16 bytes, the last of them zeros: itself, or one copy."""
    rows, length = values.shape
    padding = -length % MULTIPLE
    if not padding:
        return values.contiguous()
    wide = torch.empty(rows, length + padding, dtype=torch.uint8, device=values.device)
    wide[:, length:].zero_()  # as bytes, of which 0 is 0.0 in both formats
    wide[:, :length].copy_(values.view(torch.uint8))
    return wide.view(values.dtype)


# The linear layer in 8 bits with a scale for each row of an operand, so that an outlier costs its own row only --------

#     y  = Q4(x) Q4(w)^T             a scale for each token of x, and for each output feature of w
#     dx = Q5(dy) Q4(w^T)^T          for each token of dy, and each input feature of w
#     dw = Q5(dy^T) Q4(x^T)^T        for each output feature of dy, and each input feature of x
#
# Every product has scales of its own, because they must be the same along the features or tokens that it sums over. So
# the operands are kept for backward in the dtype that they have, and rounded there once more.


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
