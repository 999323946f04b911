"""Gradients that a test sets itself, without a backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from meshstep.optim import ParallelOptimizer


@contextmanager
def setting_gradients(optimizer: ParallelOptimizer[Any]) -> Iterator[None]:
    """Let the body set gradients in place of a backward: they count as those of one micro-batch's scaled loss."""
    with optimizer.window():
        optimizer.scale_loss(torch.zeros((), device=optimizer.device))
        yield
