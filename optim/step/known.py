"""The optimizers of torch whose updates the library's kernels make, in the order of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.native import Kind


@dataclass(frozen=True)
class Known:
    """An optimizer of torch, in the order of the kernels.

    Args:
        kind: Its formula.
        hyper: The keys of its numbers in a param group; ``"betas"`` are two.
        states: Their names.
        last: The key in a param group without which there is no last state.
        counted: It counts the steps of each parameter.
    """

    kind: Kind
    hyper: tuple[str, ...]
    states: tuple[str, ...]
    last: str | None = None
    counted: bool = True


ADAM = Known(
    Kind.ADAM,
    ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "amsgrad"),
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    last="amsgrad",
)
KNOWN: Mapping[type, Known] = {
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
    torch.optim.SGD: Known(
        Kind.SGD,
        ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
        ("momentum_buffer",),
        last="momentum",
        counted=False,
    ),
    torch.optim.Adagrad: Known(Kind.ADAGRAD, ("lr", "lr_decay", "eps", "weight_decay"), ("sum",)),
}


def first_value(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], name: str) -> float:
    """Return what torch fills a new state of the parameter's shape with.

    Args:
        optimizer: One of torch's, or any other, whose states start from 0.
        group: The parameter's param group.
        name: The state's.
    """
    if isinstance(optimizer, torch.optim.Adagrad) and name == "sum":
        return float(optimizer.defaults["initial_accumulator_value"])  # also where the group has its own, as torch does
    if isinstance(optimizer, torch.optim.Rprop) and name == "step_size":
        return float(group["lr"])
    return 0.0
