"""8-bit floating-point tensors with one scale: how values are rounded, and how ranks agree on the scale.

    scale = MAX / amax        amax = max |x| over the whole logical tensor
    q = round(x * scale)      to the nearest value of the format, ties to even
    x ~ q / scale

float8_e4m3fn has 4 significant bits up to 448, float8_e5m2 has 3 up to 57344. Without inf in the one and with little
room in the other, values are clamped to the format's range before they are rounded; the scale sees to it that only
rounding errors of the scale itself ever are.

A tensor that isn't finite stays so: an inf makes the scale 0 and every value NaN, a NaN stays one.

Reference: Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv:2209.05433.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.mesh.registry import ProcessGroupRegistry

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

# For a tensor of zeros, or of less: both the scale and its inverse stay normal float32 numbers.
MIN_AMAX = 2.0**-100


class Quantized(NamedTuple):
    """``values / scale``.

    Attributes:
        values: float8_e4m3fn or float8_e5m2.
        inverse_scale: 0-dim float32, what ``values`` must be multiplied by.
    """

    values: Tensor
    inverse_scale: Tensor

    def t(self) -> Quantized:
        return Quantized(self.values.t(), self.inverse_scale)


def quantize(x: Tensor, format: torch.dtype, amax: Tensor) -> Quantized:
    """Round ``x`` to an 8-bit format, scaled so that ``amax`` becomes its largest value.

    Args:
        x: Any shape, floating point; float64 goes through float32.
        format: `E4M3` or `E5M2`.
        amax: 0-dim float32, >= the largest absolute value in ``x``: that of the logical tensor that x is a part of.
    Collectives: none. Host reads: none.
    """
    largest = torch.finfo(format).max
    scale = largest / amax.clamp(min=MIN_AMAX)
    values = (x.float() * scale).clamp_(-largest, largest).to(format)
    return Quantized(values, scale.reciprocal())


def agreed_amax(
    tensors: Sequence[Tensor], registry: ProcessGroupRegistry | None = None, axes: tuple[str, ...] = ()
) -> tuple[Tensor, ...]:
    """The largest absolute value of each tensor, over its pieces along ``axes``; 0 for an empty one.

    A tensor that is replicated over some of the axes may be among the others: the maximum of copies is harmless.

    Returns:
        0-dim float32 tensors.
    Collectives: one all-reduce (MAX) of all of them over ``axes``; none if there is one rank. Host reads: none.
    """
    # gloo's MAX may lose a NaN of another rank; that rank's own values stay NaN, and so does what is made of them.
    amax = torch.stack([_amax(tensor) for tensor in tensors])
    if registry is not None and axes and registry.size(*axes) > 1:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=registry.group(*axes))
    return amax.unbind()


def _amax(x: Tensor) -> Tensor:
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(x.detach())  # one pass and no copy, unlike x.abs().amax()
    return torch.maximum(-low, high).float()
