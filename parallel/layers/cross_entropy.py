"""Cross entropy of logits that are sharded over classes or batch, without an all-gather of the logits.

    loss = log(s) - (x_target - m),   m = max_c x_c,   s = sum_c exp(x_c - m)
    d loss / d x_c = exp(x_c - m) / s - [c = target]

[c = target] is 1 for the target class, else 0. The numbers m, s and x_target - m are all-reduced over the axis that shards
the classes, so each rank stores only the logits of its own classes. With label smoothing e over C classes, (1 - e) [c =
target] + e / C replaces [c = target]. The sum of x_c - m over all classes is then all-reduced too.

Reference: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..layout.shard import local_index, local_shape
from ..layout.spec import P
from ..mesh.call_tracker import track_call
from ..mesh.registry import ProcessGroupRegistry

Reduction = Literal["mean", "sum", "none"]


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    registry: ProcessGroupRegistry,
    *,
    axis: str = "tensor",
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return `F.cross_entropy` of logits whose *last* dim, the classes, is sharded over an axis of size t.

        loss = vocab_parallel_cross_entropy(logits, target, registry)

    Args:
        logits: [..., classes/t], floating point; half-precision logits are computed in float32.
        target: [...], integers in 0..classes-1 or ``ignore_index``; replicated.
        registry: The process groups.
        axis: The mesh axis that shards the classes. Default: "tensor".
        ignore_index: Targets with this value are ignored. If all targets are ignored, the mean is NaN, as in torch.
            Default: -100.
        reduction: "mean" over the targets that are not ignored, "sum", or "none". Default: "mean".
        label_smoothing: Fraction of each target that is distributed over all classes, in [0, 1]. Default: 0.0.
    Returns:
        The loss, equal on all ranks along ``axis``: 0-dim, or [...] for "none". Its dtype is float32 for half-precision
            logits, else the dtype of the logits.
    Raises:
        ValueError: The shapes do not match, the reduction or an axis is unknown, or label_smoothing is out of range.
        RuntimeError: A target is out of range, or ranks along ``axis`` have different numbers of classes (on CPU; a device
            assertion on CUDA).
    Collectives: two all-reduces over ``axis`` in forward, none in backward. Host synchronization: none.
    """
    return _cross_entropy(logits, target, _Sharding(registry, axis, (), ignore_index, reduction, label_smoothing))


def cross_entropy_2d(
    logits: Tensor,
    target: Tensor,
    registry: ProcessGroupRegistry,
    *,
    row: str | tuple[str, ...] = "row",
    col: str = "col",
    classes: int | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return `F.cross_entropy` of logits whose batch is sharded over ``row`` and whose classes are sharded over ``col``.

    The batch is the first dim of the logits, and the classes are the *last* dim.

        loss = cross_entropy_2d(head(hidden), target, registry)

    Args:
        logits: [batch/rows, ..., classes/cols], floating point; half-precision logits are computed in float32.
        target: [batch/rows, ...], the targets of this rank's shard of the batch; replicated over ``col``.
        registry: The process groups.
        row: The axis that shards the batch, or several axes: ("depth", "row") in 2.5-D. Default: "row".
        col: The axis that shards the classes. Default: "col".
        classes: Number of classes over all ranks, required if it is not divisible by the size of ``col``. Default None:
            every rank along ``col`` has the same number of classes.
        ignore_index: Targets with this value are ignored. If all targets are ignored, the mean is NaN, as in torch.
            Default: -100.
        reduction: "mean" over the targets of the full batch that are not ignored, "sum" over the full batch, or "none".
            Default: "mean".
        label_smoothing: Fraction of each target that is distributed over all classes, in [0, 1]. Default: 0.0.
    Returns:
        The loss: 0-dim and equal on all ranks along ``row`` and ``col``; for "none" [batch/rows, ...], the losses of this
            rank's shard of the batch. Its dtype is float32 for half-precision logits, else the dtype of the logits. Every
            rank calls ``backward()`` on its result; the logits get the gradient of the loss of the full batch.
    Raises:
        ValueError: The shapes do not match, the reduction or an axis is unknown, or label_smoothing is out of range. The
            axes of the batch are not checked if the reduction is "none".
        RuntimeError: A target is out of range; or on several ranks along ``col``, a rank's number of classes does not match
            ``classes``, or differs between the ranks if ``classes`` is None (on CPU; a device assertion on CUDA).
    Collectives: two all-reduces over ``col`` and, unless the reduction is "none", one all-reduce over ``row`` in
    forward; none in backward. Host synchronization: none.
    """
    rows = (row,) if isinstance(row, str) else row
    sharding = _Sharding(registry, col, rows, ignore_index, reduction, label_smoothing, classes)
    return _cross_entropy(logits, target, sharding)


def cross_entropy_3d(
    logits: Tensor,
    target: Tensor,
    registry: ProcessGroupRegistry,
    *,
    input: str = "input",
    weight: str = "weight",
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return `F.cross_entropy` of logits whose batch is sharded over ``weight`` and ``input``, as from `Classifier3D`.

    The batch is the first dim of the logits. The *last* dim has all classes.

        loss = cross_entropy_3d(head(hidden), target, registry)

    Args:
        logits: [batch/(weight*input), ..., classes], floating point; half-precision logits are computed in float32.
        target: [batch/(weight*input), ...], the targets of this rank's shard of the batch.
        registry: The process groups.
        input, weight: The axes that shard the batch. Defaults: "input", "weight".
        ignore_index: Targets with this value are ignored. If all targets are ignored, the mean is NaN, as in torch.
            Default: -100.
        reduction: "mean" over the targets of the full batch that are not ignored, "sum" over the full batch, or "none".
            Default: "mean".
        label_smoothing: Fraction of each target that is distributed over all classes, in [0, 1]. Default: 0.0.
    Returns:
        The loss: 0-dim and equal on all ranks along ``weight`` and ``input``; for "none" the losses of this rank's shard of
            the batch. Its dtype is float32 for half-precision logits, else the dtype of the logits. Every rank calls
            ``backward()`` on its result; the logits get the gradient of the loss of the full batch.
    Raises:
        ValueError: The shapes do not match, the reduction or an axis is unknown, or label_smoothing is out of range. The
            axes of the batch are not checked if the reduction is "none".
        RuntimeError: A target is out of range (on CPU; a device assertion on CUDA).
    Collectives: unless the reduction is "none", one all-reduce over both axes in forward; none in backward. Host
    synchronization: none.
    """
    sharding = _Sharding(registry, None, (weight, input), ignore_index, reduction, label_smoothing)
    return _cross_entropy(logits, target, sharding)


@dataclass(frozen=True)
class _Sharding:
    """Sharding of the logits, and the options of the loss.

    ``class_axis`` is None if every rank has all classes. ``classes`` is the number of classes over all ranks; None: every
    rank has the same number.
    """

    registry: ProcessGroupRegistry
    class_axis: str | None
    batch_axes: tuple[str, ...]
    ignore_index: int
    reduction: Reduction
    smoothing: float
    classes: int | None = None

    def reduce_over_classes(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce ``tensor`` in place over the axis that shards the classes."""
        if self.class_axis is not None and self.registry.size(self.class_axis) > 1:
            with track_call("cross_entropy", self.registry):
                dist.all_reduce(tensor, op=op, group=self.registry.group(self.class_axis))
        return tensor

    def max_logit(self, values: Tensor) -> Tensor:
        """Return the maximum [...] over all classes of the logits ``values`` [..., classes of this rank].

        One all-reduce (MAX) computes the maximum, and checks each rank's number of classes. If a logit is NaN, gloo's
        maximum may miss it. The loss is NaN anyway, because the sum of exponentials is NaN.

        Raises:
            RuntimeError: On every rank: a rank has a wrong number of classes (on CPU; a device assertion on CUDA). Not
                checked with a single rank along the axis.
        """
        maximum, num_local = values.amax(-1), values.size(-1)
        if self.class_axis is None or self.registry.size(self.class_axis) == 1:
            return maximum
        errors = (num_local, -num_local)  # the two maxima add up to 0 only if all ranks have the same number
        also = ", or pass this number as classes= to cross_entropy_2d" if self.batch_axes else ""
        message = (
            f"the logits have different numbers of classes on the ranks along mesh axis {self.class_axis!r} (on this rank "
            f"{num_local}); make the number of all classes divisible by the size of the axis{also}"
        )
        if self.classes is not None:
            coordinate = self.registry.coordinate
            (expected,) = local_shape((self.classes,), P(self.class_axis), self.registry.topology, coordinate)
            errors = (abs(num_local - expected), 0)
            message = (
                f"classes={self.classes} does not fit the logits: along mesh axis {self.class_axis!r} each rank needs the "
                f"classes of its torch.chunk (this rank needs {expected} and has {num_local}); pass the number of all "
                "classes, and shard the classes with shard(..., uneven=True)"
            )
        packed = torch.cat([maximum.reshape(-1), *(maximum.new_full((1,), error) for error in errors)])
        self.reduce_over_classes(packed, dist.ReduceOp.MAX)
        torch._assert_async(packed[-2:].sum() == 0, message)
        return packed[:-2].view(maximum.shape)

    def locate_targets(self, target: Tensor, num_local: int) -> tuple[Tensor, Tensor, int]:
        """Return (index among this rank's classes, mask of targets on other ranks, number of classes over all ranks).

        The index of a target on another rank is 0.
        """
        if self.class_axis is None:
            return target, torch.zeros_like(target, dtype=torch.bool), num_local
        classes = num_local * self.registry.size(self.class_axis) if self.classes is None else self.classes
        return *local_index(target, classes, self.registry, self.class_axis), classes


def _cross_entropy(logits: Tensor, target: Tensor, sharding: _Sharding) -> Tensor:
    if logits.dim() == 0:
        raise ValueError("the logits have no dims; give logits of shape [..., classes]")
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"the target has shape {tuple(target.shape)}, but logits of shape {tuple(logits.shape)} need a target of shape "
            f"{tuple(logits.shape[:-1])}; give class ids of this shape, and logits with the classes in the last dim"
        )
    if sharding.reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={sharding.reduction!r} is unknown; use 'mean', 'sum' or 'none'")
    if not 0 <= sharding.smoothing <= 1:
        raise ValueError(f"label_smoothing={sharding.smoothing} is out of range; give a number from 0 to 1")
    loss: Tensor = _ParallelCrossEntropy.apply(logits, target, sharding)
    return loss


class _ParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, sharding: _Sharding) -> Tensor:
        values = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        ignored, smoothing = target == sharding.ignore_index, sharding.smoothing
        index, is_remote, classes = sharding.locate_targets(target.masked_fill(ignored, 0), values.size(-1))
        index = index.unsqueeze(-1)
        shifted = values - sharding.max_logit(values).unsqueeze(-1)
        target_logit = shifted.gather(-1, index).squeeze(-1).masked_fill(is_remote, 0)
        logit_sums = [shifted.sum(-1)] if smoothing else []
        exponentials = shifted.exp_()
        sums = sharding.reduce_over_classes(torch.stack([exponentials.sum(-1), target_logit, *logit_sums]))
        probabilities = exponentials.div_(sums[0].unsqueeze(-1))
        expected_logit = sums[1] if not smoothing else torch.lerp(sums[1], sums[2] / classes, smoothing)
        loss = (sums[0].log() - expected_logit).masked_fill(ignored, 0)
        total, weight = _reduce(loss, ignored, sharding)
        ctx.dtype, ctx.smoothing, ctx.classes = logits.dtype, smoothing, classes
        ctx.save_for_backward(probabilities, index, is_remote, weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        probabilities, index, is_remote, weight = ctx.saved_tensors
        scale = (grad * weight).unsqueeze(-1)
        result = probabilities * scale
        if ctx.smoothing:
            result -= scale * (ctx.smoothing / ctx.classes)
        result.scatter_add_(-1, index, -scale.masked_fill(is_remote.unsqueeze(-1), 0) * (1 - ctx.smoothing))
        return result.to(ctx.dtype), None, None


def _reduce(loss: Tensor, ignored: Tensor, sharding: _Sharding) -> tuple[Tensor, Tensor]:
    """Return the loss reduced by ``sharding.reduction``, and the weight of each target's loss in the result."""
    weight = (~ignored).to(loss.dtype)
    if sharding.reduction == "none":
        return loss, weight
    total = loss.sum()
    count = weight.sum()
    if sharding.batch_axes and sharding.registry.size(*sharding.batch_axes) > 1:
        both = torch.stack([total, count])
        with track_call("cross_entropy", sharding.registry):
            dist.all_reduce(both, group=sharding.registry.group(*sharding.batch_axes))
        total, count = both.unbind()
    if sharding.reduction == "sum":
        return total, weight
    # If all targets are ignored, the mean is NaN but its gradient is zero, as in torch.
    return total / count, weight / count.clamp(min=1)
