"""Stochastic rounding as in meshstep's kernels, in plain torch. Tests compare the kernels with it.

The noise of an element is a function of a key, the step, the number of the tensor among the tensors with this key,
and the element's index. So replicas draw equal noise, whatever else they round, and no noise is stored in memory. The
noise differs from the random numbers of `torch.Generator`, with which torch's operators round.

    counter = (index of the counter, number of the tensor, step, step >> 32)    Philox 4x32, 10 rounds, 64-bit key
    noise   = 16 bits of the four words of the result: 8 elements per counter

The Triton kernel (`triton_rounding_kernel`) and the C loop (`csrc/loops.h`) are bitwise identical to this module.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

LANES = 512  # elements of a row; a counter serves the elements of one column of 8 rows
ROWS = 8


def philox(key: int, counter: Tensor) -> Tensor:
    """Return the four words of Philox 4x32 with 10 rounds, [4, n] int64, each a 32-bit number."""
    mask = 0xFFFFFFFF
    k0, k1 = key & mask, key >> 32 & mask
    c0, c1, c2, c3 = counter
    for _ in range(10):
        (high_a, low_a), (high_b, low_b) = _product(0xD2511F53, c0), _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = k0 + 0x9E3779B9 & mask, k1 + 0xBB67AE85 & mask
    return torch.stack([c0, c1, c2, c3])


def _product(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower 32 bits of the product of two 32-bit numbers, in int64."""
    low = factor * (x & 0xFFFF)  # below 2^48
    high = factor * (x >> 16) + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def noise_of(key: int, number: int, step: int, numel: int) -> Tensor:
    """Return the noise of a tensor with ``numel`` elements: [numel] int64 in [0, 2^16)."""
    blocks = -(-numel // (ROWS * LANES))
    counter = torch.arange(blocks * LANES)
    others = torch.tensor([[number], [step & 0xFFFFFFFF], [step >> 32]]).expand(3, counter.numel())
    words = philox(key, torch.cat([counter[None], others]))
    halves = torch.stack([words & 0xFFFF, words >> 16], 1)  # [4, 2, counters]
    return halves.view(ROWS, blocks, LANES).transpose(0, 1).reshape(-1)[:numel]


def round_plainly(source: Tensor, noise: Tensor) -> Tensor:
    bits = source.contiguous().view(torch.int32).long()
    rounded = torch.where(source.isnan(), bits, bits + noise.view(source.shape)) >> 16
    return rounded.to(torch.int16).view(torch.bfloat16)
