"""Weights in 8 bits, kept from one micro-batch to the next: they are rounded once a step.

What was rounded is good until the next step of any torch optimizer, and as long as the weight has the memory and the
version that it had. The version alone would not do: torch's fused optimizers don't count their writes, nor do others'
kernels. Kept are only the weights of models that the mode `Fp8` has prepared, as the parameters that they were then: what
`fully_shard` puts in their place gets other values at times that nobody counts. And only where gradients are computed: an
evaluation may write averaged weights past the version (``.data``), and rounds what it finds. Of such a write between two
micro-batches of one window nobody hears.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ...parallel.interop.local_parameters import has_dtensors
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..capture import is_captured
from .tensor import E4M3, Quantized, agreed, amax_of, quantize


class RoundedWeight(NamedTuple):
    """A weight, or its transpose.

    Args:
        amax: Of its rows or of all of it, agreed by all ranks.
        quantized: What it was rounded to by that.
    """

    amax: Tensor
    quantized: Quantized


class KeptWeight:
    """What one weight has been rounded to since the last step, by how that was done."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._seen = _look(weight)

    def get(self, how: Hashable) -> RoundedWeight | None:
        """What `put` was given, if it still holds."""
        seen, rounded = KEPT[self._weight].get(how, (None, None))
        return rounded if seen == self._seen else None

    def put(self, how: Hashable, rounded: RoundedWeight) -> None:
        """Keep it until the next step."""
        KEPT[self._weight][how] = self._seen, rounded


KEPT: Any = WeakTensorKeyDictionary()
"""Of each weight that is kept what it was rounded to, by how."""
_hooked = False


def keep_rounded(weight: Tensor) -> None:
    """From now on, round this weight once a step."""
    global _hooked
    if isinstance(weight, nn.Parameter) and not has_dtensors([weight]):  # a DTensor's memory is others'
        KEPT[weight] = {}
    if not _hooked:
        register_optimizer_step_post_hook(_stepped)
        _hooked = True


def kept(weight: Tensor) -> KeptWeight | None:
    """Where to look for, and to keep, what this weight is rounded to; None where it is to be rounded every time: it is not
    to be kept, no gradients are computed, or what runs is recorded and will run again with other weights.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or weight not in KEPT:
        return None
    if is_captured():
        del KEPT[weight]  # for good: the graph's replays step it without a word to anybody
        return None
    return KeptWeight(weight)


def round_both(
    x: Tensor,
    format: torch.dtype,
    weight: Tensor,
    kept_weight: KeptWeight | None,
    how: Hashable,
    registry: ProcessGroupRegistry | None,
    axes: tuple[str, ...],
    by_row: bool = False,
) -> tuple[Quantized, Quantized]:
    """An operand in ``format``, and a weight in e4m3: as it was rounded in the same way since the last step, if it is kept.

    Args:
        kept_weight: Where it may be kept; ``how`` is under what.
        by_row: Each row has a scale of its own.
    Collectives: one all-reduce (MAX) of both maxima over ``axes``; none if there is one rank. Host reads: none.
    """
    known = None if kept_weight is None else kept_weight.get(how)
    maxima = [amax_of(x, by_row), amax_of(weight, by_row) if known is None else known.amax]
    amax_x, amax_weight = agreed(maxima, registry, axes)
    rounded = quantize(weight, E4M3, amax_weight) if known is None else known.quantized
    if kept_weight is not None and known is None:
        kept_weight.put(how, RoundedWeight(amax_weight, rounded))
    return quantize(x, format, amax_x), rounded


def forget_rounded() -> None:
    """Forget all rounded weights, because weights have been or will be stepped."""
    if KEPT:
        for by_how in KEPT.values():
            by_how.clear()


def _stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """One whose `step` may be called within a window says ``steps_windows``, and calls `forget_rounded` itself."""
    if not getattr(optimizer, "steps_windows", False):
        forget_rounded()


def _look(weight: Tensor) -> tuple[object, ...]:
    return weight.data_ptr(), weight._version, weight.dtype, weight.shape, weight.stride()
