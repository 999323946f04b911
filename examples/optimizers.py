"""The optimizers that `--optimizer` names, with one learning rate for all that makes sense: AdamW's."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import torch
from meshstep.optim import Muon
from torch import Tensor, nn

Named = Iterable[tuple[str, nn.Parameter]]
NO_MATRICES = ("embed*", "positions", "*bias", "*router*")
QKV = {"*qkv.weight": 3}  # three matrices in one


def _adamw(params: Named, lr: float | Tensor, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, weight_decay=0.05, fused=True, **options)


def _muon(params: Named, lr: float | Tensor) -> torch.optim.Optimizer:
    """With the scale that makes its updates as large as AdamW's."""
    adamw = {"weight_decay": 0.05, "betas": (0.9, 0.999)}
    scale: Any = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.05}
    return Muon(params, lr, **scale, adamw=adamw, no_matrices=NO_MATRICES, blocks=QKV)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": _adamw, "muon": _muon}


def add_optimizer(parser: argparse.ArgumentParser) -> None:
    """``--optimizer``."""
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="adamw", help="see optimizers.py (default: %(default)s)"
    )


def optimizer_of(name: str, params: Named, lr: float | Tensor, **options: Any) -> torch.optim.Optimizer:
    """The one of that name.

    Args:
        options: Of AdamW alone.
    Raises:
        ValueError: They are given to another one.
    """
    if options and name != "adamw":
        raise ValueError(f"--optimizer {name} has no {', '.join(options)}: take adamw, or another --precision")
    return OPTIMIZERS[name](params, lr, **options)
