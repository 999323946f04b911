"""`nn.LayerNorm` over sharded features, for a sharded batch.

Each rank computes the mean and the variance of its own features. The results of all ranks are merged as in Chan et al.
1979, "Updating formulae and a pairwise algorithm for computing sample variances", which avoids cancellation. If the
number of features is not divisible by the size of the axis, the mean is all-reduced first, and then the mean of the squared
deviations from it.

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
from .initialization import check_features, depth_axes, keep_shard


class SplitLayerNorm(nn.Module):
    """Common base class of `LayerNorm2D` and `LayerNorm3D`.

    Backward sums the gradients of weight and bias over ``batch_axes``; the optimizer sums them over ``partial``.
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
        registry.size(*batch_axes)  # raises if an axis is unknown; otherwise only backward would raise
        self._over_features = Over(registry, (feature_axis,), call=name)
        self._over_batch = Over(registry, batch_axes, call=name)
        spec = P(feature_axis, partial=partial)
        self.weight = keep_shard(torch.ones(features, device=device, dtype=dtype), spec, registry)
        zeros = torch.zeros(features, device=device, dtype=dtype)
        self.bias = keep_shard(zeros, spec, registry) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        (axis,) = self._over_features.axes
        advice = f", and its batch over {' and '.join(map(repr, self._over_batch.axes))}"
        check_features(self, input, self.features, self.weight.numel(), axis, self.registry, advice)
        output: Tensor = _SplitLayerNorm.apply(
            input, self.weight, self.bias, self.eps, self.features, self._over_features, self._over_batch
        )
        return output

    def extra_repr(self) -> str:
        over = f"{self._over_features.axes[0]}={self._over_features.size}"
        return f"{self.features}, eps={self.eps}, bias={self.bias is not None}, {over}"


class LayerNorm2D(SplitLayerNorm):
    """`nn.LayerNorm` over features that are sharded over ``col``, for a batch that is sharded over ``row``.

        norm = LayerNorm2D(512, registry)

    Args:
        features: Size of the full last dim. If it is not a multiple of the size of col, it is sharded as `torch.chunk`
            does, but every rank must get at least one feature.
        registry: The process groups.
        eps: Added to the variance. Default: 1e-5.
        bias: If True, the layer has a bias. Default: True.
        row, col: The mesh axes of the grid. Defaults: "row", "col".
        depth: The mesh axis along which there are several grids (2.5-D). Weight and bias are replicated over depth, with
            partial gradients that the optimizer sums: their spec gets ``partial=depth``. Default None: a single grid.
        device, dtype: Device and dtype of weight and bias, whose initial values are one and zero. Default None: torch's
            defaults.

    Shapes:
        input and output [batch/rows, ..., features/cols]; batch/(depth*rows) with depth. The output has the input's dtype;
            half precision is computed in float32. weight, bias [features/cols] P(col).
    Raises:
        ValueError: A rank would get no features, an axis is unknown, or the last dim of the input is not features/cols.
    Collectives: in forward an all-gather over col of the mean and variance of each rank's features; or two all-reduces, if
    the number of features is not divisible by the size of col. In backward an all-reduce over col of two means, and an
    all-reduce over row of the gradients of weight and bias.
    Host synchronization: none.
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
    """Autograd function of layer norm over sharded features.

        x' = (x - mean) / std,   y = x' w + b,   dx = (dy w - mean(dy w) - x' mean(dy w x')) / std

    The means are over all features, and std is sqrt(variance + eps).
    """

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
    """Return the mean and the variance, [..., 1] each, over the features of all ranks in the group ``cols``.

    Collectives: one all-gather, or two all-reduces if ``features`` is not divisible by the size of the group; none over a
    single rank.
    """
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
    if features % cols.size:  # scaled such that the average over the ranks is the mean over all features
        means = torch.stack([term.sum(-1) for term in terms]) / (features / cols.size)
    else:
        means = torch.stack([term.mean(-1) for term in terms])
    if cols.size > 1:
        with track_call(cols.call, cols.registry):
            dist.all_reduce(means, group=cols.group)
        means /= cols.size
    first, second = means.unsqueeze(-1).unbind()
    return (grad_normalized - first - normalized * second) * inverse_std
