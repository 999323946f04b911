"""2-D tensor parallelism: linear layer and layer norm on a square q x q grid of ranks.

Activations [batch, ..., features] are split into [batch/q, ..., features/q]: the batch over ``row``, the features over
``col``. From a full activation to this rank's block and back:

    local = scatter_to(scatter_to(full, registry, "row", dim=0), registry, "col", dim=-1)
    full = gather_from(gather_from(local, registry, "col", dim=-1), registry, "row", dim=0)

(or `shard(full, P("row", None, "col"), registry)` for data, which needs no gradient). A model's own parameter that
meets the features, a position embedding say, is laid out P(None, "col") and goes through `copy_to` over ``row``, which
completes its gradient: every row of the grid holds another part of the batch.

    positions = nn.Parameter(shard(full, P(None, "col"), registry))       # [seq, features/q]
    hidden = hidden + copy_to(positions, registry, "row")

Reference: Xu et al. 2021 (Optimus), arXiv:2104.05343.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..layout.annotation import annotate
from ..layout.blocks import blocks as in_blocks
from ..layout.shard import local_shape, shard
from ..layout.spec import P
from ..mesh.collectives import Over, all_gather, all_gather_to, broadcast_from, copy_to
from ..mesh.registry import ProcessGroupRegistry
from .initialization import draw_linear
from .summa import Grid, autocast, summa

BiasLayout = Literal["column", "all", "row0"]


def bias_spec(layout: BiasLayout, row: str = "row", col: str = "col", blocks: int | Sequence[int] = 1) -> P:
    """How each published bias layout of `Linear2D` is declared.

    Raises:
        ValueError: The layout is unknown.
    """
    columns = in_blocks(col, blocks)
    layouts = {"column": P(columns), "all": P((columns, row)), "row0": P(columns, owned={row: 0})}
    if layout not in layouts:
        raise ValueError(f"bias layout {layout!r} is unknown; use {', '.join(map(repr, layouts))}, or None for no bias")
    return layouts[layout]


class Linear2D(nn.Module):
    """``input @ weight + bias`` by SUMMA on a q x q grid.

    Args:
        in_features, out_features: Sizes of the full layer; they must divide by q, out_features by q^2 for bias="all".
        bias: Who holds the bias of this column's features. "column": every row a copy, whose gradient backward
            completes over row. "all": every row 1/q of it. "row0": row 0 alone, the other rows' ``bias`` is None.
            None: no bias.
        blocks: Several layers in one, each of which is split over col: a number of equal ones, or the ratio of their
            sizes. The output then has this column's features of each, one after the other.
        row, col: The mesh axes of the grid.
        generator, device, dtype: For the initial weights, which are those of `nn.Linear` for the same seed (the weight
            transposed).

    Shapes:
        input [batch/q, ..., in/q] -> output [batch/q, ..., out/q].
        weight [in/q, out/q] P(row, col).
        bias [out/q] P(col), [out/q^2] P((col, row)) or [out/q] P(col, owned={row: 0}).
        With several blocks blocks(col, ...) stands for col.
        Under autocast the operands are cast to its dtype before they travel.
    Collectives: forward q broadcasts along each axis, backward twice q broadcasts and q reductions (see `summa`). The
    bias adds one collective over row: "column" an all-reduce in backward, "all" an all-gather in forward and a
    reduce-scatter in backward, "row0" a broadcast in forward and a reduce in backward. Host reads: none.
    Raises:
        ValueError: The grid isn't square, a dim doesn't divide, the bias layout is unknown, or the input doesn't hold
            in/q features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        registry: ProcessGroupRegistry,
        *,
        bias: BiasLayout | None = "column",
        blocks: int | Sequence[int] = 1,
        row: str = "row",
        col: str = "col",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.registry, self.row, self.col = registry, row, col
        self.bias_layout = bias
        self.matmul: Callable[[Tensor, Tensor, Grid], Tensor] = summa
        self._grid = Grid(registry, row, col)
        weight, full_bias = draw_linear(
            in_features, out_features, bias=bias is not None, generator=generator, device=device, dtype=dtype
        )
        weight_spec = P(row, in_blocks(col, blocks))
        self.weight = nn.Parameter(shard(weight.t(), weight_spec, registry))
        annotate(self.weight, weight_spec)
        self.bias: nn.Parameter | None = None
        if bias is not None and full_bias is not None:
            spec = bias_spec(bias, row, col, blocks)
            piece = shard(full_bias, spec, registry)
            if bias != "row0" or registry.coordinate[row] == 0:
                self.bias = nn.Parameter(piece)
                annotate(self.bias, spec)

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[-1:] != self.weight.shape[:1]:
            raise ValueError(
                f"Linear2D of {self.in_features} features over {self.col}={self._grid.size} takes "
                f"{self.weight.size(0)} of them in the last dim, got shape {tuple(input.shape)}; split a full input "
                f"with scatter_to(input, registry, {self.col!r}, dim=-1)"
            )
        rows = autocast(input).reshape(-1, input.size(-1))
        output = self.matmul(rows, autocast(self.weight), self._grid)
        bias = self._column_bias()
        if bias is not None:
            output = output + bias.to(output.dtype)
        return output.reshape(*input.shape[:-1], output.size(-1))

    def _column_bias(self) -> Tensor | None:
        """The bias [out/q] of this rank's column, on every row."""
        if self.bias_layout == "row0":
            return broadcast_from(self._held_or_placeholder(), self.registry, self.row, root=0)
        if self.bias is None:
            return None
        if self.bias_layout == "all":
            return all_gather_to(self.bias, self.registry, self.row, dim=0)
        return copy_to(self.bias, self.registry, self.row)

    def _held_or_placeholder(self) -> Tensor:
        """Row 0's bias, or what stands for it elsewhere.

        It requires grad on every row, also where row 0's bias is frozen, of which the other rows can't know: the
        reduction in backward needs all of them.
        """
        if self.bias is not None:
            return self.bias if self.bias.requires_grad else self.bias.detach().requires_grad_()
        return self.weight.new_empty(self.weight.size(1)).requires_grad_()

    def extra_repr(self) -> str:
        sizes = f"{self.row}={self._grid.size}, {self.col}={self._grid.size}"
        return f"{self.in_features}, {self.out_features}, bias={self.bias_layout!r}, {sizes}"


class LayerNorm2D(nn.Module):
    """`nn.LayerNorm` over features that are split over ``col``, for a batch that is split over ``row``.

    Args:
        features: Size of the full last dim; must divide by the size of col.
        eps: Added to the variance.
        bias: Whether there is one.
        row, col: The mesh axes of the grid.
        device, dtype: Of the parameters, which start at one and zero.

    Shapes:
        input and output [batch/q, ..., features/q]; the output has the input's dtype, half types are computed in fp32.
        weight, bias [features/q] P(col).
    Collectives: an all-gather over col (mean and squared deviation of each rank's features) in forward; in backward an
    all-reduce over col (two means), and one over row that completes the gradients of weight and bias. Host reads: none.
    Raises:
        ValueError: features doesn't divide, or the input doesn't hold features/q of them.
    Reference: Ba et al. 2016, arXiv:1607.06450; variances are merged as in Chan et al. 1979, "Updating formulae and a
    pairwise algorithm for computing sample variances", which loses no digits to cancellation.
    """

    def __init__(
        self,
        features: int,
        registry: ProcessGroupRegistry,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        row: str = "row",
        col: str = "col",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.features, self.eps = features, eps
        self.registry, self.row, self.col = registry, row, col
        shape = local_shape((features,), P(col), registry.topology)
        self.weight = nn.Parameter(torch.ones(shape, device=device, dtype=dtype))
        annotate(self.weight, P(col))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))
            annotate(self.bias, P(col))

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[-1:] != self.weight.shape:
            raise ValueError(
                f"LayerNorm2D of {self.features} features over {self.col}={self.registry.size(self.col)} takes "
                f"{self.weight.numel()} of them in the last dim, got shape {tuple(input.shape)}"
            )
        output: Tensor = _LayerNorm2D.apply(
            input, self.weight, self.bias, self.eps, Over(self.registry, (self.col,)), Over(self.registry, (self.row,))
        )
        return output

    def extra_repr(self) -> str:
        return (
            f"{self.features}, eps={self.eps}, bias={self.bias is not None}, {self.col}={self.registry.size(self.col)}"
        )


class _LayerNorm2D(torch.autograd.Function):
    """y = x' w + b with x' = (x - mean) / std, and backward dx = (dy w - mean(dy w) - x' mean(dy w x')) / std."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, eps: float, cols: Over, rows: Over
    ) -> Tensor:
        x = input if input.dtype is torch.float64 else input.float()
        mean, variance = _global_moments(x, cols)
        inverse_std = torch.rsqrt(variance + eps)
        normalized = (x - mean) * inverse_std
        ctx.save_for_backward(normalized, inverse_std, weight)
        ctx.cols, ctx.rows, ctx.dtype, ctx.has_bias = cols, rows, input.dtype, bias is not None
        output = normalized * weight if bias is None else torch.addcmul(bias, normalized, weight)
        return output.to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        normalized, inverse_std, weight = ctx.saved_tensors
        grad = grad.to(normalized.dtype)
        grad_normalized = grad * weight
        grad_input = None
        if ctx.needs_input_grad[0]:
            grad_input = _input_grad(grad_normalized, normalized, inverse_std, ctx.cols).to(ctx.dtype)
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            terms = (grad * normalized, grad)
            grads = torch.stack([term.reshape(-1, weight.numel()).sum(0) for term in terms])
            if ctx.rows.size > 1:
                dist.all_reduce(grads, group=ctx.rows.group)
            grad_weight, grad_bias = grads.to(weight.dtype).unbind()
        return grad_input, grad_weight, grad_bias if ctx.has_bias else None, None, None, None


def _global_moments(x: Tensor, cols: Over) -> tuple[Tensor, Tensor]:
    """Mean and variance [..., 1] of the last dim over all of its pieces."""
    variance, mean = torch.var_mean(x, -1, correction=0)
    if cols.size > 1:
        variances, means = all_gather(torch.stack([variance, mean]).unsqueeze(0), cols).unbind(1)
        spread, mean = torch.var_mean(means, 0, correction=0)
        variance = variances.mean(0) + spread
    return mean.unsqueeze(-1), variance.unsqueeze(-1)


def _input_grad(grad_normalized: Tensor, normalized: Tensor, inverse_std: Tensor, cols: Over) -> Tensor:
    means = torch.stack([grad_normalized.mean(-1), (grad_normalized * normalized).mean(-1)])
    if cols.size > 1:
        dist.all_reduce(means, group=cols.group)
        means /= cols.size
    first, second = means.unsqueeze(-1).unbind()
    return (grad_normalized - first - normalized * second) * inverse_std
