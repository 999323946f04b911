"""Cross entropy of logits whose classes are split over ranks, without ever gathering them.

    loss = log(sum_c exp(x_c - m)) - (x_target - m),   m = max_c x_c
    d loss / d x_c = exp(x_c - m) / sum - [c = target]

Max, sum and target logit are agreed over the axis of the classes, so each rank keeps its own classes only. With label
smoothing e over C classes the target is (1 - e) [c = target] + e / C, and the sum of all logits is agreed on too.

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
_COUNTS = "ranks have unequal numbers of classes: say classes=, of all ranks together, and cut them as torch.chunk does"


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
    """`F.cross_entropy` of logits with the classes, their *last* dim, split over ``axis``.

    Args:
        logits: [..., classes/t], floating; half types are computed in fp32.
        target: [...], integers in 0..classes-1 or ignore_index; replicated.
        ignore_index: Targets with this value count nowhere; a mean over none at all is NaN, as in torch.
        reduction: "mean" over the targets that count, "sum", or "none".
        label_smoothing: In [0, 1]: how much of each target is shared out over all classes.
    Returns:
        The loss, replicated: 0-dim, or [...] for "none"; fp32 for half logits, else their dtype.
    Raises:
        ValueError: The shapes don't fit, the reduction is unknown or label_smoothing is out of range.
        RuntimeError or IndexError: A target is out of range (on CPU; a device assertion on CUDA).
    Collectives: two all-reduces over ``axis`` in forward. Host reads: none.
    """
    return _cross_entropy(logits, target, _Split(registry, axis, (), ignore_index, reduction, label_smoothing))


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
    """`F.cross_entropy` of logits with the batch split over ``row`` and the classes, their *last* dim, over ``col``.

    Args:
        logits: [batch/rows, ..., classes/cols], floating; half types are computed in fp32.
        target: [batch/rows, ...], the targets of this row's batch.
        row: The axis that splits the batch, or several: in 2.5-D ("depth", "row").
        classes: How many there are in all, where that doesn't divide over col.
        ignore_index: Targets with this value count nowhere; a mean over none at all is NaN, as in torch.
        reduction: "mean" over the targets of the whole batch that count, "sum" over the whole batch, or "none".
        label_smoothing: As in `vocab_parallel_cross_entropy`.
    Returns:
        The loss: 0-dim and equal on every rank; for "none" [batch/rows, ...], that of this row's batch. Every rank calls
        ``backward()`` on what it got; the gradient is that of the whole batch's loss. Dtypes as in
        `vocab_parallel_cross_entropy`.
    Raises:
        As `vocab_parallel_cross_entropy`. RuntimeError (on CPU; a device assertion on CUDA), on every rank: some column's
        logits are not its part of ``classes``, or without these not as many as the others'.
    Collectives: two all-reduces over ``col`` and, unless the reduction is "none", one over ``row`` in forward. Host
    reads: none.
    """
    rows = (row,) if isinstance(row, str) else row
    split = _Split(registry, col, rows, ignore_index, reduction, label_smoothing, classes)
    return _cross_entropy(logits, target, split)


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
    """`F.cross_entropy` of logits of all classes, as of `Classifier3D`, with the batch split over ``weight`` and ``input``.

    Args:
        logits: [batch/(weight*input), ..., classes], floating; half types are computed in fp32.
        target: [batch/(weight*input), ...], those of this rank's batch.
        ignore_index, reduction, label_smoothing: As in `cross_entropy_2d`.
    Returns:
        The loss, as of `cross_entropy_2d`.
    Raises:
        As `vocab_parallel_cross_entropy`.
    Collectives: unless the reduction is "none" one all-reduce over both axes in forward. Host reads: none.
    """
    split = _Split(registry, None, (weight, input), ignore_index, reduction, label_smoothing)
    return _cross_entropy(logits, target, split)


@dataclass(frozen=True)
class _Split:
    registry: ProcessGroupRegistry
    class_axis: str | None
    batch_axes: tuple[str, ...]
    ignore_index: int
    reduction: Reduction
    smoothing: float
    classes: int | None = None

    def over_classes(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduced over their axis, in place."""
        if self.class_axis is not None and self.registry.size(self.class_axis) > 1:
            with track_call("cross_entropy", self.registry):
                dist.all_reduce(tensor, op=op, group=self.registry.group(self.class_axis))
        return tensor

    def peak(self, values: Tensor) -> Tensor:
        """The largest of all classes. A NaN may get lost (gloo loses it); it comes back through the sum.

        On the way all ranks find out whether each has as many classes as it should."""
        peak, here = values.amax(-1), values.size(-1)
        if self.class_axis is None or self.registry.size(self.class_axis) == 1:
            return peak
        off = (here, -here)  # the largest of either cancel where all are equal
        if self.classes is not None:
            at = self.registry.coordinate
            (wanted,) = local_shape((self.classes,), P(self.class_axis), self.registry.topology, at)
            off = (abs(here - wanted), 0)
        counted = torch.cat([peak.reshape(-1), *(peak.new_full((1,), number) for number in off)])
        self.over_classes(counted, dist.ReduceOp.MAX)
        said = f"{_COUNTS} (this rank has {here} of {self.classes or 'equally many'})"
        torch._assert_async(counted[-2:].sum() == 0, said)
        return counted[:-2].view(peak.shape)

    def of_class(self, target: Tensor, here: int) -> tuple[Tensor, Tensor, int]:
        """Indices into this rank's ``here`` classes, a mask of those elsewhere, and the number of all classes."""
        if self.class_axis is None:
            return target, torch.zeros_like(target, dtype=torch.bool), here
        classes = here * self.registry.size(self.class_axis) if self.classes is None else self.classes
        return *local_index(target, classes, self.registry, self.class_axis), classes


def _cross_entropy(logits: Tensor, target: Tensor, split: _Split) -> Tensor:
    if logits.shape[:-1] != target.shape or logits.dim() == 0:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} need a target of shape {tuple(logits.shape[:-1])}, "
            f"got {tuple(target.shape)}; the classes are the last dim of the logits"
        )
    if split.reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction {split.reduction!r} is unknown; use 'mean', 'sum' or 'none'")
    if not 0 <= split.smoothing <= 1:
        raise ValueError(f"label_smoothing={split.smoothing}: give a number from 0 to 1")
    loss: Tensor = _ParallelCrossEntropy.apply(logits, target, split)
    return loss


class _ParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, split: _Split) -> Tensor:
        values = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        ignored = target == split.ignore_index
        index, elsewhere, classes = split.of_class(target.masked_fill(ignored, 0), values.size(-1))
        index = index.unsqueeze(-1)
        shifted = values - split.peak(values).unsqueeze(-1)
        target_logit = shifted.gather(-1, index).squeeze(-1).masked_fill(elsewhere, 0)
        all_logits = [shifted.sum(-1)] if split.smoothing else []
        exponentials = shifted.exp_()
        sums = split.over_classes(torch.stack([exponentials.sum(-1), target_logit, *all_logits]))
        probabilities = exponentials.div_(sums[0].unsqueeze(-1))
        expected_logit = sums[1] if not split.smoothing else torch.lerp(sums[1], sums[2] / classes, split.smoothing)
        loss = (sums[0].log() - expected_logit).masked_fill(ignored, 0)
        total, weight = _reduce(loss, ignored, split)
        ctx.dtype, ctx.smoothing, ctx.classes = logits.dtype, split.smoothing, classes
        ctx.save_for_backward(probabilities, index, elsewhere, weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        probabilities, index, elsewhere, weight = ctx.saved_tensors
        scale = (grad * weight).unsqueeze(-1)
        result = probabilities * scale
        if ctx.smoothing:
            result -= scale * (ctx.smoothing / ctx.classes)
        result.scatter_add_(-1, index, -scale.masked_fill(elsewhere.unsqueeze(-1), 0) * (1 - ctx.smoothing))
        return result.to(ctx.dtype), None, None


def _reduce(loss: Tensor, ignored: Tensor, split: _Split) -> tuple[Tensor, Tensor]:
    """Losses by target -> the reduced loss, and the weight of each target in it."""
    weight = (~ignored).to(loss.dtype)
    if split.reduction == "none":
        return loss, weight
    total = loss.sum()
    count = weight.sum()
    if split.batch_axes and split.registry.size(*split.batch_axes) > 1:
        both = torch.stack([total, count])
        with track_call("cross_entropy", split.registry):
            dist.all_reduce(both, group=split.registry.group(*split.batch_axes))
        total, count = both.unbind()
    if split.reduction == "sum":
        return total, weight
    # Without any target the mean is NaN but its gradient zero, as in torch.
    return total / count, weight / count.clamp(min=1)
