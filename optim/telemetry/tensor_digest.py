"""Digests of full tensors that do not depend on the layout: a hash of all bits, and a linear sketch of the values.

Each rank digests its shards, with the index i of every element in the flattened full tensor. Sums over the shards of all
ranks give the digest of the full tensor:

    hash      = sum of bits(x_i) * r_i  modulo 2^64                 r_i: a fixed odd 64-bit number per index
    sketch[b] = sum of s_i * x_i  over the elements with b_i = b    s_i: a fixed sign; b_i: one of `BUCKETS` buckets

Equal elements give equal hashes in every layout. If a single element of a tensor that is not float64 differs, the hash
differs; other differences cancel at most about once in 2^32. bits(x_i) are the bits of the element as float32, or as
float64 in a float64 tensor.

The sketch is linear: the squared length of the difference of two sketches is an unbiased estimate of ``|x - y|^2``, with a
relative standard deviation of ``sqrt(2 / BUCKETS)``. It therefore shows whether two tensors are multiples of each other, or
how far they are apart, also if their norms are equal.

Reference: Charikar, Chen and Farach-Colton 2002, "Finding frequent items in data streams" (count sketch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ...parallel.layout.shard import Region
from ..norm.replicas import splitmix64_finalizer

BUCKETS = 16  # numbers per sketch
CHUNK = 2**20  # maximum number of elements that are digested at a time; they take about 60 bytes each
HASH_WORDS = 2  # float64 numbers per hash in a collective


@dataclass(frozen=True)
class Digests:
    """Digests of several tensors on one device: ``hashes`` [tensors] int64, ``sketches`` [tensors, BUCKETS] float64."""

    hashes: Tensor
    sketches: Tensor


def digest(
    tensors: Sequence[Tensor | None],
    regions: Sequence[Region | None],
    device: torch.device,
    scale: Tensor | None = None,
) -> Digests:
    """Return the digests of this rank's shards.

    Each tensor has the shard's shape, or the elements of the region in row-major order. None: the digest is that of
    zeros. If a region is None, it is not known, and the digest is 0. All elements are multiplied by ``scale`` (0-dim)
    first; None: 1.
    """
    hashes = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    sketches = torch.zeros(len(tensors), BUCKETS, dtype=torch.float64, device=device)
    for at, (tensor, region) in enumerate(zip(tensors, regions, strict=True)):
        if tensor is None or region is None or not region.numel:
            continue
        found, sketch = None, torch.zeros(BUCKETS, dtype=torch.float64, device=tensor.device)
        for index, values in region.elements(tensor.detach(), CHUNK):
            values = values.to(torch.float64 if values.dtype == torch.float64 else torch.float32)
            if scale is not None:
                values = values * scale.to(values.device, values.dtype)
            mixed = splitmix64_finalizer(index + 1)
            own = _hash_words(values, mixed)
            found = own if found is None else found + own
            signed = torch.where(mixed & (1 << 20) == 0, values, -values).double()
            sketch.index_add_(0, mixed & (BUCKETS - 1), signed)
        if found is not None:
            hashes[at] = found.to(device)
            sketches[at] = sketch.to(device)
    return Digests(hashes, sketches)


def _hash_words(values: Tensor, mixed: Tensor) -> Tensor:
    """Return the sum over elements of their bits times an odd number, 0-dim int64, modulo 2^64."""
    words = values.contiguous().view(torch.int32).to(torch.int64)
    factors = mixed << 1 | 1
    if values.dtype == torch.float64:  # two words per element, and one odd number per word
        factors = torch.stack([factors, splitmix64_finalizer(factors) << 1 | 1], 1).view(-1)
    return (words * factors).sum()


def hash_words(hashes: Tensor) -> Tensor:
    """Return hashes, [...] int64, as two numbers below 2^32 each, [..., HASH_WORDS] float64, which collectives can sum."""
    return torch.stack([hashes & 0xFFFFFFFF, hashes >> 32 & 0xFFFFFFFF], -1).double()


def joined_hash(words: Sequence[float]) -> str:
    """Return the hash, 16 hexadecimal digits, from the sums of its two `hash_words` over the shards."""
    low, high = (int(word) for word in words)
    return f"{(low + (high << 32)) % 2**64:016x}"


# Batches --------------------------------------------------------------------------------------------------------------


def row_hashes(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum over rows of the hash of each row, 0-dim int64, modulo 2^64.

    A row has the elements at one index of the first dim, in all tensors. The sum does not depend on the order of the rows,
    nor on how they are distributed over ranks and micro-batches.
    """
    total: Tensor | None = None
    for number, tensor in enumerate(tensors):
        flat = tensor.detach().reshape(len(tensor), prod(tensor.shape[1:]))  # reshape with -1 raises without rows
        if flat.dtype == torch.bool:
            flat = flat.to(torch.uint8)
        if flat.is_floating_point():
            flat = flat.double().view(torch.int64)
        places = torch.arange(flat.shape[1], device=flat.device) + (number << 40) + 1
        of_rows = (flat.to(torch.int64) * (splitmix64_finalizer(places) << 1 | 1)).sum(1)
        total = of_rows if total is None else splitmix64_finalizer(total) + of_rows
    if total is None:
        raise ValueError("recorder.batch() was given no tensor; give at least one, such as the inputs")
    return splitmix64_finalizer(total).sum()
