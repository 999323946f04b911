"""Local parameters, local gradients and specs of parameters, some of which may be DTensors.

The local parameter of a DTensor is a plain parameter on the memory of its local tensor. A plain parameter is its own local
parameter. The module `dtensor` is imported only if DTensors are in use, because the import takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from ..layout.annotation import Annotation, Sums, annotation_of
from ..layout.spec import P
from ..mesh.topology import Topology

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def loaded_class(module: str, name: str) -> type | None:
    """Return the class ``name`` of the module named ``module``; None if the module has not been imported."""
    return getattr(sys.modules.get(module), name, None)


def has_dtensors(tensors: Iterable[Tensor]) -> bool:
    kind = loaded_class("torch.distributed.tensor", "DTensor")
    return kind is not None and any(isinstance(tensor, kind) for tensor in tensors)


def fully_sharded(model: nn.Module) -> list[Any]:
    """Return the modules within ``model``, including ``model``, to which torch's `fully_shard` was applied."""
    kind = loaded_class("torch.distributed.fsdp", "FSDPModule")
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def _param_groups(module: Any) -> list[Any]:
    """Return the ``FSDPParamGroup`` objects of a `fully_shard` module, for which torch has no public function."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # missing in torch 2.11, which has at most one group
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def has_aborted_backward(module: Any) -> bool:
    """Return True if the last backward through a `fully_shard` module raised. Call it outside of a backward.

    torch then reduces only some of the gradients in later backwards, until ``module.reset_iter_state()`` (torch 2.14 or
    newer) is called. torch has no public function for this check.
    """
    state: Any = module._get_fsdp_state()
    return bool(state._state_ctx.post_backward_final_callback_queued)


def fully_shard_meshes(model: nn.Module) -> list[DeviceMesh]:
    """Return the distinct device meshes over which the `fully_shard` modules within ``model`` average gradients."""
    groups = [group for module in fully_sharded(model) for group in _param_groups(module)]
    return list({id(group.mesh_info.mesh): group.mesh_info.mesh for group in groups}.values())


def named_shards(model: nn.Module) -> dict[str, Tensor]:
    """Return ``model.named_parameters()`` as a dict, with the sharded parameters that optimizers need.

    A `fully_shard` module may still have its gathered parameters, for example after a forward without a backward.
    """
    shards: dict[int, Tensor] = {}
    for module in fully_sharded(model):
        for param in (param for group in _param_groups(module) for param in group.fsdp_params):
            for attribute in ("_unsharded_param", "_sharded_post_forward_param"):
                shards[id(getattr(param, attribute, None))] = param.sharded_param
    return {name: shards.get(id(param), param) for name, param in model.named_parameters()}


def discard_gathered(model: nn.Module) -> None:
    """Free the gathered parameters of the `fully_shard` modules within ``model``. The next forward gathers them again.

    A module may have kept them since a forward without a backward. They do not change when the shards change.
    """
    for module in fully_sharded(model):
        module.reshard()


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's local tensor of a DTensor, or a plain tensor unchanged. Collectives: none."""
    if has_dtensors((tensor,)):
        distributed: Any = tensor
        tensor = distributed.to_local()
    return tensor


def local_parameter(param: Tensor, topology: Topology | None = None) -> Tensor:
    """Return the local parameter of a DTensor, annotated with the DTensor's spec; a plain parameter unchanged.

    Without a topology the mesh of a DTensor is not checked.
    """
    if not has_dtensors((param,)):
        return param
    from . import dtensor

    assert isinstance(param, dtensor.DTensor)
    return dtensor.local_parameter(param, topology)


def spec_of(param: Tensor, topology: Topology | None = None) -> P:
    """Return the spec of a parameter. The spec of a DTensor combines its declaration and its placements.

        spec_of(model.up.weight)      # P('tensor')

    Args:
        param: Any parameter.
        topology: If given, aliases and names of mesh dims in the spec are replaced by axes of this topology. Default None:
            the spec may have aliases, and for a DTensor the names of its mesh dims.
    Raises:
        ValueError: A plain parameter has no spec; the placements of a DTensor can't be described by a spec or contradict
            its declaration; or with a topology, the mesh of a DTensor or the spec does not fit the topology (`P.resolve`).
    """
    annotation = annotation_of(local_parameter(param, topology))
    if annotation is None:
        raise missing_spec(param)
    return annotation.spec if topology is None else annotation.spec_on(topology)


def missing_spec(param: Tensor, name: str | None = None) -> ValueError:
    """Return the error for an undeclared parameter. Without ``name``, it gives the parameter's shape."""
    return ValueError(
        f"{name or f'a parameter of shape {tuple(param.shape)}'} has no spec; declare its layout with declare(model, "
        "{'name or pattern': P(...)}), with P() for replicated (copy.deepcopy and wrappers drop specs: declare again)"
    )


class Gradients(NamedTuple):
    """Local parameters, local gradients and annotations, in the order of a list of parameters.

    A gradient is None for a parameter without a gradient; an annotation is None for a plain parameter that was not
    declared. ``sizes`` has the number of elements of each gradient, if `dtensor.of_each` found the local tensors of all
    parameters and gradients in its cache; all gradients are then dense and real. None: unknown.
    """

    params: list[Tensor]
    gradients: list[Tensor | None]
    annotations: list[Annotation | None]
    sizes: tuple[int, ...] | None = None


def local_gradients(params: Sequence[Tensor], topology: Topology, *, sum_partial: bool = False) -> Gradients:
    """Return the local parameter, local gradient and annotation of each parameter.

    With ``sum_partial``, first replace partial gradients of DTensors by their sums, except gradients of parameters that are
    declared partial.

    Collectives: with ``sum_partial``, per partial gradient an all-reduce or reduce-scatter over each partial mesh dim.
    """
    if not has_dtensors(params):
        return Gradients(list(params), [param.grad for param in params], [annotation_of(param) for param in params])
    from .dtensor import of_each

    return Gradients(*of_each(params, topology, sum_partial=sum_partial))


@contextmanager
def local_parameters(params: Sequence[Tensor], topology: Topology, *, to_sum: bool = False) -> Iterator[list[Tensor]]:
    """Context manager that yields the list of parameters, with each DTensor replaced by its local parameter.

    In the block, a local parameter uses the memory of the DTensor's local tensor, and its ``grad`` is the local tensor of
    the DTensor's gradient. When the block ends, ``grad`` is removed from the local parameter. It becomes the gradient of
    the DTensor if the DTensor has none. Pass ``to_sum=True`` if the block sums the partial gradients in place over the
    partial axes in the specs.

    Collectives: with ``to_sum``, all-reduces of partial gradients of sharded DTensors, when the block starts.
    """
    if not has_dtensors(params):
        yield list(params)
        return
    from . import dtensor

    pairs = [
        (param, dtensor.local_parameter(param, topology)) for param in params if isinstance(param, dtensor.DTensor)
    ]
    local = {id(param): piece for param, piece in pairs}
    try:
        for param, piece in pairs:
            dtensor.share_gradient(param, piece, to_sum=to_sum)
        yield [local.get(id(param), param) for param in params]
    finally:
        for param, piece in pairs:
            dtensor.return_gradient(param, piece)


def sums_seen(params: Sequence[Tensor]) -> Sums:
    """Return for each DTensor with a gradient the axes over which the gradient is partial but not declared partial.

    The key of a DTensor in the dict is the same on all ranks of its mesh.
    """
    if not has_dtensors(params):
        return {}
    from . import dtensor

    return dtensor.sums_seen(params)


def settle_sums(params: Sequence[Tensor], seen: Sequence[Sums]) -> bool:
    """Store the union of the partial axes that `sums_seen` found on all ranks, so that every step sums these gradients.

    ``params`` are those of `sums_seen`, in the same order. Return True if an axis was stored that was not stored
    before.
    """
    if not has_dtensors(params):
        return False
    from . import dtensor

    return dtensor.settle(params, seen)


# Gradients that `fully_shard` divides twice ---------------------------------------------------------------------------

# `set_gradient_divide_factor` sets a factor by which `fully_shard` divides gradients. On a shard mesh of size 1, torch
# divides once in place of the omitted reduce-scatter. If it reduces in float16 or float64, or with
# ``set_force_sum_reduction_for_comms``, it divides again around the all-reduce. The gradient is then too small by this
# factor. A shard mesh has size 1 for experts that only this rank holds, and with `replicate`.


def divide_once(model: nn.Module) -> None:
    """Make `fully_shard` modules divide gradients once by the factor of ``set_gradient_divide_factor``.

    If the shard mesh of a module has size 1, torch divides float16 and float64 gradients twice by this factor, and with
    ``set_force_sum_reduction_for_comms`` gradients of all dtypes. Call this function before the first backward; it does
    not change existing gradients. Only modules with such a factor and a shard mesh of size 1 are changed.
    """
    for module in fully_sharded(model):
        for group in _param_groups(module):
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
