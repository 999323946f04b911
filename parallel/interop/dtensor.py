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

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor as DTensor
from torch.distributed.tensor import Partial

from ..layout.annotation import Annotation, annotation_of, attach
from ..layout.spec import P
from ..mesh.topology import Topology
from .device_mesh import check_mesh as check_mesh
from .device_mesh import label as label
from .device_mesh import mesh_axes as mesh_axes

_LOCAL, _SOURCE, _MATCHED, _VERSION = (f"_meshstep_{name}" for name in ("local", "source", "matched", "version"))


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
    ``split_factor`` f that `fully_shard` makes: it splits what later mesh dims have split into f pieces already.

    Raises:
        ValueError: The mesh has no dim names, or the tensor is a pending sum or laid out in another unusual way.
    """
    sizes = dict(zip(mesh_axes(tensor), tensor.device_mesh.shape, strict=True))
    dims: list[list[str]] = [[] for _ in range(tensor.dim())]
    for axis, placement in reversed(list(zip(sizes, tensor.placements, strict=True))):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if placement.is_partial() or dim is None:
            raise ValueError(
                f"{label(tensor)} is {placement!r} over mesh dim {axis!r}; a parameter must be sharded or replicated"
            )
        _insert(dims[dim], axis, getattr(placement, "split_factor", 1), sizes)
    return P(*(tuple(axes) for axes in dims))


def _insert(axes: list[str], axis: str, split_factor: int, sizes: dict[str, int]) -> None:
    """Put ``axis`` behind those that split the dim into ``split_factor`` pieces before it did."""
    pieces, position = 1, 0
    while pieces < split_factor and position < len(axes):
        pieces *= sizes[axes[position]]
        position += 1
    if pieces != split_factor:
        raise ValueError(f"a strided shard over {axis!r} with split factor {split_factor} doesn't fit {axes}")
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
    return Annotation(spec.with_dims(dims), declared.name, mesh_axes=axes, dims=tuple(found.items()))


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
    source = (param._local_tensor, annotation_of(param), param.placements)
    piece: nn.Parameter | None = getattr(param, _LOCAL, None)
    known = (None, None, None) if piece is None else getattr(piece, _SOURCE, (None, None, None))
    if piece is None or source[0] is not known[0] or source[0].data_ptr() != piece.data_ptr():
        piece = _follow_memory(param, piece)
    matched = topology is None or _matched(param)[0] is topology
    if topology is not None and not matched:
        setattr(param, _MATCHED, (topology, check_mesh(param, topology)))
    if not matched or source[1] is not known[1] or source[2] != known[2]:
        attach(piece, annotation_for(param))
    setattr(piece, _SOURCE, source)
    if piece.requires_grad != param.requires_grad:
        piece.requires_grad_(param.requires_grad)
    _follow_version(param, piece)
    return piece


@torch.no_grad()
def _follow_memory(param: DTensor, piece: nn.Parameter | None) -> nn.Parameter:
    """The local parameter of ``param``, a new one or ``piece``, on the memory of its local tensor as that is now."""
    value = _waited(param._local_tensor).detach()
    if piece is None:
        piece = nn.Parameter(value, requires_grad=param.requires_grad)
        piece.grad_dtype = None  # any: whoever reduces gradients chooses
        setattr(param, _LOCAL, piece)
    else:
        piece.data = value
    return piece


def share_gradient(param: DTensor, piece: nn.Parameter, *, to_sum: bool = False) -> None:
    """Give ``piece`` the local tensor of the DTensor's gradient: its memory, unless ``piece.grad_dtype`` wants a cast.

    Args:
        to_sum: The caller is about to make in place, on ``piece``, the sums that its spec says are pending. The DTensor's
            gradient is then called complete.
    Raises:
        ValueError: The gradient is laid out otherwise than the parameter: it is a pending sum and not declared so, or
            (``to_sum``) the other way round.
    """
    grad = param.grad
    if grad is None:
        piece.grad = None
        return
    if not isinstance(grad, DTensor):
        raise ValueError(f"the gradient of {label(param)} is a {type(grad).__name__}; that of a DTensor is a DTensor")
    if any(placement.is_partial("avg") for placement in grad.placements):
        param.grad = grad = _as_sum(grad)
    partial = _pending(grad, param, piece, to_sum)
    local = _waited(grad._local_tensor)
    _follow_version(grad, local)
    wanted = piece.grad_dtype
    piece.grad = local if wanted is None or wanted == local.dtype else local.to(wanted)
    if partial and to_sum and piece.grad is local:
        param.grad = _like(param, local)


def _as_sum(grad: DTensor) -> DTensor:
    """A pending mean as the pending sum of its terms, each over the number of ranks."""
    mesh, count = grad.device_mesh, 1
    placements = list(grad.placements)
    for index, placement in enumerate(placements):
        if placement.is_partial("avg"):
            placements[index], count = Partial("sum"), count * mesh.size(index)
    local = _waited(grad._local_tensor) / count
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=grad.shape, stride=grad.stride())


def return_gradient(param: DTensor, piece: nn.Parameter) -> None:
    """Take the gradient from ``piece``, and give it to the DTensor if that has none."""
    if param.grad is None and piece.grad is not None:
        param.grad = _like(param, piece.grad.to(param.dtype))
    piece.grad = None


def _pending(grad: DTensor, param: DTensor, piece: nn.Parameter, to_sum: bool) -> bool:
    """Whether the gradient is a pending sum over a mesh dim, after checking that this is as declared."""
    annotation = annotation_of(piece)
    declared = annotation.spec.partial if annotation is not None else ()
    if grad.placements == param.placements and not (to_sum and declared):
        return False
    pending = False
    for axis, has, wanted in zip(mesh_axes(param), grad.placements, param.placements, strict=True):
        if axis in declared and has.is_partial("sum"):
            pending = True
        elif has != wanted:
            hint = f"declare it P(partial={axis!r})" if has.is_partial("sum") else "redistribute it"
            raise ValueError(
                f"the gradient of {label(param)} is {has!r} over {axis!r}, but the parameter is {wanted!r}: {hint}"
            )
        elif axis in declared and to_sum:
            raise ValueError(
                f"{label(param)} is declared partial over {axis!r}, but its gradient is complete ({has!r}): it would be "
                f"summed twice; leave {axis!r} out of partial="
            )
    return pending


def _like(param: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _waited(local: Tensor) -> Tensor:
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _follow_version(outer: DTensor, local: Tensor) -> None:
    """Count what DTensor's operations changed, of which its local tensor's version knows nothing."""
    if outer._version != getattr(outer, _VERSION, 0):
        torch.autograd.graph.increment_version(local)
        setattr(outer, _VERSION, outer._version)
