"""Adafactor and CAME, whose second moments are factored into rows and columns.

Adafactor (Shazeer, Stern, arXiv:1804.04235) is Adam without momentum:

    R <- R + t^c (row means of g^2 - R)    C <- C + t^c (column means of g^2 - C)    of the full matrix; c <= 0
    u <- g / sqrt(R C / mean(R))
    w <- w - lr wd w - max(eps2, RMS(w)) min(lr, 1 / sqrt(t)) u / max(1, RMS(u) / d)

The second moment of a tensor with fewer than two dims is not factored. CAME's formulas are in a comment above its
class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...parallel.layout.shard import Shape
from .optimizer import Slot, Update, WholeOptimizer, moments
from .tensors import Request, WholeTensors

# Factored second moments: the means of a matrix's rows and of its columns ---------------------------------------------

# A full tensor with two or more dims is a stack of matrices over its last two dims; other tensors are not factored.
# Rows and columns are those of the full tensor, independent of the sharding.


def is_factored(shape: Shape) -> bool:
    """Return True if a full tensor of ``shape`` has two or more dims, so that its second moment is factored."""
    return len(shape) >= 2


def row_and_column_sums(position: int, value: Tensor, shape: Shape) -> Iterator[Request]:
    """Yield two requests to `WholeTensors.sums`: for the sum of each row, and for the sum of each column.

    Args:
        position: Index of the stepped tensor over all param groups.
        value: A tensor of the stepped tensor's shape, such as a squared gradient.
        shape: Shape of the full tensor. The results have the shapes [..., rows, 1] and [..., 1, columns].
    """
    yield position, value, (len(shape) - 1,)
    yield position, value, (len(shape) - 2,)


def row_and_column_zeros(slot: Slot, shape: Shape) -> tuple[Tensor, Tensor]:
    """Return zeros [..., rows, 1] and [..., 1, columns] for a full tensor of ``shape``, in the parameter's dtype."""
    new_zeros = slot.param.new_zeros
    return new_zeros((*shape[:-1], 1)), new_zeros((*shape[:-2], 1, shape[-1]))


def total(position: int, value: Tensor, shape: Shape) -> Request:
    """Return a request to `WholeTensors.sums` for the sum of all elements of a full tensor of ``shape``."""
    return position, value, tuple(range(len(shape)))


def rms(sum_of_squares: Tensor, shape: Shape) -> Tensor:
    return (sum_of_squares.sum() / max(prod(shape), 1)).sqrt()


def toward(old: Tensor, new: Tensor, rate: float | Tensor) -> Tensor:
    """Return ``old`` moved toward ``new`` by the fraction ``rate``, in the dtype of ``old``."""
    return old + (new.to(old.dtype) - old) * rate


def outer(tensors: WholeTensors, slot: Slot, rows: Tensor, columns: Tensor) -> Tensor:
    """Return this rank's shard of ``rows * columns``, which has the full tensor's shape.

    ``rows`` has the shape [..., rows, 1], and ``columns`` the shape [..., 1, columns]. Both are the same on all ranks.
    """
    left, right = tensors.of_whole(slot.position, rows), tensors.of_whole(slot.position, columns)
    return (left * right).reshape(slot.param.shape)


# Adafactor ------------------------------------------------------------------------------------------------------------

Moments = Mapping[str, Tensor]


class Adafactor(WholeOptimizer):
    """Adafactor, with the defaults of `torch.optim.Adafactor`.

        optimizer = ParallelOptimizer(Adafactor(model.parameters()), registry, max_norm=1.0)

    Args:
        params: Parameters or param groups.
        lr: Upper limit of the relative step size min(lr, 1 / sqrt(t)) in step t: a number or a 0-dim tensor.
        beta2_decay: Exponent c <= 0. In step t, the new squared gradients have the weight t^c in the second moments.
        eps: (eps1, eps2). eps1 is the lower limit of the square root of a second moment; None: the machine epsilon of
            the parameter's dtype. The step is multiplied by the RMS of the parameter, or by eps2 if the RMS is smaller.
        d: Upper limit of the RMS of the scaled gradient, gradient / sqrt(second moment). A gradient with a larger RMS
            is scaled down to this limit.
        weight_decay: Decoupled weight decay, multiplied by ``lr``.

    A full tensor with two or more dims has the states ``row_var`` [..., rows, 1] and ``col_var`` [..., 1, columns], on
    every rank that steps a shard of it. Other tensors have ``variance``, of the shard's shape.

    Raises:
        ValueError: An option is out of range.

    Collectives: per step, two all-reduces per distinct set of ranks that step shards of a sharded tensor.
    Host synchronization: none if parameters and process groups are on one device.
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
                f"lr={lr}, beta2_decay={beta2_decay}, d={d}, weight_decay={weight_decay}: lr and weight_decay must be "
                ">= 0, beta2_decay <= 0, and d >= 1"
            )
        if not all(number is None or number >= 0 for number in eps) or eps[1] is None:
            raise ValueError(f"eps={eps}: give two numbers >= 0; the first may be None")
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def initial(self, slot: Slot) -> dict[str, Any]:
        shape = self.tensors.tensors[slot.position].shape
        if not is_factored(shape):
            return {"variance": torch.zeros_like(slot.param, memory_format=torch.contiguous_format)}
        rows, columns = row_and_column_zeros(slot, shape)
        return {"row_var": rows, "col_var": columns}

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
        measured = iter(of_updates)
        for slot in slots:
            group, u, squares = slot.group, self._update(slot, moments[slot.position]), next(measured)
            rate = sizes[slot.position].clamp(min=group["eps"][1]) * slot.step.rsqrt().clamp(max=group["lr"])
            rate = rate / (rms(squares, self._shape(slot)) / group["d"]).clamp(min=1)
            param = slot.param * (1 - group["lr"] * group["weight_decay"]) - rate * u
            yield Update(slot, param, moments[slot.position])

    def _shape(self, slot: Slot) -> tuple[int, ...]:
        return self.tensors.tensors[slot.position].shape

    def _squares(self, slots: Sequence[Slot]) -> Iterator[Request]:
        """Yield requests for the sum of squares of each parameter, and of each row and column of factored gradients."""
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
        """Return this rank's shard of gradient / sqrt(second moment). ``moments`` has the slot's new second moments."""
        eps = slot.group["eps"][0]
        if eps is None:
            eps = torch.finfo(slot.param.dtype).eps
        if "variance" in moments:
            v = moments["variance"]
        else:
            rows = moments["row_var"]
            v = outer(self.tensors, slot, rows / rows.mean(-2, keepdim=True).clamp(min=eps), moments["col_var"])
        return slot.grad * v.clamp(min=eps * eps).rsqrt()


# CAME -----------------------------------------------------------------------------------------------------------------

# Adafactor with momentum, with smaller steps where momentum and update differ (Luo et al., arXiv:2307.02047).
#
#     R <- b2 R + (1 - b2) row means of (g^2 + eps1)      C: column means          of the full matrix
#     u <- g / sqrt(R C / mean(R))
#     k <- max(1, RMS(u) / d)
#     m <- b1 m + (1 - b1) u / k
#     S <- b3 S + (1 - b3) row means of ((u / k - m)^2 + eps2)      T: column means
#     w <- w - lr wd w - lr m / sqrt(S T / mean(S))
#
# The second moment of a tensor with fewer than two dims is not factored, and w <- w - lr wd w - lr m.
#
# With the old momentum m', u / k - m = b1 (u / k - m'). Let e = u - m' and a = 1 - 1 / k; then
# (u / k - m')^2 = e^2 - 2 a e u + a^2 u^2. So the sums of e^2, e u and u^2 give the result for any k, and are reduced
# in the same all-reduce as RMS(u).


class CAME(WholeOptimizer):
    """CAME, with the defaults of its authors' package ``came_pytorch``.

        optimizer = ParallelOptimizer(CAME(model.parameters(), lr=2e-4), registry, max_norm=1.0)

    Args:
        params: Parameters or param groups.
        lr: A number or a 0-dim tensor.
        eps: (eps1, eps2). eps1 is added to the squared gradients. eps2 is added to the squared differences between the
            scaled gradient and the momentum.
        clip_threshold: Upper limit of the RMS of the scaled gradient, gradient / sqrt(second moment). A gradient with a
            larger RMS is scaled down to this limit.
        betas: (b1, b2, b3), the decay of the momentum, of the squared gradients, and of the squared differences.
        weight_decay: Decoupled weight decay, multiplied by ``lr``.

    Every tensor has the state ``exp_avg``, of the shard's shape. A full tensor with two or more dims also has these
    states on every rank that steps a shard of it: ``exp_avg_sq_row``, ``exp_avg_res_row`` [..., rows, 1] and
    ``exp_avg_sq_col``, ``exp_avg_res_col`` [..., 1, columns]. Other tensors have ``exp_avg_sq``, of the shard's shape.

    Raises:
        ValueError: An option is out of range.

    Collectives: per step, at most two all-reduces per distinct set of ranks that step shards of a sharded tensor.
    Host synchronization: none if parameters and process groups are on one device.
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
                f"lr={lr}, eps={eps}, clip_threshold={clip_threshold}, weight_decay={weight_decay}: lr and weight_decay "
                "must be >= 0, and clip_threshold and both numbers of eps > 0"
            )
        if len(betas) != 3 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas}: give three numbers in [0, 1)")
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
            descent = state["exp_avg"] = toward(slot.state["exp_avg"], u / k, 1 - beta1)
            if is_factored(shape):
                state |= self._instability(slot, 1 - 1 / k, uu, measured)
                descent = descent * self._inverse_root(slot, state, "res")
            param = slot.param * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * descent
            yield Update(slot, param, state)

    def _shape(self, slot: Slot) -> tuple[int, ...]:
        return self.tensors.tensors[slot.position].shape

    def _squares(self, slots: Sequence[Slot]) -> Iterator[Request]:
        """Yield requests for the sum of squares of each row and column of each gradient with two or more dims."""
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
        """Return this rank's shard of gradient / sqrt(second moment). ``moments`` has the slot's new second moments."""
        if "exp_avg_sq" in moments:
            return slot.grad * moments["exp_avg_sq"].rsqrt()
        return slot.grad * self._inverse_root(slot, moments, "sq")

    def _inverse_root(self, slot: Slot, moments: Moments, what: str) -> Tensor:
        rows, columns = moments[f"exp_avg_{what}_row"], moments[f"exp_avg_{what}_col"]
        return outer(self.tensors, slot, (rows / rows.mean(-2, keepdim=True)).rsqrt(), columns.rsqrt())

    def _residuals(self, slots: Sequence[Slot], moments: Mapping[int, Moments]) -> Iterator[Request]:
        """Yield requests for the sums of u^2, e^2 and e u per row and column of each factored tensor.

        For other tensors, yield a request for the sum of u^2. u is the scaled gradient, gradient / sqrt(second moment),
        and e is u minus the old momentum.
        """
        for slot in slots:
            shape, u = self._shape(slot), self._update(slot, moments[slot.position]).double()
            if not is_factored(shape):
                yield total(slot.position, u.square(), shape)
                continue
            e = u - slot.state["exp_avg"].double()
            for product in (u.square(), e.square(), e * u):
                yield from row_and_column_sums(slot.position, product, shape)

    def _instability(self, slot: Slot, a: Tensor, uu: Sequence[Tensor], sums: Iterator[Tensor]) -> Moments:
        """Return the new means per row and per column of the squared differences between scaled gradient and momentum.

        The keys are the names of the states: ``exp_avg_res_row`` and ``exp_avg_res_col``.

        Args:
            slot: The stepped tensor.
            a: 1 - 1 / k, where the scaled gradient u is divided by k before it is added to the momentum.
            uu: The sums of u^2 per row and per column.
            sums: Yields the sums of e^2 and of e u, each per row and per column. e is u minus the old momentum.
        """
        shape, (beta1, _, beta3) = self._shape(slot), slot.group["betas"]
        ee, eu = (next(sums), next(sums)), (next(sums), next(sums))
        found = {}
        for index, (along, length) in enumerate((("row", shape[-1]), ("col", shape[-2]))):
            squares = (ee[index] - 2 * a * eu[index] + a * a * uu[index]).clamp(min=0)
            mean = beta1**2 * squares / length + slot.group["eps"][1]
            found[f"exp_avg_res_{along}"] = toward(slot.state[f"exp_avg_res_{along}"], mean, 1 - beta3)
        return found
