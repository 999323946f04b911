"""SUMMA: distributed products of matrices that are stored as blocks on a grid, with block (i, j) on row i, column j.

    C = A B        C_ij = sum_k A_ik B_kj           A_ik broadcast along row i, B_kj broadcast along column j
    dA = dC B^T    dA_ik = sum_j dC_ij B_kj^T       B_kj broadcast along column j, the products reduced along row i
    dB = A^T dC    dB_kj = sum_i A_ik^T dC_ij       A_ik broadcast along row i, the products reduced along column j

The summed dim is sharded over the columns of the grid in A, and over the rows of the grid in B. It is divided into
*panels*. Each panel k lies in one shard of A and in one shard of B. On a q x q grid there are at most q panels: panel k is
block column k of A and block row k of B. On other grids the shards of A and B have different boundaries, and each boundary
separates two panels. On an r x c grid there are r + c - gcd(r, c) panels if the length is divisible by both r and c.

At any time a rank holds its own blocks and at most four panels of each operand, including panels of the operand's gradient.
While a panel is multiplied, the broadcast of the next panel or the reduction of the previous panel runs.

The ranks of a row differ along the mesh axis ``col``. "Along row i" therefore means the process group over ``col``, and
"along column j" means the process group over ``row``. Collectives of both groups run concurrently. They are started in the
same order on all ranks; see docs/explanation/COLLECTIVES.md.

References: van de Geijn and Watts 1997, "SUMMA: scalable universal matrix multiplication algorithm"; for training: Xu
et al. 2021 (Optimus), arXiv:2104.05343.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..mesh.call_tracker import track_call
from ..mesh.registry import ProcessGroupRegistry


@dataclass(frozen=True)
class Grid:
    """A grid of ranks: a rank's coordinate on the mesh axis ``row`` is the index of its row, on ``col`` of its column."""

    registry: ProcessGroupRegistry
    row: str
    col: str

    @property
    def size(self) -> int:
        return self.registry.size(self.row, self.col)

    def panels(self, length: int) -> list[Panel]:
        """Divide a dim of this length into panels."""
        chunks = {axis: -(-length // self.registry.size(axis)) for axis in (self.row, self.col)}
        cuts = sorted({*(at for chunk in chunks.values() for at in range(0, length, chunk)), length})
        return [
            {axis: Part(start // chunk, start % chunk, stop - start) for axis, chunk in chunks.items()}
            for start, stop in pairwise(cuts)
        ]


class Part(NamedTuple):
    """A panel as a part of the shard of the ranks with coordinate ``owner``; ``start`` is its index in the shard."""

    owner: int
    start: int
    width: int


Panel = dict[str, Part]
"""A panel as a part of a shard over the axis ``row``, and as a part of a shard over the axis ``col``, by axis."""


def summa(a: Tensor, b: Tensor, grid: Grid, inner: int | None = None) -> Tensor:
    """Return this rank's block [m, n] of the distributed matrix product ``A @ B``; differentiable once.

        c = summa(a, b, Grid(registry, "row", "col"))

    ``a`` is this rank's block [m, k/cols] of A, and ``b`` this rank's block [k/rows, n] of B. All blocks must have the same
    dtype, in which the products of the panels are summed. ``inner`` is k; None: the length of ``a`` along it, times the
    number of columns of the grid.

    Collectives: in forward a broadcast per panel along each axis. In backward a broadcast along one axis and a
    reduction along the other, per panel and per operand that requires gradients. No collectives along an axis of size 1.
    """
    if grid.size == 1:
        return a @ b
    inner = a.size(1) * grid.registry.size(grid.col) if inner is None else inner
    result: Tensor = _Summa.apply(a.contiguous(), b.contiguous(), grid, inner)
    return result


class _Summa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, grid: Grid, inner: int) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.grid, ctx.inner = grid, inner
        panels = grid.panels(inner)
        pairs = zip(_broadcast(a, 1, panels, grid, grid.col), _broadcast(b, 0, panels, grid, grid.row), strict=True)
        first_a, first_b = next(pairs)
        product = first_a @ first_b
        for a_k, b_k in pairs:
            product.addmm_(a_k, b_k)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        a, b = ctx.saved_tensors
        grid: Grid = ctx.grid
        need_a, need_b, *_ = ctx.needs_input_grad
        panels = grid.panels(ctx.inner)
        panels_a, panels_b = _broadcast(a, 1, panels, grid, grid.col), _broadcast(b, 0, panels, grid, grid.row)
        grad_a, grad_b = _Reduction(1, grid, grid.col), _Reduction(0, grid, grid.row)
        # One loop computes both gradients, so that the collectives of one gradient overlap with the products of the other.
        for panel in panels:
            if need_a:
                grad_a.add(panel, grad @ next(panels_b).t())
            if need_b:
                grad_b.add(panel, next(panels_a).t() @ grad)
        return grad_a.finish(), grad_b.finish(), None, None


def summa_transposed(a: Tensor, b: Tensor, grid: Grid, outer: int) -> Tensor:
    """Return this rank's block [m, n/cols] of the distributed matrix product ``A @ B.T``; differentiable once.

    ``a`` is this rank's block [m, k/cols] of A, and ``b`` this rank's block [n/rows, k/cols] of B, of the same dtype.
    ``outer`` is n, which is divided into panels.

    Collectives: in forward a broadcast along one axis and a reduction along the other, per panel. In backward, per
    panel: broadcasts along both axes for the gradient of ``a``; a broadcast and a reduction for the gradient of ``b``.
    No collectives along an axis of size 1.
    """
    if grid.size == 1:
        return a @ b.t()
    result: Tensor = _SummaTransposed.apply(a.contiguous(), b.contiguous(), grid, outer)
    return result


class _SummaTransposed(torch.autograd.Function):
    """Autograd function of C = A B^T, with dA = dC B and dB = dC^T A."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, grid: Grid, outer: int) -> Tensor | None:
        ctx.save_for_backward(a, b)
        ctx.grid, ctx.outer = grid, outer
        panels = grid.panels(outer)
        product, panels_b = _Reduction(1, grid, grid.col), _broadcast(b, 0, panels, grid, grid.row)
        for panel in panels:
            product.add(panel, a @ next(panels_b).t())
        return product.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        a, b = ctx.saved_tensors
        grid, grad = ctx.grid, grad.contiguous()
        panels = grid.panels(ctx.outer)
        grad_a = summa(grad, b, grid, ctx.outer) if ctx.needs_input_grad[0] else None
        grad_b, panels_of_grad = _Reduction(0, grid, grid.row), _broadcast(grad, 1, panels, grid, grid.col)
        if ctx.needs_input_grad[1]:
            for panel in panels:
                grad_b.add(panel, next(panels_of_grad).t() @ a)
        return grad_a, grad_b.finish(), None, None


def autocast(tensor: Tensor) -> Tensor:
    """Return ``tensor`` cast as autocast casts the operands of a matrix product; float64 unchanged."""
    device = tensor.device.type
    if tensor.dtype is torch.float64 or not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def _broadcast(block: Tensor, dim: int, panels: Sequence[Panel], grid: Grid, axis: str) -> Iterator[Tensor]:
    """Yield the panels of a sharded matrix one after the other, each broadcast to all ranks along ``axis``.

    Before a panel is yielded, the broadcast of the next panel is started.
    """
    parts = [panel[axis] for panel in panels]
    if grid.registry.size(axis) == 1:
        yield from (block.narrow(dim, part.start, part.width) for part in parts)
        return
    group, own = grid.registry.group(axis), grid.registry.rank(axis)

    def start(part: Part) -> tuple[Tensor, Any]:
        if part.owner == own:
            panel = block.narrow(dim, part.start, part.width).contiguous()
        else:
            shape = list(block.shape)
            shape[dim] = part.width
            panel = block.new_empty(shape)
        return panel, dist.broadcast(panel, group_src=part.owner, group=group, async_op=True)

    ahead = start(parts[0])
    for number in range(1, len(parts) + 1):
        panel, work = ahead
        if number < len(parts):
            ahead = start(parts[number])
        with track_call("summa", grid.registry):
            work.wait()
        yield panel


class _Reduction:
    """Sums of tensors over the ranks along ``axis``, one sum per panel, on the rank that owns the panel.

    A reduction runs while the caller computes the next tensor.
    """

    def __init__(self, dim: int, grid: Grid, axis: str) -> None:
        self._dim, self._axis, self._own = dim, axis, grid.registry.rank(axis)
        self._registry = grid.registry
        self._group = grid.registry.group(axis) if grid.registry.size(axis) > 1 else None
        self._mine: list[Tensor] = []
        self._pending: tuple[Any, Tensor] | None = None  # keeps the buffer alive until the reduction has finished

    def add(self, panel: Panel, term: Tensor) -> None:
        owner = panel[self._axis].owner
        if self._group is not None:
            work = dist.reduce(term, group_dst=owner, group=self._group, async_op=True)
            self._wait()
            self._pending = work, term
        if owner == self._own:
            self._mine.append(term)

    def finish(self) -> Tensor | None:
        """Return the sums that this rank owns, concatenated along ``dim``; None if no added tensor is for this rank."""
        self._wait()
        if len(self._mine) > 1:
            return torch.cat(self._mine, self._dim)
        return self._mine[0] if self._mine else None

    def _wait(self) -> None:
        if self._pending is not None:
            with track_call("summa", self._registry):
                self._pending[0].wait()
