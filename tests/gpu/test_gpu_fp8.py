"""Linear layers in 8 bits on tensor cores, and the emulation that other devices run."""

from __future__ import annotations

import torch
from meshstep.amp import Fp8
from meshstep.amp.fp8_linear import Fp8Linear, has_fp8
from torch import Tensor


def passed(device: torch.device, bias: bool, dtype: torch.dtype) -> list[Tensor]:
    """Return output and gradients, moved to the CPU."""
    torch.manual_seed(4)
    layer = Fp8Linear(64, 48, bias=bias)
    inputs, outer = torch.randn(32, 64, dtype=dtype), torch.randn(32, 48, dtype=dtype)
    layer, inputs = layer.to(device), inputs.to(device).requires_grad_()
    output = layer(inputs)
    output.backward(outer.to(device))
    assert layer.weight.grad is not None
    assert inputs.grad is not None
    return [output.detach().cpu(), inputs.grad.cpu(), layer.weight.grad.cpu()]


def test_fp8_linear_on_tensor_cores_matches_emulation(device: torch.device) -> None:
    """The 8-bit operands are equal, but a GPU accumulates with fewer bits."""
    for bias in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            for found, expected in zip(
                passed(device, bias, dtype), passed(torch.device("cpu"), bias, dtype), strict=True
            ):
                error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
                assert float(error) < (1e-2 if dtype == torch.bfloat16 else 2e-3)


def test_has_fp8_is_true_from_compute_capability_8_9(device: torch.device) -> None:
    capable = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    assert has_fp8(device) == capable


def test_fp8_model_reduces_its_loss_to_a_quarter(device: torch.device) -> None:
    torch.manual_seed(0)
    model = Fp8().prepare(
        torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16)).to(device)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(64, 32, device=device)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs[:, :16].sin()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 4
