"""The optimizers that `--optimizer` names, each with a learning rate that goes by AdamW's, which `--lr` is."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import torch
from meshstep.optim import LAMB, SOAP, Adafactor, Muon
from torch import Tensor, nn

Named = Iterable[tuple[str, nn.Parameter]]
NO_MATRICES = ("embed*", "positions", "*bias", "*router*")


def _adamw(params: Named, lr: float | Tensor, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, weight_decay=0.05, fused=True, **options)


def _muon(params: Named, lr: float | Tensor) -> torch.optim.Optimizer:
    """With the scale that goes by the size of AdamW's updates, and is that of a transposed weight, as 2-D layers have it.

    The iteration is float32, not bfloat16 as by default: the curves of two topologies, whose gradients are summed in other
    orders, are then equal to more digits.
    """
    adamw = {"lr": lr, "weight_decay": 0.05, "betas": (0.9, 0.999)}
    options: Any = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.02, "ns_dtype": None}
    return Muon(params, 3 * lr, **options, adamw=adamw, no_matrices=NO_MATRICES)


def _lamb(params: Named, lr: float | Tensor) -> torch.optim.Optimizer:
    return LAMB(params, 5 * lr, weight_decay=0.05)


def _adafactor(params: Named, lr: float | Tensor) -> torch.optim.Optimizer:
    return Adafactor(params, 5 * lr, weight_decay=0.01)


def _soap(params: Named, lr: float | Tensor) -> torch.optim.Optimizer:
    return SOAP(params, lr, weight_decay=0.05)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "muon": _muon,
    "lamb": _lamb,
    "adafactor": _adafactor,
    "soap": _soap,
}


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
