"""Registry for a Transformers model that `from_pretrained(..., distributed_config=...)` has sharded.

    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(tp_size=2, fsdp_size=2))
    registry = registry_of(model)

The axes are the dims of the model's meshes: ``pp``, ``dp_replicate``, ``fsdp`` and ``tp``. Experts may have a separate
mesh of the same ranks (``efsdp``, ``ep``). ``fsdp`` and ``ep`` are then aliases of their common axes.

The plan describes parameters that are not DTensors: a parameter that the plan does not shard is replicated over ``tp``.
A norm with ``replicated_with_grad_allreduce`` in the plan (q and k of Qwen3) is replicated too, but its gradient covers
only this rank's heads. Transformers sums this gradient in a hook at every backward, and thereby sums the gradients of
earlier micro-batches repeatedly. `registry_of` removes the hook and declares the gradient partial
(``P(partial="tp")``), so that it is summed once, at the end of the accumulation window.
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
from .local_parameters import divide_once

_DENSE = ("pp", "dp_replicate", "fsdp", "tp")
_EXPERTS = ("pp", "dp_replicate", "efsdp", "ep")
_SUMMED = "replicated_with_grad_allreduce"
_HOOK = "ReplicatedWithGradAllReduce.install_forward.<locals>."


def registry_of(model: nn.Module) -> ProcessGroupRegistry:
    """Return the registry on a sharded model's meshes, and annotate its parameters with specs and names.

    After this call, `ParallelOptimizer` or `sync_gradients` must sum the gradients of the norms that the plan summed by
    hooks. Any other optimizer would use incomplete gradients.

        registry = registry_of(model)
        optimizer = ParallelOptimizer(torch.optim.AdamW(model.parameters()), registry)

    Args:
        model: A sharded Transformers model, before it is compiled or wrapped. Earlier declarations are kept.
    Raises:
        ValueError: The model is not sharded, or the forward of a module whose hook must be removed is already wrapped.
            Nothing is changed.
    Collectives: none. Host synchronization: none.
    """
    meshes: Any = getattr(model, "_mesh_manager", None)
    if meshes is None:
        raise ValueError(
            f"{type(model).__name__} has no device mesh; load it with from_pretrained(path, distributed_config="
            "DistributedConfig(tp_size=2)) and pass the model without a wrapper, or create a ProcessGroupRegistry and "
            "call declare(model, ...)"
        )
    summed = _summed_modules(model)
    dense, experts = meshes.get_mesh(_DENSE), meshes.get_mesh(_EXPERTS)
    if experts.size(3) == 1:
        registry = ProcessGroupRegistry.from_device_mesh(dense)
    else:
        registry = ProcessGroupRegistry(_refine_topology(*dense.shape, *experts.shape[2:]))
    pending = {id(param) for module in summed for param in module.parameters(recurse=False)}
    for module, forward in summed.items():
        _remove_hooks(module, forward)
    divide_once(model)
    for name, param in model.named_parameters():
        if annotation_of(param) is None:
            annotate(param, P(partial="tp") if id(param) in pending else P(), name)
    return registry


def _refine_topology(pp: int, dp_replicate: int, fsdp: int, tp: int, efsdp: int, ep: int) -> Topology:
    """Return the topology of a dense and an expert mesh on the same ranks.

    The common ranks of ``fsdp`` and ``ep`` form a separate axis.
    """
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
    """Return the modules whose gradients a hook sums over ``tp``, each with the forward that attaches the hook."""
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
                f"{name} is {_SUMMED!r} in the plan, but its forward is not the forward that Transformers has set; create "
                "the optimizer before you compile or wrap the model"
            )
        else:
            found[module] = forward
    return found


def _remove_hooks(module: nn.Module, forward: Any) -> None:
    """Restore the module's original forward, and remove the hooks from its parameters."""
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
