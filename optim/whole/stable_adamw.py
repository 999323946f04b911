"""StableAdamW: AdamW whose step for a tensor is shorter where its gradient is unexpectedly long (arXiv:2304.13013).

    m <- b1' m + (1 - b1') g        v <- b2' v + (1 - b2') g^2        b' = b (1 - b^(t-1)) / (1 - b^t)
    k <- max(1, RMS(g / sqrt(max(v, eps^2))))                         of the logical tensor
    w <- w - lr / k (wd w + m / (sqrt(v) + eps))

Wortsman et al., "Stable and low-precision training for large-scale vision-language models" (2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod, sqrt
from typing import Any

from torch import Tensor

from .adamw import moments
from .on_demand import OnDemand
from .optimizer import Slot, Update, WholeOptimizer


class StableAdamW(WholeOptimizer):
    """AdamW with Adafactor's clipping of updates, with the options of optimi's and pytorch_optimizer's.

    Args:
        params: As any torch optimizer takes them.
        lr: A number, or a 0-dim tensor.
        betas, eps, weight_decay: As AdamW's.
    Raises:
        ValueError: An option is out of range.
    Collectives: one all-reduce over the world, where some tensor is split. Host reads: none.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        if not lr >= 0 or not eps > 0 or not weight_decay >= 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"lr={lr}, eps={eps}, weight_decay={weight_decay}, betas={betas}: give >= 0, > 0, >= 0, in [0, 1)"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def initial(self, slot: Slot) -> dict[str, Any]:
        return moments(slot)

    def updates(self, slots: Sequence[Slot]) -> Iterator[Update]:
        (norms,) = self.tensors.norms_of(OnDemand(slots, _normalized))
        for slot in slots:
            group, v = slot.group, _second_moment(slot)
            m = slot.state["exp_avg"].lerp(slot.grad, _rate(slot, 0).to(slot.grad.dtype))
            k = (norms[slot.position] / sqrt(max(prod(self._shape(slot)), 1))).clamp(min=1)
            towards = group["weight_decay"] * slot.param + m / (v.sqrt() + group["eps"])
            yield Update(slot, slot.param - group["lr"] / k * towards, {"exp_avg": m, "exp_avg_sq": v})

    def _shape(self, slot: Slot) -> tuple[int, ...]:
        return self.tensors.tensors[slot.position].shape


def _rate(slot: Slot, which: int) -> Tensor:
    """1 - b'."""
    beta: float = slot.group["betas"][which]
    return (1 - beta) / (1 - beta**slot.step)


def _second_moment(slot: Slot) -> Tensor:
    v: Tensor = slot.state["exp_avg_sq"]
    return v.lerp(slot.grad.square(), _rate(slot, 1).to(slot.grad.dtype))


def _normalized(slot: Slot) -> Tensor:
    return slot.grad / _second_moment(slot).clamp(min=slot.group["eps"] ** 2).sqrt()
