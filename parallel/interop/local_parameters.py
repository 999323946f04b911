"""Plain local parameters, gradients and specs of parameters that may be DTensors or plain tensors.

DTensor support is imported only if DTensors are in use, because the import takes most of a second.
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
    """Return the class ``name`` of a module if the module has already been imported, else None.

    If the module has not been imported, no instance of the class can exist.
    """
    return getattr(sys.modules.get(module), name, None)


def has_dtensors(tensors: Iterable[Tensor]) -> bool:
    """Return True if any of the tensors is a DTensor."""
    kind = loaded_class("torch.distributed.tensor", "DTensor")
    return kind is not None and any(isinstance(tensor, kind) for tensor in tensors)


def fully_sharded(model: nn.Module) -> list[Any]:
    """Return the modules within ``model``, including ``model``, to which torch's `fully_shard` was applied."""
    kind = loaded_class("torch.distributed.fsdp", "FSDPModule")
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def _param_groups(module: Any) -> list[Any]:
    """Return torch's private parameter groups of a `fully_shard` module. torch has no public function for it."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # missing in torch 2.11, which has at most one group
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def fully_shard_meshes(model: nn.Module) -> list[DeviceMesh]:
    """Return the device meshes over which the `fully_shard` modules within ``model`` average gradients, each once."""
    groups = [group for module in fully_sharded(model) for group in _param_groups(module)]
    return list({id(group.mesh_info.mesh): group.mesh_info.mesh for group in groups}.values())


def named_shards(model: nn.Module) -> dict[str, Tensor]:
    """Return ``model.named_parameters()`` as a dict, with the sharded parameter in place of each gathered parameter.

    A `fully_shard` module may have gathered its parameters, for example because its last call had no backward. Optimizers
    need the sharded parameters.
    """
    shards: dict[int, Tensor] = {}
    for module in fully_sharded(model):
        for param in (param for group in _param_groups(module) for param in group.fsdp_params):
            for attribute in ("_unsharded_param", "_sharded_post_forward_param"):
                shards[id(getattr(param, attribute, None))] = param.sharded_param
    return {name: shards.get(id(param), param) for name, param in model.named_parameters()}


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's local tensor of a DTensor, or a plain tensor unchanged. Collectives: none."""
    if not has_dtensors((tensor,)):
        return tensor
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def local_parameter(param: Tensor, topology: Topology | None = None) -> Tensor:
    """Return a DTensor's local parameter, which is plain and shares its memory; return a plain parameter unchanged.

    See `meshstep.parallel.interop.dtensor.local_parameter`.

    Args:
        param: Any parameter.
        topology: Provides the axes. None: the mesh of a DTensor is not checked.
    Raises:
        ValueError: The placements of a DTensor can't be described by a spec or contradict its declaration; or its mesh has
            no dim names or does not match ``topology``.
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
        topology: If given, aliases and names of mesh dims in the spec are replaced by axes of this topology. None: the
            spec may have aliases, and for a DTensor the names of its mesh dims.
    Raises:
        ValueError: The parameter has no spec; or as in `local_parameter` or `P.resolve`.
    """
    annotation = annotation_of(local_parameter(param, topology))
    if annotation is None:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} has no spec; declare its layout with declare(model, "
            "{'name or pattern': P(...)}), with P() for replicated (copy.deepcopy and wrappers drop specs: declare again)"
        )
    return annotation.spec if topology is None else annotation.spec_on(topology)


class Gradients(NamedTuple):
    """Local parameters, local gradients and annotations, in the order of a list of parameters.

    Attributes:
        params: Plain parameters, and the local parameters of DTensors.
        gradients: Local gradient per parameter; None for a parameter without a gradient.
        annotations: Annotation per parameter. For a DTensor, that of its local parameter, also if only its placements are
            known. None for a plain parameter that was not declared.
        sizes: Number of elements of each gradient, if all results were cached (then all are dense and real), or None.
    """

    params: list[Tensor]
    gradients: list[Tensor | None]
    annotations: list[Annotation | None]
    sizes: tuple[int, ...] | None = None


def local_gradients(params: Sequence[Tensor], topology: Topology, *, sum_partial: bool = False) -> Gradients:
    """Return the local parameter, local gradient and annotation of each parameter.

    Args:
        params: Any parameters.
        topology: Provides the axes.
        sum_partial: True: replace partial gradients of DTensors by their sums, except those of parameters that are declared
            partial. Default: False.
    Raises:
        ValueError: As in `local_parameters`.
    Collectives: with ``sum_partial``, those of `meshstep.parallel.interop.dtensor.sum_partial_gradient`; else none.
    """
    if not has_dtensors(params):
        return Gradients(list(params), [param.grad for param in params], [annotation_of(param) for param in params])
    from .dtensor import of_each

    return of_each(params, topology, sum_partial=sum_partial)


@contextmanager
def local_parameters(params: Sequence[Tensor], topology: Topology, *, to_sum: bool = False) -> Iterator[list[Tensor]]:
    """Context manager that yields the list of parameters, with each DTensor replaced by its local parameter.

    In the block, a local parameter shares memory and gradient with its DTensor. When the block ends, the gradient of a
    local parameter is set as the DTensor's gradient if the DTensor has none, and is removed from the local parameter.

    Args:
        params: Any parameters.
        topology: Provides the axes. Each mesh dim of a DTensor must consist of these axes.
        to_sum: Pass True if the block sums the partial gradients in place over the partial axes in the specs. Default:
            False.
    Raises:
        ValueError: A layout or gradient is not supported; see `meshstep.parallel.interop.dtensor`.
    Collectives: with ``to_sum`` all-reduces of partial gradients of sharded DTensors, when the block starts; else none.
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
    """Return, per DTensor with a gradient, the axes over which the gradient is partial without being declared partial.

    Args:
        params: Any parameters; plain tensors are ignored.
    Raises:
        ValueError: A gradient's placements are not supported; see `meshstep.parallel.interop.dtensor`.
    """
    if not has_dtensors(params):
        return {}
    from . import dtensor

    return dtensor.sums_seen(params)


def settle_sums(params: Sequence[Tensor], seen: Sequence[Sums]) -> bool:
    """Store the union of the partial axes that `sums_seen` found on all ranks, so that every step sums these gradients.

    Args:
        params: As in `sums_seen`.
        seen: The result of `sums_seen` on each rank.
    Returns:
        True if an axis was stored that was not stored before.
    """
    if not has_dtensors(params):
        return False
    from . import dtensor

    return dtensor.settle(params, seen)


# Gradients that `fully_shard` divides twice ---------------------------------------------------------------------------

# `set_gradient_divide_factor` sets a factor by which `fully_shard` divides gradients. On a shard mesh of size 1, torch 2.15
# divides twice: once in place of the omitted reduce-scatter, and again around the all-reduce, unless the collective itself
# divides (in float64 and float16, and with ``set_force_sum_reduction_for_comms``). The gradient is then too small by this
# factor. A shard mesh has size 1 for experts that only this rank holds, and with `replicate`.


def divide_once(model: nn.Module) -> None:
    """Make `fully_shard` modules with a shard mesh of size 1 divide gradients once, not twice, by their custom factor.

    The factor is the argument of ``set_gradient_divide_factor``. Call this function before the first backward; gradients
    that exist already stay unchanged.

    Args:
        model: The root module to which `fully_shard` was applied. Modules with larger shard meshes or without a custom
            factor are not changed.
    Collectives: none. Host synchronization: none.
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
