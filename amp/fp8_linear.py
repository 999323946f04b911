"""Linear layer in 8 bits: e4m3 operands in forward, e5m2 output gradients in backward.

    y  = Q4(x) Q4(w)^T
    dx = Q5(dy) Q4(w)            the derivative of the rounding is taken as 1 (straight-through)
    dw = Q5(dy)^T Q4(x)

Q4 rounds a tensor to float8_e4m3fn, and Q5 rounds it to float8_e5m2. `Fp8Matmul` has one scale per tensor, and
`Fp8RowMatmul` one scale per row.

The products of two elements are exact in float32. NVIDIA GPUs of capability 8.9 and up multiply on tensor cores
(`torch._scaled_mm`). Other devices use a float32 matrix product of the same 8-bit operands. The results may differ by
rounding errors of the sums.

Reference: Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv:2209.05433.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ..parallel.interop.local_parameters import has_dtensors
from ..parallel.mesh.call_tracker import track_call
from ..parallel.mesh.registry import ProcessGroupRegistry
from .capture import is_captured

# Tensor cores require dims of 8-bit operands that are multiples of this number.
MULTIPLE = 16


@dataclass(frozen=True)
class Fp8Matmul:
    """`torch.nn.functional.linear` in 8 bits with one scale per tensor. The mode `Fp8` sets it as a layer's ``matmul``.

        output = Fp8Matmul()(input, weight, bias)

    The scale of a tensor is computed from the largest absolute value of the full tensor. This value is all-reduced over
    the axes that shard the tensor, so a sharded layer rounds to the same values as the dense layer.

    If a dim of this rank's weight shard is not a multiple of 16, nothing is rounded: the call returns
    `torch.nn.functional.linear` of its arguments. Dtypes, errors and collectives below do not apply then.

    Args:
        registry: The process groups. None: the tensors are not sharded.
        forward_axes: Axes that shard the weight, the input, or both.
        backward_axes: Axes that shard the gradient of the output.

    The output has the dtype of the input, also under autocast. The weight gradient is computed in float32, and autograd
    casts it to the weight's `Tensor.grad_dtype`. The 8-bit operands are saved for backward.

    In a model that `Fp8` has prepared, the 8-bit weight is cached until the weight changes or an optimizer steps. An
    in-place write through ``.data`` is not noticed before the next step of a torch optimizer. The cache is not used while
    gradients are disabled, under `fully_shard`, in a compiled model, or in a CUDA graph.

    Raises:
        TypeError: The input or the weight is float64.
    Collectives: one all-reduce (MAX) of two numbers over forward_axes in forward, and one of a single number over
    backward_axes in backward; none over a single rank. Differentiable once.
    """

    registry: ProcessGroupRegistry | None = None
    forward_axes: tuple[str, ...] = ()
    backward_axes: tuple[str, ...] = ()

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _linear(_Fp8Linear, self, input, weight, bias)


def _linear(
    function: type[torch.autograd.Function],
    matmul: Fp8Matmul | Fp8RowMatmul,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Return the 8-bit product that ``function`` computes, plus the bias; without rounding if the weight does not fit."""
    if not fits(weight):
        return F.linear(input, weight, bias)
    check_dtypes(input, weight)
    rows = input.reshape(-1, input.size(-1))
    output: Tensor = function.apply(rows, weight, matmul, cache_of(weight))
    output = output.reshape(*input.shape[:-1], weight.size(0))
    return output if bias is None else output + bias.to(output.dtype)


class Fp8Linear(nn.Linear):
    """`nn.Linear` with an 8-bit product. The mode `Fp8` sets this class as the class of an `nn.Linear` object."""

    matmul: Callable[[Tensor, Tensor, Tensor | None], Tensor] = Fp8Matmul()

    def forward(self, input: Tensor) -> Tensor:
        return self.matmul(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if fits(self.weight) else ", not in 8 bits: dims must be multiples of 16")


def fits(weight: Tensor) -> bool:
    """Return True if all dims of ``weight`` are multiples of 16, so that it can be an 8-bit operand."""
    return all(size % MULTIPLE == 0 for size in weight.shape)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, matmul: Fp8Matmul, weight_cache: WeightCache | None) -> Tensor:
        x, w = round_both(rows, E4M3, weight, weight_cache, "tensor", matmul.registry, matmul.forward_axes)
        ctx.save_for_backward(*x, *w)
        ctx.matmul, ctx.dtype = matmul, rows.dtype
        return product(x, w, rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        saved = ctx.saved_tensors
        x, w = Quantized(*saved[:2]), Quantized(*saved[2:])
        g = quantize(grad, E5M2, global_amax(grad, ctx.matmul.registry, ctx.matmul.backward_axes))
        grad_rows = product(g, w.t(), ctx.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = product(g.t(), x.t(), torch.float32) if ctx.needs_input_grad[1] else None
        return grad_rows, grad_weight, None, None


def product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Return the product ``a @ b.T`` of two scaled 8-bit matrices in ``dtype``: [m, k] x [n, k] -> [m, n].

    The matrices both have a single scale, or both have one scale per row.
    """
    by_row, device = a.inverse_scale.dim() > 0, a.values.device
    if a.values.numel() and has_fp8(device):
        if not by_row or scales_rows(device):
            return scaled_mm(a, b, dtype)
        one = torch.ones((), device=device)
        total = scaled_mm(Quantized(a.values, one), Quantized(b.values, one), torch.float32)
    else:
        # Autocast would round the sums to half precision. TF32 may be on, because it represents all 8-bit operands exactly.
        with torch.autocast(device.type, enabled=False):
            total = a.values.float() @ b.values.float().t()
    if by_row:
        return (total * a.inverse_scale * b.inverse_scale.t()).to(dtype)
    return (total * (a.inverse_scale * b.inverse_scale)).to(dtype)


def has_fp8(device: torch.device) -> bool:
    """Return True if the device is an NVIDIA GPU of capability 8.9 or more, which multiplies 8-bit floats in hardware."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def scales_rows(device: torch.device) -> bool:
    """Return True if `torch._scaled_mm` supports one scale per row for every output dtype on this NVIDIA GPU."""
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return torch.cuda.get_device_capability(device) == (9, 0) and version >= (12, 9)


def scaled_mm(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Return the product ``a @ b.T`` of two scaled 8-bit matrices by `torch._scaled_mm`: [m, k] x [n, k] -> [m, n].

    n must be a multiple of 16. If k is not a multiple of 16, the operands are copied and padded with zeros along k.
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
    """Return an 8-bit matrix as a contiguous matrix, with each row padded with zeros to a multiple of 16 bytes."""
    rows, length = values.shape
    padding = -length % MULTIPLE
    if not padding:
        return values.contiguous()
    padded = torch.empty(rows, length + padding, dtype=torch.uint8, device=values.device)
    padded[:, length:].zero_()  # the byte 0 is 0.0 in both formats
    padded[:, :length].copy_(values.view(torch.uint8))
    return padded.view(values.dtype)


# Linear layer in 8 bits with one scale per row ------------------------------------------------------------------------

# With one scale per row, an outlier reduces the precision of its own row only.
#
#     y  = Q4(x) Q4(w)^T             one scale per token of x, and per output feature of w
#     dx = Q5(dy) Q4(w^T)^T          one scale per token of dy, and per input feature of w
#     dw = Q5(dy^T) Q4(x^T)^T        one scale per output feature of dy, and per input feature of x
#
# A scale must be constant along the dim that a product sums over, so each product needs other scales. The operands are
# therefore saved for backward in their own dtype, and backward rounds them with its own scales.


@dataclass(frozen=True)
class Fp8RowMatmul:
    """`torch.nn.functional.linear` in 8 bits with one scale per row. ``Fp8(scales="row")`` sets it as a layer's ``matmul``.

        output = Fp8RowMatmul()(input, weight, bias)

    Each operand of a product is a matrix whose rows extend along the dim that the product sums over. This dim is the input
    features in forward, the output features for the input gradient, and the samples for the weight gradient. The scale of a
    row is computed from the largest absolute value of the full row. If the dim is sharded, this value is all-reduced.

    If a dim of this rank's weight shard is not a multiple of 16, nothing is rounded: the call returns
    `torch.nn.functional.linear` of its arguments. Errors and collectives below do not apply then.

    Args:
        registry: The process groups. None: the tensors are not sharded.
        in_axes, out_axes: Axes that shard the weight's input and output features.
        batch_axes: Axes that shard the samples, over which the maxima for the weight gradient are all-reduced.
    Raises:
        TypeError: The input or the weight is float64.
    Collectives: all-reduces (MAX) of one number per row of both operands: one over in_axes in forward, one over out_axes
    for the input gradient, one over batch_axes for the weight gradient. None over a single rank. Differentiable once.
    """

    registry: ProcessGroupRegistry | None = None
    in_axes: tuple[str, ...] = ()
    out_axes: tuple[str, ...] = ()
    batch_axes: tuple[str, ...] = ()

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _linear(_Fp8RowLinear, self, input, weight, bias)


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
    """Return ``a @ b.T``, [m, k] x [n, k] -> [m, n], with both operands rounded to 8 bits with one scale per row.

    ``a`` is rounded to ``format`` and ``b`` to e4m3. ``axes`` shard the dim k. ``orientation`` is part of the key of ``b``
    in its cache: ``"rows"`` if ``b`` is the weight, ``"columns"`` if ``b`` is the weight's transpose.
    """
    return product(*round_both(a, format, b, b_cache, orientation, registry, axes, by_row=True), dtype)


# 8-bit floating-point tensors with a scale ----------------------------------------------------------------------------

#     scale = MAX / amax        amax = max |x| over the full tensor, or over each row; MAX: the largest value of the format
#     q = round(x * scale)      to the nearest value of the format, ties to even
#     x ~ q / scale
#
# float8_e4m3fn has 4 significant bits up to 448, float8_e5m2 has 3 up to 57344. With this scale no value exceeds MAX,
# except by a rounding error of far less than half a unit of the format, so no clamp is needed. A tensor is read twice:
# one kernel computes the maximum, another one scales, rounds and writes.
#
# A tensor with a non-finite element stays non-finite. An inf makes the scale 0 and the inverse scale inf, so every value
# with this scale is NaN. A NaN makes the scale NaN.

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

# Lower bound of amax. With it, scale and inverse scale are normal float32 numbers even for tensors of zeros.
MIN_AMAX = 2.0**-100


class Quantized(NamedTuple):
    """8-bit tensor with its float32 inverse scale, which is 0-dim, or [rows, 1] for one scale per row."""

    values: Tensor
    inverse_scale: Tensor

    def t(self) -> Quantized:
        """Return the transpose of a matrix with one scale for the full tensor."""
        return Quantized(self.values.t(), self.inverse_scale)


@torch.no_grad()
def quantize(x: Tensor, format: torch.dtype, amax: Tensor) -> Quantized:
    """Return ``x`` multiplied by a scale and rounded to an 8-bit format.

    The scale maps ``amax`` to the largest value of the format. ``amax`` is at least the largest absolute value in ``x``
    (float32, 0-dim) or in each row ([rows, 1]). The 8-bit values are contiguous for any memory layout of ``x``.
    """
    scale = torch.finfo(format).max / amax.clamp(min=MIN_AMAX)
    values = torch.empty(x.shape, dtype=format, device=x.device)
    # torch would round a 0-dim scale to bfloat16 before it multiplies a bfloat16 tensor, so the factor has dims.
    factor = scale if scale.dim() else scale.view([1] * max(x.dim(), 1))
    torch.mul(x, factor, out=values)
    return Quantized(values, scale.reciprocal())


def check_dtypes(*tensors: Tensor) -> None:
    """Raise TypeError if a tensor is float64. Scales and sums of 8-bit products are float32, so precision would be lost."""
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        raise TypeError(
            "an FP8 linear layer got a float64 input or weight, but scales and sums of 8-bit products are float32; give "
            "float32, bfloat16 or float16, or name the layer in Fp8(exclude=...)"
        )


def global_amax(x: Tensor, registry: ProcessGroupRegistry | None = None, axes: tuple[str, ...] = ()) -> Tensor:
    """Return the largest absolute value of a full tensor, 0-dim float32, from this rank's shard ``x``.

    Collectives: one all-reduce (MAX) of one number over ``axes``; none over a single rank.
    """
    return max_over_ranks([amax_of(x)], registry, axes)[0]


def max_over_ranks(
    maxima: Sequence[Tensor], registry: ProcessGroupRegistry | None, axes: tuple[str, ...]
) -> tuple[Tensor, ...]:
    """Return the elementwise maximum of each float32 tensor over all ranks along ``axes``.

    Collectives: one all-reduce (MAX) of all maxima over ``axes``; none over a single rank.
    """
    if registry is None or not axes or registry.size(*axes) == 1:
        return tuple(maxima)
    # gloo's MAX may ignore a NaN. This is harmless: on the rank with the NaN, the element still rounds to an 8-bit NaN.
    packed = torch.cat([amax.reshape(-1) for amax in maxima])
    with track_call("fp8 scaling", registry):
        dist.all_reduce(packed, dist.ReduceOp.MAX, group=registry.group(*axes))
    parts = packed.split([amax.numel() for amax in maxima])
    return tuple(part.view(amax.shape) for part, amax in zip(parts, maxima, strict=True))


def amax_of(x: Tensor, by_row: bool = False) -> Tensor:
    """Return the largest absolute value of ``x``, 0-dim float32, or of each row, [rows, 1]; 0 if ``x`` is empty."""
    if not x.numel():
        return x.new_zeros((x.size(0), 1) if by_row else (), dtype=torch.float32)
    # x.abs().amax() would make a copy and a second pass over memory.
    low, high = torch.aminmax(x.detach(), dim=1, keepdim=True) if by_row else torch.aminmax(x.detach())
    return torch.maximum(-low, high).float()


# Cache of 8-bit weights -----------------------------------------------------------------------------------------------

# The 8-bit values of a weight are valid until the next step of any torch optimizer, if the weight keeps its memory
# address and its version counter. The version counter alone is not enough, because torch's fused optimizers and
# third-party kernels write without incrementing it.
#
# Only parameters that exist when the mode `Fp8` prepares a model are cached. Parameters that `fully_shard` creates later
# are not cached, because no counter shows when they change.
#
# The cache is not used while gradients are disabled, because user code may write averaged weights in place through
# ``.data`` before an evaluation, which does not increment the version counter. If user code writes a weight through
# ``.data`` between two micro-batches of training, the write is not detected before the next optimizer step.


class RoundedWeight(NamedTuple):
    """Cache entry: a weight or its transpose in 8 bits, and its largest absolute value (0-dim, or [rows, 1] per row)."""

    amax: Tensor
    quantized: Quantized


class WeightCache:
    """Cached 8-bit values of one weight in its current version. The key identifies the kind of rounding."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._identity = _identity(weight)

    def get(self, key: Hashable) -> RoundedWeight | None:
        """Return the entry that `put` stored under ``key``; None if there is no entry or it is no longer valid."""
        identity, rounded = CACHE[self._weight].get(key, (None, None))
        return rounded if identity == self._identity else None

    def put(self, key: Hashable, rounded: RoundedWeight) -> None:
        """Store an entry under ``key``, until `forget_rounded` is called."""
        CACHE[self._weight][key] = self._identity, rounded


CACHE: Any = WeakTensorKeyDictionary()
"""The cache of 8-bit weights: ``CACHE[weight][key]`` is a pair of the weight's `_identity` and a `RoundedWeight`.

A weight is in the cache if `cache_rounded` has registered it.
"""
_hook_registered = False


def cache_rounded(weight: Tensor) -> None:
    """Cache the 8-bit values of ``weight`` from now on, if it is an `nn.Parameter` and not a DTensor."""
    global _hook_registered
    # A DTensor is not cached, because FSDP may reuse its memory for another tensor.
    if isinstance(weight, nn.Parameter) and not has_dtensors([weight]):
        CACHE[weight] = {}
    if not _hook_registered:
        register_optimizer_step_post_hook(_clear_after_step)
        _hook_registered = True


def cache_of(weight: Tensor) -> WeightCache | None:
    """Return the cache of the 8-bit values of ``weight``; None if the weight must be rounded at every use.

    The result is None if `cache_rounded` has not registered the weight, or if gradients are disabled. It is also None
    while the code is compiled or captured in a CUDA graph, because the compiled code or the graph may run with other
    weights later. In a capture, the call also removes the weight from the cache permanently.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or weight not in CACHE:
        return None
    if is_captured():
        del CACHE[weight]  # replays of the graph change the weight without running the hook that clears the cache
        return None
    return WeightCache(weight)


def round_both(
    x: Tensor,
    format: torch.dtype,
    weight: Tensor,
    weight_cache: WeightCache | None,
    kind: str,
    registry: ProcessGroupRegistry | None,
    axes: tuple[str, ...],
    by_row: bool = False,
) -> tuple[Quantized, Quantized]:
    """Return ``x`` rounded to ``format``, and ``weight`` rounded to e4m3: the two operands of a product in 8 bits.

    If ``weight_cache`` has a valid entry for ``kind``, ``registry`` and ``axes``, the rounded weight is taken from it.
    Otherwise the weight is rounded, and stored in the cache. ``weight`` may also be another second operand, such as the
    transposed weight or input. With ``by_row``, every row has its own scale; otherwise each tensor has one.

    Collectives: one all-reduce (MAX) of both maxima over ``axes``; none over a single rank.
    """
    key = kind, registry, axes
    cached = None if weight_cache is None else weight_cache.get(key)
    maxima = [amax_of(x, by_row), amax_of(weight, by_row) if cached is None else cached.amax]
    amax_x, amax_weight = max_over_ranks(maxima, registry, axes)
    rounded = quantize(weight, E4M3, amax_weight) if cached is None else cached.quantized
    if weight_cache is not None and cached is None:
        weight_cache.put(key, RoundedWeight(amax_weight, rounded))
    return quantize(x, format, amax_x), rounded


def forget_rounded() -> None:
    """Remove the 8-bit values of all weights from the cache. Call it when weights have changed or are about to change."""
    if CACHE:
        for by_how in CACHE.values():
            by_how.clear()


def _clear_after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Clear the cache after the step of a torch optimizer, unless ``optimizer.steps_windows`` is True.

    Such an optimizer (`ParallelOptimizer`) may return from `step` without changing weights, because more micro-batches
    follow. It calls `forget_rounded` itself when weights change.
    """
    if not getattr(optimizer, "steps_windows", False):
        forget_rounded()


def _identity(weight: Tensor) -> tuple[object, ...]:
    return weight.data_ptr(), weight._version, weight.dtype, weight.shape, weight.stride()
