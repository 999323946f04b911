"""The sums of |g|^p that one rank computes by itself, in one read of the gradients.

The plain reference is `reference_powers`, in float64 throughout. `local_powers` reads float32 and half gradients once at
memory speed: rows of 1,024 elements are accumulated in float32, the rows in float64. One float32 accumulator over a whole
gradient, which is what a plain ``vector_norm`` on a CPU amounts to, is 1e-5 off at a million elements and 3e-4 at ten
million; rows stay below 1e-7.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from ...amp.casting import is_half

ROW = 1024
SCRATCH = 2**20  # elements of half precision that are cast at a time


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device that has none."""
    return torch.float32 if device.type == "mps" else torch.float64


def reference_powers(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """[n] float64: the sum of |g|^p of each gradient, its largest |g| for p = inf. Slow and plain."""
    if norm_type == inf:
        powers = [g.double().abs().max() if g.numel() else g.new_zeros((), dtype=torch.float64) for g in gradients]
    else:
        powers = [g.double().abs().pow(norm_type).sum() for g in gradients]
    return torch.stack(powers) if powers else torch.zeros(0, dtype=torch.float64)


def local_powers(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """[n] float64: the sum of |g|^p of each gradient, its largest |g| for p = inf.

    A NaN or inf in a gradient makes its entry NaN or inf. Squares are float32 inside a row, so finite values beyond 1e19
    count as inf; for p other than 1, 2 and inf everything is float64, at several times the cost on a CPU.

    Args:
        gradients: Dense real tensors of any float dtype, all on one device.
        norm_type: p >= 1, or inf.
    Collectives: none. Host reads: none.
    """
    if not gradients:
        return torch.zeros(0, dtype=torch.float64)
    dtype = accumulation_dtype(gradients[0].device)
    if norm_type == inf:
        return torch.stack([_largest(g) for g in gradients]).to(dtype)
    if gradients[0].is_cpu:
        return _powers_by_rows(gradients, norm_type)
    # On a GPU the multi-tensor kernel reduces in a tree, which is as exact as rows are.
    norms = torch._foreach_norm(list(gradients), norm_type, dtype=_row_dtype(gradients[0], norm_type))
    return torch.stack(norms).to(dtype).pow(norm_type)


def _row_dtype(gradient: Tensor, norm_type: float) -> torch.dtype:
    exact_in_float32 = norm_type in (1.0, 2.0) and gradient.dtype != torch.float64
    return torch.float32 if exact_in_float32 else accumulation_dtype(gradient.device)


def _powers_by_rows(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    powers = torch.zeros(len(gradients), dtype=torch.float64)
    small = [i for i, gradient in enumerate(gradients) if gradient.numel() <= ROW]
    large = [i for i, gradient in enumerate(gradients) if gradient.numel() > ROW]
    if small:
        # Gathered into one tensor: a thousand kernel calls on a few elements each would cost more than a copy of them.
        tensors = [gradients[i] for i in small]
        values = _flatten_dense_tensors(tensors).double().abs()  # one float64 gradient is flattened to itself
        powers[small] = _segment_sums(values, norm_type, [tensor.numel() for tensor in tensors])
    if large:
        rows = [_norms_of_rows(gradients[i], norm_type) for i in large]
        powers[large] = _segment_sums(torch.cat(rows).double(), norm_type, [len(norms) for norms in rows])
    return powers


def _norms_of_rows(gradient: Tensor, norm_type: float) -> Tensor:
    flat, dtype = flattened(gradient), _row_dtype(gradient, norm_type)
    if is_half(flat) and dtype == torch.float32:
        # A copy and its norm take an eighth of the time of a norm that casts as it goes; new memory costs more than both.
        scratch = torch.empty(min(flat.numel(), SCRATCH), dtype=dtype)
        return torch.cat([_norms_of_rows(scratch[: len(p)].copy_(p), norm_type) for p in flat.split(SCRATCH)])
    whole = flat.numel() // ROW * ROW
    norms: Tensor = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), norm_type, dim=1, dtype=dtype)
    if whole == flat.numel():
        return norms
    return torch.cat([norms, torch.linalg.vector_norm(flat[whole:], norm_type, dtype=dtype).view(1)])


def _segment_sums(values: Tensor, norm_type: float, lengths: list[int]) -> Tensor:
    """Sums of values^p over consecutive segments; ``values`` float64, not negative, overwritten."""
    values = values if norm_type == 1 else values.square_() if norm_type == 2 else values.pow_(norm_type)
    sums: Tensor = torch.segment_reduce(values, "sum", lengths=torch.tensor(lengths), unsafe=True)
    return sums


def flattened(tensor: Tensor) -> Tensor:
    """1-dim view of a dense tensor in memory order (any order serves a norm); a copy where there is no such view."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    by_stride = sorted(range(tensor.dim()), key=lambda dim: tensor.stride(dim), reverse=True)
    return tensor.permute(by_stride).reshape(-1)


def _largest(gradient: Tensor) -> Tensor:
    if gradient.numel() == 0:
        return gradient.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(gradient)
    return torch.maximum(low.neg(), high)
