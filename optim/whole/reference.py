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


def soap(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: States,
    lr: float = 3e-3,
    betas: tuple[float, float] = (0.95, 0.95),
    shampoo_beta: float = -1,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10000,
) -> None:
    """Of matrices, and of vectors. arXiv:2409.11321."""
    beta3 = betas[1] if shampoo_beta < 0 else shampoo_beta
    for w, g, state in zip(params, grads, states, strict=True):
        outer = [g @ g.T, g.T @ g] if g.dim() == 2 else []
        used = [size <= max_precond_dim for size in g.shape]
        if not state:
            gg = [(1 - beta3) * one for one in outer]
            bases = [torch.linalg.eigh(one).eigenvectors.flip(1) for one in gg]
            q = [basis if use else torch.eye(len(basis)).to(g) for basis, use in zip(bases, used, strict=False)]
            state.update(k=0, m=torch.zeros_like(w), v=torch.zeros_like(w), gg=gg, q=q)
            continue
        k, gg, q = state["k"] + 1, state["gg"], state["q"]
        m = betas[0] * state["m"] + (1 - betas[0]) * g
        v = betas[1] * state["v"] + (1 - betas[1]) * (q[0].T @ g @ q[1] if q else g) ** 2
        u = (q[0].T @ m @ q[1] if q else m) / (v.sqrt() + eps)
        w -= lr * sqrt(1 - betas[1] ** k) / (1 - betas[0] ** k) * (q[0] @ u @ q[1].T if q else u)
        w *= 1 - lr * weight_decay
        for dim, one in enumerate(outer):
            gg[dim] = beta3 * gg[dim] + (1 - beta3) * one
            if used[dim] and k % precondition_frequency == 0:
                order = torch.diag(q[dim].T @ gg[dim] @ q[dim]).argsort(descending=True)
                v = v.index_select(dim, order)
                q[dim] = torch.linalg.qr(gg[dim] @ q[dim][:, order])[0]
        state.update(k=k, m=m, v=v)


def shampoo(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: States,
    lr: float = 1e-2,
    betas: tuple[float, float] = (0.9, 1.0),
    epsilon: float = 1e-12,
    weight_decay: float = 0.0,
    max_preconditioner_dim: int = 1024,
    precondition_frequency: int = 1,
    grafting: str = "adam",
    grafting_beta2: float = 0.999,
    grafting_epsilon: float = 1e-8,
) -> None:
    """Of matrices, and of vectors. arXiv:1802.09568, arXiv:2309.06497."""
    for w, g, state in zip(params, grads, states, strict=True):
        t = state["t"] = state.get("t", 0) + 1
        m = state["m"] = betas[0] * state.get("m", torch.zeros_like(w)) + (1 - betas[0]) * g
        v = state["v"] = grafting_beta2 * state.get("v", torch.zeros_like(w)) + (1 - grafting_beta2) * g**2
        m_hat = m / (1 - betas[0] ** t)
        a = m_hat if grafting == "sgd" else m_hat / ((v / (1 - grafting_beta2**t)).sqrt() + grafting_epsilon)
        w *= 1 - lr * weight_decay
        if g.dim() < 2:
            w -= lr * a
            continue
        p, used = m_hat, [size <= max_preconditioner_dim for size in g.shape]
        for dim, outer in enumerate((g @ g.T, g.T @ g)):
            weight, mean = (1.0, 1.0) if betas[1] == 1 else (1 - betas[1], 1 - betas[1] ** t)
            side = "LR"[dim]
            factor = state[side] = betas[1] * state.get(side, torch.zeros_like(outer)) + weight * outer
            if (t - 1) % precondition_frequency == 0:
                values, vectors = torch.linalg.eigh(factor / mean)
                power = -1 / (2 * max(1, sum(used)))
                state[side + " root"] = vectors @ torch.diag((values.clamp(min=0) + epsilon) ** power) @ vectors.T
            if used[dim]:
                root = state[side + " root"]
                p = root @ p if dim == 0 else p @ root
        w -= lr * p * (a.norm() / p.norm())
