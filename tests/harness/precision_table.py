"""The table of precision modes: the dtypes of weights, inputs, outputs and exported weights, and the model to inspect."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from meshstep.amp import (
    ApexFp16,
    Bf16,
    Fp32,
    NaiveFp16,
    Precision,
    TorchFp16,
)
from torch import Tensor, nn
from torch.nn import functional as F

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Net(nn.Module):
    """Integer and floating inputs, a convolution, batch norm, layer norm and a tied weight."""

    position: Tensor
    seen: list[torch.dtype]

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.conv = nn.Conv1d(3, 6, 3, padding=1)
        self.bn = nn.BatchNorm1d(6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("position", torch.linspace(0, 1, 6))
        self.seen = []

    def forward(self, x: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        self.seen.append(x.dtype)
        hidden = F.relu(self.bn(self.conv(x))).mean(2) + self.embed(tokens) + self.position
        return {"logits": self.head(self.norm(hidden)), "tokens": tokens}


class Row(NamedTuple):
    """A row of the table: the expected dtypes, whether there are master weights, and the initial loss scale (or None).

    ``inside`` is the dtype of the floating-point input that `Net.forward` receives.
    """

    params: torch.dtype
    batch_norm: torch.dtype
    inside: torch.dtype
    outputs: torch.dtype
    masters: bool
    scale: float | None
    exported: torch.dtype


TABLE: dict[str, tuple[Precision, Row]] = {
    "fp32": (Fp32(), Row(F32, F32, F32, F32, False, None, F32)),
    "fp16": (TorchFp16(), Row(F32, F32, F32, F16, False, 2.0**16, F32)),
    "bf16": (Bf16(), Row(BF16, BF16, BF16, BF16, True, None, BF16)),
    "bf16 split": (Bf16(split_masters=True), Row(BF16, BF16, BF16, BF16, True, None, BF16)),
    "bf16 stochastic": (Bf16(stochastic_rounding=True), Row(BF16, BF16, BF16, BF16, False, None, BF16)),
    "naive": (NaiveFp16(), Row(F16, F16, F16, F32, True, 2.0**16, F16)),
    "naive bn": (NaiveFp16(keep_batchnorm_fp32=True), Row(F16, F32, F16, F32, True, 2.0**16, F16)),
    "O0": (ApexFp16("O0"), Row(F32, F32, F32, F32, False, 1.0, F32)),
    "O1": (ApexFp16("O1"), Row(F32, F32, F32, F16, False, 2.0**16, F32)),
    "O2": (ApexFp16("O2"), Row(F16, F32, F16, F32, True, 2.0**16, F32)),
    "O2 bn": (ApexFp16("O2", keep_batchnorm_fp32=False), Row(F16, F16, F16, F32, True, 2.0**16, F32)),
    "O3": (ApexFp16("O3"), Row(F16, F16, F16, F32, False, 1.0, F32)),
    "O3 bn": (ApexFp16("O3", keep_batchnorm_fp32=True, loss_scale=128), Row(F16, F32, F16, F32, False, 128.0, F32)),
}


def batch(dtype: torch.dtype = F32) -> tuple[Tensor, Tensor]:
    """Return inputs of `Net`."""
    return torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(3)).to(dtype), torch.tensor([1, 2, 3, 1, 10])


def floating(tensors: dict[str, Any]) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in tensors.items() if tensor.is_floating_point()}


def expected_dtypes(row: Row, model: nn.Module) -> dict[str, torch.dtype]:
    """Return the expected dtypes of a prepared `Net`'s parameters and buffers."""
    return {name: row.batch_norm if name.startswith("bn.") else row.params for name in floating(model.state_dict())}
