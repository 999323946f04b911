"""What can be wrong with gradients, found before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..norm.entries import ParameterEntry, check_dense_real
from .in_place import gradient_dtype


def check_kinds(params: Sequence[Tensor], entries: Sequence[ParameterEntry]) -> None:
    """Raise TypeError, with the name, for a complex or sparse gradient."""
    gradients = [param.grad for param in params]
    kinds = {(gradient.layout, gradient.dtype) for gradient in gradients if gradient is not None}
    if all(layout is torch.strided and not dtype.is_complex for layout, dtype in kinds):
        return
    for gradient, entry in zip(gradients, entries, strict=True):
        if gradient is not None:
            check_dense_real(gradient, f"the gradient of {entry.name}")


def poison_bad_kinds(params: Sequence[Tensor], entries: Sequence[ParameterEntry]) -> TypeError | None:
    """Put NaN in place of gradients that have no norm; returns the error to raise when all ranks have been served.

    The rank keeps its part in the collectives that way, and all ranks skip the step.
    """
    try:
        check_kinds(params, entries)
    except TypeError as problem:
        for param in params:
            if param.grad is not None and (param.grad.is_complex() or param.grad.layout != torch.strided):
                param.grad = torch.full_like(param, torch.nan, dtype=gradient_dtype(param))
        return problem
    return None


def nonfinite_names(
    params: Sequence[Tensor], entries: Sequence[ParameterEntry], registry: ProcessGroupRegistry
) -> list[str]:
    """Names of the parameters whose gradients are not finite on any rank. Collectives, host reads: yes; for errors."""
    mine = [
        entry.name
        for param, entry in zip(params, entries, strict=True)
        if param.grad is not None and not bool(param.grad.isfinite().all())
    ]
    return list(dict.fromkeys(name for report in gather_objects(mine, registry) for name in report))
