"""Workaround for `fully_shard` on a shard mesh of size 1, where torch divides gradients twice by a custom factor.

Examples of such a mesh are experts that only this rank holds, and `replicate`. torch 2.15 divides by the factor of
``set_gradient_divide_factor`` in place of the omitted reduce-scatter. It divides again around the all-reduce, unless
the collective itself divides: in float64 and float16, and with ``set_force_sum_reduction_for_comms``. The gradient is
then too small by this factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .local_parameters import fully_sharded


def divide_once(model: nn.Module) -> None:
    """Make modules whose shard mesh has size 1 divide their gradients by the custom factor once, in every dtype.

    Call it before the first backward; gradients that were already divided stay unchanged.

    Args:
        model: The root module that `fully_shard` was applied to. Other modules are not changed.
    Collectives: none. Host synchronization: none.
    """
    for module in fully_sharded(model):
        state: Any = module._get_fsdp_state()  # no public API returns the factor
        groups = getattr(state, "_fsdp_param_groups", None)  # missing in torch 2.11, which has at most one group
        for group in [state._fsdp_param_group] if groups is None else groups:
            factor = getattr(group, "gradient_divide_factor", None)
            if factor in (None, 1.0) or getattr(group.mesh_info, "shard_mesh_size", 1) > 1:
                continue
            group.gradient_divide_factor = 1.0
            group._all_reduce_hook = _dividing(factor, group._all_reduce_hook)


def _dividing(factor: float, hook: Callable[[Tensor], None] | None) -> Callable[[Tensor], None]:
    """Return an all-reduce hook that divides the gradient by ``factor``, then calls the previous ``hook``."""

    def divide(reduced: Tensor) -> None:
        reduced.div_(factor)
        if hook is not None:
            hook(reduced)

    return divide
