"""LARS: SGD with a rate for each tensor, by its norm and its gradient's (You et al., arXiv:1708.03888).

u <- eta |w| / (|g| + wd |w| + eps) (g + wd w)           norms of the logical tensor
b <- mu b + u
w <- w - lr b                                            (nesterov: u + mu b)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .optimizer import Slot, Update, WholeOptimizer


class LARS(WholeOptimizer):
    """LARS, with the options of timm's.

    A param group without weight decay (biases, gains of norms) is not adapted: plain SGD, unless ``always_adapt``. So is a
    tensor whose norm, or whose gradient's, is 0.

    Args:
        params: As any torch optimizer takes them.
        lr: A number, or a 0-dim tensor. Outside of the momentum, as in `torch.optim.SGD`.
        momentum, weight_decay, nesterov: As `torch.optim.SGD`.
        trust_coeff: eta.
        eps: Added to the denominator.
        always_adapt: Adapt param groups without weight decay too.
    Raises:
        ValueError: An option is out of range.
    Collectives: one all-reduce over the world, where some tensor is split. Host reads: none.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        trust_coeff: float = 0.001,
        eps: float = 1e-8,
        *,
        always_adapt: bool = False,
    ) -> None:
        if not lr >= 0 or not momentum >= 0 or not weight_decay >= 0 or not trust_coeff > 0 or not eps >= 0:
            raise ValueError(
                f"lr={lr}, momentum={momentum}, weight_decay={weight_decay}, eps={eps}, trust_coeff={trust_coeff}: give "
                ">= 0 all, and trust_coeff > 0"
            )
        if nesterov and momentum == 0:
            raise ValueError(f"nesterov=True looks ahead along the momentum, but momentum={momentum}: give > 0")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "trust_coeff": trust_coeff,
            "eps": eps,
            "always_adapt": always_adapt,
        }
        super().__init__(params, defaults)

    def initial(self, slot: Slot) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(slot.param, memory_format=torch.contiguous_format)}

    def updates(self, slots: Sequence[Slot]) -> Iterator[Update]:
        adapted = [slot for slot in slots if slot.group["weight_decay"] != 0 or slot.group["always_adapt"]]
        params = {slot.position: slot.param for slot in adapted}
        w_norms, g_norms = self.tensors.norms_of(params, {slot.position: slot.grad for slot in adapted})
        for slot in slots:
            group, u = slot.group, slot.grad
            mu, decay = group["momentum"], group["weight_decay"]
            if slot.position in params:
                w_norm, g_norm = w_norms[slot.position], g_norms[slot.position]
                trust = group["trust_coeff"] * w_norm / (g_norm + decay * w_norm + group["eps"])
                u = torch.where((w_norm > 0) & (g_norm > 0), trust, 1.0) * (u + decay * slot.param)
            b = mu * slot.state["momentum_buffer"] + u
            param = slot.param - group["lr"] * (u + mu * b if group["nesterov"] else b)
            yield Update(slot, param, {"momentum_buffer": b})
