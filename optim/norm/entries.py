"""What a plan knows of each parameter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from types import GeneratorType

import torch
from torch import Tensor

from ...parallel.interop.local import has_dtensors, local_parameter
from ...parallel.layout.annotation import Annotation, annotation_of, attach
from ...parallel.layout.spec import P
from ...parallel.mesh.text import some
from ...parallel.mesh.topology import Topology

_UNDECLARED = Annotation(P(), declared=False)


@dataclass(frozen=True)
class ParameterEntry:
    """One parameter as this rank sees it: its name, spec, local shape, index of its param group, dtype, the axes over which
    its gradient needs no averaging any more when it comes to be synchronised, whether it is trained (not frozen), and the
    shape of the logical tensor, if every piece is as large as this rank's (None: not known)."""

    name: str
    spec: P
    shape: tuple[int, ...]
    group: int = 0
    dtype: torch.dtype = torch.float32
    averaged: tuple[str, ...] = ()
    trained: bool = True
    full_shape: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Number of elements that this rank holds."""
        return prod(self.shape)


def entries_of(
    param_groups: Iterable[Iterable[Tensor | tuple[str, Tensor]]], topology: Topology, *, compared: bool = False
) -> list[ParameterEntry]:
    """The entries of param groups, given as parameters or (name, parameter) pairs.

    A parameter that nothing declared counts as replicated where no model axis is larger than 1, and is an error elsewhere.
    The placements of a DTensor declare it for the axes of its mesh. A plain parameter beside it that nothing declared is
    copied over these axes, if copies are compared.

    Args:
        compared: Copies, of parameters and gradients, are compared before anything is stepped.
    Raises:
        ValueError: Undeclared parameters, all of them named; a DTensor whose layout has no spec.
        TypeError: A complex or sparse parameter.
    """
    entries, undeclared = [], []
    param_groups = [list(params) for params in param_groups]
    meshed = _mesh_axes(param_groups, topology) if compared else set[str]()
    for group, params in enumerate(param_groups):
        for position, item in enumerate(params):
            given, param = item if isinstance(item, tuple) else (None, item)
            whole, param = param, local_parameter(param, topology)
            annotation = annotation_of(param) or _UNDECLARED
            name = (
                given or annotation.name or f"parameter {position} of group {group} ({_shape(param, annotation.spec)})"
            )
            check_dense_real(param, name)
            if {*annotation.silent_axes(topology)} - (meshed if whole is param else set()):
                undeclared.append(name)
            entries.append(
                ParameterEntry(
                    name,
                    annotation.spec_on(topology),
                    tuple(param.shape),
                    group,
                    param.dtype,
                    averaged=annotation.mesh_axes_on(topology),
                    trained=param.requires_grad,
                    full_shape=logical_shape(whole, annotation, topology),
                )
            )
    if undeclared:
        raise ValueError(
            f"no spec for {some(undeclared)}, and {topology!r} has model axes: say how each parameter is "
            "laid out with declare(model, {'name or pattern': P(...)}), P() meaning replicated (copy.deepcopy and "
            "wrappers drop specs: declare again after them)"
        )
    return entries


def count_as_copies(params: Iterable[Tensor]) -> None:
    """Let plain parameters that nothing declared, of which `entries_of` has made entries, be declared as copied."""
    for param in params:
        if annotation_of(param) is None and not has_dtensors((param,)):
            attach(param, Annotation(P(), source="default"))


def _mesh_axes(param_groups: Iterable[Iterable[Tensor | tuple[str, Tensor]]], topology: Topology) -> set[str]:
    """The axes of the meshes of all DTensors."""
    params = [item[1] if isinstance(item, tuple) else item for params in param_groups for item in params]
    annotations = (annotation_of(local_parameter(param, topology)) for param in params if has_dtensors((param,)))
    return {axis for found in annotations if found is not None for axis in found.mesh_axes_on(topology)}


def logical_shape(param: Tensor, annotation: Annotation, topology: Topology) -> tuple[int, ...]:
    """Of the logical tensor; a DTensor knows its length along the axes of its mesh."""
    if annotation.full_shape is not None:
        return annotation.full_shape
    spec, known = annotation.spec_on(topology), annotation.mesh_axes_on(topology)
    if not spec.entries:
        return tuple(param.shape)
    return tuple(
        length * topology.size(*(axis for axis in spec.dim_axes(dim) if axis in topology.axes and axis not in known))
        for dim, length in enumerate(param.shape)
    )


def _shape(param: Tensor, spec: P) -> str:
    """The shape as far as it is the same on all ranks: pieces may be uneven."""
    sizes = ("sharded" if spec.dim_axes(dim) else str(size) for dim, size in enumerate(param.shape))
    return f"shape ({', '.join(sizes)})"


def check_unused(params: object) -> None:
    """Raise ValueError for a generator that is used up: the parameters that it had would be left out without a word.

    One that is empty for another reason, as on a pipeline stage without parameters, is accepted.
    """
    if isinstance(params, GeneratorType) and params.gi_frame is None:
        raise ValueError(
            "params is a generator that is used up, so that it has no parameters any more: give list(model.parameters()), "
            "or call model.parameters() again"
        )


def check_dense_real(tensor: Tensor, name: str) -> None:
    """Raise TypeError for a complex or sparse tensor: its norm is not defined here."""
    if tensor.is_complex():
        raise TypeError(f"{name} is complex ({tensor.dtype}); give its real view (torch.view_as_real) to the optimizer")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} is sparse ({tensor.layout}); build the layer with sparse=False")
