"""Linear layer in 8 bits: e4m3 operands in forward, e5m2 output gradients in backward.

    y  = Q4(x) Q4(w)^T           Q4: to float8_e4m3fn, Q5: to float8_e5m2, each with one scale per tensor
    dx = Q5(dy) Q4(w)            (straight-through: the derivative of the rounding is taken as 1)
    dw = Q5(dy)^T Q4(x)

Products are exact and summed in float32. CUDA devices of capability 8.9 and up use tensor cores (`torch._scaled_mm`);
other devices use a float32 matrix product. Both get the same 8-bit operands. Their results differ in the order of the
sums, and in the number of bits that a GPU keeps of a running sum.

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
from .tensor import E4M3, E5M2, Quantized, check_dtypes, global_amax, quantize
from .weights import WeightCache, cache_of, round_both

# Tensor cores require dims of 8-bit operands that are multiples of this number.
MULTIPLE = 16


@dataclass(frozen=True)
class Fp8Matmul:
    """`torch.nn.functional.linear` in 8 bits with one scale per tensor. The mode `Fp8` sets it as a layer's ``matmul``.

        output = Fp8Matmul()(input, weight, bias)

    The scales are computed from the logical tensors. The maximum is all-reduced over the axes that shard a tensor, so a
    sharded layer rounds to the same values as the dense layer. The layer determines the axes. The output features of
    its weight are sharded over the axes of its output gradient, and the input features over the axes of its input.

    If a dim of this rank's weight shard is not a multiple of 16, the call is `linear` in the given dtype.

    Args:
        registry: The process groups. Default None: the tensors are not sharded.
        forward_axes: Axes that shard the weight or the input. The other of the two may be replicated over them.
            Default: none.
        backward_axes: Axes that shard the gradient of the output. Default: none.

    Shapes:
        input [..., in], weight [out, in], bias [out] -> [..., out] in the dtype of the input, also under autocast.
        The weight gradient is computed in float32 and cast to the dtype in which the weight accumulates
            (`Tensor.grad_dtype`). Backward keeps the 8-bit operands. In a model that `Fp8` has prepared, the 8-bit
            weight is kept until the next step, so it is rounded once per accumulation window.
    Raises:
        TypeError: The input or the weight is float64.
    Collectives: one all-reduce (MAX) of two numbers over forward_axes in forward, and one of a single number over
    backward_axes in backward; none over a single rank. Host synchronization: none. Differentiable once.
    """

    registry: ProcessGroupRegistry | None = None
    forward_axes: tuple[str, ...] = ()
    backward_axes: tuple[str, ...] = ()

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not fits(weight):
            return F.linear(input, weight, bias)
        check_dtypes(input, weight)
        rows = input.reshape(-1, input.size(-1))
        output: Tensor = _Fp8Linear.apply(rows, weight, self, cache_of(weight))
        output = output.reshape(*input.shape[:-1], weight.size(0))
        return output if bias is None else output + bias.to(output.dtype)


class Fp8Linear(nn.Linear):
    """`nn.Linear` with an 8-bit product. The mode `Fp8` turns an `nn.Linear` into this class.

        layer = Fp8Linear(64, 128, dtype=torch.bfloat16, device="cuda")

    Attributes:
        matmul: Computes the output from input, weight and bias. Default: `Fp8Matmul` for tensors that are not sharded.
    """

    matmul: Callable[[Tensor, Tensor, Tensor | None], Tensor] = Fp8Matmul()

    def forward(self, input: Tensor) -> Tensor:
        return self.matmul(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if fits(self.weight) else ", not in 8 bits: dims must be multiples of 16")


def fits(weight: Tensor) -> bool:
    """Return True if a matrix can be an 8-bit operand, which requires dims that are multiples of 16."""
    return all(size % MULTIPLE == 0 for size in weight.shape)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, matmul: Fp8Matmul, weight_cache: WeightCache | None) -> Tensor:
        x, w = round_both(rows, E4M3, weight, weight_cache, matmul, matmul.registry, matmul.forward_axes)
        ctx.save_for_backward(*x, *w)
        ctx.matmul, ctx.dtype = matmul, rows.dtype
        return product(x, w, rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        saved = ctx.saved_tensors
        x, w = Quantized(*saved[:2]), Quantized(*saved[2:])
        (amax,) = global_amax((grad,), ctx.matmul.registry, ctx.matmul.backward_axes)
        g = quantize(grad, E5M2, amax)
        grad_rows = product(g, w.t(), ctx.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = product(g.t(), x.t(), torch.float32) if ctx.needs_input_grad[1] else None
        return grad_rows, grad_weight, None, None


def product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Return ``a @ b.T``, [m, k] x [n, k] -> [m, n] in ``dtype``, summed in float32.

    Args:
        a, b: 8-bit matrices. Both have a single scale, or both have one scale per row.
        dtype: The dtype of the result.
    """
    by_row, device = a.inverse_scale.dim() > 0, a.values.device
    if a.values.numel() and has_fp8(device):
        if not by_row or scales_rows(device):
            return scaled_mm(a, b, dtype)
        one = torch.ones((), device=device)
        total = scaled_mm(Quantized(a.values, one), Quantized(b.values, one), torch.float32)
    else:
        # Autocast would round the sums to half precision. TF32 is exact: 8-bit operands have at most 4 significant bits.
        with torch.autocast(device.type, enabled=False):
            total = a.values.float() @ b.values.float().t()
    if by_row:
        return (total * a.inverse_scale * b.inverse_scale.t()).to(dtype)
    return (total * (a.inverse_scale * b.inverse_scale)).to(dtype)


def has_fp8(device: torch.device) -> bool:
    """Return True if the device multiplies e4m3 and e5m2 matrices in hardware."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def scales_rows(device: torch.device) -> bool:
    """Return True if `torch._scaled_mm` applies one scale per row for every output dtype: cuBLAS 12.9 and up on Hopper."""
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return torch.cuda.get_device_capability(device) == (9, 0) and version >= (12, 9)


def scaled_mm(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Compute `product` with `torch._scaled_mm`.

    n must be a multiple of 16; k is padded with zeros to a multiple of 16.
    """
    # torch._scaled_mm requires a row-major first and a column-major second operand.
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
    """Return the matrix with contiguous rows, padded with zeros to a multiple of 16 bytes: the same tensor, or a copy."""
    rows, length = values.shape
    padding = -length % MULTIPLE
    if not padding:
        return values.contiguous()
    padded = torch.empty(rows, length + padding, dtype=torch.uint8, device=values.device)
    padded[:, length:].zero_()  # the byte 0 is 0.0 in both formats
    padded[:, :length].copy_(values.view(torch.uint8))
    return padded.view(values.dtype)


# Linear layer in 8 bits with one scale per row, so that an outlier reduces the precision of a single row ---------------

#     y  = Q4(x) Q4(w)^T             one scale per token of x, and per output feature of w
#     dx = Q5(dy) Q4(w^T)^T          one scale per token of dy, and per input feature of w
#     dw = Q5(dy^T) Q4(x^T)^T        one scale per output feature of dy, and per input feature of x
#
# A scale must be constant along the dim that a product sums over, so the three products need different scales.
# Backward therefore keeps the operands in their dtype and rounds them again.


@dataclass(frozen=True)
class Fp8RowMatmul:
    """`Fp8Matmul` with one scale per row. The mode ``Fp8(scales="row")`` sets it as a layer's ``matmul``.

        output = Fp8RowMatmul()(input, weight, bias)

    The scales are computed from the rows of the logical tensors. Several ranks hold parts of a row if the summed dim is
    sharded: input features in forward, output features for the input gradient, samples for the weight gradient.

    Args:
        registry: The process groups. Default None: the tensors are not sharded.
        in_axes, out_axes: Axes that shard the weight's input and output features. Default: none.
        batch_axes: Axes that shard the samples, and over which the scales are all-reduced. Default: none.

    Shapes: as in `Fp8Matmul`.
    Raises:
        TypeError: The input or the weight is float64.
    Collectives: one all-reduce (MAX) of one number per row of both operands over in_axes in forward, and one each over
    out_axes and batch_axes in backward; none over a single rank. Host synchronization: none. Differentiable once.
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
        output: Tensor = _Fp8RowLinear.apply(rows, weight, self, cache_of(weight))
        output = output.reshape(*input.shape[:-1], weight.size(0))
        return output if bias is None else output + bias.to(output.dtype)


class _Fp8RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, matmul: Fp8RowMatmul, weight_cache: WeightCache | None
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.matmul, ctx.weight_cache = matmul, weight_cache
        return _product(rows, weight, E4M3, rows.dtype, matmul.registry, matmul.in_axes, weight_cache, "rows")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weight = ctx.saved_tensors
        matmul: Fp8RowMatmul = ctx.matmul
        registry = matmul.registry
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = _product(
                grad, weight.t(), E5M2, rows.dtype, registry, matmul.out_axes, ctx.weight_cache, "columns"
            )
        if ctx.needs_input_grad[1]:
            grad_weight = _product(grad.t(), rows.t(), E5M2, torch.float32, registry, matmul.batch_axes)
        return grad_rows, grad_weight, None, None


def _product(
    a: Tensor,
    b: Tensor,
    format: torch.dtype,
    dtype: torch.dtype,
    registry: ProcessGroupRegistry | None,
    axes: tuple[str, ...],
    b_cache: WeightCache | None = None,
    orientation: str = "",
) -> Tensor:
    """Return ``a @ b.T``, [m, k] x [n, k] -> [m, n], with both operands rounded to 8 bits.

    Args:
        a: Rounded to ``format``.
        b: Rounded to e4m3.
        dtype: The dtype of the result.
        registry, axes: The process groups, and the axes that shard k.
        b_cache, orientation: The cache for the rounded ``b``, and ``"rows"`` or ``"columns"`` for the weight or its
            transpose.
    """
    how = orientation, registry, axes
    return product(*round_both(a, format, b, b_cache, how, registry, axes, by_row=True), dtype)
