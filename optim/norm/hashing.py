"""Numbers that stand for the bits of tensors, computed where the tensors are.

A tensor's words w_i (its elements as integers; two words of 32 bits for one of 64) become ``sum of w_i r_i`` modulo
2^64, with fixed odd r_i that depend on the position alone. One flipped bit changes w_i by a power of two below 2^32,
and so the sum by an odd multiple of that, which is never 0 modulo 2^64: it is always seen. Anything else cancels once
in about 2^32. The sum then goes through a permutation of 64-bit integers, so that differences of several copies don't
add up to nothing either, and is cut into two numbers of 32 bits: their sums over a million ranks are exact in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.device_constants import Constants

CHUNK = 2**20  # words that are read at a time, in 8 bytes each
SMALL = 2**14  # words of tensors that are read together
WORDS = 2  # numbers for each sum
NONE = 0x2545F4914F6CDD1D  # the sum of no tensor
_INTEGERS = {1: torch.int8, 2: torch.int16}


class TensorHash:
    """Sums of tensors on any devices.

    Args:
        device: Where the sums are.
        exact: All bits count. False: NaNs are alike, and -0 is 0.
    """

    def __init__(self, device: torch.device, exact: bool = False) -> None:
        self.device, self.exact = device, exact
        self._constants = Constants()

    def __call__(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """[n] int64, on ``device``; `NONE` for None. Tensors on another device cost one transfer."""
        sums = torch.full((len(tensors),), NONE, dtype=torch.int64, device=self.device)
        here = [(at, tensor.detach()) for at, tensor in enumerate(tensors) if tensor is not None]
        for device in sorted({tensor.device for _, tensor in here}, key=str):
            found = [(at, tensor) for at, tensor in here if tensor.device == device]
            places = [at for at, _ in found]
            values = self._of_device([tensor for _, tensor in found], device)
            if device != self.device:
                values = values.to(self.device)
            if len(places) == len(tensors):
                return values
            sums[self._constants(("places", *places), places.copy, torch.int64, self.device)] = values
        return sums

    def _of_device(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        flat = [tensor.reshape(-1) for tensor in tensors]
        table = _table(device, max(map(_words_in, flat)))
        sums = {at: self._by_chunks(whole, table) for at, whole in enumerate(flat) if _words_in(whole) > SMALL}
        for batch in _batches(flat):
            found = self._together([self._words(flat[at]) for at in batch], table)
            sums |= zip(batch, found.unbind(), strict=True)
        return torch.stack([sums[at] for at in range(len(flat))])

    def _by_chunks(self, flat: Tensor, table: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        for number, part in enumerate(flat.split(CHUNK * flat.numel() // _words_in(flat))):
            words = self._words(part)
            total.add_(words.to(torch.int64).mul_(table[: len(words)]).sum(), alpha=odd(number))
        return total

    def _together(self, words: Sequence[Tensor], table: Tensor) -> Tensor:
        """A few kernels for all of them: differences of a running sum, which is exact modulo 2^64."""
        ends = [0]
        for of_tensor in words:
            ends.append(ends[-1] + len(of_tensor))
        products = torch.cat([table[: len(of_tensor)] for of_tensor in words])
        products *= torch.cat([*words])
        running = torch.cat([products.new_zeros(1), products.cumsum(0)])
        return running[self._constants(("ends", *ends), ends.copy, torch.int64, table.device)].diff()

    def _words(self, flat: Tensor) -> Tensor:
        """1-dim integers; of a copy where not all bits count."""
        if not self.exact and flat.is_floating_point() and flat.element_size() > 1:
            flat = flat + 0.0
            flat = torch.where(flat.isnan(), torch.full_like(flat, torch.nan), flat)
        return flat.view(_INTEGERS.get(flat.element_size(), torch.int32))


def _words_in(tensor: Tensor) -> int:
    return tensor.numel() * max(1, tensor.element_size() // 4)


def _batches(flat: Sequence[Tensor]) -> list[list[int]]:
    """The indices of small ones, those of one size of elements together, up to a chunk in all."""
    batches: list[list[int]] = []
    open_ones: dict[torch.dtype, tuple[list[int], int]] = {}
    for at, tensor in enumerate(flat):
        if (words := _words_in(tensor)) > SMALL:
            continue
        kind = _INTEGERS.get(tensor.element_size(), torch.int32)
        batch, full = open_ones.get(kind, ([], CHUNK + 1))
        if full + words > CHUNK:
            batch, full = [], 0
            batches.append(batch)
        batch.append(at)
        open_ones[kind] = batch, full + words
    return batches


def odd(number: int) -> int:
    """One of an endless list of odd numbers, of 31 bits."""
    return (number * 0x5851F42D4C957F2D >> 20 & 0x3FFFFFFF) << 1 | 1


_TABLES: dict[torch.device, Tensor] = {}  # of all sums: to make one takes as long as to sum up a small model


def _table(device: torch.device, words: int) -> Tensor:
    """The odd number of each position; as many as ``words``, or a chunk."""
    size = min(CHUNK, max(SMALL, 1 << (words - 1).bit_length()))
    table = _TABLES.get(device)
    if table is None or len(table) < size:
        table = _TABLES[device] = _odd_numbers(torch.arange(size, device=device))
    return table


def _odd_numbers(positions: Tensor) -> Tensor:
    """Of each position: odd, of 64 bits. Small steps between neighbours would let them cancel."""
    return splitmix64_finalizer(positions + 1) << 1 | 1


def splitmix64_finalizer(numbers: Tensor) -> Tensor:
    """int64 -> int64, one to one, in which equal steps become unequal ones: the end of splitmix64."""
    for bits, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        numbers = (numbers ^ _shifted(numbers, bits)) * factor
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (numbers >> bits) & ((1 << 64 - bits) - 1)


def to_float_words(sums: Tensor) -> Tensor:
    """[..., WORDS] float64, integers below 2^32: of sums, [...] int64; equal where those are."""
    mixed = splitmix64_finalizer(sums)
    return torch.stack([mixed & 0xFFFFFFFF, _shifted(mixed, 32)], dim=-1).double()
