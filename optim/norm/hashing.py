"""64-bit hashes of tensors' bits, computed on the tensors' devices.

A tensor is read as words w_i: its elements as integers, where a 64-bit element gives two 32-bit words. The hash is
``sum of w_i r_i`` modulo 2^64, with fixed odd numbers r_i that depend on the position only. One flipped bit changes w_i by
a power of two below 2^32, and the sum by an odd multiple of it. That is never 0 modulo 2^64, so one flipped bit is always
detected. Any other difference cancels about once in 2^32.

A permutation of 64-bit integers then mixes the sum, so that differences of several replicas do not cancel each other. The
result is split into two 32-bit numbers, because sums of these over a million ranks are exact in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.device_constants import Constants

CHUNK = 2**20  # words that are read at a time, at 8 bytes per word
SMALL = 2**14  # words of a tensor that is read together with other tensors
WORDS = 2  # float64 numbers per hash
NONE = 0x2545F4914F6CDD1D  # the hash of a missing tensor
_INTEGERS = {1: torch.int8, 2: torch.int16}


class TensorHash:
    """Hashes tensors on any devices.

    Args:
        device: The device of the hashes.
        exact: True: all bits count. False (default): all NaNs are equal, and -0 equals 0.
    """

    def __init__(self, device: torch.device, exact: bool = False) -> None:
        self.device, self.exact = device, exact
        self._constants = Constants()

    def __call__(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return the hash of each tensor, [n] int64, on ``device``. The hash of None is `NONE`.

        Tensors on another device cost one transfer of hashes per device.
        """
        sums = torch.full((len(tensors),), NONE, dtype=torch.int64, device=self.device)
        here = [(at, tensor.detach()) for at, tensor in enumerate(tensors) if tensor is not None]
        for device in sorted({tensor.device for _, tensor in here}, key=str):
            found = [(at, tensor) for at, tensor in here if tensor.device == device]
            places = [at for at, _ in found]
            values = self._hash_on_device([tensor for _, tensor in found], device)
            if device != self.device:
                values = values.to(self.device)
            if len(places) == len(tensors):
                return values
            sums[self._constants(("places", *places), places.copy, torch.int64, self.device)] = values
        return sums

    def _hash_on_device(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        flat = [tensor.reshape(-1) for tensor in tensors]
        table = _table(device, max(map(_words_in, flat)))
        sums = {at: self._hash_in_chunks(whole, table) for at, whole in enumerate(flat) if _words_in(whole) > SMALL}
        for batch in _batches(flat):
            found = self._hash_small([self._words(flat[at]) for at in batch], table)
            sums |= zip(batch, found.unbind(), strict=True)
        return torch.stack([sums[at] for at in range(len(flat))])

    def _hash_in_chunks(self, flat: Tensor, table: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        for number, part in enumerate(flat.split(CHUNK * flat.numel() // _words_in(flat))):
            words = self._words(part)
            total.add_(words.to(torch.int64).mul_(table[: len(words)]).sum(), alpha=odd(number))
        return total

    def _hash_small(self, words: Sequence[Tensor], table: Tensor) -> Tensor:
        """Hash small tensors with a few kernels: differences of a running sum, which is exact modulo 2^64."""
        ends = [0]
        for tensor_words in words:
            ends.append(ends[-1] + len(tensor_words))
        products = torch.cat([table[: len(tensor_words)] for tensor_words in words])
        products *= torch.cat([*words])
        running = torch.cat([products.new_zeros(1), products.cumsum(0)])
        return running[self._constants(("ends", *ends), ends.copy, torch.int64, table.device)].diff()

    def _words(self, flat: Tensor) -> Tensor:
        """Return the bits of ``flat`` as 1-dim integers. Unless exact, a copy with canonical NaNs and zeros."""
        if not self.exact and flat.is_floating_point() and flat.element_size() > 1:
            flat = flat + 0.0
            flat = torch.where(flat.isnan(), torch.full_like(flat, torch.nan), flat)
        return flat.view(_INTEGERS.get(flat.element_size(), torch.int32))


def _words_in(tensor: Tensor) -> int:
    return tensor.numel() * max(1, tensor.element_size() // 4)


def _batches(flat: Sequence[Tensor]) -> list[list[int]]:
    """Return batches of indices of small tensors. Tensors of a batch have words of one dtype, at most ``CHUNK`` in all."""
    batches: list[list[int]] = []
    open_batches: dict[torch.dtype, tuple[list[int], int]] = {}
    for at, tensor in enumerate(flat):
        if (words := _words_in(tensor)) > SMALL:
            continue
        kind = _INTEGERS.get(tensor.element_size(), torch.int32)
        batch, full = open_batches.get(kind, ([], CHUNK + 1))
        if full + words > CHUNK:
            batch, full = [], 0
            batches.append(batch)
        batch.append(at)
        open_batches[kind] = batch, full + words
    return batches


def odd(number: int) -> int:
    """Return element ``number`` of a fixed sequence of odd 31-bit numbers."""
    return (number * 0x5851F42D4C957F2D >> 20 & 0x3FFFFFFF) << 1 | 1


_TABLES: dict[torch.device, Tensor] = {}  # cached, because making one takes as long as hashing a small model


def _table(device: torch.device, words: int) -> Tensor:
    """Return a table of odd numbers by position, for at least ``words`` positions or a chunk."""
    size = min(CHUNK, max(SMALL, 1 << (words - 1).bit_length()))
    table = _TABLES.get(device)
    if table is None or len(table) < size:
        table = _TABLES[device] = _odd_numbers(torch.arange(size, device=device))
    return table


def _odd_numbers(positions: Tensor) -> Tensor:
    """Return an odd 64-bit number per position, mixed: small steps between neighbours would let differences cancel."""
    return splitmix64_finalizer(positions + 1) << 1 | 1


def splitmix64_finalizer(numbers: Tensor) -> Tensor:
    """Apply splitmix64's finalizer, a permutation of int64 numbers that turns equal steps into unequal ones."""
    for bits, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        numbers = (numbers ^ _shift_right(numbers, bits)) * factor
    return numbers ^ _shift_right(numbers, 31)


def _shift_right(numbers: Tensor, bits: int) -> Tensor:
    """Shift to the right without sign extension."""
    return (numbers >> bits) & ((1 << 64 - bits) - 1)


def to_float_words(sums: Tensor) -> Tensor:
    """Split hashes, [...] int64, into integers below 2^32, [..., WORDS] float64. The mapping is one-to-one."""
    mixed = splitmix64_finalizer(sums)
    return torch.stack([mixed & 0xFFFFFFFF, _shift_right(mixed, 32)], dim=-1).double()
