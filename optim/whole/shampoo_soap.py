"""Shampoo and SOAP: gradients preconditioned on each side of a matrix, with states kept on the matrix's owner rank.

Shampoo multiplies gradients by inverse roots of preconditioners::

    L <- b2 L + (1 - b2) G G^T                R <- b2 R + (1 - b2) G^T G        (b2 = 1: L + G G^T, R + G^T G)
    m <- b1 m + (1 - b1) G                    m^ = m / (1 - b1^t)
    P = L^(-1/4) m^ R^(-1/4)                  roots of L / (1 - b2^t) + eps I (b2 = 1: L + eps I), and of R likewise
    A = m^ / (sqrt(v^) + graft_eps)           grafting: Adam's step with its second moment v^; "sgd": A = m^
    w <- w - lr (wd w + P |A| / |P|)

The roots are computed every ``precondition_frequency`` steps. A tensor with four or more dims has one preconditioner
per dim. With k preconditioners, the exponents are -1 / (2k). Vectors have no preconditioner; their update is A.

Gupta et al., "Shampoo: Preconditioned Stochastic Tensor Optimization" (arXiv:1802.09568). The epsilon of the roots,
averages and grafting: Anil et al. (arXiv:2002.09018) and Shi et al. (arXiv:2309.06497).

SOAP is Adam in the eigenbasis of Shampoo's preconditioners::

    L <- b3 L + (1 - b3) G G^T                R <- b3 R + (1 - b3) G^T G
    Q_L, Q_R = eigenvectors of L, R           in the first step; later qr(L Q_L), qr(R Q_R) at some steps
    G' = Q_L^T G Q_R                          before L, R and Q are updated with this gradient
    m <- b1 m + (1 - b1) G                    v <- b2 v + (1 - b2) G'^2
    U = Q_L (Q_L^T m Q_R / (sqrt(v) + eps)) Q_R^T
    w <- (w - lr sqrt(1 - b2^k) / (1 - b1^k) U) (1 - lr wd)

The bases Q_L and Q_R are computed every ``precondition_frequency`` steps. k is the number of updates, including the
present one. The first step makes no update: it only computes the first bases. A tensor with four or more dims has a
preconditioner per dim. A vector has no preconditioner, and is stepped by Adam from the second step on.

Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (arXiv:2409.11321), with the defaults of the authors'
code.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from math import prod, sqrt
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...amp.casting import copy_each_
from ...parallel.layout.shard import Shape
from . import batching
from .batching import chunks, grouped
from .exchange import Matrix, each
from .optimizer import HomeOptimizer, Slot, Update, fused_adamw, late_steps, moments, named, next_moments
from .tensors import Blocks

# Preconditioners ------------------------------------------------------------------------------------------------------

Sides = Sequence[Tensor | None]
"""One entry per dim of a tensor: a square matrix of the dim's size, or None for a dim without preconditioner."""

FACTORISATION = 40.0
"""Estimated cost of a matrix product and a QR decomposition of [n, n] matrices, divided by n^3.

The unit of cost is the time of one floating-point operation in a matrix product.
"""


def sides_of(shape: Shape) -> Shape:
    """Return the sizes of the dims that may have preconditioners: the last two dims of a stack, else all dims."""
    return tuple(shape[1:]) if len(shape) == 3 else tuple(shape)


def gram(g: Tensor, dim: int) -> Tensor:
    """Return the Gram matrix [n, n] of ``g`` along ``dim``: the inner products of its n slices along this dim."""
    rows = g.movedim(dim, 0).flatten(1)
    return rows @ rows.mT


def into(x: Tensor, bases: Sides) -> Tensor:
    """Multiply each dim of ``x`` by a matrix: for a matrix X and ``bases`` (Q_L, Q_R), return Q_L^T X Q_R."""
    for q in bases:
        x = x.movedim(0, -1) if q is None else torch.tensordot(x, q, ([0], [0]))
    return x


def out_of(x: Tensor, bases: Sides) -> Tensor:
    """Undo `into` for orthogonal ``bases``: for a matrix X and ``bases`` (Q_L, Q_R), return Q_L X Q_R^T."""
    return into(x, [None if q is None else q.mT for q in bases])


def eigh(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues (ascending) and eigenvectors of a symmetric matrix, or of each matrix of a stack.

    A non-finite matrix, which non-finite gradients give, is replaced by the identity, because torch's solver would raise.
    """
    finite = torch.isfinite(symmetric).flatten(-2).all(-1)[..., None, None]
    eye = torch.eye(symmetric.size(-1), dtype=symmetric.dtype, device=symmetric.device)
    values, vectors = torch.linalg.eigh(torch.where(finite, symmetric, eye))
    return values, vectors


def renewed(symmetric: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Improve approximate eigenbases by one step of power iteration, and return (new bases, orders [..., columns]).

    The columns of ``basis``, a matrix or a stack of matrices, are approximate eigenvectors. A new basis has the largest
    eigenvalues first; ``orders`` has the index of the old column for each new column.
    """
    product = symmetric @ basis
    order = torch.argsort((basis * product).sum(-2), dim=-1, descending=True)
    return torch.linalg.qr(product.gather(-1, order[..., None, :].expand_as(product)))[0], order


def inverse_root(symmetric: Tensor, order: int, epsilon: float) -> Tensor:
    """Return (S + epsilon I)^(-1 / order) of a symmetric matrix S, or of each matrix of a stack.

    The eigenvalues of S must be >= 0 except for rounding.
    """
    values, vectors = eigh(symmetric)
    root: Tensor = (vectors * (values.clamp(min=0) + epsilon).pow(-1 / order)[..., None, :]) @ vectors.mT
    return root


# Two functions for stacks of tensors of equal shapes: the first dim of each tensor is the index in the stack.


def gram_each(g: Tensor, dim: int) -> Tensor:
    """Return `gram` of each tensor of a stack, [tensors, n, n]."""
    rows = g.movedim(dim + 1, 1).flatten(2)
    return rows @ rows.mT


def into_each(x: Tensor, bases: Sides) -> Tensor:
    """Return `into` of each tensor of a stack. ``bases`` has a stack of matrices, or None, per dim of a tensor."""
    for q in bases:
        x = x.movedim(1, -1) if q is None else (x.flatten(2).mT @ q).view(len(x), *x.shape[2:], q.size(-1))
    return x


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors as a stack. A single tensor is not copied."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


class PreconditionedOptimizer(HomeOptimizer):
    """The base class of Shampoo and SOAP, which keep two square matrices per side (dim) of a matrix.

    These are the statistics of gradients along the side, and their inverse root (Shampoo) or eigenbasis (SOAP). A side
    that is longer than a limit has neither.

    Attributes:
        square_names: Names of the two states of a side: the statistics, and the root or basis.
        longest: Name of the option that has this limit, such as "max_precond_dim".
        product_cost: Floating-point operations per step in the products of one side, divided by (number of elements x
            length of the side).
        rounds_by_ranks: True: ``sum_order="fixed"`` rejects the optimizer, because the rounding of its factorisations may
            depend on the number of ranks.
    """

    kept = ("blocks", "factor_dtype")
    rounds_by_ranks = True
    square_names: ClassVar[tuple[str, str]]
    longest: ClassVar[str]
    product_cost: ClassVar[float]

    def __init__(self, params: Any, defaults: dict[str, Any], blocks: Blocks | None, factor_dtype: torch.dtype) -> None:
        frequency = defaults["precondition_frequency"]
        if frequency < 1 or factor_dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"precondition_frequency={frequency}, factor_dtype={factor_dtype}: the frequency must be >= 1, and "
                "factor_dtype torch.float32 or torch.float64"
            )
        self.blocks, self.factor_dtype = dict(blocks or {}), factor_dtype
        super().__init__(params, defaults)

    def cost(self, shape: Shape) -> float:
        """Return the approximate number of floating-point operations of one step of a matrix of ``shape``.

        The cost of the factorisations is divided by the number of steps between two of them.
        """
        often: int = self.defaults["precondition_frequency"]
        numel, sides = prod(shape), [n for n in sides_of(shape) if n <= self.defaults[self.longest]]
        return sum(self.product_cost * numel * side + FACTORISATION * side**3 / often for side in sides) + numel

    def initial(self, slot: Slot) -> dict[str, Any]:
        if not self.tensors.tensors[slot.position].metadata:
            return moments(slot)
        state: dict[str, Any] = {}
        for matrix in self.own(slot):
            zeros = slot.param.new_zeros(sides_of(matrix.shape))
            state |= {named("exp_avg", matrix): zeros, named("exp_avg_sq", matrix): zeros.clone()}
            for dim, side in enumerate(sides_of(matrix.shape)):
                if side <= slot.group[self.longest]:
                    square = slot.param.new_zeros((side, side), dtype=self.factor_dtype)
                    state |= {named(name, matrix, dim): square.clone() for name in self.square_names}
        return state

    def squares(self, slot: Slot, matrix: Matrix) -> list[tuple[Tensor, Tensor] | None]:
        """Return (statistics, root or basis) for each side of a matrix; None for a side without preconditioner.

        ``slot`` is the stepped tensor whose optimizer state has the states of the matrix.
        """
        found: list[tuple[Tensor, Tensor] | None] = []
        for dim in range(len(sides_of(matrix.shape))):
            statistics, made = (slot.state.get(named(name, matrix, dim)) for name in self.square_names)
            found.append(None if statistics is None or made is None else (statistics, made))
        return found

    def squares_each(self, own: Sequence[tuple[Matrix, Slot]]) -> list[tuple[list[Tensor], list[Tensor]] | None]:
        """Return (statistics of each matrix, root or basis of each matrix) for each side of a stack, as `squares` does."""
        found: list[tuple[list[Tensor], list[Tensor]] | None] = []
        for side in zip(*(self.squares(slot, matrix) for matrix, slot in own), strict=True):
            pairs = [pair for pair in side if pair is not None]
            found.append(([pair[0] for pair in pairs], [pair[1] for pair in pairs]) if pairs else None)
        return found

    def directions(self, slots: Sequence[Slot], taken: Mapping[int, int]) -> dict[int, Tensor]:
        """Return {position: this rank's shard of the update direction} for all tensors with two or more dims.

        A position is the index of a stepped tensor over all param groups. ``taken`` is {position: number of earlier
        steps}.

        Collectives: at most two all-to-alls per round of matrices, as in `Homes.map`.
        """
        slot_of = self.at_home(slots)

        def compute(matrix: Matrix, lists: list[Tensor]) -> Tensor:
            slot, (gradient,) = slot_of(matrix), lists
            g = gradient.view(sides_of(matrix.shape)).to(slot.param.device, self.factor_dtype)
            return self.direction(matrix, g, slot, taken[slot.position]).to(gradient).view(matrix.shape)

        def compute_stack(matrices: Sequence[Matrix], lists: list[Tensor]) -> Iterator[Tensor]:
            own = [(matrix, slot_of(matrix)) for matrix in matrices]
            if {slot.state[named("exp_avg", matrix)].dtype for matrix, slot in own} != {self.factor_dtype}:
                yield from each(compute)(matrices, lists)
                return
            found: dict[int, Tensor] = {}
            for indices in self._alike(own, taken):
                those = [own[index] for index in indices]
                slot, gradients = those[0][1], stacked([lists[0][index] for index in indices])
                g = gradients.view(len(those), *sides_of(matrices[0].shape)).to(slot.param.device, self.factor_dtype)
                made = self.direction_each(those, g, taken[slot.position])
                found.update(zip(indices, made.to(gradients).view(gradients.shape).unbind(), strict=True))
            yield from (found[index] for index in range(len(own)))

        gradients = {slot.position: slot.grad for slot in slots if self.tensors.tensors[slot.position].metadata}
        devices = {gradient.device for gradient in gradients.values()}
        if len(devices) == 1 and batching.batches_on(device := devices.pop()) and not self.fixed_order:
            of_round = self.homes.map_stacks([gradients], compute_stack, device)
            return {position: made for found in of_round for position, made in found.items()}
        return dict(self.homes.map([gradients], compute))

    def _alike(self, own: Sequence[tuple[Matrix, Slot]], taken: Mapping[int, int]) -> Iterator[list[int]]:
        """Divide matrices of equal shapes into stacks, and yield the list of indices of each stack.

        ``own`` is as in `direction_each`. The matrices of a stack have the same param group and step count. Together with
        their preconditioners, they have at most `batching.CHUNK` elements, or the stack has one matrix.
        """

        def elements(index: int) -> int:
            matrix, slot = own[index]
            longest: int = slot.group[self.longest]
            return prod(matrix.shape) + sum(side**2 for side in sides_of(matrix.shape) if side <= longest)

        by_options = grouped(range(len(own)), lambda at: (id(own[at][1].group), taken[own[at][1].position]))
        for indices in by_options.values():
            yield from chunks(indices, elements)

    def write_stack(self, targets: Sequence[Tensor], old: Tensor, new: Tensor) -> None:
        """Copy each tensor of the stack ``new`` into a target, unless the step is skipped; ``old`` has the old values."""
        skip = self._skip_flag(new.device)
        if skip is not None:
            new = torch.where(skip, old, new)
        copy_each_(targets, new.unbind())

    def lerp_each(self, targets: Sequence[Tensor], stack: Tensor, rate: float) -> None:
        """Move each target by the fraction ``rate`` toward a tensor of a stack, in place unless the step is skipped."""
        self.descend_each(targets, stack.unbind(), -rate, -1.0)

    def finish_step(self, slots: Sequence[Slot]) -> None:
        self.taken.note(slots)

    @abstractmethod
    def direction(self, matrix: Matrix, g: Tensor, slot: Slot, taken: int) -> Tensor:
        """Return the update direction of one matrix, and update its states.

        Args:
            matrix: A matrix that this rank owns.
            g: The full gradient of the matrix, in ``factor_dtype``.
            slot: The stepped tensor whose optimizer state has the states of the matrix.
            taken: Number of steps before this one.
        """

    @abstractmethod
    def direction_each(self, own: Sequence[tuple[Matrix, Slot]], g: Tensor, taken: int) -> Tensor:
        """Return `direction` of each matrix of a stack, and update their states in place.

        Args:
            own: (matrix, slot) for each matrix, as in `direction`. All slots are of one param group.
            g: The stack of the full gradients, in ``factor_dtype``, which is the dtype of the moments too.
            taken: Number of steps before this one.
        """


# Shampoo --------------------------------------------------------------------------------------------------------------

Grafting = Literal["adam", "sgd"]


class Shampoo(PreconditionedOptimizer):
    """Shampoo for matrices, with Adam (or SGD with momentum, see ``grafting``) for vectors.

        optimizer = ParallelOptimizer(Shampoo(model.named_parameters()), registry, max_norm=1.0)

    A parameter with two dims is a matrix, with three dims a stack of matrices (experts). A parameter with four or more
    dims has a preconditioner per dim. One rank, the owner rank, computes the update of a matrix, and only it keeps the
    matrix's states, which are preconditioners, their roots and the moments.

    Args:
        params: Parameters, ``model.named_parameters()``, or param groups.
        lr: A number or a 0-dim tensor. Default 0.01.
        betas: (b1, b2), the decay of the momentum and of the preconditioners. b2 = 1: a preconditioner is the sum of
            the products of gradients, as in the paper. Default (0.9, 1.0).
        epsilon: Added to the eigenvalues of the preconditioners. Default 1e-12.
        weight_decay: Decoupled weight decay, multiplied by ``lr``. Default 0.
        max_preconditioner_dim: Dims of a larger size have no preconditioner. Default 1024.
        precondition_frequency: Number of steps between new roots. The first step always computes roots. Default 1:
            every step computes roots.
        grafting: "adam" (default) or "sgd" (SGD with momentum). The update of a matrix is scaled to the norm of this
            method's step. The update of a vector is this method's step.
        grafting_beta2, grafting_epsilon: b2 and eps of the Adam step for ``grafting="adam"``. Defaults 0.999 and 1e-8.
        blocks: {glob over names: blocks of a fused weight along its rows}, each a separate matrix. The value is the
            number of equal blocks, or the list of their numbers of rows. A weight that no glob matches has the blocks
            that its layout declares. None (default): no globs.
        factor_dtype: Dtype of preconditioners and roots: float32 (default) or float64.

    Raises:
        ValueError: An option is out of range. In the constructor of `ParallelOptimizer`, or without it in the first
            step: ``blocks`` does not fit a weight.

    Collectives: per step, gradients are exchanged in rounds. In a round, each owner rank receives full matrices of up
        to 64 MiB, or one larger matrix. Each round has at most two all-to-alls among the ranks that step shards of its
        matrices.
    Host synchronization: on CUDA, one per stack of new roots, to check that the eigenvalue solver converged. Matrices that
        are computed together (see Memory) have one stack of roots per side, other matrices one root per side. In the
        first step, and in the first step after a load, also to read step counts. In other steps, the host waits for the
        end of the previous step.
    Memory: for a matrix [m, n], 2 (m^2 + n^2) elements of ``factor_dtype`` and 2 m n elements of the parameter's dtype
        on the owner rank, none on other ranks. A dim of size n without preconditioner saves 2 n^2. In a step, also the
        matrices and buffers of the exchange, as in `Muon`. On a GPU, matrices of equal shapes in a round are computed
        together if ``factor_dtype`` is the dtype of their parameters. This needs copies of up to 34 million elements of
        their states, or of the states of one matrix.
    """

    square_names, longest, product_cost = ("factor", "root"), "max_preconditioner_dim", 4.0

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
                f"lr={lr}, weight_decay={weight_decay}, betas={betas}: lr and weight_decay must be >= 0, betas[0] in "
                "[0, 1), and betas[1] in (0, 1]"
            )
        if grafting not in ("adam", "sgd"):
            raise ValueError(f"grafting={grafting!r}: give 'adam' or 'sgd'")
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
        super().__init__(params, defaults, blocks, factor_dtype)

    def updates(self, slots: Sequence[Slot]) -> Iterator[Update]:
        taken = self.taken.of(slots)
        found = self.directions(slots, taken)
        kinds = grouped(slots, lambda slot: slot.is_batched and slot.group["grafting"] == "adam")
        yield from self._updates_together(kinds.get(True, ()), found)
        for slot in kinds.get(False, ()):
            new: dict[str, Tensor] = {}
            if slot.position not in found:
                m, v, found[slot.position] = grafted(
                    slot.state["exp_avg"], slot.state["exp_avg_sq"], slot.grad, slot.group, taken[slot.position] + 1
                )
                new = {"exp_avg": m, "exp_avg_sq": v}
            lr, decay = slot.group["lr"], slot.group["weight_decay"]
            yield Update(slot, slot.param * (1 - lr * decay) - lr * found[slot.position], new)

    def _updates_together(self, slots: Sequence[Slot], found: Mapping[int, Tensor]) -> Iterator[Update]:
        """Step matrices along their directions, and vectors by fused AdamW, in place with few kernels."""
        for of_group in grouped(slots, lambda slot: (id(slot.group), slot.position in found)).values():
            group = of_group[0].group
            params, lr, decay = [slot.param for slot in of_group], group["lr"], group["weight_decay"]
            if of_group[0].position in found:
                self.descend_each(params, [found[slot.position] for slot in of_group], lr, decay)
                yield from (Update(slot, slot.param, {}) for slot in of_group)
                continue
            betas, counts = (group["betas"][0], group["grafting_beta2"]), [slot.state["step"] for slot in of_group]
            fused_adamw(of_group, params, counts, self.found_inf, lr, decay, betas, group["grafting_epsilon"])

    def direction(self, matrix: Matrix, g: Tensor, slot: Slot, taken: int) -> Tensor:
        """Return the preconditioned momentum, scaled to the norm of the grafted step, and update the states."""
        group, t = slot.group, taken + 1
        beta1, beta2 = group["betas"]
        squares = self.squares(slot, matrix)
        roots: list[Tensor | None] = [None] * len(squares)
        order = 2 * max(1, len(squares) - squares.count(None))
        for dim, pair in enumerate(squares):
            if pair is None:
                continue
            factor, roots[dim] = pair
            new = factor + gram(g, dim) if beta2 == 1 else factor.lerp(gram(g, dim), 1 - beta2)
            if taken % group["precondition_frequency"] == 0:
                mean = new if beta2 == 1 else new / (1 - beta2**t)
                roots[dim] = made = inverse_root(mean, order, group["epsilon"])
                self.write(pair[1], made)
            self.write(factor, new)
        m_key, v_key = named("exp_avg", matrix), named("exp_avg_sq", matrix)
        m, v, a = grafted(slot.state[m_key].to(g), slot.state[v_key].to(g), g, group, t)
        p = into(m / (1 - beta1**t), roots)
        self.write(slot.state[m_key], m)
        self.write(slot.state[v_key], v)
        update: Tensor = p * (a.norm() / p.norm().clamp(min=1e-30))
        return update

    def direction_each(self, own: Sequence[tuple[Matrix, Slot]], g: Tensor, taken: int) -> Tensor:
        group, t = own[0][1].group, taken + 1
        beta1, beta2 = group["betas"]
        squares = self.squares_each(own)
        roots: list[Tensor | None] = [None] * len(squares)
        order = 2 * max(1, len(squares) - squares.count(None))
        for dim, side in enumerate(squares):
            if side is None:
                continue
            factors, old_roots = side
            if beta2 == 1:
                self.descend_each(factors, gram_each(g, dim).unbind(), -1.0)
            else:
                self.lerp_each(factors, gram_each(g, dim), 1 - beta2)
            roots[dim] = old = stacked(old_roots)
            if taken % group["precondition_frequency"] == 0:
                mean = stacked(factors) if beta2 == 1 else stacked(factors) / (1 - beta2**t)
                roots[dim] = made = inverse_root(mean, order, group["epsilon"])
                self.write_stack(old_roots, old, made)
        m, v = ([slot.state[named(key, matrix)] for matrix, slot in own] for key in ("exp_avg", "exp_avg_sq"))
        self.lerp_each(m, g, 1 - beta1)
        self.lerp_each(v, g.square(), 1 - group["grafting_beta2"])
        a = m_hat = stacked(m) / (1 - beta1**t)
        if group["grafting"] == "adam":
            roots_of_v = (stacked(v) / (1 - group["grafting_beta2"] ** t)).sqrt_()
            a = m_hat / roots_of_v.add_(group["grafting_epsilon"])
        p = into_each(m_hat, roots)
        norms = [torch.linalg.vector_norm(tensor.flatten(1), dim=1) for tensor in (a, p)]
        scales = norms[0] / norms[1].clamp(min=1e-30)
        return p.mul_(scales.view(-1, *[1] * (p.dim() - 1)))


def grafted(m: Tensor, v: Tensor, g: Tensor, group: Mapping[str, Any], t: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (new first moment, new second moment, grafted step).

    The grafted step is Adam's, or the bias-corrected first moment if ``group["grafting"]`` is "sgd". ``t`` is the
    number of steps, including the present one.
    """
    beta1, beta2 = group["betas"][0], group["grafting_beta2"]
    m, v = m.lerp(g, 1 - beta1), v.lerp(g.square(), 1 - beta2)
    m_hat = m / (1 - beta1**t)
    if group["grafting"] == "sgd":
        return m, v, m_hat
    return m, v, m_hat / ((v / (1 - beta2**t)).sqrt() + group["grafting_epsilon"])


# SOAP -----------------------------------------------------------------------------------------------------------------


class SOAP(PreconditionedOptimizer):
    """SOAP for matrices, with Adam for vectors. The first step changes no weights: it computes the first bases.

        optimizer = ParallelOptimizer(SOAP(model.named_parameters()), registry, max_norm=1.0)

    A parameter with two dims is a matrix, with three dims a stack of matrices (experts). A parameter with four or more
    dims has a preconditioner per dim. One rank, the owner rank, computes the update of a matrix, and only it keeps the
    matrix's states, which are the preconditioners L and R, their eigenbases and two moments.

    The first bases come from a single gradient. If this gradient matrix does not have full rank, some vectors of a
    basis are arbitrary, as in the authors' code. They depend on the last bits of the gradient, so a sum of gradients in
    another order gives other bases.

    Args:
        params: Parameters, ``model.named_parameters()``, or param groups.
        lr: A number or a 0-dim tensor. Default 0.003.
        betas: (b1, b2), the decay of the first and the second moment. Default (0.95, 0.95).
        shampoo_beta: Decay of the preconditioners L and R. A negative value, such as the default -1, means b2.
        eps: Added to the square root of the second moment. Default 1e-8.
        weight_decay: Decoupled weight decay, multiplied by ``lr``. Default 0.01.
        precondition_frequency: Number of steps between new bases. Default 10.
        max_precond_dim: Dims of a larger size have no preconditioner. Default 10000.
        blocks: {glob over names: blocks of a fused weight along its rows}, each a separate matrix. The value is the
            number of equal blocks, or the list of their numbers of rows. A weight that no glob matches has the blocks
            that its layout declares. None (default): no globs.
        factor_dtype: Dtype of L, R and the bases, and of their products and factorisations: float32 (default) or
            float64.

    Raises:
        ValueError: An option is out of range. In the constructor of `ParallelOptimizer`, or without it in the first
            step: ``blocks`` does not fit a weight.

    Collectives: per step, gradients are exchanged in rounds. In a round, each owner rank receives full matrices of up
        to 64 MiB, or one larger matrix. Each round has at most two all-to-alls among the ranks that step shards of its
        matrices.
    Host synchronization: in each step until every matrix has been stepped once, and in the first step after a load. In
        other steps, the host waits only for the end of the previous step.
    Memory: for a matrix [m, n], 2 (m^2 + n^2) elements of ``factor_dtype`` and 2 m n elements of the parameter's dtype
        on the owner rank, none on other ranks. A dim of size n without preconditioner saves 2 n^2. In a step, also the
        matrices and buffers of the exchange, as in `Muon`. On a GPU, matrices of equal shapes in a round are computed
        together if ``factor_dtype`` is the dtype of their parameters. This needs copies of up to 34 million elements of
        their states, or of the states of one matrix.
    """

    square_names, longest, product_cost = ("GG", "Q"), "max_precond_dim", 8.0

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
                f"lr={lr}, weight_decay={weight_decay}, betas={betas}, shampoo_beta={shampoo_beta}: lr and weight_decay "
                "must be >= 0, betas in [0, 1), and shampoo_beta < 1"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "shampoo_beta": shampoo_beta,
            "eps": eps,
            "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
            "max_precond_dim": max_precond_dim,
        }
        super().__init__(params, defaults, blocks, factor_dtype)

    def updates(self, slots: Sequence[Slot]) -> Iterator[Update]:
        taken = self.taken.of(slots)
        found = self.directions(slots, taken)
        kinds = grouped(slots, lambda slot: slot.is_batched and self._has_positive_rate(slot))
        yield from self._updates_together(kinds.get(True, ()), found, taken)
        for slot in kinds.get(False, ()):
            k, new = taken[slot.position], dict[str, Tensor]()
            if not k:
                yield Update(slot, slot.param, {})
                continue
            if slot.position in found:
                u = found[slot.position]
            else:
                m, v = next_moments(slot)
                u, new = m / (v.sqrt() + slot.group["eps"]), {"exp_avg": m, "exp_avg_sq": v}
            (beta1, beta2), lr = slot.group["betas"], slot.group["lr"]
            rate = lr * sqrt(1 - beta2**k) / (1 - beta1**k)
            yield Update(slot, (slot.param - rate * u) * (1 - lr * slot.group["weight_decay"]), new)

    def _has_positive_rate(self, slot: Slot) -> bool:
        """Return True if lr is a number > 0 and lr * weight_decay < 1, so that r' > 0 in `_updates_together`."""
        lr, decay = slot.group["lr"], slot.group["weight_decay"]
        return not isinstance(lr, Tensor) and lr > 0 and lr * decay < 1

    def _updates_together(
        self, slots: Sequence[Slot], found: Mapping[int, Tensor], taken: Mapping[int, int]
    ) -> Iterator[Update]:
        """Step matrices along their directions, and vectors by fused AdamW, in place with few kernels.

        The step (w - r U) (1 - lr wd) equals w - r' (U + d w), with r' = r (1 - lr wd) and d = lr wd / r'.
        """
        for (_, k, is_matrix), alike in grouped(
            slots, lambda slot: (id(slot.group), taken[slot.position], slot.position in found)
        ).items():
            group, params = alike[0].group, [slot.param for slot in alike]
            (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
            if k:
                rate = lr * sqrt(1 - beta2**k) / (1 - beta1**k) * (1 - lr * decay)
                if is_matrix:
                    self.descend_each(params, [found[slot.position] for slot in alike], rate, lr * decay / rate)
                else:  # `rate` contains the bias correction; with `late_steps`, AdamW makes none
                    counts = late_steps(alike)
                    fused_adamw(
                        alike, params, counts, self.found_inf, rate, lr * decay / rate, group["betas"], group["eps"]
                    )
            yield from (Update(slot, slot.param, {}) for slot in alike)

    def direction(self, matrix: Matrix, g: Tensor, slot: Slot, taken: int) -> Tensor:
        """Return Adam's direction in the eigenbases, rotated back; zeros in the first step. Update the states."""
        group, squares = slot.group, self.squares(slot, matrix)
        (beta1, beta2), beta3 = group["betas"], group["shampoo_beta"]
        q = [None if pair is None else pair[1] for pair in squares]
        u = torch.zeros_like(g)
        v = slot.state[named("exp_avg_sq", matrix)]
        if taken:
            m = slot.state[named("exp_avg", matrix)].to(g).lerp(g, 1 - beta1)
            v = v.to(g).lerp(into(g, q).square(), 1 - beta2)
            u = out_of(into(m, q) / (v.sqrt() + group["eps"]), q)
            self.write(slot.state[named("exp_avg", matrix)], m)
        for dim, pair in enumerate(squares):
            if pair is None:
                continue
            factor, basis = pair
            new = factor.lerp(gram(g, dim), 1 - (beta2 if beta3 < 0 else beta3))
            if taken == 0:
                self.write(basis, eigh(new)[1].flip(1))  # the largest eigenvalue first
            elif taken % group["precondition_frequency"] == 0:
                turned, order = renewed(new, basis)
                v = v.index_select(dim, order)
                self.write(basis, turned)
            self.write(factor, new)
        if taken:
            self.write(slot.state[named("exp_avg_sq", matrix)], v)
        return u

    def direction_each(self, own: Sequence[tuple[Matrix, Slot]], g: Tensor, taken: int) -> Tensor:
        group = own[0][1].group
        (beta1, beta2), beta3 = group["betas"], group["shampoo_beta"]
        if not taken:
            # One matrix after the other, because the first bases may have arbitrary vectors, which depend on rounding.
            return torch.stack(
                [self.direction(matrix, one, slot, 0) for one, (matrix, slot) in zip(g, own, strict=True)]
            )
        squares = self.squares_each(own)
        q = [None if side is None else stacked(side[1]) for side in squares]
        m, v = ([slot.state[named(key, matrix)] for matrix, slot in own] for key in ("exp_avg", "exp_avg_sq"))
        self.lerp_each(v, into_each(g, q).square(), 1 - beta2)
        self.lerp_each(m, g, 1 - beta1)
        u = into_each(stacked(m), q) / stacked(v).sqrt().add_(group["eps"])
        u = into_each(u, [None if basis is None else basis.mT for basis in q])
        for dim, (side, basis) in enumerate(zip(squares, q, strict=True)):
            if side is None or basis is None:
                continue
            factors, bases = side
            self.lerp_each(factors, gram_each(g, dim), 1 - (beta2 if beta3 < 0 else beta3))
            if taken % group["precondition_frequency"] == 0:
                turned, order = renewed(stacked(factors), basis)
                old = stacked(v)
                index = order.view(len(own), *[-1 if at == dim else 1 for at in range(len(squares))])
                self.write_stack(v, old, old.gather(dim + 1, index.expand_as(old)))
                self.write_stack(bases, basis, turned)
        return u
