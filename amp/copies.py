"""Copies of many tensors at once: on a GPU a few kernels for all of them, not one a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_each_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into the target of the same shape and device, cast to its dtype.

    torch's multi-tensor copy is one kernel a tensor for the whole list as soon as one pair has unequal strides or other
    dtypes than the rest (one gradient that is channels_last in a bucket, say). So those go by themselves.
    """
    alike: dict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.stride() != source.stride():
            if not (target.is_contiguous() and source.is_contiguous()):
                target.copy_(source)
                continue
            target, source = target.view(-1), source.view(-1)  # a dim of length 1 has whatever stride
        of_targets, of_sources = alike.setdefault((target.device, target.dtype, source.dtype), ([], []))
        of_targets.append(target)
        of_sources.append(source)
    for of_targets, of_sources in alike.values():
        torch._foreach_copy_(of_targets, of_sources)


def has_equal_values(tensor: Tensor, copy: Tensor) -> bool:
    """Return True if ``copy``, cast to the dtype and device of ``tensor``, equals it. NaNs are equal, and so are 0 and -0.

    Memory: of one cast copy; where the two differ, of three masks. Host synchronization: one or two.
    """
    if tensor.shape != copy.shape:
        return False
    cast = copy.to(tensor.device, tensor.dtype)
    if torch.equal(tensor, cast):
        return True
    return bool(((tensor == cast) | (tensor.isnan() & cast.isnan())).all())


def float32_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in float32, of the same strides."""
    copies = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    copy_each_(copies, tensors)
    return copies
