"""Triton kernels for powers of gradients, and for the optimizer updates of `native.Kind`.

The kernels read the addresses of tensors from tables, so one launch covers tensors at arbitrary addresses.
"""

# Triton reads the annotations, which `from __future__ import annotations` would turn into strings.

import triton
import triton.language as tl

CHUNK = 16384  # elements per program
BLOCK = 1024  # elements per loop iteration
VECTOR = tl.constexpr(16)  # bytes per load of a thread

# Powers of gradients --------------------------------------------------------------------------------------------------

# A program of the first kernel sums one chunk of a tensor. A second kernel adds these sums per tensor.
#
#     cells[chunk] = sum over the chunk of |x|^p          out[tensor] = sum of the tensor's cells
#
# There are no atomics: every sum has a fixed order, whichever program runs first. For p = inf, the bits of float64
# values without the sign are compared as integers. They are ordered like the values, with NaN as the largest. Loops use
# ``while``, because Triton's interpreter may not support ``range`` with a bound that was loaded from memory.
#
# A load of 16 bytes needs an aligned address. So the loop over a chunk begins at the first aligned element, after
# ``head`` elements. The sums do not depend on the addresses: the division into chunks does not, element i is always
# added to the sum with index i % BLOCK, and these sums are always added in the same order.

WITHOUT_SIGN = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def together(total: tl.tensor, POWER: tl.constexpr) -> tl.tensor:
    """Return one float64 from a block of lanes: their sum, or for POWER 0 (p = inf) their maximum.

    For POWER 0 the lanes are int64 with the bits of float64 values >= 0 or NaN.
    """
    return tl.max(total, 0).to(tl.float64, bitcast=True) if POWER == 0 else tl.sum(total, 0)


@triton.jit
def add_powers(total: tl.tensor, values: tl.tensor, DTYPE: tl.constexpr, POWER: tl.constexpr) -> tl.tensor:
    """Return ``total`` plus |x|^p of the loaded ``values``; for POWER 0 (p = inf) the larger of the two."""
    if DTYPE == 2:  # bfloat16 is the upper half of a float32
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
    return total


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
    """Sum |x|^p over one chunk of a tensor, or find the largest |x| (p = inf), and write the result to ``cells``.

    ``addresses`` and ``numels`` have one item per tensor; ``chunks`` has the index of the chunk's tensor, and the
    chunk's index within that tensor. DTYPE is as in `native.DTYPES`. POWER is p; 0 means p = inf.
    """
    cell = tl.program_id(0)
    tensor = tl.load(chunks + 2 * cell)
    start = tl.load(chunks + 2 * cell + 1) * CHUNK
    count = tl.minimum(tl.load(numels + tensor) - start, CHUNK).to(tl.int32)
    address = tl.load(addresses + tensor)
    if DTYPE == 0:
        elements = address.to(tl.pointer_type(tl.float32))
        size = 4
    elif DTYPE == 1:
        elements = address.to(tl.pointer_type(tl.float64))
        size = 8
    elif DTYPE == 2:
        elements = address.to(tl.pointer_type(tl.uint16))
        size = 2
    else:
        elements = address.to(tl.pointer_type(tl.float16))
        size = 2
    elements += start
    head = (-address & (VECTOR - 1)).to(tl.int32) // size
    body = tl.multiple_of(elements + head, VECTOR)
    lanes = tl.arange(0, BLOCK)
    total = tl.full((BLOCK,), 0, tl.int64 if POWER == 0 else tl.float64)
    if head > 0:  # the elements before ``body`` go to the last lanes
        at = lanes - (BLOCK - head)
        total = add_powers(total, tl.load(elements + at, mask=(at >= 0) & (at < count), other=0), DTYPE, POWER)
    rest = count - head
    whole = rest // BLOCK * BLOCK
    first = 0
    while first < whole:
        total = add_powers(total, tl.load(body + first + lanes), DTYPE, POWER)
        first += BLOCK
    if first < rest:
        total = add_powers(total, tl.load(body + first + lanes, mask=first + lanes < rest, other=0), DTYPE, POWER)
    if POWER != 0:
        total = tl.gather(total, (lanes + (BLOCK - head)) % BLOCK, 0)
    tl.store(cells + cell, together(total, POWER))


@triton.jit
def sums_of_cells(
    cells: tl.tensor, first_chunk: tl.tensor, out: tl.tensor, POWER: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Write ``out[tensor]``: the sum of the cells that `powers_of_chunks` wrote for the tensor, or their maximum.

    The tensor's cells begin at ``first_chunk[tensor]`` and end before the next tensor's first chunk. POWER is p; 0
    means p = inf, the maximum.
    """
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


# Updates of optimizers ------------------------------------------------------------------------------------------------

# An update has two launches. `count_steps` uses one lane per parameter: it increments the step counts on the device,
# and computes in float64 the factors that depend on learning rate and step count. `update_chunks` uses one program per
# chunk of a parameter: it reads the gradient in its own precision, multiplies it by a factor, updates parameter and
# states, and writes the half-precision copy of the updated parameter. The gradient is unchanged. Both kernels read
# ``found_inf`` on the device. If it is not 0, they change no parameter, state or step count.
#
# In `update_chunks`, divisions and roots are rounded as in IEEE 754, and the launch disables fused multiply-add.
# Triton's default divisions and roots are approximate, so the bits of a result could depend on the compilation.
# Rounding to bfloat16 uses bit operations, because the cast of Triton's interpreter truncates.

ROWS = 128  # parameters per program of `count_steps`
HYPER = 8  # float64 numbers per param group: 5 hyper-parameters, log(beta1), log(beta2), sign of the gradient
BY_ROW = 4  # float32 numbers per parameter: rate, root, decay, unused
ADAM, SGD = tl.constexpr(0), tl.constexpr(1)  # values of native.Kind; any other value means Adagrad
GROUP, ROW = tl.constexpr(HYPER), tl.constexpr(BY_ROW)


@triton.jit(do_not_specialize=["rows"])
def count_steps(
    fixed: tl.tensor,
    group_of: tl.tensor,
    hyper: tl.tensor,
    rates: tl.tensor,
    found_inf: tl.tensor,
    by_row: tl.tensor,
    rows: tl.tensor,
    KIND: tl.constexpr,
    DECOUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute the rate, root and decay of each parameter's update, and increment its step count if ``found_inf`` is 0.

    Rate is the learning rate, divided for Adam by the first bias correction and for Adagrad by its decay. Root is the
    square root of Adam's second bias correction, else 1. Decay is the weight decay, or for decoupled weight decay the
    factor on the parameter.

    Args:
        fixed: Addresses [5, rows] of parameter, first, second and third state, and step count; 0: none.
        group_of: Index of each parameter's param group, [rows].
        hyper: Hyper-parameters per param group, [groups, HYPER] float64.
        rates: Per param group, the address of a learning rate tensor (0: none), and 1 if it is float64, [groups, 2].
        by_row: Output, [rows, BY_ROW] float32: rate, root and decay; the last column is not written.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = row < rows
    group = tl.load(group_of + row, mask=here, other=0)
    own = hyper + group * GROUP
    address, is_wide = tl.load(rates + 2 * group), tl.load(rates + 2 * group + 1) != 0
    wide = tl.load(address.to(tl.pointer_type(tl.float64)), mask=(address != 0) & is_wide, other=0.0)
    narrow = tl.load(address.to(tl.pointer_type(tl.float32)), mask=(address != 0) & (is_wide == 0), other=0.0)
    rate = tl.where(address == 0, tl.load(own), wide + narrow.to(tl.float64))
    step_at = tl.load(fixed + 4 * rows + row, mask=here, other=0)
    counts = step_at.to(tl.pointer_type(tl.float32))
    step = tl.load(counts, mask=step_at != 0, other=0.0) + 1
    count = step.to(tl.float64)
    root = tl.full((BLOCK,), 1.0, tl.float64)
    if KIND == ADAM:
        decay = tl.load(own + 4)
        if DECOUPLED:
            decay = 1 - rate * decay
        rate = rate / (1 - tl.exp(count * tl.load(own + 5)))
        root = tl.sqrt(1 - tl.exp(count * tl.load(own + 6)))
    elif KIND == SGD:
        decay = tl.load(own + 3)
    else:
        decay = tl.load(own + 3)
        rate = rate / (1 + (count - 1) * tl.load(own + 1))
    tl.store(by_row + ROW * row, rate.to(tl.float32), mask=here)
    tl.store(by_row + ROW * row + 1, root.to(tl.float32), mask=here)
    tl.store(by_row + ROW * row + 2, decay.to(tl.float32), mask=here)
    if tl.load(found_inf) == 0:
        tl.store(counts, step, mask=step_at != 0)


@triton.jit
def step_block(
    params: tl.tensor,
    grads: tl.tensor,
    firsts: tl.tensor,
    seconds: tl.tensor,
    thirds: tl.tensor,
    halves: tl.tensor,
    has_half: tl.tensor,
    here: tl.tensor,
    factor: tl.tensor,
    rate: tl.tensor,
    root: tl.tensor,
    decay: tl.tensor,
    one: tl.tensor,
    rest_of_one: tl.tensor,
    two: tl.tensor,
    rest_of_two: tl.tensor,
    three: tl.tensor,
    KIND: tl.constexpr,
    DECOUPLED: tl.constexpr,
    OPTION: tl.constexpr,
    GRAD: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """Update a block of elements of a parameter, with their optimizer states and half-precision copies.

    Args:
        params, grads, firsts, seconds, thirds, halves: Pointers to the elements of parameter, gradient, first, second
            and third state, and half-precision copy.
        rate, root, decay: The parameter's numbers from `count_steps`.
        one, two, three: Adam: beta1, beta2, eps. SGD: momentum, dampening. Adagrad: eps as ``two``.
        rest_of_one, rest_of_two: 1 - ``one`` and 1 - ``two``.
        OPTION: Adam: amsgrad. SGD: 0 without momentum, 1 with momentum, 2 with Nesterov momentum.
        GRAD, HALF: Dtypes of gradient and half-precision copy, as in `native.DTYPES`. HALF 0: no parameter has a copy.
    """
    p = tl.load(params, mask=here, other=0.0)
    g = tl.load(grads, mask=here, other=0)
    if GRAD == 2:  # bfloat16 is the upper half of a float32
        g = (g.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    g = g.to(tl.float32) * factor
    if KIND == ADAM:
        if DECOUPLED:
            p = p * decay
        else:
            g = g + decay * p
        mean = tl.load(firsts, mask=here, other=0.0) * one + rest_of_one * g
        square = tl.load(seconds, mask=here, other=0.0) * two + rest_of_two * g * g
        tl.store(firsts, mean, mask=here)
        tl.store(seconds, square, mask=here)
        if OPTION:
            most = tl.load(thirds, mask=here, other=0.0)
            square = tl.where(most > square, most, square)
            tl.store(thirds, square, mask=here)
        p = p - tl.div_rn(rate * mean, tl.div_rn(tl.sqrt_rn(square), root) + three)
    elif KIND == SGD:
        g = g + decay * p
        if OPTION:
            kept = tl.load(firsts, mask=here, other=0.0) * one + g * rest_of_two
            tl.store(firsts, kept, mask=here)
            g = g + kept * one if OPTION == 2 else kept
        p = p - rate * g
    else:
        g = g + decay * p
        square = tl.load(firsts, mask=here, other=0.0) + g * g
        tl.store(firsts, square, mask=here)
        p = p - tl.div_rn(rate * g, tl.sqrt_rn(square) + two)
    tl.store(params, p, mask=here)
    if HALF:  # noqa: SIM102 (the outer condition is decided at compile time)
        if has_half:  # round to nearest, ties to even; NaN as in torch
            if HALF == 2:
                bits = p.to(tl.uint32, bitcast=True)
                rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
                rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
                tl.store(halves, rounded.to(tl.uint16), mask=here)
            else:
                tl.store(halves, p.to(tl.float16), mask=here)


@triton.jit(do_not_specialize=["rows"])
def update_chunks(
    fixed: tl.tensor,
    grads: tl.tensor,
    halves: tl.tensor,
    numels: tl.tensor,
    chunks: tl.tensor,
    group_of: tl.tensor,
    hyper: tl.tensor,
    by_row: tl.tensor,
    found_inf: tl.tensor,
    factor: tl.tensor,
    rows: tl.tensor,
    KIND: tl.constexpr,
    DECOUPLED: tl.constexpr,
    OPTION: tl.constexpr,
    GRAD: tl.constexpr,
    HALF: tl.constexpr,
    SCALED: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Update one chunk of a parameter if ``found_inf`` is 0.

    Most arguments are as in `count_steps`, whose output is ``by_row``, and in `step_block`.

    Args:
        grads, halves: Addresses of gradients and half-precision copies, [rows]; 0: the parameter has no copy.
        chunks: For each chunk the row of its parameter, and the chunk's index within that parameter, [chunks, 2].
        factor: Pointer to a number. With SCALED, the gradients are multiplied by it.
        ALIGNED: True: the addresses of float32 tensors, except step counts, are multiples of 16 bytes, and the
            addresses of half-precision tensors are multiples of 8 bytes.
    """
    if tl.load(found_inf) == 0:
        chunk = tl.program_id(0)
        row = tl.load(chunks + 2 * chunk)
        start = tl.load(chunks + 2 * chunk + 1) * CHUNK
        count = tl.minimum(tl.load(numels + row) - start, CHUNK).to(tl.int32)
        params = tl.load(fixed + row).to(tl.pointer_type(tl.float32))
        firsts = tl.load(fixed + rows + row).to(tl.pointer_type(tl.float32))
        seconds = tl.load(fixed + 2 * rows + row).to(tl.pointer_type(tl.float32))
        thirds = tl.load(fixed + 3 * rows + row).to(tl.pointer_type(tl.float32))
        grad_at, half_at = tl.load(grads + row), tl.load(halves + row)
        kind = tl.float32 if GRAD == 0 else tl.uint16 if GRAD == 2 else tl.float16
        gradients = grad_at.to(tl.pointer_type(kind))
        copies = half_at.to(tl.pointer_type(tl.uint16 if HALF == 2 else tl.float16))
        if ALIGNED:  # four elements per access in every dtype, so that all tensors have the same register layout
            params, gradients, copies = (
                tl.multiple_of(params, 16),
                tl.multiple_of(gradients, 16 if GRAD == 0 else 8),
                tl.multiple_of(copies, 8),
            )
            firsts, seconds, thirds = (
                tl.multiple_of(firsts, 16),
                tl.multiple_of(seconds, 16),
                tl.multiple_of(thirds, 16),
            )
        own = hyper + tl.load(group_of + row) * GROUP
        times = tl.load(own + 7).to(tl.float32)
        if SCALED:
            times = times * tl.load(factor).to(tl.float32)
        rate, root = tl.load(by_row + ROW * row), tl.load(by_row + ROW * row + 1)
        decay = tl.load(by_row + ROW * row + 2)
        one, two, three = tl.load(own + 1), tl.load(own + 2), tl.load(own + 3).to(tl.float32)
        rest_of_one, rest_of_two = (1 - one).to(tl.float32), (1 - two).to(tl.float32)
        one, two = one.to(tl.float32), two.to(tl.float32)
        lanes = tl.arange(0, BLOCK)
        whole = count // BLOCK * BLOCK
        every = tl.full((BLOCK,), True, tl.int1)
        begin = 0
        while begin < whole:
            at = start + begin + lanes
            step_block(
                params + at, gradients + at, firsts + at, seconds + at, thirds + at, copies + at, half_at != 0, every,
                times, rate, root, decay, one, rest_of_one, two, rest_of_two, three, KIND, DECOUPLED, OPTION, GRAD, HALF,
            )  # fmt: skip
            begin += BLOCK
        if whole < count:
            at, here = start + whole + lanes, whole + lanes < count
            step_block(
                params + at, gradients + at, firsts + at, seconds + at, thirds + at, copies + at, half_at != 0, here,
                times, rate, root, decay, one, rest_of_one, two, rest_of_two, three, KIND, DECOUPLED, OPTION, GRAD, HALF,
            )  # fmt: skip
