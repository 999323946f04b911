"""Triton kernels for powers of gradients.

One program sums a chunk of a tensor, and a second kernel adds the sums by tensor.

    cells[chunk] = sum over the chunk of |x|^p          out[tensor] = sum of the tensor's cells

There are no atomics: every sum has a fixed order, whichever program runs first. The largest |x| (p = inf) is found in
the bits of float64, which without the sign are ordered like the values, with NaN as the largest. Addresses come from
tables, so one launch covers tensors at arbitrary addresses. The division into chunks does not depend on the addresses,
so the sums do not either. Loops use ``while``: with a new numpy, the interpreter of Triton 3.6 does not support
``range`` with a loaded bound.
"""

# Triton reads the annotations, which `from __future__ import annotations` would turn into strings.

import triton
import triton.language as tl

CHUNK = 16384  # elements per program
BLOCK = 1024  # elements per loop iteration
WITHOUT_SIGN = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def together(total: tl.tensor, POWER: tl.constexpr) -> tl.tensor:
    """Reduce all lanes to one float64."""
    return tl.max(total, 0).to(tl.float64, bitcast=True) if POWER == 0 else tl.sum(total, 0)


@triton.jit
def powers_of_chunks(
    addresses: tl.tensor,
    numels: tl.tensor,
    chunks: tl.tensor,
    cells: tl.tensor,
    DTYPE: tl.constexpr,
    POWER: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write ``cells[chunk]`` for a chunk, given in ``chunks`` as (tensor, number within it). POWER is p, or 0 for inf."""
    cell = tl.program_id(0)
    tensor = tl.load(chunks + 2 * cell)
    start = tl.load(chunks + 2 * cell + 1) * CHUNK
    count = tl.minimum(tl.load(numels + tensor) - start, CHUNK).to(tl.int32)
    address = tl.load(addresses + tensor)
    if DTYPE == 0:
        elements = address.to(tl.pointer_type(tl.float32))
    elif DTYPE == 1:
        elements = address.to(tl.pointer_type(tl.float64))
    elif DTYPE == 2:
        elements = address.to(tl.pointer_type(tl.uint16))
    else:
        elements = address.to(tl.pointer_type(tl.float16))
    lanes = tl.arange(0, BLOCK)
    total = tl.full((BLOCK,), 0, tl.int64 if POWER == 0 else tl.float64)
    first = 0
    while first < count:
        values = tl.load(elements + start + first + lanes, mask=first + lanes < count, other=0)
        if DTYPE == 2:  # the upper half of a float32
            values = (values.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        values = values.to(tl.float64)
        if POWER == 0:
            total = tl.maximum(total, values.to(tl.int64, bitcast=True) & WITHOUT_SIGN)
        elif POWER == 2:
            total += values * values
        else:
            size = tl.abs(values)
            power = size
            for _ in tl.static_range(POWER - 1):
                power *= size
            total += power
        first += BLOCK
    tl.store(cells + cell, together(total, POWER))


@triton.jit
def sums_of_cells(
    cells: tl.tensor, first_chunk: tl.tensor, out: tl.tensor, POWER: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Write ``out[tensor]``, the sum of the cells from ``first_chunk[tensor]`` up to the next tensor's first chunk."""
    tensor = tl.program_id(0)
    begin = tl.load(first_chunk + tensor)
    count = (tl.load(first_chunk + tensor + 1) - begin).to(tl.int32)
    lanes = tl.arange(0, BLOCK)
    total = tl.full((BLOCK,), 0, tl.int64 if POWER == 0 else tl.float64)
    first = 0
    while first < count:
        values = tl.load(cells + begin + first + lanes, mask=first + lanes < count, other=0.0)
        if POWER == 0:
            total = tl.maximum(total, values.to(tl.int64, bitcast=True))
        else:
            total += values
        first += BLOCK
    tl.store(out + tensor, together(total, POWER))
