"""The optimizers of torch whose updates the library's kernels make, in the order of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
