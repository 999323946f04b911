"""A float32 master as the bfloat16 weight and a 16-bit remainder: 4 bytes for both, and all bits of the master.

The weight is the nearest bfloat16, so the master is at most half a unit of it away, and that distance is the remainder:

    master bits = weight bits x 2^16 + remainder,   remainder in [-2^15, 2^15)

Of the two ends that holds one. Rounded to even, as everywhere else, an even weight would stand for both of its ties, 2^16 +
1 masters, which 16 bits can't tell apart; so here ties go away from zero. Nothing else is rounded in another way: what is
above the largest bfloat16 becomes infinity, and denormals are numbers like others.

NaN. The sum above is one to one, but the bits of a NaN, taken for a number's, round to infinity or run over into -0. So
they are moved among themselves first (`_code`), and the weight of a NaN is its upper half, a NaN. Of all of them that can't
be: 2 x (2^23 - 1) NaNs are more than the 2 x 127 x 2^16 pairs whose weight is one. The 131,070 that are left over begin
with 0x7f80 or 0xff80: signalling NaNs, which no arithmetic makes, but a flipped bit may. Their weights are infinite
(65,534) or 0, until the next update makes them quiet. Every quiet NaN shows in its weight, and all 2^32 masters come back
to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SIZE = 0x7FFFFFFF  # all but the sign
_LOWEST = 0x7F808000  # of the codes of NaNs whose weight is one
_LEFT = 0x7FFF8000  # those above it stand for NaNs that are left over
_MOVED = 0x7F0000  # where they came from, below


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 weight, to nearest, ties away from zero, and the int16 remainder, of a float32 master.

    Args:
        master: Of any shape and strides, which both get. Every pattern of bits.
    Collectives, host reads: none. Temporary memory: 12 bytes an element.
    """
    code = _code(master.view(torch.int32))
    remainder = code.to(torch.int16)  # the lower half
    return code.add_(2**15).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16), remainder


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master of which `split` made these, to the bit. Args, collectives, host reads: as there."""
    code = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(remainder)
    size = code & _SIZE
    code += (size >= _LOWEST).to(torch.int32).mul_(2**15)
    code -= (size >= _LEFT).to(torch.int32).mul_(2**15 + _MOVED)
    return code.view(torch.float32)


def _code(bits: Tensor) -> Tensor:
    """A new tensor: those of numbers as they are; NaNs moved to where rounding leaves them NaN, as far as there is room."""
    size = bits & _SIZE
    above = (size >= _LOWEST).to(torch.int32)  # (masks of int32: those of bools are slow on a CPU)
    upper = (size >= _LOWEST + 2**15).to(torch.int32)
    return bits + above.mul_(_MOVED) - upper.mul_(_MOVED + 2**15)
