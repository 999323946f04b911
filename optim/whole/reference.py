"""Each optimizer once more, plain: whole tensors, one after another, in one process. What tests compare with.

A function makes one step of a list of parameters, in place; ``states`` has a dictionary for each of them, empty at first.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

States = Sequence[dict[str, Any]]


def muon(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: States,
    lr: float,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    eps: float = 1e-7,
    steps: int = 5,
) -> None:
    """Of matrices. Keller Jordan et al. (2024)."""
    a, b, c = coefficients
    for w, g, state in zip(params, grads, states, strict=True):
        m = state["m"] = momentum * state.get("m", torch.zeros_like(w)) + (1 - momentum) * g
        u = (1 - momentum) * g + momentum * m if nesterov else m
        x = u / max(float(u.norm()), eps)
        for _ in range(steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        w -= lr * (weight_decay * w + sqrt(max(1, w.shape[0] / w.shape[1])) * x)


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: States,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> None:
    """arXiv:1711.05101."""
    for w, g, state in zip(params, grads, states, strict=True):
        t = state["t"] = state.get("t", 0) + 1
        m = state["m"] = betas[0] * state.get("m", torch.zeros_like(w)) + (1 - betas[0]) * g
        v = state["v"] = betas[1] * state.get("v", torch.zeros_like(w)) + (1 - betas[1]) * g * g
        w -= lr * (weight_decay * w + (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps))
