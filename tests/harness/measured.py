"""Optimizers that use norms of logical tensors: their class, plain reference, and options in the tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import whole_references
from meshstep.optim import CAME, LAMB, LARS, Adafactor, StableAdamW
from whole_runs import Make

OPTIONS: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[..., None], dict[str, Any]]] = {
    "LAMB": (LAMB, whole_references.lamb, {"lr": 0.05, "weight_decay": 0.1}),
    "LARS": (LARS, whole_references.lars, {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1, "trust_coeff": 0.1}),
    "StableAdamW": (StableAdamW, whole_references.stable_adamw, {"lr": 0.05, "weight_decay": 0.1}),
    "Adafactor": (Adafactor, whole_references.adafactor, {"lr": 0.05, "weight_decay": 0.1}),
    "CAME": (CAME, whole_references.came, {"lr": 0.003, "weight_decay": 0.1, "betas": (0.9, 0.99, 0.995)}),
}
MAKES: dict[str, Make] = {name: partial(kind, **options) for name, (kind, _, options) in OPTIONS.items()}
