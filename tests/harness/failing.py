"""A function whose backward raises, for tests of the state after a failed backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, error: Exception) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ctx.error


def fails_in_backward(x: Tensor, error: Exception) -> Tensor:
    result: Tensor = _Fails.apply(x, error)
    return result
