"""Optimizers whose update of a whole tensor is made of those of its elements; others can't be given pieces."""

from __future__ import annotations

import torch

from ...parallel.interop.local import has_dtensors

_ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,  # and AdamW
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def check_elementwise(optimizer: torch.optim.Optimizer, why: str) -> None:
    """Raise ValueError if the optimizer is not known to treat every element alike."""
    if not (isinstance(optimizer, _ELEMENTWISE) or getattr(optimizer, "elementwise", False)):
        raise ValueError(
            f"{why}, which is right only for optimizers that treat all elements alike (Adam, SGD, ...), and "
            f"{type(optimizer).__name__} is not known to; if this one does, set optimizer.elementwise = True"
        )


def check_update(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the update of a whole matrix isn't made of those of its pieces, and DTensors are stepped so."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if isinstance(optimizer, (torch.optim.Muon, torch.optim.Adafactor)) and has_dtensors(params):
        raise ValueError(
            f"{type(optimizer).__name__} computes with whole matrices, but DTensor parameters are stepped piece by piece; "
            "take an optimizer that treats every element alike (AdamW, SGD, ...)"
        )
