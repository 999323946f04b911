"""Shampoo: gradients multiplied by inverse roots of preconditioners, which are kept on each matrix's owner rank.

    L <- b2 L + (1 - b2) G G^T                R <- b2 R + (1 - b2) G^T G        (b2 = 1: L + G G^T, R + G^T G)
    m <- b1 m + (1 - b1) G                    m^ = m / (1 - b1^t)
    P = L^(-1/4) m^ R^(-1/4)                  of L / (1 - b2^t) + eps, every ``precondition_frequency`` steps
    A = m^ / (sqrt(v^) + graft_eps)           grafting: Adam's step, or m^ ("sgd")
    w <- w - lr (wd w + P |A| / |P|)

A tensor with k dims has k preconditioners, and the exponents are -1 / (2k). Vectors use the grafted step A.

Gupta et al., "Shampoo: Preconditioned Stochastic Tensor Optimization" (arXiv:1802.09568). The epsilon of the roots,
averages and grafting: Anil et al. (arXiv:2002.09018) and Shi et al. (arXiv:2309.06497).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ...parallel.layout.shard import Shape
from .at_home import FACTORISATION, HomeOptimizer, Sides, gram, into, inverse_root, moments_at_home, named, sides_of
from .exchange import Matrix
from .layout import Blocks
from .optimizer import Slot, Update, moments

Grafting = Literal["adam", "sgd"]


class Shampoo(HomeOptimizer):
    """Shampoo for matrices, the grafted method for vectors.

        optimizer = ParallelOptimizer(Shampoo(model.named_parameters()), registry, max_norm=1.0)

    A parameter with two dims is a matrix, with three dims a stack of matrices (experts). The states of a matrix
    (preconditioners, their roots and the moments) are on its owner rank only.

    Args:
        params: Parameters, ``model.named_parameters()``, or param groups.
        lr: A number or a 0-dim tensor.
        betas: b1, b2; b2 = 1 sums the products, as in the paper.
        epsilon: Added to the eigenvalues of the preconditioners.
        weight_decay: Decoupled weight decay.
        max_preconditioner_dim: Longer dims have no preconditioner.
        precondition_frequency: Number of steps between new roots. The first step always computes roots.
        grafting: The method that determines the norm of the update: "adam" or "sgd".
        grafting_beta2, grafting_epsilon: Options of the grafted Adam step.
        blocks: As in `Muon`: blocks of a fused weight, each a separate matrix. None: the blocks of layouts only.
        factor_dtype: Dtype of preconditioners and roots: float32 or float64.

    Raises:
        ValueError: An option is out of range.

    Collectives: as in `SOAP`.
    Host synchronization: as in `SOAP`; on CUDA also one per new root, to check that the eigenvalue solver converged.
    Memory: for a matrix [m, n], 2 (m^2 + n^2) elements of ``factor_dtype`` and 2 m n elements on the owner rank, none
        on others.
    """

    kept = ("blocks", "factor_dtype")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] = (0.9, 1.0),
        epsilon: float = 1e-12,
        weight_decay: float = 0.0,
        max_preconditioner_dim: int = 1024,
        precondition_frequency: int = 1,
        grafting: Grafting = "adam",
        grafting_beta2: float = 0.999,
        grafting_epsilon: float = 1e-8,
        *,
        blocks: Blocks | None = None,
        factor_dtype: torch.dtype = torch.float32,
    ) -> None:
        if not lr >= 0 or not weight_decay >= 0 or not 0 <= betas[0] < 1 or not 0 < betas[1] <= 1:
            raise ValueError(
                f"lr={lr}, weight_decay={weight_decay}, betas={betas}: give >= 0, >= 0, in [0, 1) and (0, 1]"
            )
        if precondition_frequency < 1 or factor_dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"precondition_frequency={precondition_frequency}, factor_dtype={factor_dtype}: give >= 1, torch.float32 "
                "or torch.float64"
            )
        if grafting not in ("adam", "sgd"):
            raise ValueError(f"grafting={grafting!r}: give 'adam' or 'sgd'")
        self.blocks, self.factor_dtype = dict(blocks or {}), factor_dtype
        defaults = {
            "lr": lr,
            "betas": betas,
            "epsilon": epsilon,
            "weight_decay": weight_decay,
            "max_preconditioner_dim": max_preconditioner_dim,
            "precondition_frequency": precondition_frequency,
            "grafting": grafting,
            "grafting_beta2": grafting_beta2,
            "grafting_epsilon": grafting_epsilon,
        }
        super().__init__(params, defaults)

    # Cost -----------------------------------------------------------------------------------------------------------

    def cost(self, shape: Shape) -> float:
        """Return the cost of two products with each preconditioner per step, and of its root every few steps."""
        often: int = self.defaults["precondition_frequency"]
        most: int = self.defaults["max_preconditioner_dim"]
        numel, sides = torch.Size(shape).numel(), [side for side in sides_of(shape) if side <= most]
        return sum(4.0 * numel * side + FACTORISATION * side**3 / often for side in sides) + numel

    # The step -------------------------------------------------------------------------------------------------------

    def initial(self, slot: Slot) -> dict[str, Any]:
        if not self.tensors.tensors[slot.position].metadata:
            return moments(slot)
        state: dict[str, Any] = {}
        for matrix in self.own(slot):
            state |= moments_at_home(slot, matrix)
            for dim, side in enumerate(sides_of(matrix.shape)):
                if side <= slot.group["max_preconditioner_dim"]:
                    square = slot.param.new_zeros((side, side), dtype=self.factor_dtype)
                    state |= {named("factor", matrix, dim): square, named("root", matrix, dim): square.clone()}
        return state

    def updates(self, slots: Sequence[Slot]) -> Iterator[Update]:
        taken = {slot.position: self.taken.of(slot) for slot in slots}
        logical, slot_of = self.tensors.tensors, self.at_home(slots)

        def preconditioned(matrix: Matrix, lists: list[Tensor]) -> Tensor:
            slot = slot_of(matrix)
            return self._preconditioned(matrix, lists[0], slot, taken[slot.position])

        gradients = {slot.position: slot.grad for slot in slots if logical[slot.position].metadata}
        found = dict(self.homes.map([gradients], preconditioned))
        for slot in slots:
            new: dict[str, Tensor] = {}
            if slot.position not in found:
                m, v, found[slot.position] = grafted(
                    slot.state["exp_avg"], slot.state["exp_avg_sq"], slot.grad, slot.group, taken[slot.position] + 1
                )
                new = {"exp_avg": m, "exp_avg_sq": v}
            lr, decay = slot.group["lr"], slot.group["weight_decay"]
            yield Update(slot, slot.param * (1 - lr * decay) - lr * found[slot.position], new)
        self.taken.note(slots)

    def _preconditioned(self, matrix: Matrix, gradient: Tensor, slot: Slot, taken: int) -> Tensor:
        """Return P |A| / |P|, and update the matrix's state."""
        group, t = slot.group, taken + 1
        g = gradient.view(sides_of(matrix.shape)).to(slot.param.device, self.factor_dtype)
        beta1, beta2 = group["betas"]
        factors: Sides = [slot.state.get(named("factor", matrix, dim)) for dim in range(g.dim())]
        roots: list[Tensor | None] = [slot.state.get(named("root", matrix, dim)) for dim in range(g.dim())]
        order = 2 * max(1, sum(factor is not None for factor in factors))
        for dim, (factor, root) in enumerate(zip(factors, roots, strict=True)):
            if factor is None or root is None:
                continue
            new = factor + gram(g, dim) if beta2 == 1 else factor.lerp(gram(g, dim), 1 - beta2)
            if taken % group["precondition_frequency"] == 0:
                mean = new if beta2 == 1 else new / (1 - beta2**t)
                roots[dim] = made = inverse_root(mean, order, group["epsilon"])
                self.write(root, made)
            self.write(factor, new)
        m_key, v_key = named("exp_avg", matrix), named("exp_avg_sq", matrix)
        m, v, a = grafted(slot.state[m_key].to(g), slot.state[v_key].to(g), g, group, t)
        p = into(m / (1 - beta1**t), roots)
        self.write(slot.state[m_key], m)
        self.write(slot.state[v_key], v)
        update: Tensor = p * (a.norm() / p.norm().clamp(min=1e-30))
        return update.to(gradient).view(matrix.shape)


def grafted(m: Tensor, v: Tensor, g: Tensor, group: Mapping[str, Any], t: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new moments, and A."""
    beta1, beta2 = group["betas"][0], group["grafting_beta2"]
    m, v = m.lerp(g, 1 - beta1), v.lerp(g.square(), 1 - beta2)
    m_hat = m / (1 - beta1**t)
    if group["grafting"] == "sgd":
        return m, v, m_hat
    return m, v, m_hat / ((v / (1 - beta2**t)).sqrt() + group["grafting_epsilon"])
