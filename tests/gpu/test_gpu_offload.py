"""Offloaded states: equal training, and the freed GPU memory."""

from __future__ import annotations

import gc

import torch
from meshstep.optim import Offloaded, ParallelOptimizer
from meshstep.parallel import ProcessGroupRegistry, Topology
from torch import nn

LAYERS = 4


def trained(device: torch.device, width: int, fraction: float) -> tuple[list[torch.Tensor], int]:
    """Return the final weights, moved to the CPU, and the bytes that stay allocated on the GPU between steps."""
    torch.manual_seed(0)
    before = allocated(device)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))).to(device)
    optimizer = ParallelOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=True),
        ProcessGroupRegistry(Topology()),
        max_norm=0.5,
        states=Offloaded(fraction),
    )
    for step in range(4):
        inputs = torch.randn(8, width, generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        optimizer.backward(model(inputs).square().mean())
        optimizer.step()
    optimizer.zero_grad()
    kept = allocated(device) - before
    return [param.detach().cpu() for param in model.parameters()], kept


def allocated(device: torch.device) -> int:
    """Return the bytes of living tensors on the GPU; 0 on the CPU."""
    gc.collect()  # the optimizer of an earlier run is in reference cycles
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def test_offloaded_states_free_gpu_memory_and_train_equally(device: torch.device) -> None:
    width = 1024 if device.type == "cuda" else 32
    # The first run also allocates memory that libraries keep.
    _, (expected, whole), (found, rest) = (trained(device, width, fraction) for fraction in (0.0, 0.0, 1.0))
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    elements = LAYERS * (width * width + width)
    if device.type == "cuda":
        assert whole - rest >= 0.95 * 8 * elements  # two moments
