"""Adafactor: Adam without momentum whose second moments are means of rows and columns (Shazeer, Stern, arXiv:1804.04235).

    R <- R + t^c (rows of g^2 - R)      C <- C + t^c (columns of g^2 - C)        means, of the logical matrix; c < 0
    u <- g / sqrt(R C / mean(R))
    w <- w - lr wd w - max(eps2, RMS(w)) min(lr, 1 / sqrt(t)) u / max(1, RMS(u) / d)

Of a tensor of fewer than two dims the second moment is kept whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .factored import is_factored, outer, rms, row_and_column_sums, row_and_column_zeros, total, toward
from .optimizer import Slot, Update, WholeOptimizer
from .tensors import Request

Moments = Mapping[str, Tensor]


class Adafactor(WholeOptimizer):
    """Adafactor, with the numbers of `torch.optim.Adafactor`.

    Args:
        params: As any torch optimizer takes them.
        lr: The longest relative step; a number, or a 0-dim tensor.
        beta2_decay: c.
        eps: eps1, the least that a second moment's root is (None: of the parameter's dtype), and eps2, the least RMS that a
            parameter counts as.
        d: The largest RMS of an update.
        weight_decay: Of the parameter, times ``lr``.
    Raises:
        ValueError: An option is out of range.
    State: of matrices ``row_var`` [..., rows, 1] and ``col_var`` [..., 1, columns] of the logical tensor, on every rank
    that has some of it; of others ``variance``, of the piece.
    Collectives: for each set of ranks that share split tensors two all-reduces. Host reads: none.
    """

    whole_states: ClassVar[frozenset[str]] = frozenset({"row_var", "col_var"})

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        if not lr >= 0 or not beta2_decay <= 0 or not d >= 1 or not weight_decay >= 0:
            raise ValueError(
                f"lr={lr}, beta2_decay={beta2_decay}, d={d}, weight_decay={weight_decay}: give >= 0, <= 0, >= 1, >= 0"
            )
        if not all(number is None or number >= 0 for number in eps) or eps[1] is None:
            raise ValueError(f"eps={eps}: give two numbers >= 0; the first may be None")
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def initial(self, slot: Slot) -> dict[str, Any]:
        shape = self.tensors.tensors[slot.position].shape
        if not is_factored(shape):
            return {"variance": torch.zeros_like(slot.param, memory_format=torch.contiguous_format)}
        return dict(zip(("row_var", "col_var"), row_and_column_zeros(slot, shape), strict=True))

    def updates(self, slots: Sequence[Slot]) -> Iterator[Update]:
        measured = iter(self.tensors.sums(self._squares(slots)))
        sizes, moments = dict[int, Tensor](), dict[int, Moments]()
        for slot in slots:
            sizes[slot.position] = rms(next(measured), self._shape(slot))
            moments[slot.position] = self._moments(slot, measured)
        of_updates = self.tensors.sums(
            total(slot.position, self._update(slot, moments[slot.position]).double().square(), self._shape(slot))
            for slot in slots
        )
        for slot, squares in zip(slots, of_updates, strict=True):
            group, u = slot.group, self._update(slot, moments[slot.position])
            rate = sizes[slot.position].clamp(min=group["eps"][1]) * slot.step.rsqrt().clamp(max=group["lr"])
            rate = rate / (rms(squares, self._shape(slot)) / group["d"]).clamp(min=1)
            param = slot.param * (1 - group["lr"] * group["weight_decay"]) - rate * u
            yield Update(slot, param, moments[slot.position])

    def _shape(self, slot: Slot) -> tuple[int, ...]:
        return self.tensors.tensors[slot.position].shape

    def _squares(self, slots: Sequence[Slot]) -> Iterator[Request]:
        """Of a parameter in all; of a matrix's gradient by rows and columns."""
        for slot in slots:
            shape = self._shape(slot)
            yield total(slot.position, slot.param.double().square(), shape)
            if is_factored(shape):
                yield from row_and_column_sums(slot.position, slot.grad.double().square(), shape)

    def _moments(self, slot: Slot, sums: Iterator[Tensor]) -> Moments:
        shape, rate = self._shape(slot), slot.step ** slot.group["beta2_decay"]
        if not is_factored(shape):
            return {"variance": toward(slot.state["variance"], slot.grad.square(), rate)}
        rows, columns = next(sums) / shape[-1], next(sums) / shape[-2]
        return {
            "row_var": toward(slot.state["row_var"], rows, rate),
            "col_var": toward(slot.state["col_var"], columns, rate),
        }

    def _update(self, slot: Slot, moments: Moments) -> Tensor:
        """u."""
        eps = slot.group["eps"][0]
        if eps is None:
            eps = torch.finfo(slot.param.dtype).eps
        if "variance" in moments:
            v = moments["variance"]
        else:
            rows = moments["row_var"]
            v = outer(self.tensors, slot, rows / rows.mean(-2, keepdim=True).clamp(min=eps), moments["col_var"])
        return slot.grad * v.clamp(min=eps * eps).rsqrt()
