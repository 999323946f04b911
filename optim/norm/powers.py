"""Powers of one rank's gradients, computed without a collective. The power of a gradient g is the sum of |g|^p.

`local_powers` chooses the kernels: compiled loops, Triton kernels, or torch's kernels (`powers_by_torch`). Up to
p = 6, the power of a finite float32 or half-precision gradient neither overflows nor underflows in float64.

On devices with float64, sums are accumulated in float64. Exception: torch's kernels on a CPU sum `ROW` squares of
float32 gradients at a time in float32. ``torch.linalg.vector_norm`` on a CPU would accumulate all squares of a float32
gradient in float32; its relative error is 1e-5 at a million elements and 3e-4 at ten million.

For p >= `HIGH` = 12, p-th powers often leave the range of float64, so norms replace powers. `p_norm` combines norms: it
divides them by their maximum before it raises them to the power p.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from ..kernels.choice import chosen, triton_on
from ..kernels.device_constants import Constants
from ..kernels.memory import DEVICE, DTYPE, PLAIN, in_memory_order
from ..kernels.native import DTYPES, MEAN_OF, NO_MEMORY, NORM_TYPES, Native

SMALL = 1024  # `_powers_on_cpu` sums all gradients with at most this many elements in one kernel call
ROW = 1024  # number of consecutive squares that are summed in float32
SCRATCH = 2**18  # number of elements that are cast to float64 at a time: 2 MiB
EXACT = 1e-29  # below this mean of squares, squares that underflow in float32 are not negligible
HIGH = 12.0  # for p >= HIGH, functions return p-norms instead of powers


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of powers and norms on ``device``: float64, or float32 on Apple GPUs (mps), which lack float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def powers_by_torch(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the values of `local_powers`, [n] of `accumulation_dtype`, computed with torch's kernels."""
    dtype = accumulation_dtype(gradients[0].device)
    if inf > norm_type >= HIGH:
        return torch.stack([_high_norm(g, norm_type).to(dtype) for g in gradients])
    if not gradients[0].is_cpu:
        return _powers_at_once(gradients, norm_type, dtype)
    if norm_type == inf:
        return torch.stack([_largest(g) for g in gradients]).to(dtype)
    return _powers_on_cpu(gradients, norm_type)


def p_norm(values: Tensor, norm_type: float, dim: int = 0) -> Tensor:
    """Return the p-norm of non-negative ``values`` along ``dim`` (default 0).

    Values are divided by their maximum first, so that their p-th powers do not overflow.
    """
    largest = values.amax(dim, keepdim=True)
    if norm_type == inf:
        return largest.squeeze(dim)
    unit = torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))
    return ((values / unit).pow(norm_type).sum(dim, keepdim=True).pow(1 / norm_type) * unit).squeeze(dim)


def _powers_at_once(gradients: Sequence[Tensor], norm_type: float, dtype: torch.dtype) -> Tensor:
    # Empty gradients are left out: they have no maximum, and torch's kernel gives wrong results for lists of more than a
    # hundred tensors if some are empty.
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
        # All small gradients are copied into one tensor, because one kernel call per small gradient costs more.
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
    """Return the sum of squares of a 1-dim float32 CPU tensor, 0-dim float64; None if float32 is not exact enough.

    Sums rows of `ROW` squares in float32, with a relative error of 1e-7, and adds the sums of the rows in float64. This
    takes a third of the time of `_power_by_parts`. The result is None if the sum is not finite, or if the mean square is
    below `EXACT` (also for zeros), where squares may underflow in float32.
    """
    whole = flat.numel() // ROW * ROW
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), 2, dim=1).double()
    rest = flat[whole:].double()
    power = norms.dot(norms) + rest.dot(rest)
    found = ctypes.c_double.from_address(power.data_ptr()).value  # reads CPU memory: no host synchronization
    return power if flat.numel() * EXACT <= found < inf else None


def _power_by_parts(flat: Tensor, norm_type: float, scratch: Tensor) -> Tensor:
    """Return the sum of |g|^p, 0-dim float64. Casts one part at a time into ``scratch``, which fits into the CPU's cache.

    torch's kernels that cast while they sum take ten times as long.
    """
    sums = []
    for part in flat.split(len(scratch)):
        values = scratch[: len(part)].copy_(part)
        if norm_type == 2:
            sums.append(values.dot(values))
        else:
            sums.append((values.abs_() if norm_type == 1 else values.abs_().pow_(norm_type)).sum())
    return torch.stack(sums).sum()


def _segment_sums(values: Tensor, norm_type: float, lengths: list[int]) -> Tensor:
    """Return one sum of values^p per consecutive segment. ``values`` (non-negative, float64) may be overwritten."""
    values = values if norm_type == 1 else values.square_() if norm_type == 2 else values.pow_(norm_type)
    sums: Tensor = torch.segment_reduce(values, "sum", lengths=torch.tensor(lengths), unsafe=True)
    return sums


def flattened(tensor: Tensor) -> Tensor:
    """Return a 1-dim view of a dense tensor in memory order; a copy if no such view exists."""
    return tensor.view(-1) if tensor.is_contiguous() else in_memory_order(tensor)


def _largest(gradient: Tensor) -> Tensor:
    if gradient.numel() == 0:
        return gradient.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(gradient)
    return torch.maximum(low.neg(), high)


# Choice of the kernels that compute powers ----------------------------------------------------------------------------


def are_alike(tensors: Sequence[Tensor]) -> bool:
    return len({*map(DTYPE, tensors)}) == 1 and len({*map(DEVICE, tensors)}) == 1


def local_powers(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the power of each gradient: the sum of |g|^p, [n] float64. For p = inf, it is the largest |g|.

    For `HIGH` = 12 <= p < inf the values are p-norms instead. On a device without float64 the values are float32. A
    value is NaN or inf if its gradient has a NaN or inf. It is also inf if the sum overflows, which float64 sums of
    float32 and half-precision gradients do not up to p = 6.

    Relative errors: 1e-14 with the compiled loops (`Native`; p = 1, 2 and inf on a CPU) and with the Triton kernels
    (integer p and inf on a GPU); 1e-7 for squares of float32 gradients on a CPU without the compiled loops; 1e-12
    otherwise, if values are float64. GPU kernels cast every element to float64 as they read it, and sum in float64.

    ``gradients`` are dense real tensors of one float dtype, all on one device. ``norm_type`` is >= 1, or inf.
    Collectives, host synchronization: none.
    """
    if not gradients:
        return torch.zeros(0, dtype=torch.float64)
    device, powers = gradients[0].device, None
    high = inf > norm_type >= HIGH
    kernels = None if high else triton_on(device)
    if kernels is not None:
        powers = kernels.powers(gradients, norm_type)
    elif chosen.native is not None and gradients[0].is_cpu:
        powers = powers_by_loops(chosen.native, gradients, norm_type)
    return powers_by_torch(gradients, norm_type) if powers is None else powers


def mixed_powers(gradients: Sequence[Tensor], norm_type: float, device: torch.device, constants: Constants) -> Tensor:
    """Return `local_powers` of gradients of any dtypes and devices, in the order of ``gradients``.

    The result is on the device of the first gradient; without gradients it is an empty tensor on ``device``.
    """
    if not gradients:
        return torch.zeros(0, dtype=accumulation_dtype(device), device=device)
    if are_alike(gradients):
        return local_powers(gradients, norm_type)
    device, kinds = gradients[0].device, {(gradient.device, gradient.dtype) for gradient in gradients}
    found, order = list[Tensor](), list[int]()
    for kind in sorted(kinds, key=str):
        indices = [i for i, gradient in enumerate(gradients) if (gradient.device, gradient.dtype) == kind]
        kind_powers = local_powers([gradients[i] for i in indices], norm_type)
        found, order = [*found, kind_powers.to(device, accumulation_dtype(device))], order + indices
    powers = torch.cat(found)
    return powers[constants(("place", *order), partial(_invert_permutation, order), torch.int64, device)]


def _invert_permutation(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def powers_by_loops(loops: Native, tensors: Sequence[Tensor], norm_type: float) -> Tensor | None:
    """Return the powers of CPU tensors of one dtype, [n] float64, from the compiled loops.

    Return None if ``loops`` do not support ``norm_type``, the dtype or a class of the tensors.
    """
    kind, dtype = NORM_TYPES.get(norm_type), DTYPES.get(tensors[0].dtype)
    if kind is None or dtype is None or not {*map(type, tensors)} <= PLAIN:
        return None
    if not all(map(Tensor.is_contiguous, tensors)):
        tensors = [tensor if tensor.is_contiguous() else in_memory_order(tensor) for tensor in tensors]
    return _by_loop(loops.powers, tensors, dtype, kind, len(tensors))


def means_by_loops(loops: Native, tensors: Sequence[Tensor], norm_type: float) -> Tensor | None:
    """Return the mean of |g|^p per `MEAN_OF` consecutive elements of each tensor in turn, 1-dim float64.

    The additions have a fixed order. Missing elements at the end of a tensor count as zeros. Return None if ``loops`` do
    not support the dtype or a class of the tensors.

    ``tensors`` are contiguous. ``norm_type`` is 1 or 2.
    """
    dtype = tensors[0].dtype
    if dtype == torch.float64 or dtype not in DTYPES or not {*map(type, tensors)} <= PLAIN:
        return None
    count = sum(-(-tensor.numel() // MEAN_OF) for tensor in tensors)
    return _by_loop(loops.means, tensors, DTYPES[dtype], NORM_TYPES[norm_type], count)


def _by_loop(loop: Callable[..., int], tensors: Sequence[Tensor], dtype: int, kind: int, count: int) -> Tensor:
    addresses, numels = array("Q", map(Tensor.data_ptr, tensors)), array("q", map(Tensor.numel, tensors))
    found, threads = torch.empty(count, dtype=torch.float64), torch.get_num_threads()
    (at, _), (lengths, _) = addresses.buffer_info(), numels.buffer_info()
    if loop(len(tensors), at, lengths, dtype, kind, found.data_ptr(), threads):
        raise MemoryError(NO_MEMORY)
    return found
