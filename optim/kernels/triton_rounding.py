"""Launcher of the Triton kernel in `triton_rounding_kernel`, and the same rounding in plain torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...amp.casting import copy_each_
from ...amp.stochastic_rounding import Drawn
from .device_constants import Tables
from .memory import PLAIN
from .triton_rounding_kernel import CHUNK, LANES, ROWS, round_chunks

_tables = Tables()


@torch.no_grad()
def round_by_triton(everything: Sequence[Drawn]) -> None:
    """Round the source of each pair into its target, with one launch for all tensors of a device and step.

    Element i of a tensor in row-major order has noise number i, whatever its strides.

    Args:
        everything: The pairs, on devices on which the kernel runs, with the keys of their noise.

    Host synchronization: none.
    """
    groups: dict[tuple[torch.device, int], list[tuple[int, int, Tensor, Tensor]]] = {}
    for drawn in everything:
        for number, (target, source) in enumerate(drawn.pairs):
            if target.numel():
                group = groups.setdefault((target.device, drawn.noise.steps), [])
                group.append((drawn.noise.key, number, target, source))
    for (device, step), group in groups.items():
        # contiguous tensors, because the kernel reads and writes memory linearly
        sources = [source.to(torch.float32).contiguous() for _, _, _, source in group]
        targets = [target for _, _, target, _ in group]
        direct = [target.is_contiguous() and type(target) in PLAIN for target in targets]
        written = [
            target if is_direct else torch.empty(target.shape, dtype=target.dtype, device=device)
            for target, is_direct in zip(targets, direct, strict=True)
        ]
        keys, numbers = array("Q", [one[0] for one in group]), array("q", [one[1] for one in group])
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            _launch(written, sources, keys, numbers, step)
        strided = [index for index, is_direct in enumerate(direct) if not is_direct]
        if strided:
            copy_each_([targets[index] for index in strided], [written[index] for index in strided])


def _launch(
    targets: Sequence[Tensor], sources: Sequence[Tensor], keys: array[int], numbers: array[int], step: int
) -> None:
    """Launch the kernel for contiguous tensors with elements, all on one device."""
    device = targets[0].device
    addresses = [array("Q", [tensor.data_ptr() for tensor in tensors]) for tensors in (targets, sources)]
    cut = _tables.chunks_of(array("q", [tensor.numel() for tensor in targets]), CHUNK, device)
    kernel: Any = round_chunks[(cut.count,)]
    kernel(
        *(_tables.of(table, device) for table in addresses),
        cut.numels,
        cut.chunks,
        _tables.of(keys, device),
        _tables.of(numbers, device),
        step,
        all(address % 16 == 0 for table in addresses for address in table),
        LANES,
        ROWS,
        CHUNK,
    )


# The same in plain torch, which the tests compare with ----------------------------------------------------------------


def philox(key: int, counter: Tensor) -> Tensor:
    """Return the four words of Philox 4x32 with 10 rounds.

    Args:
        key: A 64-bit number.
        counter: [4, n] int64, each a 32-bit number.
    Returns:
        [4, n] int64, each a 32-bit number.
    """
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
    """Return the noise of a tensor in `round_chunks`: [numel] int64 in [0, 2^16)."""
    blocks = -(-numel // (ROWS * LANES))
    counter = torch.arange(blocks * LANES)
    others = torch.tensor([[number], [step & 0xFFFFFFFF], [step >> 32]]).expand(3, counter.numel())
    words = philox(key, torch.cat([counter[None], others]))
    halves = torch.stack([words & 0xFFFF, words >> 16], 1)  # [4, 2, counters]
    return halves.view(ROWS, blocks, LANES).transpose(0, 1).reshape(-1)[:numel]


def round_plainly(source: Tensor, noise: Tensor) -> Tensor:
    """Return a float32 tensor rounded to bfloat16 with the given noise, [elements] in [0, 2^16)."""
    bits = source.contiguous().view(torch.int32).long()
    rounded = torch.where(source.isnan(), bits, bits + noise.view(source.shape)) >> 16
    return rounded.to(torch.int16).view(torch.bfloat16)
