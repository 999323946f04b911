"""SUMMA: products of matrices that lie in blocks on a square q x q grid, block (i, j) at row i, column j.

    C = A B        C_ij = sum_k A_ik B_kj           A_ik broadcast along row i, B_kj broadcast along column j
    dA = dC B^T    dA_ik = sum_j dC_ij B_kj^T       B_kj broadcast along column j, the products reduced along row i
    dB = A^T dC    dB_kj = sum_i A_ik^T dC_ij       A_ik broadcast along row i, the products reduced along column j

No rank ever holds more than its own blocks and two panels of each operand: while one panel is being multiplied, the
broadcast of the next (or the reduction of the last) is under way.

The ranks of one row differ along the axis `col`, so "along the row" is the group over ``col``, and the other way round.
Collectives of both are under way together, started in one order on all ranks: see "The order of collectives" in the
README of `parallel`.

Reference: van de Geijn and Watts 1997, "SUMMA: scalable universal matrix multiplication algorithm"; for training: Xu et
al. 2021 (Optimus), arXiv:2104.05343.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..mesh.registry import ProcessGroupRegistry


@dataclass(frozen=True)
class Grid:
    """The two mesh axes of a square grid of ranks."""

    registry: ProcessGroupRegistry
    row: str
    col: str

    def __post_init__(self) -> None:
        rows, cols = self.registry.size(self.row), self.registry.size(self.col)
        if rows != cols:
            raise ValueError(
                f"SUMMA needs a square grid, but {self.row}={rows} and {self.col}={cols}; make the two sizes equal"
            )

    @property
    def size(self) -> int:
        """q, the length of a side."""
        return self.registry.size(self.row)


def summa(a: Tensor, b: Tensor, grid: Grid) -> Tensor:
    """This rank's block [m, n] of ``A @ B``, from its blocks ``a`` [m, k] and ``b`` [k, n]. Differentiable, once.

    The q products are summed in the dtype of the operands, which must be the same and the same on every rank.

    Collectives: in forward q broadcasts along each axis; in backward for each operand that requires grad q broadcasts
    along one axis and q reductions along the other. None if q is 1. Host reads: none.
    """
    if grid.size == 1:
        return a @ b
    result: Tensor = _Summa.apply(a.contiguous(), b.contiguous(), grid)
    return result


class _Summa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, grid: Grid) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.grid = grid
        panels = zip(_panels(a, grid, grid.col), _panels(b, grid, grid.row), strict=True)
        first_a, first_b = next(panels)
        product = first_a @ first_b
        for a_k, b_k in panels:
            product.addmm_(a_k, b_k)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b = ctx.saved_tensors
        grid: Grid = ctx.grid
        need_a, need_b, _ = ctx.needs_input_grad
        panels_a, panels_b = _panels(a, grid, grid.col), _panels(b, grid, grid.row)
        grad_a, grad_b = _Reduction(grid, grid.col), _Reduction(grid, grid.row)
        # Both products in step: the collectives of one overlap with the other's (a quarter faster than in turn).
        for k in range(grid.size):
            if need_a:
                grad_a.add(k, grad @ next(panels_b).t())
            if need_b:
                grad_b.add(k, next(panels_a).t() @ grad)
        return grad_a.finish(), grad_b.finish(), None


def summa_transposed(a: Tensor, b: Tensor, grid: Grid) -> Tensor:
    """This rank's block [m, n] of ``A @ B.T``, from its blocks ``a`` [m, k] and ``b`` [n, k]. Differentiable, once.

    Collectives: in forward q broadcasts along one axis and q reductions along the other; in backward for each operand that
    requires grad as many, or q broadcasts along each axis. None if q is 1. Host reads: none.
    """
    if grid.size == 1:
        return a @ b.t()
    result: Tensor = _SummaTransposed.apply(a.contiguous(), b.contiguous(), grid)
    return result


class _SummaTransposed(torch.autograd.Function):
    """C = A B^T, dA = dC B, dB = dC^T A: the three products of `_Summa`, in other parts."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, grid: Grid) -> Tensor | None:
        ctx.save_for_backward(a, b)
        ctx.grid = grid
        product = _Reduction(grid, grid.col)
        for k, b_k in enumerate(_panels(b, grid, grid.row)):
            product.add(k, a @ b_k.t())
        return product.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b = ctx.saved_tensors
        grid, grad = ctx.grid, grad.contiguous()
        grad_a = summa(grad, b, grid) if ctx.needs_input_grad[0] else None
        grad_b = _Reduction(grid, grid.row)
        if ctx.needs_input_grad[1]:
            for k, grad_k in enumerate(_panels(grad, grid, grid.col)):
                grad_b.add(k, grad_k.t() @ a)
        return grad_a, grad_b.finish(), None


def autocast(tensor: Tensor) -> Tensor:
    """Cast as autocast casts the operands of a matrix product: to its dtype, where it is on, but for float64."""
    device = tensor.device.type
    if tensor.dtype is torch.float64 or not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def _panels(block: Tensor, grid: Grid, axis: str) -> Iterator[Tensor]:
    """The block of each coordinate along ``axis`` in turn; the next one is on its way while the caller uses one."""
    group, own = grid.registry.group(axis), grid.registry.rank(axis)

    def start(k: int) -> tuple[Tensor, Any]:
        panel = block if k == own else torch.empty_like(block)
        return panel, dist.broadcast(panel, group_src=k, group=group, async_op=True)

    ahead = start(0)
    for k in range(grid.size):
        panel, work = ahead
        if k + 1 < grid.size:
            ahead = start(k + 1)
        work.wait()
        yield panel


class _Reduction:
    """Sums term k over ``axis`` to coordinate k of it, for all k; one is on its way while the next is computed."""

    def __init__(self, grid: Grid, axis: str) -> None:
        self._group, self._own = grid.registry.group(axis), grid.registry.rank(axis)
        self._result: Tensor | None = None
        self._pending: tuple[Any, Tensor] | None = None  # with its buffer, which must live until the reduction is done

    def add(self, k: int, term: Tensor) -> None:
        work = dist.reduce(term, group_dst=k, group=self._group, async_op=True)
        self._wait()
        self._pending = work, term
        if k == self._own:
            self._result = term

    def finish(self) -> Tensor | None:
        """The sum that belongs to this rank; None if nothing was added."""
        self._wait()
        return self._result

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending[0].wait()
