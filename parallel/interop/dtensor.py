"""DTensor parameters: FSDP2's `fully_shard`, `parallelize_module`, `distribute_tensor`.

A DTensor says for each dim of its device mesh what it does with the tensor. Where the ranks along the mesh's dims are
those of axes of the topology its spec follows, whatever the dims are called, and whether they are slices of a mesh or
several dims flattened to one (``registry.device_mesh("data")`` makes a mesh on the registry's groups):

    fully_shard over data                              (Shard(0),)                    P("data")
    ... of a plain piece declared P("tensor", None)    (Shard(0),)                    P(("tensor", "data"))
    ... of a DTensor that is Shard(0) over tensor      (_StridedShard(0), Shard(0))   P(("tensor", "data"))
    ColwiseParallel and RowwiseParallel weights        (Shard(0),) and (Shard(1),)    P("tensor") and P(None, "tensor")
    SequenceParallel norm, declared partial over it    (Replicate(),)                 P(partial="tensor")

The mesh speaks for its own axes, a declaration for all others, and both are needed: torch makes new parameters, which
lose what their layers declared. Declare again afterwards, or wrap the change in `keep_specs`. A DTensor that nothing
declared is an error if the topology has a model axis that its mesh lacks.

For tensor parallelism and `fully_shard` on the same parameters torch wants slices of one mesh:
``mesh = registry.device_mesh("data", "tensor")``, then ``mesh["tensor"]`` and ``mesh["data"]``.

A DTensor's gradient is complete over the axes of its mesh (`fully_shard` averages), so nothing is averaged again there.
All else is done with local tensors. DTensor's own operations would issue collectives for a norm, and refuse lists in
which plain tensors are mixed with DTensors.
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

# The dims of a DTensor's device mesh as axes of the topology, whatever they are called --------------------------------


def mesh_axes(tensor: DTensor) -> tuple[str, ...]:
    """The names of its mesh's dims.

    Raises:
        ValueError: They have none.
    """
    names = tensor.device_mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            f"{label(tensor)} is on a mesh without dim names, {tensor.device_mesh}; make it with "
            "registry.device_mesh('data') or init_device_mesh(..., mesh_dim_names=('data',)), whose names are axes"
        )
    return names


def check_mesh(tensor: DTensor, topology: Topology) -> dict[str, tuple[str, ...]]:
    """The axes of the topology that those dims of the mesh are whose names it doesn't know.

    Raises:
        ValueError: This rank isn't in the mesh; a dim is no axes, or has the name of another axis than it is.
    """
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {mesh.get_rank()} has {label(tensor)}, but is not in its mesh {mesh}; give "
            "the optimizer only the parameters of this rank"
        )
    dims = {}
    for index, name in enumerate(mesh_axes(tensor)):
        ranks = ranks_along(mesh, index)
        if name not in topology.axes and name not in topology.aliases:
            axes = axes_along(ranks, topology)
            if axes is None:
                raise ValueError(
                    f"{label(tensor)} is on a device mesh with dim {name!r}, which holds ranks {ranks}: no axes of "
                    f"{topology!r} make these up. Make the topology of all meshes, Topology.of_meshes(...), or the mesh "
                    "with registry.device_mesh('data')"
                )
            dims[name] = axes
        elif ranks != (expected := topology.peers(mesh.get_rank(), name)):
            raise ValueError(
                f"{label(tensor)} is on a device mesh whose dim {name!r} holds ranks {ranks}, but the "
                f"axis of {topology!r} holds {expected}; make the mesh with registry.device_mesh({name!r})"
            )
    return dims


def label(tensor: DTensor) -> str:
    """What errors call it."""
    annotation = annotation_of(tensor)
    return (annotation.name if annotation else None) or f"a DTensor parameter of shape {tuple(tensor.shape)}"


# Dtensor --------------------------------------------------------------------------------------------------------------

_LOCAL, _SOURCE, _MATCHED, _VERSION, _SUMS = (
    f"_meshstep_{name}" for name in ("local", "source", "matched", "version", "sums")
)

SEEN = "_meshstep_seen"
"""What `meshstep.parallel.interop.dtensor_gradients` keeps of a DTensor."""


@contextmanager
def keep_specs(module: nn.Module) -> Iterator[None]:
    """Let declarations survive what makes new parameters of the same names: `fully_shard`, `parallelize_module`.

        with keep_specs(model):
            for block in model.blocks:
                fully_shard(block, mesh=registry.device_mesh("data"))
            fully_shard(model, mesh=registry.device_mesh("data"))

    What has been declared meanwhile stays.
    """
    before = {name: annotation_of(param) for name, param in module.named_parameters()}
    yield
    for name, param in module.named_parameters():
        annotation = before.get(name)
        if annotation is not None and annotation_of(param) is None:
            attach(param, annotation)


# Layout -----------------------------------------------------------------------------------------------------------------


def placement_spec(tensor: DTensor) -> P:
    """What a DTensor's placements say, in the names of its mesh's dims.

    Several mesh dims may shard one tensor dim. The first is the slowest then, but for the strided shard of
    ``split_factor`` f that `fully_shard` makes: it splits what later mesh dims have split into f pieces already. Where
    none have, it splits each of f blocks, as the weights of gate and up in one matrix.

    Raises:
        ValueError: The mesh has no dim names, or the tensor is a pending sum or laid out in another unusual way.
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
                f"{label(tensor)} is {placement!r} over mesh dim {axis!r}; a parameter must be sharded or "
                "replicated: redistribute it before the optimizer is made"
            )
        split_factor = getattr(placement, "split_factor", 1)
        if split_factor > 1 and not dims[dim]:
            in_blocks.append((axis, (1,) * split_factor))
            split_factor = 1
        _insert(dims[dim], axis, split_factor, sizes)
    return P().with_dims(map(tuple, dims), blocks=in_blocks)


def _insert(axes: list[str], axis: str, split_factor: int, sizes: dict[str, int]) -> None:
    """Put ``axis`` behind those that split the dim into ``split_factor`` pieces before it did."""
    pieces, position = 1, 0
    while pieces < split_factor and position < len(axes):
        pieces *= sizes[axes[position]]
        position += 1
    if pieces != split_factor:
        raise ValueError(
            f"a strided shard over {axis!r} with split factor {split_factor} doesn't fit {axes}; apply "
            "parallelize_module first and fully_shard then, as torch does"
        )
    axes.insert(position, axis)


def annotation_for(param: DTensor) -> Annotation:
    """The layout of this rank's local tensor over all axes: what was declared, and within it what the placements say.

    Raises:
        ValueError: As `placement_spec`; or the declaration contradicts the placements.
    """
    declared, axes, inner, (topology, found) = (
        annotation_of(param),
        mesh_axes(param),
        placement_spec(param),
        _matched(param),
    )
    if declared is None:
        return Annotation(inner, None, mesh_axes=axes, declared=False, dims=tuple(found.items()))
    spec = declared.spec
    if topology is not None and found:
        there = [axis for axis in spec.named_axes if axis in (*topology.axes, *topology.aliases)]
        spec = spec.renamed(
            {axis: dim for axis in there for dim, atoms in found.items() if atoms == topology.atoms(axis)}
        )
    outer = [tuple(part for part in spec.cuts(dim) if {*part}.isdisjoint(axes)) for dim in range(param.dim())]
    dims = [outer[dim] + inner.cuts(dim) for dim in range(param.dim())]
    owned, tied, merged = dict(spec.owned), dict(spec.tied), P().with_dims(dims)
    repeated = {*spec.sharded_axes} & {*axes} and spec.entries != merged.entries
    if repeated or {*owned, *tied} & {*axes} or {*spec.partial} & {*inner.sharded_axes}:
        raise ValueError(
            f"{label(param)} is declared {spec}, but its placements over {', '.join(axes)} make it {merged}; declare "
            f"only what the mesh doesn't say: {P().with_dims(outer)}"
        )
    return Annotation(
        spec.with_dims(dims, blocks=inner.blocks), declared.name, mesh_axes=axes, dims=tuple(found.items())
    )


def _matched(param: DTensor) -> tuple[Topology | None, dict[str, tuple[str, ...]]]:
    """The topology that its mesh was last matched with, and what `check_mesh` said."""
    found: tuple[Topology | None, dict[str, tuple[str, ...]]] = getattr(param, _MATCHED, (None, {}))
    return found


# Local parameters -------------------------------------------------------------------------------------------------------


def local_parameter(param: DTensor, topology: Topology | None = None) -> nn.Parameter:
    """A plain parameter that is this rank's local tensor (its memory) and carries the spec over all axes.

    One a DTensor, however often it is asked for; it follows what was declared, moved or frozen since.

    Raises:
        ValueError: As `annotation_for`; and `check_mesh`, where a topology is given.
    """
    # Not to_local(): of a parameter that makes a new view each time.
    local, annotation, laid_out = param._local_tensor, annotation_of(param), param._spec
    memory = local.data_ptr()
    piece: nn.Parameter | None = param.__dict__.get(_LOCAL)
    known = (None, None, None, None) if piece is None else piece.__dict__[_SOURCE]
    if piece is None or known[0] is not local or known[3] != memory:
        piece = _follow_memory(param, piece)
    matched = topology is None or (_matched(param)[0] is topology and known[2] is laid_out)
    if topology is not None and not matched:
        setattr(param, _MATCHED, (topology, check_mesh(param, topology)))
    if not matched or known[1] is not annotation or known[2] is not laid_out:
        attach(piece, _with_sums(annotation_for(param), settled_sums(piece)))
    if known[0] is not local or known[1] is not annotation or known[2] is not laid_out or known[3] != memory:
        setattr(piece, _SOURCE, (local, annotation, laid_out, memory))
    if piece.requires_grad != param.requires_grad:
        piece.requires_grad_(param.requires_grad)
    follow_version(param, piece)
    return piece


@torch.no_grad()
def _follow_memory(param: DTensor, piece: nn.Parameter | None) -> nn.Parameter:
    """The local parameter of ``param``, a new one or ``piece``, on the memory of its local tensor as that is now."""
    value = waited(param._local_tensor).detach()
    if piece is None:
        piece = nn.Parameter(value, requires_grad=param.requires_grad)
        piece.grad_dtype = None  # any: whoever reduces gradients chooses
        setattr(param, _LOCAL, piece)
    else:
        piece.data = value
    return piece


def settle_sums(param: DTensor, axes: tuple[str, ...]) -> None:
    """From now on the gradient of ``param`` is summed over ``axes`` of its mesh, though nobody declared that."""
    piece = local_parameter(param)
    vars(param).pop(SEEN, None)
    setattr(piece, _SUMS, axes)
    attach(piece, _with_sums(annotation_for(param), axes))


def mesh_ranks(param: DTensor) -> tuple[int, ...]:
    """All ranks of its mesh."""
    return tuple(param.device_mesh.mesh.flatten().tolist())


def settled_sums(piece: nn.Parameter) -> tuple[str, ...]:
    """The axes of `settle_sums`, of a local parameter."""
    found: tuple[str, ...] = getattr(piece, _SUMS, ())
    return found


def _with_sums(annotation: Annotation, axes: tuple[str, ...]) -> Annotation:
    """With the sums over those of ``axes`` that don't split the parameter, of which a spec can say both."""
    spec = annotation.spec
    more = [axis for axis in axes if axis not in spec.named_axes]
    return replace(annotation, spec=spec.with_partial((*spec.partial, *more))) if more else annotation


def waited(local: Tensor) -> Tensor:
    """``local``, when a collective that makes it has ended."""
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def follow_version(outer: DTensor, local: Tensor) -> None:
    """Count what DTensor's operations changed, of which its local tensor's version knows nothing."""
    if outer._version != getattr(outer, _VERSION, 0):
        torch.autograd.graph.increment_version(local)
        setattr(outer, _VERSION, outer._version)
