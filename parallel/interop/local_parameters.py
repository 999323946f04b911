"""Plain local parameters, gradients and specs of any parameters, DTensors and others.

The module imports DTensor support only if DTensors are in use, because the import takes most of a second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..layout.annotation import Annotation, Sums, annotation_of
from ..layout.spec import P
from ..mesh.topology import Topology


def loaded_class(module: str, name: str) -> type | None:
    """Return a class of a module that has already been imported, else None.

    Without the import, no instance of the class can exist.
    """
    return getattr(sys.modules.get(module), name, None)


def has_dtensors(tensors: Iterable[Tensor]) -> bool:
    """Return True if any of the tensors is a DTensor."""
    kind = loaded_class("torch.distributed.tensor", "DTensor")
    return kind is not None and any(isinstance(tensor, kind) for tensor in tensors)


def fully_sharded(model: nn.Module) -> list[Any]:
    """Return the modules within ``model``, including itself, that torch's `fully_shard` was applied to."""
    kind = loaded_class("torch.distributed.fsdp", "FSDPModule")
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def _param_groups(module: Any) -> list[Any]:
    """Return the objects that gather the parameters of a module with `fully_shard`; torch has no public API for them."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # missing in torch 2.11, which has at most one group
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def named_shards(model: nn.Module) -> dict[str, Tensor]:
    """Return ``model.named_parameters()``, with the shard in place of each parameter that `fully_shard` has gathered.

    Between two steps a module may have gathered parameters, for example if its last call had no backward. Optimizers step
    the shards.
    """
    shards: dict[int, Tensor] = {}
    for module in fully_sharded(model):
        for param in (param for group in _param_groups(module) for param in group.fsdp_params):
            for attribute in ("_unsharded_param", "_sharded_post_forward_param"):
                shards[id(getattr(param, attribute, None))] = param.sharded_param
    return {name: shards.get(id(param), param) for name, param in model.named_parameters()}


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's local tensor of a DTensor; other tensors are returned unchanged. Collectives: none."""
    if not has_dtensors((tensor,)):
        return tensor
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def local_parameter(param: Tensor, topology: Topology | None = None) -> Tensor:
    """Return the plain local parameter of a DTensor, which shares its memory; other parameters are returned unchanged.

    See `meshstep.parallel.interop.dtensor.local_parameter`.

    Args:
        param: Any parameter.
        topology: The mesh axes. Default None: the mesh of a DTensor is not checked.
    Raises:
        ValueError: A DTensor's layout has no spec, or its mesh does not match ``topology``.
    """
    if not has_dtensors((param,)):
        return param
    from . import dtensor

    assert isinstance(param, dtensor.DTensor)
    return dtensor.local_parameter(param, topology)


def spec_of(param: Tensor, topology: Topology | None = None) -> P:
    """Return the spec of a parameter; for a DTensor it combines the declaration and the placements.

        spec_of(model.up.weight)      # P('tensor')

    Args:
        param: Any parameter.
        topology: If given, the spec uses the axes of this topology, without aliases and without names of mesh dims.
            Default None: the names in the declaration and in the DTensor's mesh.
    Raises:
        ValueError: The parameter has no spec, a DTensor's placements contradict the declaration, or its mesh does not
            match the topology.
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
        gradients: This rank's part of each gradient; None if there is none.
        annotations: The declared layouts; None if there is none.
    """

    params: list[Tensor]
    gradients: list[Tensor | None]
    annotations: list[Annotation | None]


def local_gradients(params: Sequence[Tensor], topology: Topology) -> Gradients:
    """Return local parameters, local gradients and annotations.

    Args:
        params: Any parameters.
        topology: The mesh axes.
    Raises:
        ValueError: As in `local_parameters`.
    """
    if not has_dtensors(params):
        return Gradients(list(params), [param.grad for param in params], [annotation_of(param) for param in params])
    from .dtensor import of_each

    return Gradients(*of_each(params, topology))


@contextmanager
def local_parameters(params: Sequence[Tensor], topology: Topology, *, to_sum: bool = False) -> Iterator[list[Tensor]]:
    """Yield the parameters, with each DTensor replaced by its plain local parameter and local gradient.

    Within the context a local parameter shares memory and gradient with its DTensor. A gradient that is assigned to a
    local parameter within the context is passed to the DTensor at the end.

    Args:
        params: Any parameters.
        topology: The mesh axes, which the mesh dims must match.
        to_sum: If True, the caller is about to sum the partial gradients over the axes in the specs. Default: False.
    Raises:
        ValueError: A layout or gradient is not supported; see `meshstep.parallel.interop.dtensor`.
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
    """Return the axes over which gradients of DTensors are partial although they are not declared partial.

    Args:
        params: Any parameters.
    Raises:
        ValueError: A gradient's placements are not supported; see `meshstep.parallel.interop.dtensor`.
    """
    if not has_dtensors(params):
        return {}
    from . import dtensor

    return dtensor.sums_seen(params)


def settle_sums(params: Sequence[Tensor], seen: Sequence[Sums]) -> bool:
    """Store the partial axes that all ranks have found, so that every step sums these gradients.

    Args:
        params: As in `sums_seen`.
        seen: The result of `sums_seen` on each rank.
    Returns:
        True if the spec of a parameter changed.
    """
    if not has_dtensors(params):
        return False
    from . import dtensor

    return dtensor.settle(params, seen)


# Gradients that `fully_shard` divides twice ---------------------------------------------------------------------------

# On a shard mesh of size 1, torch divides gradients twice by a custom factor. Examples of such a mesh are experts that
# only this rank holds, and `replicate`. torch 2.15 divides by the factor of ``set_gradient_divide_factor`` in place of
# the omitted reduce-scatter. It divides again around the all-reduce, unless the collective itself divides: in float64
# and float16, and with ``set_force_sum_reduction_for_comms``. The gradient is then too small by this factor.


def divide_once(model: nn.Module) -> None:
    """Make modules whose shard mesh has size 1 divide their gradients by the custom factor once, in every dtype.

    Call it before the first backward; gradients that were already divided stay unchanged.

    Args:
        model: The root module that `fully_shard` was applied to. Other modules are not changed.
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
