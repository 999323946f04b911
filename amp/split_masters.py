"""A float32 master as the bfloat16 weight and a 16-bit remainder: 4 bytes for both, and all bits of the master.

The weight is the nearest bfloat16, so the master is at most half a unit of it away, and that distance is the remainder:

    master bits = weight bits x 2^16 + remainder,   remainder in [-2^15, 2^15)

Of the two ends that holds one. Rounded to even, as everywhere else, an even weight would stand for both of its ties, 2^16 +
1 masters, which 16 bits can't tell apart; so here ties go away from zero. Nothing else is rounded in another way: what is
above the largest bfloat16 becomes infinity, and denormals are numbers like others.

NaN. Taken as numbers, the bits of some NaNs would round to infinity or run over into -0. `split` moves them down by half
a unit (`_code`), so that the weight of every NaN is a NaN. The 131,070 signalling NaNs whose upper half is 0x7f80 or
0xff80 have no room below; they become quiet first, as any arithmetic would make them. All other masters come back bitwise.

Written weights. The model's code may write a weight without its remainder, which then belongs to an older weight. `join`
accepts any pair: the master it returns always rounds to the weight. Only two kinds of pairs are never made by `split`: a
zero with a negative remainder and an infinity with a positive one. Their sums would be the bits of NaNs, so `join` ignores
the remainder there. An infinity with a negative remainder is a finite master above the largest bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SIZE = 0x7FFFFFFF  # all but the sign
_INFINITY = 0x7F800000
_QUIET = 0x400000
_HALF = 2**15  # half a unit of the weight


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bfloat16 weight, to nearest, ties away from zero, and the int16 remainder of a float32 master.

    Args:
        master: Of any shape and strides, which both get. Any bits.
    Collectives, host synchronization: none. Temporary memory: 12 bytes per element.
    """
    code = _code(master.view(torch.int32))
    remainder = code.to(torch.int16)  # the lower half
    return code.add_(_HALF).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16), remainder


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master that `split` took apart, bitwise; of any other pair a master that rounds to ``weight``.

    Args:
        weight: bfloat16, any shape and strides. Any bits, also if written after `split`.
        remainder: int16, the same shape.
    Collectives, host synchronization: none. Temporary memory: 12 bytes per element.
    """
    bits = weight.view(torch.int16)
    size = bits & 0x7FFF
    is_stale = (size == 0) & (remainder < 0) | (size == _INFINITY >> 16) & (remainder > 0)
    code = bits.to(torch.int32).bitwise_left_shift_(16).add_(remainder.masked_fill(is_stale, 0))
    is_nan = (code & _SIZE) >= _INFINITY + _HALF
    return code.add_(is_nan.to(torch.int32), alpha=_HALF).view(torch.float32)


def _code(bits: Tensor) -> Tensor:
    """Return a new tensor: the bits of numbers unchanged, those of NaNs where rounding leaves them NaN."""
    size = bits & _SIZE
    nan = (size > _INFINITY).to(torch.int32)  # (int32 masks: bool masks are slow on a CPU)
    without_room = (size < _INFINITY + 2 * _HALF).to(torch.int32).mul_(nan)
    return (bits | without_room.mul_(_QUIET)).sub_(nan.mul_(_HALF))
