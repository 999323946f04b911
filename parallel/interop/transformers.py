"""Registry for a Transformers model that `from_pretrained(..., distributed_config=...)` has sharded.

    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(tp_size=2, fsdp_size=2))
    registry = registry_of(model)

The axes are the dims of the model's meshes: ``pp``, ``dp_replicate``, ``fsdp`` and ``tp``. Experts may have a separate
mesh of the same ranks (``efsdp``, ``ep``). ``fsdp`` and ``ep`` are then aliases of their common axes.

The model's tensor-parallel plan defines which parameters are sharded. A parameter that the plan does not shard is not a
DTensor, and is replicated over ``tp``. A norm layer with ``replicated_with_grad_allreduce`` in the plan (q and k norms of
Qwen3) is replicated too, but on each rank its gradient has only the terms of this rank's heads. Transformers all-reduces
the accumulated gradient in a hook after every backward, which sums the gradients of earlier micro-batches again.
`registry_of` removes the hook and declares the gradient partial (``P(partial="tp")``). The gradient is then summed once, at
the end of the accumulation window (the micro-batches between two steps).
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import Tensor, nn

from ..layout.annotation import annotate, annotation_of
from ..layout.spec import P
from ..mesh.registry import ProcessGroupRegistry
from ..mesh.text import some, without_wrappers
from ..mesh.topology import Topology
from .local_parameters import divide_once

_DENSE = ("pp", "dp_replicate", "fsdp", "tp")
_EXPERTS = ("pp", "dp_replicate", "efsdp", "ep")
_SUMMED = "replicated_with_grad_allreduce"
_HOOK = "ReplicatedWithGradAllReduce.install_forward.<locals>."
_RELEASED = "_meshstep_released"  # attribute of a module whose hook was removed


def registry_of(model: nn.Module) -> ProcessGroupRegistry:
    """Return a registry on a sharded Transformers model's device meshes, and annotate its parameters with specs and names.

    The call removes the hooks of Transformers that sum gradients of norm layers (see the module docstring). From then on,
    `ParallelOptimizer` or `sync_gradients` must sum these gradients; any other optimizer would use incomplete gradients.
    The call also corrects gradients that `fully_shard` would divide twice (`divide_once`).

        registry = registry_of(model)
        optimizer = ParallelOptimizer(torch.optim.AdamW(model.parameters()), registry)

    Args:
        model: A sharded Transformers model, or a module that contains one (``torch.compile``, PEFT, a module of your own).
            Parameters outside the Transformers model, such as adapters, are declared replicated, unless they are DTensors.
            Existing declarations are kept.
    Raises:
        ValueError: ``model`` contains no sharded model, or more than one; no module or parameter has a name of the
            tensor-parallel plan; the forward that Transformers set on a module with a hook was replaced; a norm layer
            whose hook the call removes is declared without ``partial="tp"``; or as in
            `ProcessGroupRegistry.from_device_mesh`. The model is unchanged in these cases.
    Collectives: none. Host synchronization: none.
    """
    sharded = sharded_model(model)
    meshes: Any = vars(sharded)["_mesh_manager"]
    summed = _summed_modules(sharded)
    dense, experts = meshes.get_mesh(_DENSE), meshes.get_mesh(_EXPERTS)
    if experts.size(3) == 1:
        registry = ProcessGroupRegistry.from_device_mesh(dense)
    else:
        registry = ProcessGroupRegistry(_refine_topology(*dense.shape, *experts.shape[2:]))
    pending = {id(param) for module in summed for param in module.parameters(recurse=False)}
    for name, param in model.named_parameters():
        declared = annotation_of(param)
        if id(param) in pending and declared is not None and "tp" not in declared.spec.partial:
            raise ValueError(
                f"{name} is declared {declared.spec}, but its gradient is partial over 'tp' without the hook of "
                "Transformers; leave it undeclared, or declare it P(partial='tp')"
            )
    for module, forward in summed.items():
        _remove_hooks(module, forward)
    divide_once(sharded)
    names = {id(param): without_wrappers(name) for name, param in sharded.named_parameters()}
    for name, param in model.named_parameters():
        if annotation_of(param) is None:
            annotate(param, P(partial="tp") if id(param) in pending else P(), names.get(id(param), name))
    return registry


def sharded_model(model: nn.Module) -> Any:
    """Return the model that `from_pretrained` has sharded: ``model``, or a module within it.

    It is the module whose attribute has the device meshes, so names and kinds of wrapper modules do not matter.

    Raises:
        ValueError: There is no such module, or more than one.
    """
    found = [module for module in model.modules() if vars(module).get("_mesh_manager") is not None]
    kind = type(model).__name__
    if not found:
        raise ValueError(
            f"{kind} has no device mesh; load it with from_pretrained(path, distributed_config="
            "DistributedConfig(tp_size=2)), or create a ProcessGroupRegistry and call "
            "declare(model, ...)"
        )
    if len(found) > 1:
        raise ValueError(
            f"{kind} contains {len(found)} sharded models ({', '.join(type(module).__name__ for module in found)}); pass "
            "only the model that the optimizer trains"
        )
    return found[0]


def _refine_topology(pp: int, dp_replicate: int, fsdp: int, tp: int, efsdp: int, ep: int) -> Topology:
    """Return the common refinement of the dense and the expert mesh, from the sizes of their dims.

    The dims ``fsdp`` and ``ep`` overlap: their common factor is the axis ``fsdp_in_ep``, and both are aliases.
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


def _summed_modules(model: Any) -> dict[nn.Module, Any]:
    """Return the modules whose gradients a hook of Transformers sums over ``tp``, each with the forward that adds the hook.

    The forward is None if `registry_of` has already removed the hook. The modules are found by their forward. The names in
    the plan are used only to detect modules whose forward was replaced.

    Args:
        model: The result of `sharded_model`.
    Raises:
        ValueError: As in `registry_of`: a name of the plan is missing, or a forward was replaced.
    """
    if getattr(model, "_tp_size", None) in (None, 1):
        return {}
    found = {module: vars(module).get("forward") for module in model.modules() if _is_summed(module)}
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    modules = {without_wrappers(name): module for name, module in model.named_modules()}
    names = [*modules, *(without_wrappers(name) for name, _ in model.named_parameters())]
    if plan and not any(name in plan or _glob_of(name) in plan for name in names):
        raise ValueError(
            f"the tensor-parallel plan of {type(model).__name__} names {some(plan)}, but no module or parameter has such a "
            "name; create the optimizer before you rename or wrap modules within the model"
        )
    for name, module in modules.items():
        if _SUMMED in (plan.get(name), plan.get(_glob_of(name))) and not found.keys() & {*module.modules()}:
            raise ValueError(
                f"{name} is {_SUMMED!r} in the plan, but its forward is not the forward that Transformers has set; create "
                "the optimizer before you replace the module or its forward"
            )
    return found


def _is_summed(module: nn.Module) -> bool:
    """Return True if Transformers sums this module's gradient in a hook, or did before `registry_of` removed the hook."""
    forward = vars(module).get("forward")
    return getattr(forward, "__qualname__", "").startswith(_HOOK) or (
        forward is None and getattr(module, _RELEASED, False) is True
    )


def _glob_of(name: str) -> str:
    """Return the name with ``*`` in place of each number, as the tensor-parallel plan writes layer indices."""
    return re.sub(r"\d+", "*", name)


def _remove_hooks(module: nn.Module, forward: Any) -> None:
    """Restore the module's original forward and remove the hooks from its parameters; no effect if ``forward`` is None."""
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
    setattr(module, _RELEASED, True)
