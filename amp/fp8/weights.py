"""Cache of 8-bit weights, which are rounded once per step instead of once per micro-batch.

A cached weight is valid until the next step of any torch optimizer, while the weight keeps its memory address and
version. The version alone is not enough, because torch's fused optimizers and third-party kernels write without
counting.

Only weights of models that the mode `Fp8` has prepared are cached, and only the parameters of that time. The parameters
that `fully_shard` creates change at times that no counter shows. The cache is used only with gradients enabled. An
evaluation may write averaged weights through ``.data``, which does not change the version, so it rounds the current
weights. Such a write between two micro-batches of a window is not detected.
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
from .tensor import E4M3, Quantized, amax_of, max_over_ranks, quantize


class RoundedWeight(NamedTuple):
    """8-bit weight, or its transpose.

    Attributes:
        amax: Maximum of the weight or of each row, over all ranks.
        quantized: The weight, rounded with this maximum.
    """

    amax: Tensor
    quantized: Quantized


class WeightCache:
    """Cache entries of one weight since the last step, by the kind of rounding."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._identity = _identity(weight)

    def get(self, how: Hashable) -> RoundedWeight | None:
        """Return the entry of `put`, or None if it is no longer valid."""
        identity, rounded = CACHE[self._weight].get(how, (None, None))
        return rounded if identity == self._identity else None

    def put(self, how: Hashable, rounded: RoundedWeight) -> None:
        """Store an entry until the next step."""
        CACHE[self._weight][how] = self._identity, rounded


CACHE: Any = WeakTensorKeyDictionary()
"""The cache: for each registered weight, a dict from the kind of rounding to identity and rounded weight."""
_hook_registered = False


def cache_rounded(weight: Tensor) -> None:
    """Cache the 8-bit values of this weight from now on."""
    global _hook_registered
    if isinstance(weight, nn.Parameter) and not has_dtensors([weight]):  # FSDP may reuse a DTensor's memory
        CACHE[weight] = {}
    if not _hook_registered:
        register_optimizer_step_post_hook(_clear_after_step)
        _hook_registered = True


def cache_of(weight: Tensor) -> WeightCache | None:
    """Return the cache for this weight; None if the weight must be rounded in every forward pass.

    The latter is the case if the weight is not registered or gradients are disabled. It is also the case if the code is
    compiled or captured, because it may run again with other weights.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or weight not in CACHE:
        return None
    if is_captured():
        del CACHE[weight]  # permanently: replays of the graph step the weight without running the hook
        return None
    return WeightCache(weight)


def round_both(
    x: Tensor,
    format: torch.dtype,
    weight: Tensor,
    weight_cache: WeightCache | None,
    how: Hashable,
    registry: ProcessGroupRegistry | None,
    axes: tuple[str, ...],
    by_row: bool = False,
) -> tuple[Quantized, Quantized]:
    """Round an operand to ``format`` and a weight to e4m3. A cached weight from the same kind of rounding is reused.

    Args:
        x: The operand.
        format: `E4M3` or `E5M2`, the format of ``x``.
        weight: The weight, or its transpose.
        weight_cache: The cache of the weight; None: no cache.
        how: The key in this cache.
        registry, axes: As in `max_over_ranks`.
        by_row: If True, every row has its own scale. Default: False.
    Collectives: one all-reduce (MAX) of both maxima over ``axes``; none over a single rank. Host synchronization: none.
    """
    cached = None if weight_cache is None else weight_cache.get(how)
    maxima = [amax_of(x, by_row), amax_of(weight, by_row) if cached is None else cached.amax]
    amax_x, amax_weight = max_over_ranks(maxima, registry, axes)
    rounded = quantize(weight, E4M3, amax_weight) if cached is None else cached.quantized
    if weight_cache is not None and cached is None:
        weight_cache.put(how, RoundedWeight(amax_weight, rounded))
    return quantize(x, format, amax_x), rounded


def forget_rounded() -> None:
    """Clear the cache. Call it when weights have been or will be stepped."""
    if CACHE:
        for by_how in CACHE.values():
            by_how.clear()


def _clear_after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Clear the cache, unless the optimizer has ``steps_windows``.

    The `step` of such an optimizer may be called within a window; it calls `forget_rounded` itself.
    """
    if not getattr(optimizer, "steps_windows", False):
        forget_rounded()


def _identity(weight: Tensor) -> tuple[object, ...]:
    return weight.data_ptr(), weight._version, weight.dtype, weight.shape, weight.stride()
