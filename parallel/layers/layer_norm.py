"""`nn.LayerNorm` over features that are split over one axis, for a batch that is split over others.

Each rank has mean and squared deviation of its features. They are merged as in Chan et al. 1979, "Updating formulae and a
pairwise algorithm for computing sample variances", which loses no digits to cancellation; where features don't divide, the
mean is agreed on first and then the deviation from it.

Reference: Ba et al. 2016, arXiv:1607.06450.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..layout.spec import P
from ..mesh.call_tracker import track_call
from ..mesh.collectives import Over, all_gather, all_reduce
from ..mesh.registry import ProcessGroupRegistry
from .initialization import depth_axes, kept_piece


class SplitLayerNorm(nn.Module):
    """Common base of `LayerNorm2D` and `LayerNorm3D`.

    Args:
        features: Size of the full last dim.
        feature_axis: Splits it.
        batch_axes: Over these the gradients of weight and bias are summed in backward.
        partial: Over these the optimizer sums them.
        eps, bias, device, dtype: As in `LayerNorm2D`.
    """

    def __init__(
        self,
        features: int,
        registry: ProcessGroupRegistry,
        feature_axis: str,
        batch_axes: tuple[str, ...],
        eps: float,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        partial: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.features, self.eps, self.registry = features, eps, registry
        name = type(self).__name__
        self._over_features = Over(registry, (feature_axis,), call=name)
        self._over_batch = Over(registry, batch_axes, call=name)
        spec = P(feature_axis, partial=partial)
        self.weight = kept_piece(torch.ones(features, device=device, dtype=dtype), spec, registry)
        zeros = torch.zeros(features, device=device, dtype=dtype)
        self.bias = kept_piece(zeros, spec, registry) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[-1:] != self.weight.shape:
            raise ValueError(
                f"{type(self).__name__} of {self.features} features over {self._over_features.axes[0]}="
                f"{self._over_features.size} takes {self.weight.numel()} of them in the last dim, got shape "
                f"{tuple(input.shape)}; split a full input with scatter_to(input, registry, "
                f"{self._over_features.axes[0]!r}, dim=-1)"
            )
        output: Tensor = _SplitLayerNorm.apply(
            input, self.weight, self.bias, self.eps, self.features, self._over_features, self._over_batch
        )
        return output

    def extra_repr(self) -> str:
        over = f"{self._over_features.axes[0]}={self._over_features.size}"
        return f"{self.features}, eps={self.eps}, bias={self.bias is not None}, {over}"


class LayerNorm2D(SplitLayerNorm):
    """`nn.LayerNorm` over features that are split over ``col``, for a batch that is split over ``row``.

    Args:
        features: Size of the full last dim; what doesn't divide is cut as `torch.chunk` does, but every rank must have
            something.
        eps: Added to the variance.
        bias: Whether there is one.
        row, col: The mesh axes of the grid.
        depth: The mesh axis along which several grids lie (2.5-D), as in `Linear2D`. None: one grid.
        device, dtype: Of the parameters, which start at one and zero.

    Shapes:
        input and output [batch/rows, ..., features/cols]; the output has the input's dtype, half types are computed in
        fp32. weight, bias [features/cols] P(col).
    Collectives: an all-gather over col (mean and squared deviation of each rank's features) in forward, two all-reduces
    where features don't divide; in backward an all-reduce over col (two means), and one over row that completes the
    gradients of weight and bias. Host reads: none.
    Raises:
        ValueError: features leaves nothing for some rank, or the input doesn't hold this column's.
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
        depth: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features, registry, col, (row,), eps, bias, device, dtype, partial=depth_axes(depth, registry))


class _SplitLayerNorm(torch.autograd.Function):
    """y = x' w + b with x' = (x - mean) / std, and backward dx = (dy w - mean(dy w) - x' mean(dy w x')) / std."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, eps: float, features: int, cols: Over, rows: Over
    ) -> Tensor:
        x = input if input.dtype is torch.float64 else input.float()
        mean, variance = _global_moments(x, features, cols)
        inverse_std = torch.rsqrt(variance + eps)
        normalized = (x - mean) * inverse_std
        ctx.save_for_backward(normalized, inverse_std, weight)
        ctx.features, ctx.cols, ctx.rows, ctx.dtype = features, cols, rows, input.dtype
        ctx.has_bias = bias is not None
        output = normalized * weight if bias is None else torch.addcmul(bias, normalized, weight)
        return output.to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normalized, inverse_std, weight = ctx.saved_tensors
        grad = grad.to(normalized.dtype)
        grad_normalized = grad * weight
        grad_input = None
        if ctx.needs_input_grad[0]:
            grad_input = _input_grad(grad_normalized, normalized, inverse_std, ctx.features, ctx.cols)
            grad_input = grad_input.to(ctx.dtype)
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            terms = (grad * normalized, grad)
            grads = torch.stack([term.reshape(-1, weight.numel()).sum(0) for term in terms])
            if ctx.rows.size > 1:
                with track_call(ctx.rows.call, ctx.rows.registry):
                    dist.all_reduce(grads, group=ctx.rows.group)
            grad_weight, grad_bias = grads.to(weight.dtype).unbind()
        return grad_input, grad_weight, grad_bias if ctx.has_bias else None, None, None, None, None


def _global_moments(x: Tensor, features: int, cols: Over) -> tuple[Tensor, Tensor]:
    """Mean and variance [..., 1] of the last dim over all of its pieces."""
    if features % cols.size:
        mean = all_reduce(x.sum(-1, keepdim=True) / features, cols)
        return mean, all_reduce((x - mean).square().sum(-1, keepdim=True) / features, cols)
    variance, mean = torch.var_mean(x, -1, correction=0)
    if cols.size > 1:
        variances, means = all_gather(torch.stack([variance, mean]).unsqueeze(0), cols).unbind(1)
        spread, mean = torch.var_mean(means, 0, correction=0)
        variance = variances.mean(0) + spread
    return mean.unsqueeze(-1), variance.unsqueeze(-1)


def _input_grad(grad_normalized: Tensor, normalized: Tensor, inverse_std: Tensor, features: int, cols: Over) -> Tensor:
    terms = (grad_normalized, grad_normalized * normalized)
    if features % cols.size:  # the mean over the ranks of what would be means if all had as many
        means = torch.stack([term.sum(-1) for term in terms]) / (features / cols.size)
    else:
        means = torch.stack([term.mean(-1) for term in terms])
    if cols.size > 1:
        with track_call(cols.call, cols.registry):
            dist.all_reduce(means, group=cols.group)
        means /= cols.size
    first, second = means.unsqueeze(-1).unbind()
    return (grad_normalized - first - normalized * second) * inverse_std
