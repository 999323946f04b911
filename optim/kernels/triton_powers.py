"""Powers of gradients in Triton: a chunk of a tensor a program, its sum in a cell of its own, and cells added by tensor.

    cells[chunk] = sum over the chunk of |x|^p          out[tensor] = sum of the tensor's cells

No atomics: every sum is made in one order, whatever runs first. The largest |x| (p = inf) is found by the bits of float64:
without the sign they are ordered as the values are, and NaN is above all. Addresses come from tables, so that one launch
serves tensors that lie anywhere; where in a tensor a chunk lies does not depend on its address, and so the sums don't.
Loops say ``while``: the interpreter of Triton 3.6 has no ``range`` up to a number that it has loaded, with a new numpy.
"""

# Triton reads annotations: no `from __future__ import annotations`, which would make them strings.

import triton
import triton.language as tl

CHUNK = 16384  # elements a program reads
BLOCK = 1024  # at a time
WITHOUT_SIGN = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def together(total: tl.tensor, POWER: tl.constexpr) -> tl.tensor:
    """All lanes as one float64."""
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
    """cells[chunk] of chunk (tensor, number within it) of ``chunks``; POWER: p, 0 for inf."""
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
    """out[tensor] of the cells from first_chunk[tensor] to the next tensor's."""
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
