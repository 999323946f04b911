"""The plain local parameter and the spec of any parameter, be it a DTensor or not.

What is here costs nothing where a neighbour is not used: importing DTensor takes most of a second.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..layout.annotation import Annotation, Sums, annotation_of
from ..layout.spec import P
from ..mesh.topology import Topology


def loaded_class(module: str, name: str) -> type | None:
    """A class of a module that somebody has imported. None: nobody has, and nothing is one of its objects."""
    return getattr(sys.modules.get(module), name, None)


def has_dtensors(tensors: Iterable[Tensor]) -> bool:
    """Whether one of them is a DTensor."""
    kind = loaded_class("torch.distributed.tensor", "DTensor")
    return kind is not None and any(isinstance(tensor, kind) for tensor in tensors)


def fully_sharded(model: nn.Module) -> list[Any]:
    """The modules of ``model``, itself among them, that torch's `fully_shard` has been applied to."""
    kind = loaded_class("torch.distributed.fsdp", "FSDPModule")
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def local_tensor(tensor: Tensor) -> Tensor:
    """``tensor``; of a DTensor this rank's part, as it is. Collectives: none."""
    if not has_dtensors((tensor,)):
        return tensor
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def local_parameter(param: Tensor, topology: Topology | None = None) -> Tensor:
    """``param``; for a DTensor its `meshstep.parallel.interop.dtensor.local_parameter`.

    Raises:
        ValueError: A DTensor's layout has no spec, or its mesh isn't part of ``topology``.
    """
    if not has_dtensors((param,)):
        return param
    from . import dtensor

    assert isinstance(param, dtensor.DTensor)
    return dtensor.local_parameter(param, topology)


def spec_of(param: Tensor, topology: Topology | None = None) -> P:
    """The declared spec of a parameter; of a DTensor the one of its local tensor, its placements included.

    Args:
        topology: Say it in its axes, without aliases, and without names that only a DTensor's mesh has for them.
    Raises:
        ValueError: Nothing declared it; a DTensor's placements contradict what was declared, or its mesh the topology.
    """
    annotation = annotation_of(local_parameter(param, topology))
    if annotation is None:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} has no spec; say how it is laid out with declare(model, "
            "{'name or pattern': P(...)}), P() meaning replicated (copy.deepcopy and wrappers drop specs: declare again)"
        )
    return annotation.spec if topology is None else annotation.spec_on(topology)


class Gradients(NamedTuple):
    """Of each parameter: itself, or the local one of a DTensor; its gradient, this rank's part; its annotation."""

    params: list[Tensor]
    gradients: list[Tensor | None]
    annotations: list[Annotation | None]


def local_gradients(params: Sequence[Tensor], topology: Topology) -> Gradients:
    """What is local of parameters and their gradients.

    Raises:
        ValueError: As `local_parameters`.
    """
    if not has_dtensors(params):
        return Gradients(list(params), [param.grad for param in params], [annotation_of(param) for param in params])
    from .dtensor_gradients import of_each

    return Gradients(*of_each(params, topology))


@contextmanager
def local_parameters(params: Sequence[Tensor], topology: Topology, *, to_sum: bool = False) -> Iterator[list[Tensor]]:
    """The same list, but plain local parameters in the place of DTensors, with local gradients.

    Within the context each shares memory and gradient with its DTensor; what has been given a gradient meanwhile passes it
    on at the end.

    Args:
        topology: Whose axes the dims of their meshes must be.
        to_sum: The pending sums that their specs tell of are going to be made.
    Raises:
        ValueError: A layout or gradient is none that can be worked with locally; see `meshstep.parallel.interop.dtensor`.
    """
    if not has_dtensors(params):
        yield list(params)
        return
    from . import dtensor
    from .dtensor_gradients import return_gradient, share_gradient

    pairs = [
        (param, dtensor.local_parameter(param, topology)) for param in params if isinstance(param, dtensor.DTensor)
    ]
    local = {id(param): piece for param, piece in pairs}
    try:
        for param, piece in pairs:
            share_gradient(param, piece, to_sum=to_sum)
        yield [local.get(id(param), param) for param in params]
    finally:
        for param, piece in pairs:
            return_gradient(param, piece)


def sums_seen(params: Sequence[Tensor]) -> Sums:
    """The sums over axes of their meshes that the gradients of DTensors say are still to be made, and nobody declared.

    Raises:
        ValueError: A gradient is laid out in a way of which nothing can be made; see
            `meshstep.parallel.interop.dtensor_gradients`.
    """
    if not has_dtensors(params):
        return {}
    from . import dtensor_gradients

    return dtensor_gradients.sums_seen(params)


def settle_sums(params: Sequence[Tensor], seen: Sequence[Sums]) -> bool:
    """Make these sums in every step, on all ranks.

    Args:
        seen: What `sums_seen` gave on each rank.
    Returns:
        Whether a spec says more now.
    """
    if not has_dtensors(params):
        return False
    from . import dtensor_gradients

    return dtensor_gradients.settle(params, seen)
