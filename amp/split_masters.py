"""A float32 master stored as the bfloat16 weight and a 16-bit remainder: 4 bytes for both, with all bits of the master.

The weight is the nearest bfloat16, so the master differs from it by at most half a unit in the last place. The
remainder is this difference:

    master bits = weight bits x 2^16 + remainder,   remainder in [-2^15, 2^15)

The interval contains only its lower end. With rounding to even, an even weight would represent both of its ties. These
are 2^16 + 1 masters, more than 16 bits distinguish, so ties round away from zero here. All other values round as usual:
values above the largest bfloat16 become infinity, and denormals are ordinary numbers.

NaN. Interpreted as integers, the bits of some NaNs would round to infinity or overflow into -0. `split` lowers the bits
of a NaN by half a unit (`_code`), so the weight of every NaN is a NaN. The 131,070 signalling NaNs whose upper half is
0x7f80 or 0xff80 would leave the range of NaNs. `split` makes these quiet first, as any arithmetic would. All other
masters are restored bitwise.

Written weights. The model's code may write a weight without its remainder, which then belongs to an older weight.
`join` accepts any pair: the master it returns always rounds to the weight. `split` never produces two kinds of pairs: a
zero with a negative remainder, and an infinity with a positive one. Their sums would be the bits of NaNs, so `join`
ignores the remainder of such pairs. An infinity with a negative remainder is a finite master above the largest
bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SIZE = 0x7FFFFFFF  # all bits except the sign
_INFINITY = 0x7F800000
_QUIET = 0x400000
_HALF = 2**15  # half a unit of the weight


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bfloat16 weight and the int16 remainder of a float32 master. Ties round away from zero.

    Args:
        master: float32 tensor of any shape, strides and bits. Weight and remainder have the same shape and strides.
    Collectives: none. Host synchronization: none. Temporary memory: 12 bytes per element.
    """
    code = _code(master.view(torch.int32))
    remainder = code.to(torch.int16)  # the lower half
    return code.add_(_HALF).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16), remainder


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master of a weight and its remainder, bitwise as given to `split`.

    For a pair that `split` did not produce, the result is a master that rounds to ``weight``.

    Args:
        weight: bfloat16 tensor of any shape, strides and bits; it may have been written after `split`.
        remainder: int16 tensor of the same shape.
    Collectives: none. Host synchronization: none. Temporary memory: 12 bytes per element.
    """
    bits = weight.view(torch.int16)
    size = bits & 0x7FFF
    is_stale = (size == 0) & (remainder < 0) | (size == _INFINITY >> 16) & (remainder > 0)
    code = bits.to(torch.int32).bitwise_left_shift_(16).add_(remainder.masked_fill(is_stale, 0))
    is_nan = (code & _SIZE) >= _INFINITY + _HALF
    return code.add_(is_nan.to(torch.int32), alpha=_HALF).view(torch.float32)


def _code(bits: Tensor) -> Tensor:
    """Return the bits as a new tensor, with the bits of NaNs changed such that a NaN rounds to a NaN."""
    size = bits & _SIZE
    nan = (size > _INFINITY).to(torch.int32)  # int32, because bool masks are slow on a CPU
    without_room = (size < _INFINITY + 2 * _HALF).to(torch.int32).mul_(nan)
    return (bits | without_room.mul_(_QUIET)).sub_(nan.mul_(_HALF))
