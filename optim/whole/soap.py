"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners, which are kept on each matrix's owner rank.

    L <- b3 L + (1 - b3) G G^T                R <- b3 R + (1 - b3) G^T G
    Q_L, Q_R = eigenvectors of L, R           in the first step; qr(L Q_L), qr(R Q_R) every ``precondition_frequency`` steps
    G' = Q_L^T G Q_R                          before L, R and Q are updated with this gradient
    m <- b1 m + (1 - b1) G                    v <- b2 v + (1 - b2) G'^2
    U = Q_L (Q_L^T m Q_R / (sqrt(v) + eps)) Q_R^T
    w <- (w - lr sqrt(1 - b2^k) / (1 - b1^k) U) (1 - lr wd)

k counts the updates: the first step only computes the first bases. A tensor with four or more dims has a preconditioner
per dim. A vector has none: it is stepped like Adam, from the second step on.

Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (arXiv:2409.11321), with the defaults of the authors'
code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from ...parallel.layout.shard import Shape
from .at_home import (
    FACTORISATION,
    HomeOptimizer,
    Sides,
    eigenvectors,
    gram,
    into,
    moments_at_home,
    named,
    out_of,
    renewed,
    sides_of,
)
from .exchange import Matrix
from .layout import Blocks
from .optimizer import Slot, Update, moments


class SOAP(HomeOptimizer):
    """SOAP for matrices, its Adam for vectors.

        optimizer = ParallelOptimizer(SOAP(model.named_parameters()), registry, max_norm=1.0)

    A parameter with two dims is a matrix, with three dims a stack of matrices (experts). The states of a matrix (L, R,
    both bases and two moments) are on its owner rank only.

    The first bases come from a single gradient. If that has fewer independent columns than rows, the rest of a basis is
    arbitrary, as in the authors' code. It depends on the last bits of the gradient, so sums in another order give other
    bases.

    Args:
        params: Parameters, ``model.named_parameters()``, or param groups.
        lr: A number or a 0-dim tensor.
        betas: b1, b2.
        shampoo_beta: b3. Default -1: any negative value means b2.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        precondition_frequency: Number of steps between new bases.
        max_precond_dim: Longer dims have no preconditioner.
        blocks: As in `Muon`: blocks of a fused weight, each a separate matrix. None: the blocks of layouts only.
        factor_dtype: Dtype of L, R and the bases, and of their products and factorisations: float32 or float64.

    Raises:
        ValueError: An option is out of range.

    Collectives: as in `Muon`.
    Host synchronization: one in the first step and one in the first step after loading. Otherwise the host waits for
        the end of the previous step only.
    Memory: for a matrix [m, n], 2 (m^2 + n^2) elements of ``factor_dtype`` and 2 m n elements on the owner rank, none
        on others.
    """

    kept = ("blocks", "factor_dtype")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float = -1,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        max_precond_dim: int = 10000,
        *,
        blocks: Blocks | None = None,
        factor_dtype: torch.dtype = torch.float32,
    ) -> None:
        if not lr >= 0 or not weight_decay >= 0 or not all(0 <= beta < 1 for beta in betas) or shampoo_beta >= 1:
            raise ValueError(
                f"lr={lr}, weight_decay={weight_decay}, betas={betas}, shampoo_beta={shampoo_beta}: give >= 0, >= 0, in "
                "[0, 1), < 1"
            )
        if precondition_frequency < 1 or factor_dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"precondition_frequency={precondition_frequency}, factor_dtype={factor_dtype}: give >= 1, torch.float32 "
                "or torch.float64"
            )
        self.blocks, self.factor_dtype = dict(blocks or {}), factor_dtype
        defaults = {
            "lr": lr,
            "betas": betas,
            "shampoo_beta": shampoo_beta,
            "eps": eps,
            "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
            "max_precond_dim": max_precond_dim,
        }
        super().__init__(params, defaults)

    # Cost -----------------------------------------------------------------------------------------------------------

    def cost(self, shape: Shape) -> float:
        """Return the cost of four products with each basis per step, and of a factorisation every few steps."""
        often: int = self.defaults["precondition_frequency"]
        most: int = self.defaults["max_precond_dim"]
        numel, sides = torch.Size(shape).numel(), [side for side in sides_of(shape) if side <= most]
        return sum(8.0 * numel * side + FACTORISATION * side**3 / often for side in sides) + numel

    # The step -------------------------------------------------------------------------------------------------------

    def initial(self, slot: Slot) -> dict[str, Any]:
        if not self.tensors.tensors[slot.position].metadata:
            return moments(slot)
        state: dict[str, Any] = {}
        for matrix in self.own(slot):
            state |= moments_at_home(slot, matrix)
            for dim, side in enumerate(sides_of(matrix.shape)):
                if side <= slot.group["max_precond_dim"]:
                    square = slot.param.new_zeros((side, side), dtype=self.factor_dtype)
                    state |= {named("GG", matrix, dim): square, named("Q", matrix, dim): square.clone()}
        return state

    def updates(self, slots: Sequence[Slot]) -> Iterator[Update]:
        taken = {slot.position: self.taken.of(slot) for slot in slots}
        logical = self.tensors.tensors
        slot_of = self.at_home(slots)

        def turned(matrix: Matrix, lists: list[Tensor]) -> Tensor:
            slot = slot_of(matrix)
            return self._turned(matrix, lists[0], slot, taken[slot.position])

        gradients = {slot.position: slot.grad for slot in slots if logical[slot.position].metadata}
        found = dict(self.homes.map([gradients], turned))
        for slot in slots:
            beta1, beta2 = slot.group["betas"]
            lr, k, new = slot.group["lr"], taken[slot.position], {}
            if slot.position in found:
                u = found[slot.position]
            elif k:
                m = slot.state["exp_avg"].lerp(slot.grad, 1 - beta1)
                v = slot.state["exp_avg_sq"].lerp(slot.grad.square(), 1 - beta2)
                u, new = m / (v.sqrt() + slot.group["eps"]), {"exp_avg": m, "exp_avg_sq": v}
            if not k:
                yield Update(slot, slot.param, {})
                continue
            rate = lr * sqrt(1 - beta2**k) / (1 - beta1**k)
            yield Update(slot, (slot.param - rate * u) * (1 - lr * slot.group["weight_decay"]), new)
        self.taken.note(slots)

    def _turned(self, matrix: Matrix, gradient: Tensor, slot: Slot, k: int) -> Tensor:
        """Return U, and update the matrix's state."""
        group, g = slot.group, gradient.view(sides_of(matrix.shape)).to(slot.param.device, self.factor_dtype)
        dims = range(g.dim())
        (beta1, beta2), beta3 = group["betas"], group["shampoo_beta"]
        gg: Sides = [slot.state.get(named("GG", matrix, dim)) for dim in dims]
        q: Sides = [slot.state.get(named("Q", matrix, dim)) for dim in dims]
        u = torch.zeros_like(g)
        v = slot.state[named("exp_avg_sq", matrix)]
        if k:
            m = slot.state[named("exp_avg", matrix)].to(g).lerp(g, 1 - beta1)
            v = v.to(g).lerp(into(g, q).square(), 1 - beta2)
            u = out_of(into(m, q) / (v.sqrt() + group["eps"]), q)
            self.write(slot.state[named("exp_avg", matrix)], m)
        for dim, (factor, basis) in enumerate(zip(gg, q, strict=True)):
            if factor is None or basis is None:
                continue
            new = factor.lerp(gram(g, dim), 1 - (beta2 if beta3 < 0 else beta3))
            if k == 0:
                self.write(basis, eigenvectors(new))
            elif k % group["precondition_frequency"] == 0:
                turned, order = renewed(new, basis)
                v = v.index_select(dim, order)
                self.write(basis, turned)
            self.write(factor, new)
        if k:
            self.write(slot.state[named("exp_avg_sq", matrix)], v)
        return u.to(gradient).view(matrix.shape)
