"""Gradients that a test sets itself, without a backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from meshstep.optim import ParallelOptimizer
from torch import Tensor


@contextmanager
def setting_gradients(optimizer: ParallelOptimizer[Any]) -> Iterator[None]:
    """Let the body set gradients in place of a backward: they count as those of one micro-batch's scaled loss."""
    with optimizer.window():
        optimizer.scale_loss(torch.zeros((), device=optimizer.device))
        yield


def run_backward(optimizer: ParallelOptimizer[Any], gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Run ``optimizer.backward`` with a backward that adds these gradients of the scaled loss, in their order.

    ``gradients`` are pairs (parameter, gradient). As autograd does, it calls the post-accumulate hooks of a parameter
    as soon as it has added the gradient.
    """

    def backward(loss: Tensor, **_: Any) -> None:
        for param, gradient in gradients:
            if param.grad is None:
                param.grad = gradient
            else:
                param.grad += gradient
            hooks: Any = param._post_accumulate_grad_hooks or {}
            for hook in list(hooks.values()):
                hook(param)

    with mock.patch.object(Tensor, "backward", backward):
        optimizer.backward(torch.zeros((), device=optimizer.device))
