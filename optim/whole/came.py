"""CAME: Adafactor with momentum, and slower where the momentum and the update differ (Luo et al., arXiv:2307.02047).

    R <- b2 R + (1 - b2) rows of (g^2 + eps1)      C: of columns                 means, of the logical matrix
    u <- g / sqrt(R C / mean(R))
    k <- max(1, RMS(u) / d)
    m <- b1 m + (1 - b1) u / k
    S <- b3 S + (1 - b3) rows of ((u / k - m)^2 + eps2)      T: of columns
    w <- w - lr wd w - lr m / sqrt(S T / mean(S))

Of a tensor of fewer than two dims the second moment is kept whole, and w <- w - lr wd w - lr m.

u / k - m = b1 (u / k - m') with the m' of before. What it is for any k follows from the sums of e^2, e u and u^2, where
e = u - m': with a = 1 - 1 / k, (u / k - m')^2 = e^2 - 2 a e u + a^2 u^2. So they travel together with RMS(u).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .adafactor import Moments
from .adamw import moments
from .factored import is_factored, outer, rms, row_and_column_sums, row_and_column_zeros, total, toward
from .optimizer import Slot, Update, WholeOptimizer
from .tensors import Request


class CAME(WholeOptimizer):
    """CAME, with the numbers of its authors' ``came_pytorch``.

    Args:
        params: As any torch optimizer takes them.
        lr: A number, or a 0-dim tensor.
        eps: eps1 and eps2.
        clip_threshold: d.
        betas: b1, b2, b3.
        weight_decay: Of the parameter, times ``lr``.
    Raises:
        ValueError: An option is out of range.
    State: ``exp_avg``, of the piece; of matrices ``exp_avg_sq_row``, ``exp_avg_res_row`` [..., rows, 1] and
    ``exp_avg_sq_col``, ``exp_avg_res_col`` [..., 1, columns] of the logical tensor, on every rank that has some of it; of
    others ``exp_avg_sq``, of the piece.
    Collectives: for each set of ranks that share split tensors two all-reduces. Host reads: none.
    """

    whole_states: ClassVar[frozenset[str]] = frozenset(
        f"exp_avg_{what}_{along}" for what in ("sq", "res") for along in ("row", "col")
    )

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
    ) -> None:
        if not lr >= 0 or not all(number > 0 for number in eps) or not clip_threshold > 0 or not weight_decay >= 0:
            raise ValueError(
                f"lr={lr}, eps={eps}, clip_threshold={clip_threshold}, weight_decay={weight_decay}: give >= 0, two > 0, "
                "> 0, >= 0"
            )
        if len(betas) != 3 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas}: give three in [0, 1)")
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "betas": betas,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def initial(self, slot: Slot) -> dict[str, Any]:
        shape = self._shape(slot)
        if not is_factored(shape):
            return moments(slot)
        state = {"exp_avg": torch.zeros_like(slot.param, memory_format=torch.contiguous_format)}
        for what in ("sq", "res"):
            state[f"exp_avg_{what}_row"], state[f"exp_avg_{what}_col"] = row_and_column_zeros(slot, shape)
        return state

    def updates(self, slots: Sequence[Slot]) -> Iterator[Update]:
        measured = iter(self.tensors.sums(self._squares(slots)))
        moments = {slot.position: self._moments(slot, measured) for slot in slots}
        measured = iter(self.tensors.sums(self._residuals(slots, moments)))
        for slot in slots:
            group, shape, u = slot.group, self._shape(slot), self._update(slot, moments[slot.position])
            beta1, state = group["betas"][0], dict(moments[slot.position])
            uu = [next(measured) for _ in range(2 if is_factored(shape) else 1)]
            k = (rms(uu[0], shape) / group["clip_threshold"]).clamp(min=1)
            towards = state["exp_avg"] = toward(slot.state["exp_avg"], u / k, 1 - beta1)
            if is_factored(shape):
                state |= self._instability(slot, 1 - 1 / k, uu, measured)
                towards = towards * self._inverse_root(slot, state, "res")
            param = slot.param * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * towards
            yield Update(slot, param, state)

    def _shape(self, slot: Slot) -> tuple[int, ...]:
        return self.tensors.tensors[slot.position].shape

    def _squares(self, slots: Sequence[Slot]) -> Iterator[Request]:
        """Of gradients of matrices."""
        for slot in slots:
            if is_factored(shape := self._shape(slot)):
                yield from row_and_column_sums(slot.position, slot.grad.double().square(), shape)

    def _moments(self, slot: Slot, sums: Iterator[Tensor]) -> Moments:
        shape, rate, eps = self._shape(slot), 1 - slot.group["betas"][1], slot.group["eps"][0]
        if not is_factored(shape):
            return {"exp_avg_sq": toward(slot.state["exp_avg_sq"], slot.grad.square() + eps, rate)}
        means = {"exp_avg_sq_row": next(sums) / shape[-1] + eps, "exp_avg_sq_col": next(sums) / shape[-2] + eps}
        return {key: toward(slot.state[key], mean, rate) for key, mean in means.items()}

    def _update(self, slot: Slot, moments: Moments) -> Tensor:
        """u."""
        if "exp_avg_sq" in moments:
            return slot.grad * moments["exp_avg_sq"].rsqrt()
        return slot.grad * self._inverse_root(slot, moments, "sq")

    def _inverse_root(self, slot: Slot, moments: Moments, what: str) -> Tensor:
        rows, columns = moments[f"exp_avg_{what}_row"], moments[f"exp_avg_{what}_col"]
        return outer(self.tensors, slot, (rows / rows.mean(-2, keepdim=True)).rsqrt(), columns.rsqrt())

    def _residuals(self, slots: Sequence[Slot], moments: Mapping[int, Moments]) -> Iterator[Request]:
        """Of u^2; for matrices, by rows and columns, of e^2 and e u too."""
        for slot in slots:
            shape, u = self._shape(slot), self._update(slot, moments[slot.position]).double()
            if not is_factored(shape):
                yield total(slot.position, u.square(), shape)
                continue
            e = u - slot.state["exp_avg"].double()
            for product in (u.square(), e.square(), e * u):
                yield from row_and_column_sums(slot.position, product, shape)

    def _instability(self, slot: Slot, a: Tensor, uu: Sequence[Tensor], sums: Iterator[Tensor]) -> Moments:
        """S and T."""
        shape, (beta1, _, beta3) = self._shape(slot), slot.group["betas"]
        ee, eu = (next(sums), next(sums)), (next(sums), next(sums))
        found = {}
        for along, length, of_uu, of_ee, of_eu in zip(("row", "col"), (shape[-1], shape[-2]), uu, ee, eu, strict=True):
            squares = (of_ee - 2 * a * of_eu + a * a * of_uu).clamp(min=0)
            mean = beta1**2 * squares / length + slot.group["eps"][1]
            found[f"exp_avg_res_{along}"] = toward(slot.state[f"exp_avg_res_{along}"], mean, 1 - beta3)
        return found
