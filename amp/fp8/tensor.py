"""8-bit floating-point tensors with one scale: how values are rounded, and how ranks agree on the scale.

    scale = MAX / amax        amax = max |x| over the whole logical tensor
    q = round(x * scale)      to the nearest value of the format, ties to even
    x ~ q / scale

float8_e4m3fn has 4 significant bits up to 448, float8_e5m2 has 3 up to 57344. By the scale no value is beyond, but for
rounding errors of the scale itself, and these are far below half a unit of the format: nothing has to be clamped. So a
tensor is read twice, by one kernel for the maximum and by one that scales, rounds and writes.

A tensor that isn't finite stays so: an inf makes the scale 0 and every value NaN, a NaN stays one.

Reference: Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv:2209.05433.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.mesh.call_tracker import track_call
from ...parallel.mesh.registry import ProcessGroupRegistry

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

# For a tensor of zeros, or of less: both the scale and its inverse stay normal float32 numbers.
MIN_AMAX = 2.0**-100


class Quantized(NamedTuple):
    """``values / scale``.

    Attributes:
        values: float8_e4m3fn or float8_e5m2.
        inverse_scale: 0-dim float32, or [rows, 1], what ``values`` must be multiplied by.
    """

    values: Tensor
    inverse_scale: Tensor

    def t(self) -> Quantized:
        return Quantized(self.values.t(), self.inverse_scale)


@torch.no_grad()
def quantize(x: Tensor, format: torch.dtype, amax: Tensor) -> Quantized:
    """Round ``x`` to an 8-bit format, scaled so that ``amax`` becomes its largest value. One pass.

    Args:
        x: Floating point, of any shape and memory layout.
        format: `E4M3` or `E5M2`.
        amax: 0-dim float32, >= the largest absolute value in ``x``: that of the logical tensor that x is a part of; or
            [rows, 1], that of each row.
    Returns:
        Values that are contiguous (row-major), whatever ``x`` is.
    Collectives: none. Host reads: none.
    """
    scale = torch.finfo(format).max / amax.clamp(min=MIN_AMAX)
    values = torch.empty(x.shape, dtype=format, device=x.device)
    # A scale with dims, for bfloat16 times a 0-dim number would be rounded to bfloat16 first.
    factor = scale if scale.dim() else scale.view([1] * max(x.dim(), 1))
    torch.mul(x, factor, out=values)
    return Quantized(values, scale.reciprocal())


def check_dtypes(*tensors: Tensor) -> None:
    """Raise TypeError for float64, which nobody who asks for 8 bits can mean."""
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        raise TypeError(
            "a float64 tensor is to be multiplied in 8 bits, whose scales and sums are float32: give float32, bfloat16 or "
            "float16, or name the layer in Fp8(leave_out=...)"
        )


def agreed_amax(
    tensors: Sequence[Tensor], registry: ProcessGroupRegistry | None = None, axes: tuple[str, ...] = ()
) -> tuple[Tensor, ...]:
    """The largest absolute value of each tensor, over its pieces along ``axes``; 0 for an empty one.

    A tensor that is replicated over some of the axes may be among the others: the maximum of copies is harmless.

    Returns:
        0-dim float32 tensors.
    Collectives: one all-reduce (MAX) of all of them over ``axes``; none if there is one rank. Host reads: none.
    """
    return agreed([amax_of(tensor) for tensor in tensors], registry, axes)


def agreed(
    maxima: Sequence[Tensor], registry: ProcessGroupRegistry | None = None, axes: tuple[str, ...] = ()
) -> tuple[Tensor, ...]:
    """The maxima, elementwise, of all ranks along ``axes``: float32 tensors, of the shapes given.

    Collectives: one all-reduce (MAX) of all of them over ``axes``; none if there is one rank. Host reads: none.
    """
    if registry is None or not axes or registry.size(*axes) == 1:
        return tuple(maxima)
    # gloo's MAX may lose a NaN of another rank; that rank's own values stay NaN, and so does what is made of them.
    packed = torch.cat([amax.reshape(-1) for amax in maxima])
    with track_call("fp8 scaling", registry):
        dist.all_reduce(packed, dist.ReduceOp.MAX, group=registry.group(*axes))
    parts = packed.split([amax.numel() for amax in maxima])
    return tuple(part.view(amax.shape) for part, amax in zip(parts, maxima, strict=True))


def amax_of(x: Tensor, by_row: bool = False) -> Tensor:
    """The largest absolute value, float32: 0-dim, or [rows, 1] of the rows of a matrix. Host reads: none."""
    if not x.numel():
        return x.new_zeros((x.size(0), 1) if by_row else (), dtype=torch.float32)
    # One pass and no copy, unlike x.abs().amax().
    low, high = torch.aminmax(x.detach(), dim=1, keepdim=True) if by_row else torch.aminmax(x.detach())
    return torch.maximum(-low, high).float()
