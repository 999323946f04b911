"""Registry for a Transformers model that `from_pretrained(..., distributed_config=...)` has sharded.

    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(tp_size=2, fsdp_size=2))
    registry = registry_of(model)

The axes are the dims of the model's device mesh: ``pp``, ``dp_replicate``, ``fsdp`` and ``tp``. Experts may have a second
mesh of the same ranks: ``pp``, ``dp_replicate``, ``efsdp`` and ``ep``. The axes are then ``pp``, ``dp_replicate``,
``efsdp``, ``fsdp_in_ep`` and ``tp``, and the dims ``fsdp`` and ``ep`` are aliases for two axes each.

The model's tensor-parallel plan defines which parameters are sharded over ``tp``. The other parameters are replicated over
``tp``. Some norm layers (the q and k norms of Qwen3) have ``replicated_with_grad_allreduce`` in the plan: on each rank
their gradient has only the terms of this rank's heads, so it must be summed over ``tp``. Transformers all-reduces the
accumulated gradient in a hook after every backward, which sums the gradients of earlier micro-batches again. `registry_of`
removes the hook and declares the gradient partial (``P(partial="tp")``). The gradient is then summed once per step, after
the last micro-batch.
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
    """Return a registry on the device meshes of a sharded Transformers model, and declare the model's parameters.

    The call removes the hooks by which Transformers sums the gradients of some norm layers (the q and k norms of Qwen3)
    over ``tp``, and declares these gradients partial. From then on, `ParallelOptimizer` or `sync_gradients` must sum these
    gradients; any other optimizer would use incomplete gradients. The call also corrects gradients that `fully_shard`
    would divide twice (`divide_once`).

        registry = registry_of(model)
        optimizer = ParallelOptimizer(torch.optim.AdamW(model.parameters()), registry)

    Args:
        model: A sharded Transformers model, or a module that contains one (``torch.compile``, PEFT, a module of your own).
            The parameters of the norm layers above are declared ``P(partial="tp")``, all other parameters ``P()``: a plain
            parameter is then replicated, and a DTensor is replicated over the axes outside its mesh. Existing
            declarations are kept.
    Raises:
        ValueError: ``model`` contains no sharded model, or more than one; no module or parameter has a name of the
            tensor-parallel plan; a module or its forward was replaced after Transformers set a forward with a hook; a norm
            layer whose hook the call removes is declared without ``partial="tp"``; or as in
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
        pp, dp_replicate, fsdp, tp = dense.shape
        efsdp = experts.size(2)
        topology = Topology(  # its axes are common to the dense mesh (fsdp, tp) and the expert mesh (efsdp, ep)
            pp=pp,
            dp_replicate=dp_replicate,
            efsdp=efsdp,
            fsdp_in_ep=fsdp // efsdp,
            tp=tp,
            roles={"fsdp_in_ep": "data"},
            aliases={"fsdp": ("efsdp", "fsdp_in_ep"), "ep": ("fsdp_in_ep", "tp")},
        )
        registry = ProcessGroupRegistry(topology)
    pending = {id(param) for module in summed for param in module.parameters(recurse=False)}
    for name, param in model.named_parameters():
        declared = annotation_of(param)
        if id(param) in pending and declared is not None and "tp" not in declared.spec.partial:
            raise ValueError(
                f"{name} is declared {declared.spec}, but its gradient is partial over 'tp', because registry_of removes "
                "the hook of Transformers that sums the gradient; leave the parameter undeclared, or declare it "
                "P(partial='tp')"
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
    """Return the model that `from_pretrained` has sharded: ``model`` itself, or a module within it.

    This is the only module that has the attribute ``_mesh_manager``, so names and classes of wrapper modules do not matter.
    """
    found = [module for module in model.modules() if vars(module).get("_mesh_manager") is not None]
    kind = type(model).__name__
    if not found:
        raise ValueError(
            f"{kind} contains no model that from_pretrained has sharded; load it with from_pretrained(path, "
            "distributed_config=DistributedConfig(tp_size=2)), or create a ProcessGroupRegistry and call "
            "declare(model, ...)"
        )
    if len(found) > 1:
        raise ValueError(
            f"{kind} contains {len(found)} sharded models ({', '.join(type(module).__name__ for module in found)}); pass "
            "only the model that the optimizer trains"
        )
    return found[0]


def _summed_modules(model: Any) -> dict[nn.Module, Any]:
    """Return the modules whose gradients Transformers sums over ``tp``, as a dict from module to forward.

    Transformers replaces the forward of such a module by one that registers a hook, and the hook sums the gradients. The
    forward in the dict is None if `registry_of` has already removed the hook. The modules are found by their forward. The
    names in the tensor-parallel plan are used only to detect modules whose forward was replaced.

    Raises:
        ValueError: No module or parameter has a name of the plan; or the forward of a module in the plan was replaced.
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
            "name; create the registry and the optimizer before you rename or wrap modules within the model"
        )
    for name, module in modules.items():
        if _SUMMED in (plan.get(name), plan.get(_glob_of(name))) and not found.keys() & {*module.modules()}:
            raise ValueError(
                f"{name} is {_SUMMED!r} in the tensor-parallel plan, but its forward is not the forward that Transformers "
                "has set; create the registry and the optimizer before you replace this module or its forward"
            )
    return found


def _is_summed(module: nn.Module) -> bool:
    """Return True if a hook of Transformers sums this module's gradients, or did until `registry_of` removed the hook."""
    forward = vars(module).get("forward")
    return getattr(forward, "__qualname__", "").startswith(_HOOK) or (
        forward is None and getattr(module, _RELEASED, False) is True
    )


def _glob_of(name: str) -> str:
    """Return the name with ``*`` in place of each number, because the tensor-parallel plan has ``*`` for layer indices."""
    return re.sub(r"\d+", "*", name)


def _remove_hooks(module: nn.Module, forward: Any) -> None:
    """Restore the module's original forward, and remove Transformers' hooks; do nothing if ``forward`` is None."""
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
