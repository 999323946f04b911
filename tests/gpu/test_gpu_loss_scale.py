"""The loss scale changes like the one of torch's GradScaler."""

from __future__ import annotations

import torch
from meshstep.amp import DynamicLossScale
from torch import nn

OVERFLOWS = {0, 1, 7, 8, 20, 33, 34, 35}


def test_loss_scale_sequence_equals_grad_scaler_of_torch(device: torch.device) -> None:
    settings = {"init_scale": 2.0**20, "growth_interval": 4}
    scaler = torch.amp.GradScaler(device.type, **settings)  # type: ignore[arg-type]
    own = DynamicLossScale(**settings, device=device)  # type: ignore[arg-type]
    weight = nn.Parameter(torch.ones(3, device=device))
    sgd = torch.optim.SGD([weight], lr=0.0)
    expected, found = [], []
    for step in range(40):
        sgd.zero_grad()
        overflow = torch.tensor(float(step in OVERFLOWS), device=device)
        loss = (weight * torch.where(overflow > 0, torch.inf, 1.0)).sum()
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(sgd)
        scaler.update()
        own.update(overflow)
        expected.append(scaler.get_scale())
        found.append(float(own.scale))
    assert found == expected
    assert len(set(expected)) > 3
