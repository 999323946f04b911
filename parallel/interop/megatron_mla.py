"""Megatron-core's multi-latent attention (MLA): its norms, and the gradient of its rotary keys.

    sum_rope_gradients(model)            # before declare_by_flags, unless check_rope_gradients(model) passes
    declare_by_flags(model, registry)

In MLA each of the norms ``q_layernorm`` and ``kv_layernorm`` comes before a column-parallel layer, whose backward sums over
the tensor-parallel group. The gradients of the norms are therefore complete. With sequence parallelism, each rank's
gradient has the terms of its shard of the sequence, and the norms have the flag ``sequence_parallel``.

All ranks of the tensor-parallel group use the same rotary keys (``k_pos_emb``), each for its own heads. The gradient of the
rotary keys must therefore be summed over this group. The backward of Megatron-core 0.16 makes this sum only with sequence
parallelism and a replicated down projection. In the other cases the gradients of the down projection and of all layers
before it lack terms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def mla_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the (name, module) pairs of the multi-latent attention (MLA) modules of ``model``."""
    for name, module in model.named_modules():
        if hasattr(module, "linear_kv_down_proj") and hasattr(module, "linear_kv_up_proj"):
            yield name, module


def norms_before_projection(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of ``q_layernorm`` and ``kv_layernorm`` in all multi-latent attention modules."""
    return {
        id(param)
        for _, module in mla_modules(model)
        for norm in (getattr(module, "q_layernorm", None), getattr(module, "kv_layernorm", None))
        if norm is not None
        for param in norm.parameters()
    }


def _is_down_sharded(module: Any) -> bool:
    return bool(getattr(module.linear_kv_down_proj.weight, "tensor_model_parallel", False))


def _modules_without_sum(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the (name, module) pairs of MLA modules whose backward does not sum the gradient of the rotary keys.

    Megatron makes the sum, over the tensor-parallel group, only with sequence parallelism and a replicated
    ``linear_kv_down_proj``.
    """
    for name, module in mla_modules(model):
        is_summed = module.config.sequence_parallel and not _is_down_sharded(module)
        if not is_summed and not hasattr(module, "_meshstep_rope_hook"):
            yield name, module


def check_rope_gradients(model: nn.Module) -> None:
    """Raise ValueError if the backward of a multi-latent attention module does not sum the gradient of its rotary keys.

    Call it only if the tensor-parallel group has more than one rank.
    """
    for name, module in _modules_without_sum(model):
        layout = "sharded" if _is_down_sharded(module) else "replicated"
        raise ValueError(
            f"the backward of {name} does not sum the gradient of its rotary keys over the tensor-parallel group "
            f"(sequence_parallel={module.config.sequence_parallel}, linear_kv_down_proj {layout} over the group); call "
            "sum_rope_gradients(model) of meshstep.parallel.interop.megatron_mla first, or set sequence_parallel=True with "
            "a replicated linear_kv_down_proj"
        )


def sum_rope_gradients(model: nn.Module) -> None:
    """Make the backward of all multi-latent attention modules sum the gradient of the rotary keys.

    The sum is over the tensor-parallel group. A forward hook on ``linear_kv_down_proj`` inserts the missing collectives.
    It does not change the values of the forward. Modules whose backward already makes the sum get no hook. A second call
    does nothing.

        sum_rope_gradients(model)

    Collectives: in each backward of a module with a hook, an all-reduce of the gradient of the rotary keys, or with
    sequence parallelism a reduce-scatter by Megatron. The hook gathers the output of a sharded down projection, which
    Megatron would gather itself without the hook.
    """
    for _, module in _modules_without_sum(model):
        config, group = module.config, module.pg_collection.tp
        hook = _RopeSum(config.kv_lora_rank, config.qk_pos_emb_head_dim, config.sequence_parallel, group)
        module._meshstep_rope_hook = module.linear_kv_down_proj.register_forward_hook(hook)


class _RopeSum:
    """Forward hook of ``linear_kv_down_proj``, which makes backward sum the gradient of the rotary keys."""

    def __init__(self, latent: int, rope: int, sequence_parallel: bool, group: dist.ProcessGroup) -> None:
        self.latent, self.rope, self.sequence_parallel, self.group = latent, rope, sequence_parallel, group

    def __call__(self, module: nn.Module, inputs: object, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        from megatron.core.tensor_parallel import mappings

        combined, bias = output
        if combined.size(-1) != self.latent + self.rope:
            combined = mappings.gather_from_tensor_model_parallel_region(combined, self.group)
            if self.sequence_parallel:  # MLA later gathers the rotary keys, and the backward of this gather sums
                return mappings.scatter_to_sequence_parallel_region(combined, self.group), bias
        if self.sequence_parallel:
            return combined, bias
        latent, rope = combined.split([self.latent, self.rope], -1)
        return torch.cat([latent, _SumInBackward.apply(rope, self.group)], -1), bias


class _SumInBackward(torch.autograd.Function):
    """Autograd function that returns its tensor, and in backward sums the gradient over a process group.

    Megatron's `copy_to_tensor_model_parallel_region` is not used, because it loses the sum if the gradient is not
    contiguous. The gradient of the rotary keys is not contiguous.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        summed = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None
