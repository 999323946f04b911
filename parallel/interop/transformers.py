"""Transformers models that `from_pretrained(..., distributed_config=...)` has split: their meshes and plans, as a registry.

    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(tp_size=2, fsdp_size=2))
    registry = registry_of(model)

The axes are the dims of the model's own meshes: ``pp``, ``dp_replicate``, ``fsdp`` and ``tp``. Where experts are on a mesh
of their own (``efsdp``, ``ep``), of the same ranks, ``fsdp`` and ``ep`` are aliases of the axes that both consist of.

What DTensors don't say of its parameters the plan does: what it does not split over ``tp`` is copied there. A norm in the
plan as ``replicated_with_grad_allreduce`` (q and k of Qwen3) is copied too, but has a gradient of this rank's heads alone.
Transformers sums it in a hook on every backward, the part of earlier micro-batches again and again; here it is a pending
sum (``P(partial="tp")``) that is made once, at the end of a window, and the hook is taken away.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import Tensor, nn

from ..layout.annotation import annotate, annotation_of
from ..layout.spec import P
from ..mesh.registry import ProcessGroupRegistry
from ..mesh.topology import Topology
from .fsdp_division import divide_once

_DENSE = ("pp", "dp_replicate", "fsdp", "tp")
_EXPERTS = ("pp", "dp_replicate", "efsdp", "ep")
_SUMMED = "replicated_with_grad_allreduce"
_HOOK = "ReplicatedWithGradAllReduce.install_forward.<locals>."


def registry_of(model: nn.Module) -> ProcessGroupRegistry:
    """The registry of a split model's own meshes; its parameters get their specs and names.

    From here on the gradients of norms that the plan has summed by hooks are sums that `ParallelOptimizer` (or
    `sync_gradients`) makes: another optimizer would step with parts of them.

    Args:
        model: A Transformers model that is split, before it is compiled or wrapped. What has been declared stays.
    Raises:
        ValueError: It is not split; its forward is wrapped already where a hook must be taken away. Nothing is changed.
    Collectives, host reads: none.
    """
    meshes: Any = getattr(model, "_mesh_manager", None)
    if meshes is None:
        raise ValueError(
            f"{type(model).__name__} has no device mesh: load it with from_pretrained(path, distributed_config="
            "DistributedConfig(tp_size=2)), give the model itself and no wrapper of it, or make a ProcessGroupRegistry and "
            "declare(model, ...)"
        )
    summed = _summed_modules(model)
    dense, experts = meshes.get_mesh(_DENSE), meshes.get_mesh(_EXPERTS)
    if experts.size(3) == 1:
        registry = ProcessGroupRegistry.from_device_mesh(dense)
    else:
        registry = ProcessGroupRegistry(_folded(*dense.shape, *experts.shape[2:]))
    pending = {id(param) for module in summed for param in module.parameters(recurse=False)}
    for module, forward in summed.items():
        _take_hooks(module, forward)
    divide_once(model)
    for name, param in model.named_parameters():
        if annotation_of(param) is None:
            annotate(param, P(partial="tp") if id(param) in pending else P(), name)
    return registry


def _folded(pp: int, dp_replicate: int, fsdp: int, tp: int, efsdp: int, ep: int) -> Topology:
    """Of two meshes of the same ranks: what ``fsdp`` and ``ep`` have in common is an axis of its own."""
    return Topology(
        pp=pp,
        dp_replicate=dp_replicate,
        efsdp=efsdp,
        fsdp_in_ep=fsdp // efsdp,
        tp=tp,
        roles={"fsdp_in_ep": "data"},
        aliases={"fsdp": ("efsdp", "fsdp_in_ep"), "ep": ("fsdp_in_ep", "tp")},
    )


def _summed_modules(model: nn.Module) -> dict[nn.Module, Any]:
    """The modules whose parameters' gradients a hook sums over ``tp``, and the forward that attaches it."""
    if getattr(model, "_tp_size", None) in (None, 1):
        return {}
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    found: dict[nn.Module, Any] = {}
    for name, module in model.named_modules():
        if _SUMMED not in (plan.get(name), plan.get(re.sub(r"\d+", "*", name))):
            continue
        forward = vars(module).get("forward")
        if forward is None and getattr(module, "_meshstep_released", False):
            found[module] = None
        elif not getattr(forward, "__qualname__", "").startswith(_HOOK):
            raise ValueError(
                f"{name} is {_SUMMED!r} in the plan, but its forward is not the one that Transformers has given it: make "
                "the optimizer before the model is compiled or wrapped"
            )
        else:
            found[module] = forward
    return found


def _take_hooks(module: nn.Module, forward: Any) -> None:
    """Give the module the forward it had before, and its parameters no hooks."""
    if forward is None:
        return
    inner = inspect.getclosurevars(forward).nonlocals
    hooked: list[Tensor] = [*inner.get("is_already_hooked", {}).values(), *module.parameters(recurse=False)]
    for param in hooked:
        hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
        for key in [key for key, hook in hooks.items() if getattr(hook, "__qualname__", "").startswith(_HOOK)]:
            del hooks[key]
    del module.forward
    if getattr(inner["original_forward"], "__func__", None) is not type(module).forward:
        module.forward = inner["original_forward"]
    module._meshstep_released = True  # type: ignore[assignment]
