"""The optimizers of `--optimizer`. Their learning rates are derived from `--lr`, which is the rate of AdamW."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from meshstep.optim import LAMB, SOAP, Adafactor, Muon
from torch import Tensor, nn

Named = Iterable[tuple[str, nn.Parameter]]
ADAMW_NAMES = ("embed*", "positions", "*bias", "*router*")


def _muon(params: Named, lr: float | Tensor) -> torch.optim.Optimizer:
    """Return Muon with updates of the size of AdamW updates, also for transposed weights, as 2-D layers have.

    The Newton-Schulz iteration uses the parameters' dtype instead of the default bfloat16, so that curves of two
    topologies, which sum gradients in different orders, agree to more digits.
    """
    adamw = {"lr": lr, "weight_decay": 0.05, "betas": (0.9, 0.999)}
    options: Any = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.02, "ns_dtype": None}
    return Muon(params, 3 * lr, **options, adamw=adamw, adamw_names=ADAMW_NAMES)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, weight_decay=0.05, fused=True),
    "muon": _muon,
    "lamb": lambda params, lr: LAMB(params, 5 * lr, weight_decay=0.05),
    "adafactor": lambda params, lr: Adafactor(params, 5 * lr, weight_decay=0.01),
    "soap": partial(SOAP, weight_decay=0.05),
}


def add_optimizer(parser: argparse.ArgumentParser) -> None:
    """Add ``--optimizer``."""
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="adamw", help="see optimizer_flag.py (default: %(default)s)"
    )


def optimizer_of(name: str, params: Named, lr: float | Tensor, **options: Any) -> torch.optim.Optimizer:
    """Return the optimizer that ``--optimizer name`` selects.

    Args:
        options: Options of AdamW.
    Raises:
        ValueError: Options are given for another optimizer.
    """
    if options and name != "adamw":
        raise ValueError(
            f"--optimizer {name} does not support this --precision, which needs AdamW's option {', '.join(options)}: give "
            "--optimizer adamw, or another --precision"
        )
    return OPTIMIZERS[name](params, lr, **options)
