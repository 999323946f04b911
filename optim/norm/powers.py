"""The sums of |g|^p that one rank computes by itself, in one read of the gradients, by torch's kernels.

The plain reference is `reference_powers`, in float64 throughout; `powers_by_torch` is as far as its result tells: no finite
gradient overflows or vanishes, however it is cut. (One float32 accumulator over a whole gradient, which is what a plain
``vector_norm`` on a CPU amounts to, is 1e-5 off at a million elements and 3e-4 at ten million.) From p = `HIGH` on p-th
powers leave the range of float64 too: there p-norms stand in for them, which are put together with their maximum taken out.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from ...amp.capture import is_captured
from ..kernels.choice import chosen, triton_on
from ..kernels.memory import PLAIN
from ..kernels.native import DTYPES, NO_MEMORY, NORM_TYPES, Native, in_memory_order

SMALL = 1024  # elements
ROW = 1024  # elements that are summed in float32
SCRATCH = 2**18  # elements that are cast at a time: 2 MiB
EXACT = 1e-29  # mean squares from which on float32 has lost nothing to speak of below its range
HIGH = 12.0


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device that has none."""
    return torch.float32 if device.type == "mps" else torch.float64


def reference_powers(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """[n] float64: what `local_powers` returns. Slow and plain."""
    if norm_type >= HIGH and norm_type != inf:
        largest = reference_powers(gradients, inf)
        scaled = [g.double() / max(float(m), 1e-300) for g, m in zip(gradients, largest, strict=True)]
        return torch.stack([g.abs().pow(norm_type).sum() for g in scaled]).pow(1 / norm_type) * largest
    if norm_type == inf:
        powers = [g.double().abs().max() if g.numel() else g.new_zeros((), dtype=torch.float64) for g in gradients]
    else:
        powers = [g.double().abs().pow(norm_type).sum() for g in gradients]
    return torch.stack(powers) if powers else torch.zeros(0, dtype=torch.float64)


def powers_by_torch(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """[n] float64: what `local_powers` returns, by torch's kernels; arguments as there."""
    dtype = accumulation_dtype(gradients[0].device)
    if inf > norm_type >= HIGH:
        return torch.stack([_high_norm(g, norm_type).to(dtype) for g in gradients])
    if not gradients[0].is_cpu:
        return _powers_at_once(gradients, norm_type, dtype)
    if norm_type == inf:
        return torch.stack([_largest(g) for g in gradients]).to(dtype)
    return _powers_on_cpu(gradients, norm_type)


def p_norm(values: Tensor, norm_type: float, dim: int = 0) -> Tensor:
    """The p-norm of non-negative values along a dim, also where their p-th powers are out of range."""
    largest = values.amax(dim, keepdim=True)
    if norm_type == inf:
        return largest.squeeze(dim)
    unit = torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))
    return ((values / unit).pow(norm_type).sum(dim, keepdim=True).pow(1 / norm_type) * unit).squeeze(dim)


def _powers_at_once(gradients: Sequence[Tensor], norm_type: float, dtype: torch.dtype) -> Tensor:
    """A few kernels for all gradients where p is 1, 2 or inf, one a gradient for another p; all sums in ``dtype``."""
    # Those without elements have no largest one, and torch takes them for others where there are more than a hundred.
    full = [gradient for gradient in gradients if gradient.numel()]
    norms = iter(torch._foreach_norm(full, norm_type, dtype=dtype) if full else ())
    powers = torch.stack(
        [next(norms) if g.numel() else torch.zeros((), dtype=dtype, device=g.device) for g in gradients]
    )
    return powers if norm_type in (1, inf) else powers.square_() if norm_type == 2 else powers.pow_(norm_type)


def _high_norm(gradient: Tensor, norm_type: float) -> Tensor:
    if gradient.numel() == 0:
        return gradient.new_zeros((), dtype=accumulation_dtype(gradient.device))
    dtype = accumulation_dtype(gradient.device)
    parts = [part.to(dtype, copy=True).abs_() for part in flattened(gradient).split(SCRATCH)]
    return p_norm(torch.stack([p_norm(part, norm_type) for part in parts]), norm_type)


def _powers_on_cpu(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    powers = torch.zeros(len(gradients), dtype=torch.float64)
    numels = [gradient.numel() for gradient in gradients]
    small = [i for i, numel in enumerate(numels) if numel <= SMALL]
    if small:
        # Gathered into one tensor: a thousand kernel calls on a few elements each would cost more than a copy of them.
        # A float64 one is flattened to itself.
        values = _flatten_dense_tensors([gradients[i] for i in small]).double().abs()
        sums = _segment_sums(values, norm_type, [numels[i] for i in small])
        if len(small) == len(gradients):
            return sums
        powers[small] = sums
    scratch = torch.empty(0, dtype=torch.float64)
    for index, gradient in enumerate(gradients):
        if numels[index] > SMALL:
            flat = flattened(gradient)
            power = _squares_by_rows(flat) if norm_type == 2 and flat.dtype == torch.float32 else None
            if power is None:
                scratch = torch.empty(SCRATCH, dtype=torch.float64) if not scratch.numel() else scratch
                power = _power_by_parts(flat, norm_type, scratch)
            powers[index] = power
    return powers


def _squares_by_rows(flat: Tensor) -> Tensor | None:
    """A third of the time: rows are summed in float32, which costs 1e-7, and put together in float64. None where squares
    leave float32's range."""
    whole = flat.numel() // ROW * ROW
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), 2, dim=1).double()
    rest = flat[whole:].double()
    power = norms.dot(norms) + rest.dot(rest)
    found = ctypes.c_double.from_address(power.data_ptr()).value  # on a CPU it is there, and nobody waits for it
    return power if flat.numel() * EXACT <= found < inf else None


def _power_by_parts(flat: Tensor, norm_type: float, scratch: Tensor) -> Tensor:
    """Parts that stay in the cache are cast and summed: a kernel that casts as it sums takes ten times as long."""
    sums = []
    for part in flat.split(len(scratch)):
        values = scratch[: len(part)].copy_(part)
        if norm_type == 2:
            sums.append(values.dot(values))
        else:
            sums.append((values.abs_() if norm_type == 1 else values.abs_().pow_(norm_type)).sum())
    return torch.stack(sums).sum()


def _segment_sums(values: Tensor, norm_type: float, lengths: list[int]) -> Tensor:
    """Sums of values^p over consecutive segments; ``values`` float64, not negative, overwritten."""
    values = values if norm_type == 1 else values.square_() if norm_type == 2 else values.pow_(norm_type)
    sums: Tensor = torch.segment_reduce(values, "sum", lengths=torch.tensor(lengths), unsafe=True)
    return sums


def flattened(tensor: Tensor) -> Tensor:
    """1-dim view of a dense tensor in memory order (any order serves a norm); a copy where there is no such view."""
    return tensor.view(-1) if tensor.is_contiguous() else in_memory_order(tensor)


def _largest(gradient: Tensor) -> Tensor:
    if gradient.numel() == 0:
        return gradient.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(gradient)
    return torch.maximum(low.neg(), high)


# The kernels that compute them ----------------------------------------------------------------------------------------


def are_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether all have one dtype and device."""
    return len({tensor.dtype for tensor in tensors}) == 1 and len({tensor.device for tensor in tensors}) == 1


def local_powers(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """[n] float64: the sum of |g|^p of each gradient, its largest |g| for p = inf, its p-norm for `HIGH` <= p < inf.

    A NaN or inf in a gradient makes its entry NaN or inf, and finite values don't. Within 1e-14 by the compiled loops, for
    p = 1, 2 and inf on a CPU (`meshstep.optim.kernels`); else within 1e-12, but for squares of float32 gradients on a CPU:
    1e-7. On a GPU every element is cast to float64 as it is read, and its power is taken and summed there: with the range
    of the CPU path; by Triton's kernels, if they were chosen, for whole p and inf, within 1e-14.

    Args:
        gradients: Dense real tensors of any float dtype, all on one device.
        norm_type: p >= 1, or inf.
    Collectives: none. Host reads: none.
    """
    if not gradients:
        return torch.zeros(0, dtype=torch.float64)
    device, powers = gradients[0].device, None
    high = inf > norm_type >= HIGH
    kernels = None if high or chosen.triton is None or is_captured() else triton_on(device)
    if kernels is not None:
        powers = kernels.powers(gradients, norm_type)
    elif chosen.native is not None and gradients[0].is_cpu:
        powers = powers_by_loops(chosen.native, gradients, norm_type)
    return powers_by_torch(gradients, norm_type) if powers is None else powers


def powers_by_loops(loops: Native, tensors: Sequence[Tensor], norm_type: float) -> Tensor | None:
    """[n] float64: `Native.powers`, of tensors on the CPU of one dtype; None where the loops have not their like."""
    kind, dtype = NORM_TYPES.get(norm_type), DTYPES.get(tensors[0].dtype)
    if kind is None or dtype is None or not {*map(type, tensors)} <= PLAIN:
        return None
    tensors = [tensor if tensor.is_contiguous() else in_memory_order(tensor) for tensor in tensors]
    addresses, numels = array("Q", map(Tensor.data_ptr, tensors)), array("q", map(Tensor.numel, tensors))
    found, threads = torch.empty(len(tensors), dtype=torch.float64), torch.get_num_threads()
    (at, _), (lengths, _) = addresses.buffer_info(), numels.buffer_info()
    if loops.powers(len(tensors), at, lengths, dtype, kind, found.data_ptr(), threads):
        raise MemoryError(NO_MEMORY)
    return found
