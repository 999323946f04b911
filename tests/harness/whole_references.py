"""Plain reference optimizers on full tensors: unsharded, one tensor after another, in one process.

Each function makes one step for a list of parameters, in place. ``states`` has a dictionary per parameter, empty at first.
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
    eps: float = 0.0,
    steps: int = 5,
) -> None:
    """Step matrices by Muon. Keller Jordan et al. (2024)."""
    a, b, c = coefficients
    for w, g, state in zip(params, grads, states, strict=True):
        m = state["m"] = momentum * state.get("m", torch.zeros_like(w)) + (1 - momentum) * g
        u = (1 - momentum) * g + momentum * m if nesterov else m
        norm = max(float(u.norm()), eps)
        x = u / norm if norm else u
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
    """Step by AdamW. arXiv:1711.05101."""
    for w, g, state in zip(params, grads, states, strict=True):
        t = state["t"] = state.get("t", 0) + 1
        m = state["m"] = betas[0] * state.get("m", torch.zeros_like(w)) + (1 - betas[0]) * g
        v = state["v"] = betas[1] * state.get("v", torch.zeros_like(w)) + (1 - betas[1]) * g * g
        w -= lr * (weight_decay * w + (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps))


def lamb(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: States,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    bias_correction: bool = True,
    always_adapt: bool = False,
) -> None:
    """Step by LAMB. arXiv:1904.00962."""
    for w, g, state in zip(params, grads, states, strict=True):
        t = state["t"] = state.get("t", 0) + 1
        m = state["m"] = betas[0] * state.get("m", torch.zeros_like(w)) + (1 - betas[0]) * g
        v = state["v"] = betas[1] * state.get("v", torch.zeros_like(w)) + (1 - betas[1]) * g * g
        if bias_correction:
            m, v = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        r = m / (v.sqrt() + eps) + weight_decay * w
        adapts = (weight_decay > 0 or always_adapt) and w.norm() > 0 and r.norm() > 0
        w -= lr * (w.norm() / r.norm() if adapts else 1) * r


def lars(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: States,
    lr: float = 1.0,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    trust_coeff: float = 0.001,
    eps: float = 1e-8,
    always_adapt: bool = False,
) -> None:
    """Step by LARS. arXiv:1708.03888."""
    for w, g, state in zip(params, grads, states, strict=True):
        adapts = (weight_decay > 0 or always_adapt) and w.norm() > 0 and g.norm() > 0
        trust = trust_coeff * w.norm() / (g.norm() + weight_decay * w.norm() + eps) if adapts else 1
        u = trust * (g + weight_decay * w)
        b = state["b"] = momentum * state.get("b", torch.zeros_like(w)) + u
        w -= lr * (u + momentum * b if nesterov else b)


def adafactor(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: States,
    lr: float = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
) -> None:
    """Step by Adafactor. arXiv:1804.04235, in torch's version."""
    for w, g, state in zip(params, grads, states, strict=True):
        t = state["t"] = state.get("t", 0) + 1
        eps1 = torch.finfo(w.dtype).eps if eps[0] is None else eps[0]
        beta = 1 - t**beta2_decay
        if w.dim() < 2:
            v = state["v"] = beta * state.get("v", torch.zeros_like(w)) + (1 - beta) * g * g
        else:
            rows = state["rows"] = beta * state.get("rows", 0) + (1 - beta) * (g * g).mean(-1, keepdim=True)
            columns = state["columns"] = beta * state.get("columns", 0) + (1 - beta) * (g * g).mean(-2, keepdim=True)
            v = rows @ columns / rows.mean(-2, keepdim=True).clamp(min=eps1)
        u = g / v.sqrt().clamp(min=eps1)
        alpha = max(eps[1], root_mean_square(w)) * min(lr, 1 / sqrt(t))
        w -= lr * weight_decay * w + alpha * u / max(1, root_mean_square(u) / d)


def came(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: States,
    lr: float,
    eps: tuple[float, float] = (1e-30, 1e-16),
    clip_threshold: float = 1.0,
    betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
    weight_decay: float = 0.0,
) -> None:
    """Step by CAME. arXiv:2307.02047."""

    def average(state: dict[str, Any], key: str, beta: float, squares: Tensor) -> Tensor:
        def moved(to: str, mean: Tensor) -> Tensor:
            now: Tensor = beta * state.get(key + to, 0) + (1 - beta) * mean
            state[key + to] = now
            return now

        if squares.dim() < 2:
            return moved("", squares)
        rows, columns = (
            moved(" rows", squares.mean(-1, keepdim=True)),
            moved(" columns", squares.mean(-2, keepdim=True)),
        )
        return rows @ columns / rows.mean(-2, keepdim=True)

    for w, g, state in zip(params, grads, states, strict=True):
        u = g / average(state, "v", betas[1], g * g + eps[0]).sqrt()
        u = u / max(1, root_mean_square(u) / clip_threshold)
        m = state["m"] = betas[0] * state.get("m", torch.zeros_like(w)) + (1 - betas[0]) * u
        if w.dim() < 2:
            w -= lr * (weight_decay * w + m)
        else:
            w -= lr * (weight_decay * w + m / average(state, "s", betas[2], (u - m) ** 2 + eps[1]).sqrt())


def stable_adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: States,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """Step by StableAdamW. arXiv:2304.13013."""
    for w, g, state in zip(params, grads, states, strict=True):
        t = state["t"] = state.get("t", 0) + 1
        beta1, beta2 = (beta * (1 - beta ** (t - 1)) / (1 - beta**t) for beta in betas)
        m = state["m"] = beta1 * state.get("m", torch.zeros_like(w)) + (1 - beta1) * g
        v = state["v"] = beta2 * state.get("v", torch.zeros_like(w)) + (1 - beta2) * g * g
        k = max(1, root_mean_square(g / v.clamp(min=eps**2).sqrt()))
        w -= lr / k * (weight_decay * w + m / (v.sqrt() + eps))


def root_mean_square(tensor: Tensor) -> float:
    return float(tensor.norm()) / sqrt(tensor.numel())


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
    """Step matrices and vectors by SOAP. arXiv:2409.11321."""
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
    """Step matrices and vectors by Shampoo. arXiv:1802.09568, arXiv:2309.06497."""
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
