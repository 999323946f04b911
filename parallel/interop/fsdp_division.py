"""Gradients that `fully_shard` divides by a factor of one's own, where it would do so twice.

Over a mesh that shards over one rank alone (experts that no other rank has; `replicate`) torch 2.15 divides by the factor
of ``set_gradient_divide_factor`` in the place of the reduction that there is none of, and then once more before and after
it, where it does not leave that to the collective: in float64 and float16, and with
``set_force_sum_reduction_for_comms``. The gradient is then too small by that factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .local_parameters import fully_sharded


def divide_once(model: nn.Module) -> None:
    """Let what shards over one rank alone divide by its factor once, in every dtype.

    Args:
        model: The root that `fully_shard` was applied to; any other is left as it is. What has been divided stays: before
            the first backward.
    Collectives, host reads: none.
    """
    for module in fully_sharded(model):
        state: Any = module._get_fsdp_state()  # what a factor is kept in; nothing public tells it
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one at most
        for group in [state._fsdp_param_group] if groups is None else groups:
            factor = getattr(group, "gradient_divide_factor", None)
            if factor in (None, 1.0) or getattr(group.mesh_info, "shard_mesh_size", 1) > 1:
                continue
            group.gradient_divide_factor = 1.0
            group._all_reduce_hook = _dividing(factor, group._all_reduce_hook)


def _dividing(factor: float, hook: Callable[[Tensor], None] | None) -> Callable[[Tensor], None]:
    """What torch does with a gradient when it has been reduced: ``hook`` of others, on what they would have been given."""

    def divide(reduced: Tensor) -> None:
        reduced.div_(factor)
        if hook is not None:
            hook(reduced)

    return divide
