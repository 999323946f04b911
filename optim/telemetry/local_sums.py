"""What a rank finds by itself of the tensors that it holds: sums of squares, of zeros, of what half precision loses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...amp.casting import is_half
from ..norm.constants import Constants
from ..norm.global_norm import local_powers
from ..norm.powers import SCRATCH, accumulation_dtype, flattened

SMALLEST_NORMAL = 2.0**-14
"""Of float16; what is smaller is subnormal there, with fewer than its 11 bits, or 0."""


def squares(tensors: Sequence[Tensor | None], device: torch.device, constants: Constants) -> Tensor:
    """[n] float64, on ``device``: the sum of squares of each tensor, on any device and of any float dtype; 0 for None.

    Args:
        constants: Keep where in the result these tensors stand.
    """
    dtype = accumulation_dtype(device)
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            kinds.setdefault((tensor.device, tensor.dtype), []).append(index)
    if len(kinds) == 1 and all(tensor is not None for tensor in tensors):
        return local_powers([tensor for tensor in tensors if tensor is not None], 2.0).to(device, dtype)
    found = torch.zeros(len(tensors), dtype=dtype, device=device)
    for indices in kinds.values():
        of_kind = local_powers([tensor for index in indices if (tensor := tensors[index]) is not None], 2.0)
        found[_places(indices, device, constants)] = of_kind.to(device, dtype)
    return found


def counts(
    gradients: Sequence[Tensor | None], numels: Sequence[int], device: torch.device, constants: Constants
) -> Tensor:
    """[2, n] float64, on ``device``: how many elements of each gradient are 0, and how many are smaller than
    `SMALLEST_NORMAL`, zeros among them. One that did not come counts as zeros.

    Args:
        numels: Of what they are the gradients of.
        constants: Keep these, and where in the result the gradients stand that came.
    """
    dtype = accumulation_dtype(device)
    came = [index for index, gradient in enumerate(gradients) if gradient is not None]
    filled = [_counts(gradient.detach()) for gradient in gradients if gradient is not None]
    here = torch.stack([of_one.to(device) for of_one in filled], 1).to(dtype) if filled else None
    if here is not None and len(came) == len(gradients):
        return here
    found = constants(tuple(numels), lambda: numels, dtype, device).repeat(2, 1)
    if here is not None:
        found[:, _places(came, device, constants)] = here
    return found


def _places(indices: list[int], device: torch.device, constants: Constants) -> Tensor:
    return constants(tuple(indices), indices.copy, torch.int64, device)


def _counts(gradient: Tensor) -> Tensor:
    """[2] float64; of a NaN neither is said."""
    flat, dtype = flattened(gradient), accumulation_dtype(gradient.device)
    # On a CPU in parts that stay in the cache: fresh memory for all of it would cost more than to read it.
    length = SCRATCH if gradient.is_cpu else max(len(flat), 1)
    scratch = torch.empty_like(flat[:length])
    found = []
    for part in flat.split(length):
        size = torch.abs(part, out=scratch[: len(part)])
        zeros = (len(part) - size.count_nonzero()).to(dtype)
        found.append(torch.stack([zeros, size.lt_(SMALLEST_NORMAL).sum(dtype=dtype)]))
    return found[0] if len(found) == 1 else torch.stack(found).sum(0)


def kept(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, from which `changes_` can subtract: float32 of half-precision ones, else of the same dtype."""
    return [tensor.detach().float() if is_half(tensor) else tensor.detach().clone() for tensor in tensors]


def changes_(before: Sequence[Tensor], after: Sequence[Tensor]) -> Sequence[Tensor]:
    """``before`` minus ``after``, in place. Of what is float32 or half a difference is rounded to float32, where it is
    rounded at all: not between numbers within twice of each other."""
    if before:
        torch._foreach_sub_(list(before), [tensor.detach() for tensor in after])
    return before
