"""Adafactor and CAME, whose second moments are factored into rows and columns.

Adafactor (Shazeer, Stern, arXiv:1804.04235) is Adam without momentum:

    R <- R + t^c (row means of g^2 - R)    C <- C + t^c (column means of g^2 - C)    of the full matrix; c <= 0
    u <- g / sqrt(R C / mean(R))
    w <- w - lr wd w - max(eps2, RMS(w)) min(lr, 1 / sqrt(t)) u / max(1, RMS(u) / d)

The second moment of a tensor with fewer than two dims is not factored. CAME's formulas are in a comment above its
class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...amp.casting import copy_each_
from ...parallel.layout.shard import Shape
from ..norm.powers import powers_by_torch
from .batching import PackedTensors, by_position, chunks, grouped
from .optimizer import Slot, Update, WholeOptimizer, moments
from .tensors import Request, WholeTensors, float64_stack

# Factored second moments: the means of a matrix's rows and of its columns ---------------------------------------------

# A full tensor with two or more dims is a stack of matrices over its last two dims; other tensors are not factored.
# Rows and columns are those of the full tensor, independent of the sharding.


def is_factored(shape: Shape) -> bool:
    return len(shape) >= 2


def row_and_column_sums(position: int, value: Tensor, shape: Shape) -> Iterator[Request]:
    """Yield two requests to `WholeTensors.sums`: for the sum of each row, and for the sum of each column."""
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


def rms_of_each(sums_of_squares: Sequence[Tensor], shapes: Sequence[Shape]) -> Tensor:
    """Return `rms` of each full tensor, given the sum of the squares of all its elements, [tensors]."""
    means = torch.stack([one.view(()) for one in sums_of_squares])
    counts = torch._foreach_div(list(means.unbind()), [float(max(prod(shape), 1)) for shape in shapes])
    return torch.stack(counts).sqrt_()


def toward(old: Tensor, new: Tensor, rate: float | Tensor) -> Tensor:
    """Return ``old`` moved toward ``new`` by the fraction ``rate``, in the dtype of ``old``."""
    return old + (new.to(old.dtype) - old) * rate


def outer(tensors: WholeTensors, slot: Slot, rows: Tensor, columns: Tensor) -> Tensor:
    """Return this rank's shard of the full tensor ``rows * columns``. Both factors must be the same on all ranks."""
    left, right = tensors.of_whole(slot.position, rows), tensors.of_whole(slot.position, columns)
    return (left * right).reshape(slot.param.shape)


# Many tensors with few kernels, as on a GPU ---------------------------------------------------------------------------

# Tensors of equal layouts (`WholeTensors.alike`) are stacked. One kernel computes the row sums of all tensors in a stack,
# another the column sums.
# Full-size temporary tensors are computed for one `Chunk` of tensors at a time, and recomputed instead of kept.


class FactoredOptimizer(WholeOptimizer):
    """The base class of Adafactor and CAME."""

    def shape_of(self, slot: Slot) -> Shape:
        """Return the shape of the full tensor."""
        return self.tensors.tensors[slot.position].shape

    def is_factored(self, slot: Slot) -> bool:
        """Return True if the second moment of the tensor is factored into rows and columns."""
        return is_factored(self.shape_of(slot))

    def sums(
        self,
        slots: Sequence[Slot],
        requests: Callable[[Slot], Iterator[Request]],
        together: Mapping[int, Sequence[Tensor]],
    ) -> dict[int, list[Tensor]]:
        """Return {position: the sums that ``requests(slot)`` requests}. Collectives: as in `WholeTensors.sums`.

        ``together`` has this rank's parts of these sums, by position, for slots that are stepped together.
        """
        local: list[tuple[int, Tensor]] = []
        for slot in slots:
            parts = together.get(slot.position)
            if parts is None:
                parts = [self.tensors.local_sum(*request) for request in requests(slot)]
            local += ((slot.position, part) for part in parts)
        found: dict[int, list[Tensor]] = {slot.position: [] for slot in slots}
        for position, total_sum in self.tensors.add_up(local):
            found[position].append(total_sum)
        return found

    def gradient_squares(self, slots: Sequence[Slot]) -> dict[int, list[Tensor]]:
        """Sum the squares of this rank's gradients per row and per column, and return {position: [row sums, column sums]}.

        The list is empty for a tensor whose second moment is not factored.
        """
        found: dict[int, list[Tensor]] = {slot.position: [] for slot in slots}
        factored = [slot for slot in slots if self.is_factored(slot)]
        for alike in grouped(factored, lambda slot: (slot.param.device, slot.param.dtype)).values():
            grads = {slot.position: slot.grad for slot in alike}
            for positions in self.tensors.alike(grads):
                own = [grads[position] for position in positions]
                stack = float64_stack(own if self.tensors.contributes(positions[0]) else [own[0][:0]] * len(own))
                self.add_row_and_column_sums(found, positions, stack, square=True)
        return found

    def add_row_and_column_sums(
        self, found: Mapping[int, list[Tensor]], positions: Sequence[int], stack: Tensor, square: bool
    ) -> None:
        """Append this rank's sums per row, and then per column, of each tensor of a stack to ``found[position]``.

        If ``square`` is True, they are sums of squares. The other arguments are those of `WholeTensors.local_stack_sums`.
        """
        dims = len(self.tensors.tensors[positions[0]].shape)
        for dim in (dims - 1, dims - 2):
            parts = self.tensors.local_stack_sums(positions, stack, (dim,), square)
            for position, part in zip(positions, parts, strict=True):
                found[position].append(part)

    def chunks_of(self, slots: Sequence[Slot]) -> Iterator[Chunk]:
        """Divide stepped tensors into chunks, each of one param group, device and dtype."""
        by_kind = grouped(slots, lambda slot: (id(slot.group), slot.param.device, slot.param.dtype)).values()
        for kind in by_kind:
            by_position = {slot.position: slot for slot in kind}
            positions = [slot.position for slot in kind if self.is_factored(slot)]
            # All tensors of a stack go into one chunk. Otherwise the other stacks of the chunk would decide where a stack
            # is divided, and so how its sums are rounded.
            parts = [[by_position[position] for position in own] for own in self.tensors.alike(positions)]
            parts += [[slot] for slot in kind if not self.is_factored(slot)]
            for chunk in chunks(parts, lambda part: sum(slot.param.numel() for slot in part)):
                stacks = [part for part in chunk if self.is_factored(part[0])]
                yield Chunk([slot for part in chunk for slot in part], stacks)

    def packed(self, chunk: Chunk) -> PackedTensors:
        """Return uninitialized tensors of the slots' shapes. The key of a stack is the position of its first slot."""
        stack_of = {slot.position: stack[0].position for stack in chunk.stacks for slot in stack}
        return PackedTensors.like(
            chunk.slots, [stack_of.get(slot.position, (slot.param.numel(),)) for slot in chunk.slots]
        )

    def write_products(self, chunk: Chunk, factors: Factors, into: PackedTensors) -> None:
        """Write the product of row factors and column factors of each factored tensor into ``into``, from `packed`."""
        for stack in chunk.stacks:
            position = stack[0].position
            self.tensors.outer_products(position, *factors[position], into.stacks[position])

    def move(self, old: Sequence[Tensor], new: PackedTensors, rate: float | Tensor) -> None:
        """Move each tensor of ``old`` in place toward ``new`` by a fraction, unless the step is skipped.

        Args:
            old: The tensors to change, with the dtype of ``new``.
            new: The targets; overwritten.
            rate: The fraction, or one fraction per tensor, [tensors].
        """
        torch._foreach_sub_(new.tensors, list(old))
        if isinstance(rate, Tensor):
            new.multiply(rate)
        self.descend_each(old, new.tensors, -1.0 if isinstance(rate, Tensor) else -rate)

    def means(self, slots: Sequence[Slot], sums: Mapping[int, Sequence[Tensor]]) -> list[Tensor]:
        """Return a list: the row means and the column means of the first slot, then of the second slot, and so on.

        ``sums`` has the sums per row and per column, by position; overwritten.
        """
        found = [part for slot in slots for part in sums[slot.position]]
        lengths = [self.shape_of(slot)[dim] for slot in slots for dim in (-1, -2)]
        if found:
            torch._foreach_div_(found, [float(max(length, 1)) for length in lengths])
        return found

    def move_means(
        self, slots: Sequence[Slot], names: tuple[str, str], means: Sequence[Tensor], rate: float | Tensor
    ) -> None:
        """Move states of factored tensors in place toward new means, unless the step is skipped.

        Args:
            names: Names of the states with the means per row and per column.
            means: The new means, in the order in which `means` returns them.
            rate: The fraction, or one fraction per slot, [slots].
        """
        old = [slot.state[name] for slot in slots for name in names]
        rates = rate.repeat_interleave(2).unbind() if isinstance(rate, Tensor) else ()
        for (device, dtype), indices in grouped(
            range(len(old)), lambda index: (old[index].device, old[index].dtype)
        ).items():
            new = PackedTensors([old[index].shape for index in indices], dtype, device)
            new.fill([means[index] for index in indices])
            those = torch.stack([rates[index] for index in indices]) if isinstance(rate, Tensor) else rate
            self.move([old[index] for index in indices], new, those)


@dataclass
class Chunk:
    """Stepped tensors (`Slot`) of one param group, device and dtype that are computed together.

    ``slots`` begins with the factored tensors, in the order of ``stacks``, which are lists of tensors with equal layouts
    (`WholeTensors.alike`).
    """

    slots: list[Slot]
    stacks: list[list[Slot]]

    @property
    def group(self) -> dict[str, Any]:
        return self.slots[0].group

    @property
    def factored(self) -> list[Slot]:
        return [slot for stack in self.stacks for slot in stack]

    @property
    def others(self) -> list[Slot]:
        return self.slots[len(self.factored) :]


Factors = Mapping[int, tuple[Tensor, Tensor]]
"""(row factors, column factors) of stacks of factored tensors, such as `stacked_factors`, by position of the first slot."""


def stacked_factors(stack: Sequence[Slot], rows: str, columns: str, least: float | None) -> tuple[Tensor, Tensor]:
    """Return (row means / their mean, column means) of slots with equal layouts.

    ``rows`` and ``columns`` name the states that have the means. ``least`` is a lower limit of the mean; None: no limit.
    """
    left, right = (torch.stack([slot.state[key] for slot in stack]) for key in (rows, columns))
    # The sum of a matrix does not depend on the other matrices of the stack, so it is bitwise identical on all ranks.
    matrices = left.flatten(0, -3).unbind()
    means = left.new_zeros(0) if not matrices else powers_by_torch(matrices, 1.0) / max(left.size(-2), 1)
    means = means.to(left.dtype).view(*left.shape[:-2], 1, 1)
    return left.div_(means if least is None else means.clamp_(min=least)), right


# Adafactor ------------------------------------------------------------------------------------------------------------

Moments = Mapping[str, Tensor]


class Adafactor(FactoredOptimizer):
    """Adafactor, with the defaults of `torch.optim.Adafactor`.

        optimizer = ParallelOptimizer(Adafactor(model.parameters()), registry, max_norm=1.0)

    Args:
        params: Parameters or param groups.
        lr: Upper limit of the relative step size min(lr, 1 / sqrt(t)) in step t: a number or a 0-dim tensor. Default
            0.01.
        beta2_decay: Exponent c <= 0. In step t, the new squared gradients have the weight t^c in the second moments.
            Default -0.8.
        eps: (eps1, eps2). eps1 is the lower limit of the square root of a second moment, and of the mean of its factor R;
            None: the machine epsilon of the parameter's dtype. The step is multiplied by the RMS of the parameter, or by
            eps2 if the RMS is smaller. Default (None, 0.001).
        d: Upper limit of the RMS of the scaled gradient, gradient / sqrt(second moment). A gradient with a larger RMS
            is scaled down to this limit. Default 1.
        weight_decay: Decoupled weight decay, multiplied by ``lr``. Default 0.

    A full tensor with two or more dims has the states ``row_var`` [..., rows, 1] and ``col_var`` [..., 1, columns], on
    every rank that steps a shard of it. Other tensors have ``variance``, of the shard's shape.

    Raises:
        ValueError: An option is out of range.

    Collectives: per step, two all-reduces per distinct set of ranks that step shards of a sharded tensor.
    Host synchronization: none if parameters and process groups are on one device.
    Memory: on a GPU, in a step, the unscaled gradients, and about 300 MB, or two tensors of the size of the largest
        parameter if that is more.
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
        shape = self.shape_of(slot)
        if not is_factored(shape):
            return {"variance": torch.zeros_like(slot.param, memory_format=torch.contiguous_format)}
        rows, columns = row_and_column_zeros(slot, shape)
        return {"row_var": rows, "col_var": columns}

    def updates(self, slots: Sequence[Slot]) -> Iterator[Update]:
        kinds = grouped(slots, lambda slot: slot.is_batched)
        together, single = kinds.get(True, []), kinds.get(False, [])
        chunks = list(self.chunks_of(together))
        sums = self.sums(slots, self._squares, self._squares_together(together))
        sizes = {slot.position: sums[slot.position].pop(0) for slot in slots}  # sums of squares of the parameters
        moments = {slot.position: self._moments(slot, iter(sums[slot.position])) for slot in single}
        self._write_moments(chunks, sums)
        factors = {
            stack[0].position: stacked_factors(stack, "row_var", "col_var", self._least(stack[0]))
            for chunk in chunks
            for stack in chunk.stacks
        }
        powers = dict[int, list[Tensor]]()
        for chunk in chunks:
            of_chunk = self.tensors.local_powers(by_position(chunk.slots, self._updates_of(chunk, factors).tensors))
            powers.update((position, [power]) for position, power in of_chunk.items())

        def of_update(slot: Slot) -> Iterator[Request]:
            u = self._update(slot, moments[slot.position])
            yield total(slot.position, u.double().square(), self.shape_of(slot))

        squares = {position: own[0] for position, own in self.sums(slots, of_update, powers).items()}
        for slot in single:
            group, u, shape = slot.group, self._update(slot, moments[slot.position]), self.shape_of(slot)
            rate = rms(sizes[slot.position], shape).clamp(min=group["eps"][1]) * slot.step.rsqrt().clamp(
                max=group["lr"]
            )
            rate = rate / (rms(squares[slot.position], shape) / group["d"]).clamp(min=1)
            param = slot.param * (1 - group["lr"] * group["weight_decay"]) - rate * u
            yield Update(slot, param, moments[slot.position])
        for chunk in chunks:
            u_of_chunk, lr = self._updates_of(chunk, factors), chunk.group["lr"]
            u_of_chunk.multiply(self._relative_rates(chunk, sizes, squares))
            params = [slot.param for slot in chunk.slots]
            self.descend_each(params, u_of_chunk.tensors, lr, chunk.group["weight_decay"])
            yield from (Update(slot, slot.param, {}) for slot in chunk.slots)

    # One tensor after the other -------------------------------------------------------------------------------------

    def _squares(self, slot: Slot) -> Iterator[Request]:
        """Yield requests for the sum of squares of a parameter, and of each row and column of a factored gradient."""
        shape = self.shape_of(slot)
        yield total(slot.position, slot.param.double().square(), shape)
        if is_factored(shape):
            yield from row_and_column_sums(slot.position, slot.grad.double().square(), shape)

    def _moments(self, slot: Slot, sums: Iterator[Tensor]) -> Moments:
        shape, rate = self.shape_of(slot), slot.step ** slot.group["beta2_decay"]
        if not is_factored(shape):
            return {"variance": toward(slot.state["variance"], slot.grad.square(), rate)}
        rows, columns = next(sums) / shape[-1], next(sums) / shape[-2]
        return {
            "row_var": toward(slot.state["row_var"], rows, rate),
            "col_var": toward(slot.state["col_var"], columns, rate),
        }

    def _update(self, slot: Slot, moments: Moments) -> Tensor:
        """Return this rank's shard of gradient / sqrt(second moment). ``moments`` has the slot's new second moments."""
        eps = self._least(slot)
        if "variance" in moments:
            v = moments["variance"]
        else:
            rows = moments["row_var"]
            v = outer(self.tensors, slot, rows / rows.mean(-2, keepdim=True).clamp(min=eps), moments["col_var"])
        return slot.grad * v.clamp(min=eps * eps).rsqrt()

    def _least(self, slot: Slot) -> float:
        """Return the lower limit of the square root of a second moment."""
        eps: float | None = slot.group["eps"][0]
        return torch.finfo(slot.param.dtype).eps if eps is None else eps

    # Many tensors with few kernels ----------------------------------------------------------------------------------

    def _squares_together(self, slots: Sequence[Slot]) -> dict[int, list[Tensor]]:
        """Return this rank's parts of the sums that `_squares` requests, by position."""
        powers = self.tensors.local_powers({slot.position: slot.param for slot in slots})
        of_gradients = self.gradient_squares(slots)
        return {position: [power, *of_gradients[position]] for position, power in powers.items()}

    def _write_moments(self, chunks: Sequence[Chunk], sums: Mapping[int, Sequence[Tensor]]) -> None:
        """Change the second moments in place. ``sums`` has sums of squares per row and per column, by position."""
        for chunk in chunks:
            rates = _steps(chunk.slots) ** chunk.group["beta2_decay"]
            if chunk.factored:
                means = self.means(chunk.factored, sums)
                self.move_means(chunk.factored, ("row_var", "col_var"), means, rates[: len(chunk.factored)])
            if chunk.others:
                new = PackedTensors.like(chunk.others).fill([slot.grad for slot in chunk.others])
                new.flat.square_()
                self.move([slot.state["variance"] for slot in chunk.others], new, rates[len(chunk.factored) :])

    def _updates_of(self, chunk: Chunk, factors: Factors) -> PackedTensors:
        """Return `_update` of each slot. ``factors`` has the `stacked_factors` of the chunk's stacks."""
        made = self.packed(chunk)
        self.write_products(chunk, factors, made)
        copy_each_(made.tensors[len(chunk.factored) :], [slot.state["variance"] for slot in chunk.others])
        made.flat.clamp_(min=self._least(chunk.slots[0]) ** 2).rsqrt_()
        torch._foreach_mul_(made.tensors, [slot.grad for slot in chunk.slots])
        return made

    def _relative_rates(self, chunk: Chunk, sizes: Mapping[int, Tensor], squares: Mapping[int, Tensor]) -> Tensor:
        """Return the factor on each slot's `_update`, divided by the learning rate; finite for a learning rate of 0."""
        group = chunk.group
        of_params, of_updates = (
            rms_of_each([found[slot.position] for slot in chunk.slots], [self.shape_of(slot) for slot in chunk.slots])
            for found in (sizes, squares)
        )
        rates: Tensor = of_params.clamp(min=group["eps"][1]) * (_steps(chunk.slots).rsqrt() / group["lr"]).clamp(max=1)
        return rates.div_((of_updates / group["d"]).clamp(min=1))


def _steps(slots: Sequence[Slot]) -> Tensor:
    return torch.stack([slot.step for slot in slots])


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


class CAME(FactoredOptimizer):
    """CAME, with the defaults of its authors' package ``came_pytorch``.

        optimizer = ParallelOptimizer(CAME(model.parameters(), lr=2e-4), registry, max_norm=1.0)

    Args:
        params: Parameters or param groups.
        lr: A number or a 0-dim tensor.
        eps: (eps1, eps2). eps1 is added to the squared gradients. eps2 is added to the squared differences between the
            scaled gradient and the momentum. Default (1e-30, 1e-16).
        clip_threshold: Upper limit of the RMS of the scaled gradient, gradient / sqrt(second moment). A gradient with a
            larger RMS is scaled down to this limit. Default 1.
        betas: (b1, b2, b3), the decay of the momentum, of the squared gradients, and of the squared differences.
            Default (0.9, 0.999, 0.9999).
        weight_decay: Decoupled weight decay, multiplied by ``lr``. Default 0.

    Every tensor has the state ``exp_avg``, of the shard's shape. A full tensor with two or more dims also has these
    states on every rank that steps a shard of it: ``exp_avg_sq_row``, ``exp_avg_res_row`` [..., rows, 1] and
    ``exp_avg_sq_col``, ``exp_avg_res_col`` [..., 1, columns]. Other tensors have ``exp_avg_sq``, of the shard's shape.

    Raises:
        ValueError: An option is out of range.

    Collectives: per step, at most two all-reduces per distinct set of ranks that step shards of a sharded tensor.
    Host synchronization: none if parameters and process groups are on one device.
    Memory: on a GPU, in a step, the unscaled gradients, and about 700 MB, or five tensors of the size of the largest
        parameter if that is more.
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
        shape = self.shape_of(slot)
        if not is_factored(shape):
            return moments(slot)
        state = {"exp_avg": torch.zeros_like(slot.param, memory_format=torch.contiguous_format)}
        for what in ("sq", "res"):
            state[f"exp_avg_{what}_row"], state[f"exp_avg_{what}_col"] = row_and_column_zeros(slot, shape)
        return state

    def updates(self, slots: Sequence[Slot]) -> Iterator[Update]:
        kinds = grouped(slots, lambda slot: slot.is_batched)
        together, single = kinds.get(True, []), kinds.get(False, [])
        chunks = list(self.chunks_of(together))
        sums = self.sums(slots, self._squares, self.gradient_squares(together))
        moments = {slot.position: self._moments(slot, iter(sums[slot.position])) for slot in single}
        self._write_moments(chunks, sums)
        factors = _inverse_roots(chunks, "sq")
        parts = dict[int, list[Tensor]]()
        for chunk in chunks:
            parts |= self._residuals_together(chunk, self._updates_of(chunk, factors))
        sums = self.sums(slots, lambda slot: self._residuals(slot, moments[slot.position]), parts)
        for slot in single:
            group, shape, u = slot.group, self.shape_of(slot), self._update(slot, moments[slot.position])
            beta1, state, measured = group["betas"][0], dict(moments[slot.position]), iter(sums[slot.position])
            uu = [next(measured) for _ in range(2 if is_factored(shape) else 1)]
            k = (rms(uu[0], shape) / group["clip_threshold"]).clamp(min=1)
            descent = state["exp_avg"] = toward(slot.state["exp_avg"], u / k, 1 - beta1)
            if is_factored(shape):
                state |= self._instability(slot, 1 - 1 / k, uu, measured)
                descent = descent * self._inverse_root(slot, state, "res")
            param = slot.param * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * descent
            yield Update(slot, param, state)
        for chunk in chunks:
            self._descend_together(chunk, factors, sums)
            yield from (Update(slot, slot.param, {}) for slot in chunk.slots)

    # One tensor after the other -------------------------------------------------------------------------------------

    def _squares(self, slot: Slot) -> Iterator[Request]:
        """Yield requests for the sum of squares of each row and column of a gradient with two or more dims."""
        if is_factored(shape := self.shape_of(slot)):
            yield from row_and_column_sums(slot.position, slot.grad.double().square(), shape)

    def _moments(self, slot: Slot, sums: Iterator[Tensor]) -> Moments:
        shape, rate, eps = self.shape_of(slot), 1 - slot.group["betas"][1], slot.group["eps"][0]
        if not is_factored(shape):
            return {"exp_avg_sq": toward(slot.state["exp_avg_sq"], slot.grad.square() + eps, rate)}
        means = {"exp_avg_sq_row": next(sums) / shape[-1] + eps, "exp_avg_sq_col": next(sums) / shape[-2] + eps}
        return {key: toward(slot.state[key], mean, rate) for key, mean in means.items()}

    def _update(self, slot: Slot, moments: Moments) -> Tensor:
        if "exp_avg_sq" in moments:
            return slot.grad * moments["exp_avg_sq"].rsqrt()
        return slot.grad * self._inverse_root(slot, moments, "sq")

    def _inverse_root(self, slot: Slot, moments: Moments, what: str) -> Tensor:
        rows, columns = moments[f"exp_avg_{what}_row"], moments[f"exp_avg_{what}_col"]
        return outer(self.tensors, slot, (rows / rows.mean(-2, keepdim=True)).rsqrt(), columns.rsqrt())

    def _residuals(self, slot: Slot, moments: Moments) -> Iterator[Request]:
        """Yield requests for the sums of u^2, e^2 and e u of a factored tensor, or of u^2 (comment above `CAME`)."""
        shape, u = self.shape_of(slot), self._update(slot, moments).double()
        if not is_factored(shape):
            yield total(slot.position, u.square(), shape)
            return
        e = u - slot.state["exp_avg"].double()
        for product in (u.square(), e.square(), e * u):
            yield from row_and_column_sums(slot.position, product, shape)

    def _instability(self, slot: Slot, a: Tensor, uu: Sequence[Tensor], sums: Iterator[Tensor]) -> Moments:
        """Return the new averages per row and per column of (u / k - m)^2, where m is the new momentum.

        ``uu`` has the sums of u^2, and ``sums`` yields the sums of e^2 and of e u, each per row and per column. The comment
        above `CAME` defines ``a``, u and e.
        """
        shape, (beta1, _, beta3) = self.shape_of(slot), slot.group["betas"]
        ee, eu = (next(sums), next(sums)), (next(sums), next(sums))
        found = {}
        for index, (along, length) in enumerate((("row", shape[-1]), ("col", shape[-2]))):
            squares = (ee[index] - 2 * a * eu[index] + a * a * uu[index]).clamp(min=0)
            mean = beta1**2 * squares / length + slot.group["eps"][1]
            found[f"exp_avg_res_{along}"] = toward(slot.state[f"exp_avg_res_{along}"], mean, 1 - beta3)
        return found

    # Many tensors with few kernels ----------------------------------------------------------------------------------

    def _write_moments(self, chunks: Sequence[Chunk], sums: Mapping[int, Sequence[Tensor]]) -> None:
        """Change the second moments in place. ``sums`` has sums of squares per row and per column, by position."""
        for chunk in chunks:
            rate, eps = 1 - chunk.group["betas"][1], chunk.group["eps"][0]
            if chunk.factored:
                means = self.means(chunk.factored, sums)
                torch._foreach_add_(means, eps)
                self.move_means(chunk.factored, ("exp_avg_sq_row", "exp_avg_sq_col"), means, rate)
            if chunk.others:
                new = PackedTensors.like(chunk.others).fill([slot.grad for slot in chunk.others])
                new.flat.square_().add_(eps)
                self.move([slot.state["exp_avg_sq"] for slot in chunk.others], new, rate)

    def _updates_of(self, chunk: Chunk, factors: Factors) -> PackedTensors:
        """Return `_update` of each slot. ``factors`` has the `_inverse_roots` of the chunk's stacks."""
        made = self.packed(chunk)
        self.write_products(chunk, factors, made)
        if others := made.tensors[len(chunk.factored) :]:
            copy_each_(others, [slot.state["exp_avg_sq"] for slot in chunk.others])
            torch._foreach_rsqrt_(others)
        torch._foreach_mul_(made.tensors, [slot.grad for slot in chunk.slots])
        return made

    def _residuals_together(self, chunk: Chunk, updates: PackedTensors) -> dict[int, list[Tensor]]:
        """Return this rank's parts of the sums that `_residuals` requests, by position."""
        powers = self.tensors.local_powers(by_position(chunk.others, updates.tensors[len(chunk.factored) :]))
        found = {position: [power] for position, power in powers.items()}
        for stack in chunk.stacks:
            positions, numel = [slot.position for slot in stack], stack[0].param.numel()
            found.update((position, []) for position in positions)
            numel = numel if self.tensors.contributes(positions[0]) else 0
            u = updates.stacks[positions[0]][:, :numel].double()
            e = float64_stack([slot.state["exp_avg"].view(-1)[:numel] for slot in stack])
            torch.sub(u, e, out=e)
            self.add_row_and_column_sums(found, positions, u, square=True)
            self.add_row_and_column_sums(found, positions, e, square=True)
            self.add_row_and_column_sums(found, positions, u.mul_(e), square=False)
        return found

    def _descend_together(self, chunk: Chunk, factors: Factors, sums: Mapping[int, Sequence[Tensor]]) -> None:
        """Change momentum, squared differences and parameters in place."""
        group, factored, momenta = chunk.group, chunk.factored, [slot.state["exp_avg"] for slot in chunk.slots]
        # for a factored tensor, the sums of u^2 per row, which add up to the sum of u^2
        powers = [sums[slot.position][0] for slot in chunk.slots]
        means = rms_of_each(list(powers_by_torch(powers, 1.0).unbind()), [self.shape_of(slot) for slot in chunk.slots])
        k = (means / group["clip_threshold"]).clamp(min=1)
        made = self._updates_of(chunk, factors)
        made.multiply(k.reciprocal())
        self.move(momenta, made, 1 - group["betas"][0])
        along = momenta[len(factored) :]
        if factored:
            self._write_instability(factored, 1 - k[: len(factored)].reciprocal(), sums)
            self.write_products(chunk, _inverse_roots([chunk], "res"), made)
            torch._foreach_mul_(made.tensors[: len(factored)], momenta[: len(factored)])
            along = [*made.tensors[: len(factored)], *along]
        self.descend_each([slot.param for slot in chunk.slots], along, group["lr"], group["weight_decay"])

    def _write_instability(self, slots: Sequence[Slot], a: Tensor, sums: Mapping[int, Sequence[Tensor]]) -> None:
        """Change the means of the squared differences of factored slots of one param group, as `_instability` does."""
        group, rates = slots[0].group, a.repeat_interleave(2)
        uu, ee, eu = ([one for slot in slots for one in sums[slot.position][which : which + 2]] for which in (0, 2, 4))
        squares, products, updates = (
            PackedTensors([one.shape for one in part], part[0].dtype, part[0].device).fill(part)
            for part in (ee, eu, uu)
        )
        products.multiply(-2 * rates)
        updates.multiply(rates.square())
        squares.flat.add_(products.flat).add_(updates.flat).clamp_(min=0).mul_(group["betas"][0] ** 2)
        means = self.means(
            slots, {slot.position: squares.tensors[2 * at : 2 * at + 2] for at, slot in enumerate(slots)}
        )
        torch._foreach_add_(means, group["eps"][1])
        self.move_means(slots, ("exp_avg_res_row", "exp_avg_res_col"), means, 1 - group["betas"][2])


def _inverse_roots(chunks: Sequence[Chunk], what: str) -> Factors:
    """Return the factors of 1 / sqrt(means of squares) of each stack: its `stacked_factors` to the power -1/2."""
    found = {}
    for stack in (stack for chunk in chunks for stack in chunk.stacks):
        left, right = stacked_factors(stack, f"exp_avg_{what}_row", f"exp_avg_{what}_col", None)
        found[stack[0].position] = left.rsqrt_(), right.rsqrt_()
    return found
