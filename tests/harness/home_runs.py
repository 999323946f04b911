"""Optimizers whose states live at homes, as tests step them, and what they leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from meshstep.optim import SOAP, ParallelOptimizer, Shampoo, load_checkpoint, save_checkpoint
from meshstep.optim.whole import AnyOptimizer, HomeOptimizer, whole
from meshstep.parallel import ProcessGroupRegistry
from planted import Layout, Part, Planted, parts, run_step
from zero_models import small_buckets

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
    """What is wrong: every piece is a matrix."""
    return {"soap": bare_soap, "shampoo": bare_shampoo, "adafactor": bare_adafactor}[kind]


def bare(optimizer: HomeOptimizer) -> HomeOptimizer:
    optimizer.bind = lambda pieces, registry: None  # type: ignore[method-assign]
    return optimizer


def bare_soap(params: Iterable[Any]) -> HomeOptimizer:
    return bare(soap(params, blocks={}))


def bare_shampoo(params: Iterable[Any]) -> HomeOptimizer:
    return bare(shampoo(params, blocks={}))


def bare_adafactor(params: Iterable[Any]) -> HomeOptimizer:
    return bare(adafactor(params))


def run_to(
    layout: Layout, kind: str, folder: Path, steps: range, load: bool, options: dict[str, Any], seed: Any = None
) -> list[Part]:
    """Some steps, from a checkpoint or to one."""
    with ProcessGroupRegistry(layout.topology) as registry, small_buckets(64):
        model = Planted(layout, registry.global_rank, torch.float64)
        optimizer = ParallelOptimizer(MAKES[kind](model.named_parameters()), registry, **options)
        if load:
            load_checkpoint(folder, model, optimizer)
        for step in steps:
            run_step(model, optimizer, step)
            optimizer.step()
        if not load:
            save_checkpoint(folder, model, optimizer)
        return parts(layout, optimizer)


def at_homes(optimizer: torch.optim.Optimizer) -> list[str]:
    """The keys of what this rank has of states at home."""
    part: Any = getattr(optimizer, "optimizer", optimizer)
    return [key for state in part.state.values() for key in state if part.is_whole_state(key)]
