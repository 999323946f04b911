"""A Triton kernel that rounds many float32 tensors to bfloat16 stochastically in one launch.

The formula of the noise is in `rounding`.
"""

# Triton reads the annotations, which `from __future__ import annotations` would turn into strings.

import triton
import triton.language as tl

LANES = 512  # elements of a row
ROWS = 8  # a counter serves the elements of one column of 8 rows
CHUNK = 4 * ROWS * LANES  # elements per program


@triton.jit
def round_block(
    source: tl.tensor,
    target: tl.tensor,
    left: tl.tensor,
    key: tl.tensor,
    counter: tl.tensor,
    number: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    WHOLE: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Round a block of ROWS x LANES elements, which share LANES counters.

    ``left`` is the number of elements from the start of the block to the end of the chunk. ``counter``, [LANES], is the
    first word of the counters; ``number``, ``low`` and ``high`` are the other words. With WHOLE, the tensor has all
    elements of the block, so no access needs a mask.
    """
    lanes = tl.arange(0, LANES)
    # These zeros give the noise the layout of the elements among threads. Otherwise Triton exchanges the noise between
    # threads through shared memory.
    first = tl.load(source + lanes) if WHOLE else tl.load(source + lanes, mask=lanes < left, other=0)
    zeros = (first >> 31) >> 1
    counter += zeros
    w0, w1, w2, w3 = tl.philox(key, counter, zeros + number, zeros + low, zeros + high, 10)
    for row in tl.static_range(ROWS):
        if row < 2:
            word = w0
        elif row < 4:
            word = w1
        elif row < 6:
            word = w2
        else:
            word = w3
        noise = (word >> 16) if row % 2 else (word & 0xFFFF)
        at = row * LANES + lanes
        bits = tl.load(source + at) if WHOLE else tl.load(source + at, mask=at < left, other=0)
        is_number = (bits & 0x7FFFFFFF) <= 0x7F800000  # a carry would overflow the bits of a NaN
        rounded = (tl.where(is_number, bits + noise, bits) >> 16).to(tl.uint16)
        if WHOLE:
            tl.store(target + at, rounded)
        else:
            tl.store(target + at, rounded, mask=at < left)


@triton.jit(do_not_specialize=["step"])
def round_chunks(
    targets: tl.tensor,
    sources: tl.tensor,
    numels: tl.tensor,
    chunks: tl.tensor,
    keys: tl.tensor,
    numbers: tl.tensor,
    step: tl.tensor,
    ALIGNED: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Round one chunk of a float32 tensor to bfloat16.

    Per tensor, ``numbers`` has its number among the tensors with its key. Per chunk, ``chunks`` has the index of its
    tensor, and the chunk's index within that tensor, [chunks, 2]. ALIGNED: all addresses are multiples of 16. CHUNK,
    the elements per program, is a multiple of LANES x ROWS; ROWS, the rows that share counters, is 8.
    """
    chunk = tl.program_id(0)
    tensor = tl.load(chunks + 2 * chunk)
    start = tl.load(chunks + 2 * chunk + 1) * CHUNK
    count = tl.minimum(tl.load(numels + tensor) - start, CHUNK).to(tl.int32)
    source = tl.load(sources + tensor).to(tl.pointer_type(tl.uint32))
    target = tl.load(targets + tensor).to(tl.pointer_type(tl.uint16))
    if ALIGNED:
        # The declared alignment of the target is only 8 bytes, so that a thread stores the four elements that it has
        # loaded. With 16 bytes it would store eight elements, which Triton exchanges between threads through shared memory.
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 8)
    key, number = tl.load(keys + tensor), tl.load(numbers + tensor).to(tl.uint32)
    wide = step.to(tl.uint64)
    low, high = (wide & 0xFFFFFFFF).to(tl.uint32), (wide >> 32).to(tl.uint32)
    lanes = tl.arange(0, LANES)
    whole = count // (ROWS * LANES) * (ROWS * LANES)
    begin = 0
    while begin < whole:
        at = start + begin
        counter = (at // ROWS + lanes).to(tl.uint32)
        round_block(source + at, target + at, count - begin, key, counter, number, low, high, True, LANES, ROWS)
        begin += ROWS * LANES
    if whole < count:
        at = start + whole
        counter = (at // ROWS + lanes).to(tl.uint32)
        round_block(source + at, target + at, count - whole, key, counter, number, low, high, False, LANES, ROWS)
