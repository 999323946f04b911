"""DTensor parameters: FSDP2's `fully_shard`, `parallelize_module`, `distribute_tensor`.

The spec of a DTensor follows from its placements if the ranks along each mesh dim are the ranks of axes of the
topology. The names of the mesh dims need not match. The mesh may be sliced, and a mesh dim may be several axes
flattened into one. ``registry.device_mesh("data")`` creates a mesh on the registry's groups.

    fully_shard over data                               (Shard(0),)                    P("data")
    ... of a plain shard declared P("tensor", None)     (Shard(0),)                    P(("tensor", "data"))
    ... of a DTensor that is Shard(0) over tensor       (_StridedShard(0), Shard(0))   P(("tensor", "data"))
    ColwiseParallel and RowwiseParallel weights         (Shard(0),) and (Shard(1),)    P("tensor") and P(None, "tensor")
    SequenceParallel norm, declared partial over it     (Replicate(),)                 P(partial="tensor")

The placements determine the layout over the axes of the mesh, and a declaration determines the layout over all other
axes. Both are needed. torch replaces the parameters and thereby drops the declarations of their layers. Declare the
parameters again afterwards, or wrap the change in `keep_specs`. An undeclared DTensor is an error if the topology has a
model axis that its mesh lacks.

To combine tensor parallelism and `fully_shard` on the same parameters, torch requires slices of one mesh: ``mesh =
registry.device_mesh("data", "tensor")``, then ``mesh["tensor"]`` and ``mesh["data"]``.

A DTensor's gradient is complete over the axes of its mesh (`fully_shard` averages), so it is not averaged again. All
computations use local tensors. DTensor's own operations would issue collectives for a norm, and reject lists that mix
plain tensors with DTensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor as DTensor

from ..layout.annotation import Annotation, annotation_of, attach
from ..layout.spec import P
from ..mesh.refinement import ranks_along
from ..mesh.topology import Topology, axes_along

# Mesh dims of a DTensor as axes of the topology -----------------------------------------------------------------------


def mesh_axes(tensor: DTensor) -> tuple[str, ...]:
    """Return the names of the mesh dims of a DTensor.

    Raises:
        ValueError: The mesh has no dim names.
    """
    names = tensor.device_mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            f"{label(tensor)} is on a mesh without dim names, {tensor.device_mesh}; make the mesh with "
            "registry.device_mesh('data') or init_device_mesh(..., mesh_dim_names=('data',)), with axes as names"
        )
    return names


def check_mesh(tensor: DTensor, topology: Topology) -> dict[str, tuple[str, ...]]:
    """Return the axes of each mesh dim whose name the topology does not have, as {mesh dim: axes}.

    Args:
        tensor: A DTensor.
        topology: The mesh axes.
    Raises:
        ValueError: This rank is not in the mesh, or a mesh dim does not correspond to axes. Or a mesh dim and an axis
            of the same name have different ranks.
    """
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {mesh.get_rank()} has {label(tensor)}, but is not in the mesh {mesh} of this DTensor; give "
            "the optimizer only the parameters of this rank"
        )
    dims = {}
    for index, name in enumerate(mesh_axes(tensor)):
        ranks = ranks_along(mesh, index)
        if name not in topology.axes and name not in topology.aliases:
            axes = axes_along(ranks, topology)
            if axes is None:
                raise ValueError(
                    f"{label(tensor)} is on a device mesh whose dim {name!r} has ranks {ranks}, and no axes of "
                    f"{topology!r} have these ranks; create the topology from all meshes with Topology.of_meshes(...), "
                    "or the mesh with registry.device_mesh('data')"
                )
            dims[name] = axes
        elif ranks != (expected := topology.peers(mesh.get_rank(), name)):
            raise ValueError(
                f"{label(tensor)} is on a device mesh whose dim {name!r} has ranks {ranks}, but the axis of "
                f"{topology!r} has ranks {expected}; create the mesh with registry.device_mesh({name!r})"
            )
    return dims


def label(tensor: DTensor) -> str:
    """Return the name of a DTensor for messages, or its shape if it has no name."""
    annotation = annotation_of(tensor)
    return (annotation.name if annotation else None) or f"a DTensor parameter of shape {tuple(tensor.shape)}"


# Attributes of DTensors -----------------------------------------------------------------------------------------------

_LOCAL, _SOURCE, _MATCHED, _VERSION, _SUMS = (
    f"_meshstep_{name}" for name in ("local", "source", "matched", "version", "sums")
)

SEEN = "_meshstep_seen"
"""Attribute of a DTensor for the cache of `meshstep.parallel.interop.dtensor_gradients.of_each`."""


@contextmanager
def keep_specs(module: nn.Module) -> Iterator[None]:
    """Restore declarations after an operation that replaces parameters under the same names.

    Such operations are `fully_shard` and `parallelize_module`.

        with keep_specs(model):
            for block in model.blocks:
                fully_shard(block, mesh=registry.device_mesh("data"))
            fully_shard(model, mesh=registry.device_mesh("data"))

    Parameters that are declared within the context keep their new declarations.

    Args:
        module: The module whose parameters are replaced.
    """
    before = {name: annotation_of(param) for name, param in module.named_parameters()}
    yield
    for name, param in module.named_parameters():
        annotation = before.get(name)
        if annotation is not None and annotation_of(param) is None:
            attach(param, annotation)


# Layout -----------------------------------------------------------------------------------------------------------------


def placement_spec(tensor: DTensor) -> P:
    """Return the spec that a DTensor's placements describe, with the names of its mesh dims as axes.

    Several mesh dims may shard the same tensor dim. The first mesh dim is then the slowest, except for the strided
    shard with ``split_factor`` f that `fully_shard` creates. It follows later mesh dims that already shard the tensor
    dim into f parts. Without such mesh dims it shards each of f blocks, such as the gate and up weights in one matrix.

    Args:
        tensor: A DTensor.
    Raises:
        ValueError: The mesh has no dim names, a placement is partial, or a placement is of an unknown kind.
    """
    sizes = dict(zip(mesh_axes(tensor), tensor.device_mesh.shape, strict=True))
    dims: list[list[str]] = [[] for _ in range(tensor.dim())]
    in_blocks: list[tuple[str, tuple[int, ...]]] = []
    for axis, placement in reversed(list(zip(sizes, tensor.placements, strict=True))):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if placement.is_partial() or dim is None:
            raise ValueError(
                f"{label(tensor)} is {placement!r} over mesh dim {axis!r}, but a parameter must be sharded or "
                "replicated; redistribute it before you create the optimizer"
            )
        split_factor = getattr(placement, "split_factor", 1)
        if split_factor > 1 and not dims[dim]:
            in_blocks.append((axis, (1,) * split_factor))
            split_factor = 1
        _insert(dims[dim], axis, split_factor, sizes)
    return P().with_dims(map(tuple, dims), blocks=in_blocks)


def _insert(axes: list[str], axis: str, split_factor: int, sizes: dict[str, int]) -> None:
    """Insert ``axis`` after the axes that already split the dim into ``split_factor`` parts."""
    parts, position = 1, 0
    while parts < split_factor and position < len(axes):
        parts *= sizes[axes[position]]
        position += 1
    if parts != split_factor:
        raise ValueError(
            f"a strided shard over {axis!r} with split factor {split_factor} doesn't fit the sizes of the mesh dims "
            f"{axes}; apply parallelize_module before fully_shard, as torch does"
        )
    axes.insert(position, axis)


def annotation_for(param: DTensor) -> Annotation:
    """Return the layout of this rank's local tensor over all axes: the declaration, refined by the placements.

    Raises:
        ValueError: As in `placement_spec`, or the declaration contradicts the placements.
    """
    declared, axes, inner, (topology, found) = (
        annotation_of(param),
        mesh_axes(param),
        placement_spec(param),
        _last_match(param),
    )
    if declared is None:
        return Annotation(inner, None, mesh_axes=axes, declared=False, dims=tuple(found.items()))
    spec = declared.spec
    if topology is not None and found:
        named = [axis for axis in spec.named_axes if axis in (*topology.axes, *topology.aliases)]
        spec = spec.renamed(
            {axis: dim for axis in named for dim, atoms in found.items() if atoms == topology.atoms(axis)}
        )
    outer = [tuple(part for part in spec.cuts(dim) if {*part}.isdisjoint(axes)) for dim in range(param.dim())]
    dims = [outer[dim] + inner.cuts(dim) for dim in range(param.dim())]
    owned, tied, merged = dict(spec.owned), dict(spec.tied), P().with_dims(dims)
    repeated = {*spec.sharded_axes} & {*axes} and spec.entries != merged.entries
    if repeated or {*owned, *tied} & {*axes} or {*spec.partial} & {*inner.sharded_axes}:
        raise ValueError(
            f"{label(param)} is declared {spec}, but its placements over {', '.join(axes)} make it {merged}; declare "
            f"only the axes outside its mesh: {P().with_dims(outer)}"
        )
    return Annotation(
        spec.with_dims(dims, blocks=inner.blocks), declared.name, mesh_axes=axes, dims=tuple(found.items())
    )


def _last_match(param: DTensor) -> tuple[Topology | None, dict[str, tuple[str, ...]]]:
    """Return the topology that was last matched with the parameter's mesh, and the result of `check_mesh`."""
    found: tuple[Topology | None, dict[str, tuple[str, ...]]] = getattr(param, _MATCHED, (None, {}))
    return found


# Local parameters -------------------------------------------------------------------------------------------------------


def local_parameter(param: DTensor, topology: Topology | None = None) -> nn.Parameter:
    """Return a plain parameter that shares memory with this rank's local tensor and has the spec over all axes.

    Every call returns the same parameter per DTensor, updated if the DTensor was declared, moved or frozen.

    Args:
        param: A DTensor parameter.
        topology: The mesh axes. Default None: the mesh is not checked.
    Raises:
        ValueError: As in `annotation_for`; with a topology also as in `check_mesh`.
    """
    # to_local() would create a new view of a parameter in every call.
    local, annotation, layout = param._local_tensor, annotation_of(param), param._spec
    memory = local.data_ptr()
    piece: nn.Parameter | None = param.__dict__.get(_LOCAL)
    source = (None, None, None, None) if piece is None else piece.__dict__[_SOURCE]
    if piece is None or source[0] is not local or source[3] != memory:
        piece = _follow_memory(param, piece)
    matched = topology is None or (_last_match(param)[0] is topology and source[2] is layout)
    if topology is not None and not matched:
        setattr(param, _MATCHED, (topology, check_mesh(param, topology)))
    if not matched or source[1] is not annotation or source[2] is not layout:
        attach(piece, _add_partial(annotation_for(param), settled_sums(piece)))
    if source[0] is not local or source[1] is not annotation or source[2] is not layout or source[3] != memory:
        setattr(piece, _SOURCE, (local, annotation, layout, memory))
    if piece.requires_grad != param.requires_grad:
        piece.requires_grad_(param.requires_grad)
    follow_version(param, piece)
    return piece


@torch.no_grad()
def _follow_memory(param: DTensor, piece: nn.Parameter | None) -> nn.Parameter:
    """Return the local parameter, new or ``piece``, on the current memory of the DTensor's local tensor."""
    value = waited(param._local_tensor).detach()
    if piece is None:
        piece = nn.Parameter(value, requires_grad=param.requires_grad)
        piece.grad_dtype = None  # accepts any dtype: the gradient reduction chooses it
        setattr(param, _LOCAL, piece)
    else:
        piece.data = value
    return piece


def settle_sums(param: DTensor, axes: tuple[str, ...]) -> None:
    """Mark the gradient of ``param`` as partial over ``axes`` of its mesh, without a declaration by the user."""
    piece = local_parameter(param)
    vars(param).pop(SEEN, None)
    setattr(piece, _SUMS, axes)
    attach(piece, _add_partial(annotation_for(param), axes))


def mesh_ranks(param: DTensor) -> tuple[int, ...]:
    """Return all ranks of the DTensor's mesh."""
    return tuple(param.device_mesh.mesh.flatten().tolist())


def settled_sums(piece: nn.Parameter) -> tuple[str, ...]:
    """Return the axes that `settle_sums` stored for a local parameter."""
    found: tuple[str, ...] = getattr(piece, _SUMS, ())
    return found


def _add_partial(annotation: Annotation, axes: tuple[str, ...]) -> Annotation:
    """Return the annotation with additional partial axes.

    Axes that shard the parameter are omitted, because a spec cannot have both.
    """
    spec = annotation.spec
    more = [axis for axis in axes if axis not in spec.named_axes]
    return replace(annotation, spec=spec.with_partial((*spec.partial, *more))) if more else annotation


def waited(local: Tensor) -> Tensor:
    """Return ``local`` after the collective that computes it has finished."""
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def follow_version(outer: DTensor, local: Tensor) -> None:
    """Increment the version of ``local`` if operations on the DTensor changed it.

    Operations on a DTensor do not increment the version of its local tensor.
    """
    if outer._version != getattr(outer, _VERSION, 0):
        torch.autograd.graph.increment_version(local)
        setattr(outer, _VERSION, outer._version)
