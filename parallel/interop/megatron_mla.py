"""Megatron-core's multi-latent attention (MLA): its norms, and the gradient of its rotary keys.

    sum_rope_gradients(model)            # before declare_by_flags, unless the checks below pass
    declare_by_flags(model, registry)

In MLA the norms ``q_layernorm`` and ``kv_layernorm`` come before a column-parallel layer, whose backward sums over tensor.
Their gradients are therefore complete, or one per shard of the sequence with the flag ``sequence_parallel``.

Every tensor rank uses the rotary part of the keys (``k_pos_emb``) for its own heads, so its gradient must be summed over
tensor. The backward of Megatron-core 0.16 makes this sum only with sequence parallelism and a down projection that is
replicated over tensor. In the other cases the gradients of this layer and of all layers below it lack terms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def mla_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the MLA modules of ``model`` with their names."""
    for name, module in model.named_modules():
        if hasattr(module, "linear_kv_down_proj") and hasattr(module, "linear_kv_up_proj"):
            yield name, module


def norms_before_projection(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of ``q_layernorm`` and ``kv_layernorm`` in all MLA modules."""
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
    """Yield the MLA modules whose backward does not sum the gradient of the rotary keys over tensor, with their names."""
    for name, module in mla_modules(model):
        is_summed = module.config.sequence_parallel and not _is_down_sharded(module)
        if not is_summed and not hasattr(module, "_meshstep_rope_hook"):
            yield name, module


def check_rope_gradients(model: nn.Module) -> None:
    """Check that the backward of every MLA module sums the gradient of its rotary keys over tensor, of size 2 or more.

    Raises:
        ValueError: A module's backward does not make this sum.
    """
    for name, module in _modules_without_sum(model):
        layout = "sharded" if _is_down_sharded(module) else "replicated"
        raise ValueError(
            f"the backward of {name} does not sum the gradient of its rotary keys over tensor (sequence_parallel="
            f"{module.config.sequence_parallel}, linear_kv_down_proj {layout} over tensor); call "
            "sum_rope_gradients(model) of meshstep.parallel.interop.megatron_mla first, or set sequence_parallel=True with "
            "a replicated linear_kv_down_proj"
        )


def sum_rope_gradients(model: nn.Module) -> None:
    """Make the backward of every MLA module sum the gradient of its rotary keys over tensor.

    A forward hook on ``linear_kv_down_proj`` inserts the missing collectives. It leaves the values of the forward
    unchanged. Modules whose backward already makes the sum get no hook. A second call does nothing.

        sum_rope_gradients(model)

    Args:
        model: A model chunk of Megatron layers; it may be wrapped.
    Collectives: none now. In each backward of a module with a hook, an all-reduce of the rotary part over tensor, or with
        sequence parallelism a reduce-scatter by Megatron. A sharded down projection is gathered as without the hook.
    Host synchronization: none.
    """
    for _, module in _modules_without_sum(model):
        config, group = module.config, module.pg_collection.tp
        hook = _RopeSum(config.kv_lora_rank, config.qk_pos_emb_head_dim, config.sequence_parallel, group)
        module._meshstep_rope_hook = module.linear_kv_down_proj.register_forward_hook(hook)


class _RopeSum:
    """Forward hook of ``linear_kv_down_proj``.

    Args:
        latent, rope: Output columns of the latent and of the rotary keys.
        sequence_parallel: The value in the config.
        group: The tensor group.
    """

    def __init__(self, latent: int, rope: int, sequence_parallel: bool, group: dist.ProcessGroup) -> None:
        self.latent, self.rope, self.sequence_parallel, self.group = latent, rope, sequence_parallel, group

    def __call__(self, module: nn.Module, inputs: object, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        from megatron.core.tensor_parallel import mappings

        combined, bias = output
        if combined.size(-1) != self.latent + self.rope:
            combined = mappings.gather_from_tensor_model_parallel_region(combined, self.group)
            if self.sequence_parallel:  # MLA gathers the rotary keys again; the backward of this gather sums
                return mappings.scatter_to_sequence_parallel_region(combined, self.group), bias
        if self.sequence_parallel:
            return combined, bias
        latent, rope = combined.split([self.latent, self.rope], -1)
        return torch.cat([latent, _SumInBackward.apply(rope, self.group)], -1), bias


class _SumInBackward(torch.autograd.Function):
    """Return the tensor; the backward sums its gradient over a group.

    Megatron's `copy_to_tensor_model_parallel_region` loses the sum if the gradient is not contiguous, as here.
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
