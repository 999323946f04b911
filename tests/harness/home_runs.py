"""Optimizers that keep states on owner ranks, as tests construct them, and inspection of these states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from meshstep.optim import SOAP, Shampoo
from meshstep.optim.whole import AnyOptimizer, HomeOptimizer, whole

BLOCKS = {"up": 2}


def soap(params: Iterable[Any], **options: Any) -> SOAP:
    given: dict[str, Any] = {"precondition_frequency": 3, "blocks": BLOCKS, "factor_dtype": torch.float64, **options}
    return SOAP(params, lr=0.1, **given)


def shampoo(params: Iterable[Any], **options: Any) -> Shampoo:
    given: dict[str, Any] = {"precondition_frequency": 2, "blocks": BLOCKS, "factor_dtype": torch.float64, **options}
    return Shampoo(params, lr=0.1, weight_decay=0.1, **{"epsilon": 1e-3, **given})


def adafactor(params: Iterable[Any]) -> AnyOptimizer:
    return whole(torch.optim.Adafactor(params, lr=0.1))


MAKES: dict[str, Callable[..., HomeOptimizer]] = {"soap": soap, "shampoo": shampoo, "adafactor": adafactor}


def unbound(kind: str) -> Callable[..., HomeOptimizer]:
    return {"soap": bare_soap, "shampoo": bare_shampoo, "adafactor": bare_adafactor}[kind]


def bare(optimizer: HomeOptimizer) -> HomeOptimizer:
    optimizer.bind = lambda rows, registry: None  # type: ignore[method-assign]
    return optimizer


def bare_soap(params: Iterable[Any]) -> HomeOptimizer:
    return bare(soap(params, blocks={}))


def bare_shampoo(params: Iterable[Any]) -> HomeOptimizer:
    return bare(shampoo(params, blocks={}))


def bare_adafactor(params: Iterable[Any]) -> HomeOptimizer:
    return bare(adafactor(params))


def at_homes(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the keys of the states that this rank owns."""
    part: Any = getattr(optimizer, "optimizer", optimizer)
    return [key for state in part.state.values() for key in state if part.is_whole_state(key)]
