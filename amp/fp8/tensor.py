"""8-bit floating-point tensors with a scale: rounding, and the agreement of all ranks on the scale.

    scale = MAX / amax        amax = max |x| over the logical tensor
    q = round(x * scale)      to the nearest value of the format, ties to even
    x ~ q / scale

float8_e4m3fn has 4 significant bits up to 448, float8_e5m2 has 3 up to 57344. Under this scale no value exceeds the
range. A rounding error of the scale can push a value past the range by far less than half a unit of the format. No clamp is
needed. A tensor is read twice: one kernel computes the maximum, another one scales, rounds and writes.

A non-finite tensor stays non-finite: inf makes the scale 0 and every value NaN, and NaN stays NaN.

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

# Lower bound of amax, for tensors of zeros or tiny values: scale and inverse scale stay normal float32 numbers.
MIN_AMAX = 2.0**-100


class Quantized(NamedTuple):
    """8-bit tensor that represents ``values * inverse_scale``.

    Attributes:
        values: float8_e4m3fn or float8_e5m2.
        inverse_scale: float32, 0-dim or [rows, 1].
    """

    values: Tensor
    inverse_scale: Tensor

    def t(self) -> Quantized:
        return Quantized(self.values.t(), self.inverse_scale)


@torch.no_grad()
def quantize(x: Tensor, format: torch.dtype, amax: Tensor) -> Quantized:
    """Round ``x`` to an 8-bit format, scaled such that ``amax`` becomes the largest value of the format.

    The function makes one pass over memory.

    Args:
        x: Floating-point tensor of any shape and memory layout.
        format: `E4M3` or `E5M2`.
        amax: float32, at least the largest absolute value in ``x``. 0-dim: the maximum of the logical tensor. [rows,
            1]: the maximum of each row.
    Returns:
        Contiguous (row-major) values for any memory layout of ``x``, and the inverse scale.
    Collectives: none. Host synchronization: none.
    """
    scale = torch.finfo(format).max / amax.clamp(min=MIN_AMAX)
    values = torch.empty(x.shape, dtype=format, device=x.device)
    # torch would round a 0-dim scale to bfloat16 before it multiplies a bfloat16 tensor, so the factor has dims.
    factor = scale if scale.dim() else scale.view([1] * max(x.dim(), 1))
    torch.mul(x, factor, out=values)
    return Quantized(values, scale.reciprocal())


def check_dtypes(*tensors: Tensor) -> None:
    """Raise TypeError for float64 tensors: the scales and sums of 8-bit products are only float32."""
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        raise TypeError(
            "a linear layer in 8 bits got a float64 tensor, but scales and sums of 8-bit products are float32; give "
            "float32, bfloat16 or float16, or name the layer in Fp8(leave_out=...)"
        )


def global_amax(
    tensors: Sequence[Tensor], registry: ProcessGroupRegistry | None = None, axes: tuple[str, ...] = ()
) -> tuple[Tensor, ...]:
    """Return the largest absolute value of each tensor over its shards along ``axes``; 0 for an empty tensor.

    A tensor may be replicated over some of the axes, because the maximum of equal values is unchanged.

    Args:
        tensors: Floating-point tensors.
        registry: The process groups. Default None: the tensors are not sharded.
        axes: Axes that shard the tensors. Default: none.
    Returns:
        0-dim float32 tensors.
    Collectives: one all-reduce (MAX) of all maxima over ``axes``; none over a single rank. Host synchronization: none.
    """
    return max_over_ranks([amax_of(tensor) for tensor in tensors], registry, axes)


def max_over_ranks(
    maxima: Sequence[Tensor], registry: ProcessGroupRegistry | None = None, axes: tuple[str, ...] = ()
) -> tuple[Tensor, ...]:
    """Return the elementwise maxima over all ranks along ``axes``: float32 tensors, with the shapes of ``maxima``.

    Collectives: one all-reduce (MAX) of all maxima over ``axes``; none over a single rank. Host synchronization: none.
    """
    if registry is None or not axes or registry.size(*axes) == 1:
        return tuple(maxima)
    # gloo's MAX may lose a NaN of another rank. The values of the other rank stay NaN, and so do all later results.
    packed = torch.cat([amax.reshape(-1) for amax in maxima])
    with track_call("fp8 scaling", registry):
        dist.all_reduce(packed, dist.ReduceOp.MAX, group=registry.group(*axes))
    parts = packed.split([amax.numel() for amax in maxima])
    return tuple(part.view(amax.shape) for part, amax in zip(parts, maxima, strict=True))


def amax_of(x: Tensor, by_row: bool = False) -> Tensor:
    """Return the largest absolute value as float32: 0-dim, or [rows, 1] for the rows of a matrix. Host synchronization:
    none.
    """
    if not x.numel():
        return x.new_zeros((x.size(0), 1) if by_row else (), dtype=torch.float32)
    # x.abs().amax() would make a copy and a second pass over memory.
    low, high = torch.aminmax(x.detach(), dim=1, keepdim=True) if by_row else torch.aminmax(x.detach())
    return torch.maximum(-low, high).float()
