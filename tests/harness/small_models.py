"""Small single-process models that several test files train, and their batches; models with layouts are in
`scenarios`."""

from __future__ import annotations

from typing import Literal

import torch
from meshstep.parallel import P, annotate
from torch import Tensor, nn
from torch.utils.data import TensorDataset

Base = Literal["bf16", "fp32"]  # the dtype of `small_model` before it is prepared


class Mlp(nn.Module):
    """A model with 6 input and 3 output features, and a layer norm in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(self.first(x)).tanh())
        return result


def mlp(dtype: torch.dtype, seed: int = 0) -> Mlp:
    """Return `Mlp`; equal seeds give equal weights."""
    torch.manual_seed(seed)
    return Mlp().to(dtype)


def parameter(
    name: str, numel: int = 4, spec: P | None = None, trained: bool = True, value: float = 0.0
) -> nn.Parameter:
    """Return a declared vector whose elements all have one value."""
    param = nn.Parameter(torch.full((numel,), value), requires_grad=trained)
    annotate(param, spec or P(), name)
    return param


def dataset(count: int = 48) -> TensorDataset:
    """Return samples for `classifier`: 6 features; the target is the index of the largest of the first three."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(count, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def classifier() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def small_model() -> nn.Sequential:
    """Return a model for 8-bit layers: a linear layer from 16 to 32 features, and two linear layers with 10 outputs or 10
    inputs, which fall back to higher precision."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 10), nn.Linear(10, 16))
