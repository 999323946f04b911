"""LAMB: Adam whose step for a tensor is as long as a share of the tensor itself (You et al., arXiv:1904.00962).

m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
r <- (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + wd w
w <- w - lr |w| / |r| r                                  norms of the logical tensor
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .adamw import moments
from .on_demand import OnDemand
from .optimizer import Slot, Update, WholeOptimizer


class LAMB(WholeOptimizer):
    """LAMB, with the options of NVIDIA's and timm's; gradients are clipped by `ParallelOptimizer`, if at all.

    A param group without weight decay (biases, gains of norms) is not adapted: its trust ratio is 1, unless
    ``always_adapt``. So is that of a tensor whose norm, or whose update's, is 0.

    Args:
        params: As any torch optimizer takes them.
        lr: A number, or a 0-dim tensor.
        betas, eps: As Adam's.
        weight_decay: Part of the update, before its norm is taken.
        bias_correction: Divide m and v by 1 - b1^t and 1 - b2^t.
        always_adapt: Adapt param groups without weight decay too.
    Raises:
        ValueError: An option is out of range.
    Collectives: one all-reduce over the world, where some tensor is split. Host reads: none.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        always_adapt: bool = False,
    ) -> None:
        if not lr >= 0 or not eps >= 0 or not weight_decay >= 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"lr={lr}, eps={eps}, weight_decay={weight_decay}, betas={betas}: give >= 0, >= 0, >= 0, in [0, 1)"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "always_adapt": always_adapt,
        }
        super().__init__(params, defaults)

    def initial(self, slot: Slot) -> dict[str, Any]:
        return moments(slot)

    def updates(self, slots: Sequence[Slot]) -> Iterator[Update]:
        adapted = [slot for slot in slots if slot.group["weight_decay"] != 0 or slot.group["always_adapt"]]
        params = {slot.position: slot.param for slot in adapted}
        w_norms, r_norms = self.tensors.norms_of(params, OnDemand(adapted, lambda slot: _direction(slot)[2]))
        for slot in slots:
            m, v, r = _direction(slot)
            rate = slot.group["lr"]
            if slot.position in params:
                w_norm, r_norm = w_norms[slot.position], r_norms[slot.position]
                rate = rate * torch.where((w_norm > 0) & (r_norm > 0), w_norm / r_norm, 1.0)
            yield Update(slot, slot.param - rate * r, {"exp_avg": m, "exp_avg_sq": v})


def _direction(slot: Slot) -> tuple[Tensor, Tensor, Tensor]:
    """m, v and r."""
    group, t = slot.group, slot.step
    beta1, beta2 = group["betas"]
    m = slot.state["exp_avg"].lerp(slot.grad, 1 - beta1)
    v = slot.state["exp_avg_sq"].lerp(slot.grad.square(), 1 - beta2)
    m_hat, v_hat = (m / (1 - beta1**t), v / (1 - beta2**t)) if group["bias_correction"] else (m, v)
    return m, v, m_hat / (v_hat.sqrt() + group["eps"]) + group["weight_decay"] * slot.param
