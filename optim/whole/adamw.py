"""AdamW, for what has no whole to ask for: elementwise (arXiv:1711.05101).

m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
w <- w - lr (wd w + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))
"""

from __future__ import annotations

from typing import Any

import torch

from .optimizer import Slot, Update

ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def moments(slot: Slot) -> dict[str, Any]:
    """Adam's two of a position, before its first step: of the piece's shape and dtype."""
    zeros = torch.zeros_like(slot.param, memory_format=torch.contiguous_format)
    return {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}


def adamw_update(slot: Slot) -> Update:
    """One step. Collectives, host reads: none."""
    group, t = slot.group, slot.step
    beta1, beta2 = group["betas"]
    m = slot.state["exp_avg"].lerp(slot.grad, 1 - beta1)
    v = slot.state["exp_avg_sq"].lerp(slot.grad.square(), 1 - beta2)
    m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
    param = slot.param * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * m_hat / (v_hat.sqrt() + group["eps"])
    return Update(slot, param, {"exp_avg": m, "exp_avg_sq": v})
