"""DTensor parameters and their gradients: FSDP2's `fully_shard`, `parallelize_module`, `distribute_tensor`.

The spec of a DTensor is derived from its placements. Each mesh dim must be along the same ranks as an axis of the
topology, or as several axes that are flattened into one mesh dim. The names may differ. ``registry.device_mesh("data")``
creates a mesh on the registry's groups; a slice of a mesh is a valid mesh too.

    parameter                                           placements                     spec
    fully_shard over data                               (Shard(0),)                    P("data")
    ... of a plain shard declared P("tensor", None)     (Shard(0),)                    P(("tensor", "data"))
    ... of a DTensor that is Shard(0) over tensor       (_StridedShard(0), Shard(0))   P(("tensor", "data"))
    ColwiseParallel and RowwiseParallel weights         (Shard(0),) and (Shard(1),)    P("tensor") and P(None, "tensor")
    SequenceParallel norm, declared partial (tensor)    (Replicate(),)                 P(partial="tensor")

The placements determine the layout over the axes of the DTensor's mesh. A declaration (`declare`) determines the layout
over all other axes. In an optimizer, a trained DTensor without a declaration is an error if its mesh lacks a model axis
larger than 1.
`fully_shard` and `parallelize_module` replace parameters, and the new parameters have no declaration. Declare them again
afterwards, or call these functions in a `keep_specs` block.

To combine tensor parallelism and `fully_shard` on the same parameters, torch requires slices of one mesh: ``mesh =
registry.device_mesh("data", "tensor")``, then ``mesh["tensor"]`` and ``mesh["data"]``.

The gradient of a DTensor is not averaged over the axes of the DTensor's mesh, because torch has already reduced it over
them (`fully_shard` averages it). All computations here use a plain parameter on the memory of a DTensor's local tensor: its
*local parameter*. DTensor's own operations would issue collectives for a norm, and reject lists that mix plain tensors with
DTensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor as DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle, unserializable_hook

from ..layout.annotation import ATTRIBUTE, Annotation, Sums, annotation_of, attach, label_of
from ..layout.spec import P, cut_spans
from ..mesh.refinement import dim_names, ranks_along
from ..mesh.topology import Topology, axes_along

# Mesh dims of a DTensor as axes of the topology -----------------------------------------------------------------------


def mesh_axes(tensor: DTensor) -> tuple[str, ...]:
    """Return the names of the mesh dims of a DTensor; dim_0, dim_1, ... if the mesh has no dim names."""
    return dim_names(tensor.device_mesh)


def check_mesh(tensor: DTensor, topology: Topology) -> dict[str, tuple[str, ...]]:
    """Check that each mesh dim of a DTensor is along the same ranks as an axis, or several axes, of the topology.

    Return a dict from the names of mesh dims to their axes. It has only the mesh dims whose names are neither axes nor
    aliases of the topology.
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
                    "or the mesh from the topology's axes, such as registry.device_mesh('data')"
                )
            dims[name] = axes
        elif ranks != (expected := topology.peers(mesh.get_rank(), name)):
            raise ValueError(
                f"{label(tensor)} is on a device mesh whose dim {name!r} has ranks {ranks}, but the axis of this name in "
                f"{topology!r} has ranks {expected}; create the mesh with registry.device_mesh({name!r})"
            )
    return dims


def label(tensor: DTensor) -> str:
    return label_of(tensor, "DTensor parameter")


# Attributes of DTensors -----------------------------------------------------------------------------------------------

# A DTensor stores its local parameter (_LOCAL), the topology and result of its last `check_mesh` (_MATCHED), and its
# version counter at the last `follow_version` (_VERSION). A local parameter stores the local tensor, annotation,
# DTensorSpec and memory address from which it was made or updated (_SOURCE), and the axes of `settle_sums` (_SUMS).
_LOCAL, _SOURCE, _MATCHED, _VERSION, _SUMS = (
    f"_meshstep_{name}" for name in ("local", "source", "matched", "version", "sums")
)

SEEN = "_meshstep_seen"
"""Name of the attribute in which `of_each` caches its result on a DTensor."""


@contextmanager
def keep_specs(module: nn.Module) -> Iterator[None]:
    """Context manager that keeps the declared layouts of parameters that are replaced within its block.

    `fully_shard` and `parallelize_module` replace parameters. When the block ends, a new parameter gets the declaration of
    the parameter that was the same attribute of the same module before. A parameter of a new module, or a new attribute,
    gets the declaration of the former parameter with the same qualified name.

        with keep_specs(model):
            for block in model.blocks:
                fully_shard(block, mesh=registry.device_mesh("data"))
            fully_shard(model, mesh=registry.device_mesh("data"))

    A parameter that is declared within the block keeps this declaration. If the block raises, nothing is copied.
    """
    before = {place: annotation_of(param) for place, param in _places(module)}
    by_name = {name: annotation_of(param) for name, param in module.named_parameters()}
    yield
    names = {id(param): name for name, param in module.named_parameters()}
    for place, param in _places(module):
        annotation = before[place] if place in before else by_name.get(names[id(param)])
        if annotation is not None and annotation_of(param) is None:
            attach(param, annotation)


def _places(module: nn.Module) -> list[tuple[tuple[nn.Module, str], Tensor]]:
    """Return ((module, attribute name), parameter) pairs of all modules within ``module``."""
    return [((part, name), param) for part in module.modules() for name, param in part.named_parameters(recurse=False)]


# The spec and annotation of a DTensor -----------------------------------------------------------------------------------


def placement_spec(tensor: DTensor) -> P:
    """Return the spec that a DTensor's placements describe, with the names of its mesh dims as axes.

    If several mesh dims shard a tensor dim by `Shard`, the first mesh dim is the slowest, as in torch.

    A strided shard placement over a mesh dim has a ``split_factor`` f > 1. If later mesh dims shard the same tensor dim,
    f must be the product of the sizes of the first later mesh dims, one or more. In the spec, the mesh dim of the strided
    placement comes after them. `fully_shard` creates such placements: (_StridedShard(0), Shard(0)) over ("data", "tensor")
    is P(("tensor", "data")). If no later mesh dim shards the tensor dim, the tensor dim consists of f blocks, such as the
    gate and up weights in one matrix, and the mesh dim shards each block.

    A placement that is partial or of an unknown kind raises ValueError.
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
                "replicated; redistribute the parameter first"
            )
        split_factor = getattr(placement, "split_factor", 1)
        if split_factor > 1 and not dims[dim]:
            in_blocks.append((axis, (1,) * split_factor))
            split_factor = 1
        try:
            _insert(dims[dim], axis, split_factor, sizes)
        except ValueError as problem:
            raise ValueError(f"{label(tensor)}: {problem}") from None
    return P().with_dims(map(tuple, dims), blocks=in_blocks)


def _insert(axes: list[str], axis: str, split_factor: int, sizes: dict[str, int]) -> None:
    """Insert ``axis`` into ``axes``, slowest first, after the first axes whose sizes have the product ``split_factor``."""
    parts, position = 1, 0
    while parts < split_factor and position < len(axes):
        parts *= sizes[axes[position]]
        position += 1
    if parts != split_factor:
        raise ValueError(
            f"a strided shard over mesh dim {axis!r} with split factor {split_factor} doesn't fit the sizes of the mesh "
            f"dims {axes}; apply parallelize_module before fully_shard, as torch requires"
        )
    axes.insert(position, axis)


def annotation_for(param: DTensor) -> Annotation:
    """Return the `Annotation` (layout and name) for the local parameter of a DTensor.

    The layout over the axes of the DTensor's mesh follows from the placements, the layout over other axes from the
    declaration. Without a declaration, the layout over other axes is unknown, and the annotation has ``declared=False``.
    """
    declared, axes, inner = annotation_of(param), mesh_axes(param), placement_spec(param)
    topology, found = _last_match(param)
    if declared is None:
        return Annotation(inner, None, mesh_axes=axes, declared=False, dims=tuple(found.items()))
    spec = declared.spec
    if topology is not None and found:
        named = [axis for axis in spec.named_axes if axis in (*topology.axes, *topology.aliases)]
        spec = spec.renamed(
            {axis: dim for axis in named for dim, atoms in found.items() if atoms == topology.expand_aliases(axis)}
        )
    outer = [tuple(part for part in spec.joint_dim_axes(dim) if {*part}.isdisjoint(axes)) for dim in range(param.dim())]
    dims = [outer[dim] + inner.joint_dim_axes(dim) for dim in range(param.dim())]
    owned, tied, merged = dict(spec.owned), dict(spec.tied), P().with_dims(dims)
    repeated = {*spec.sharded_axes} & {*axes} and spec.entries != merged.entries
    if repeated or {*owned, *tied} & {*axes} or {*spec.partial} & {*inner.sharded_axes}:
        raise ValueError(
            f"{label(param)} is declared {spec}, but its placements over {', '.join(axes)} make it {merged}; declare "
            f"only the axes outside its mesh: {_without_mesh_axes(spec, outer, axes)}"
        )
    return Annotation(
        spec.with_dims(dims, blocks=inner.blocks), declared.name, mesh_axes=axes, dims=tuple(found.items())
    )


def _without_mesh_axes(spec: P, outer: Sequence[Sequence[tuple[str, ...]]], axes: Sequence[str]) -> P:
    """Return the part of ``spec`` that names no axis in ``axes``. ``outer`` has the axes that shard each dim in it."""
    owned = {axis: at for axis, at in spec.owned if not {axis, at} & {*axes}}
    tied = {axis: where for axis, where in spec.tied if axis not in axes}
    partial = tuple(axis for axis in spec.partial if axis not in axes)
    sharded = tuple(axis for parts in outer for part in parts for axis in part)
    return P(sharded, owned=owned, tied=tied).with_dims(outer, partial=partial, blocks=spec.blocks)


def _last_match(param: DTensor) -> tuple[Topology | None, dict[str, tuple[str, ...]]]:
    """Return the topology and the result of the last `check_mesh` call by `local_parameter`; (None, {}) before it."""
    found: tuple[Topology | None, dict[str, tuple[str, ...]]] = getattr(param, _MATCHED, (None, {}))
    return found


# Local parameters -------------------------------------------------------------------------------------------------------


def local_parameter(param: DTensor, topology: Topology | None = None) -> nn.Parameter:
    """Return the local parameter of a DTensor: a plain parameter that uses the memory of the DTensor's local tensor.

    The annotation of the local parameter has the layout over all axes, from the DTensor's placements and declaration. Every
    call returns the same object for a DTensor. If the layout, the memory or ``requires_grad`` of the DTensor has changed
    since the last call, the object is updated. Without a topology the mesh is not checked (`check_mesh`).
    """
    # `to_local` is not used, because it would create a new view in every call.
    local, annotation, layout = param._local_tensor, annotation_of(param), param._spec
    memory = local.data_ptr()
    piece: nn.Parameter | None = param.__dict__.get(_LOCAL)
    # A local parameter has no source if the call that created it raised an error afterwards.
    source = (None, None, None, None) if piece is None else piece.__dict__.get(_SOURCE, (None, None, None, None))
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
    """Make the local parameter ``piece``, or a new one, use the memory of the DTensor's local tensor, and return it."""
    value = waited(param._local_tensor).detach()
    if piece is None:
        piece = nn.Parameter(value, requires_grad=param.requires_grad)
        piece.grad_dtype = None  # the gradient may have any dtype, which the gradient reduction chooses
        setattr(param, _LOCAL, piece)
    else:
        piece.data = value
    return piece


def settle_sums(param: DTensor, axes: tuple[str, ...]) -> None:
    """Store that backward returns a gradient of ``param`` that is partial over ``axes`` and must be summed.

    An axis that does not shard the parameter becomes a partial axis in the spec of the local parameter. An axis that shards
    the parameter can't become a partial axis, because a spec names an axis once; `local_gradient` sums over this axis.
    ``axes`` are not declared partial. They replace the axes that an earlier call stored.
    """
    piece = local_parameter(param)
    vars(param).pop(SEEN, None)
    setattr(piece, _SUMS, axes)
    attach(piece, _add_partial(annotation_for(param), axes))


def mesh_ranks(param: DTensor) -> tuple[int, ...]:
    return tuple(param.device_mesh.mesh.flatten().tolist())


def settled_sums(piece: nn.Parameter) -> tuple[str, ...]:
    """Return the axes that `settle_sums` stored for the DTensor of the local parameter ``piece``."""
    found: tuple[str, ...] = getattr(piece, _SUMS, ())
    return found


def _add_partial(annotation: Annotation, axes: tuple[str, ...]) -> Annotation:
    """Return ``annotation`` with ``axes`` as additional partial axes, except axes that its spec already names."""
    spec = annotation.spec
    more = [axis for axis in axes if axis not in spec.named_axes]
    return replace(annotation, spec=spec.with_partial((*spec.partial, *more))) if more else annotation


def waited(local: Tensor) -> Tensor:
    """Return ``local`` as a plain tensor. If an asynchronous collective computes it, wait for the collective."""
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def follow_version(outer: DTensor, local: Tensor) -> None:
    """Increment the version counter of ``local`` if the DTensor ``outer`` was written since the last call.

    ``local`` is a tensor on the memory of the DTensor's local tensor. An in-place operation on a DTensor writes to this
    memory, but torch increments only the DTensor's counter.
    """
    if outer._version != getattr(outer, _VERSION, 0):
        torch.autograd.graph.increment_version(local)
        setattr(outer, _VERSION, outer._version)


# Gradients of DTensors ------------------------------------------------------------------------------------------------

# The operations of backward determine the placements of a gradient. They may differ from the placements of the parameter.
# The gradient of the local parameter depends on both placements over a mesh dim:
#
#     parameter   gradient            gradient of the local parameter
#     any         same placement      the local tensor of the gradient
#     Shard       Replicate           this rank's slice; torch replicates the gradient of a vocabulary embedding
#     Replicate   Partial             a partial gradient, which the step sums together with all other partial gradients
#     Shard       Partial             this rank's slice of the sum, which this module computes
#
# The sums in the last two rows are collectives, in which ranks without a gradient must take part too. In the first step,
# all ranks therefore exchange the axes over which their gradients are partial (`sums_seen`), and store the union of these
# axes (`settle`). From then on these gradients are summed in every step, as if they were declared partial. If such a
# gradient is replicated in a later step, the first rank along the mesh dim contributes the gradient, and the other ranks
# contribute zeros.


def share_gradient(param: DTensor, piece: nn.Parameter, *, to_sum: bool) -> None:
    """Set ``piece.grad``, the gradient of a local parameter, to the result of `local_gradient`, in ``piece.grad_dtype``."""
    local, wanted = local_gradient(param, piece, to_sum=to_sum), piece.grad_dtype
    piece.grad = local if local is None or wanted is None or wanted == local.dtype else local.to(wanted)


def local_gradient(param: DTensor, piece: nn.Parameter, *, to_sum: bool = False) -> Tensor | None:
    """Return this rank's local tensor of the gradient of a DTensor, in the layout of its local parameter ``piece``.

    If the placements of the gradient differ from the placements of the parameter, ``param.grad`` is replaced by a gradient
    with the parameter's placements. It is not replaced if the gradient stays partial and ``to_sum`` is False.

    Args:
        to_sum: Pass True if you then sum the result in place over the partial axes in the spec of ``piece``. The new
            ``param.grad``, which shares memory with the result, then has the summed gradient.
    Returns:
        The local gradient; None if ``param`` has no gradient. With ``to_sum``, a rank without a gradient contributes zeros
        to the all-reduces below, and returns its slice of the sum; None if there are no all-reduces.
    Raises:
        ValueError: The gradient is not a DTensor; it is partial over an axis that is neither declared partial nor stored by
            `settle`; its placements can't be converted to the parameter's by slicing or summing; without ``to_sum``, it is
            partial over an axis that shards the parameter; or with ``to_sum``, it is not partial over an axis that is
            declared partial, or is sharded over an axis over which it was partial in the first step.
    Collectives: with ``to_sum``, one all-reduce per axis that shards the parameter and that `settle` stored as partial.
    """
    grad: Tensor | None = param.grad
    if not isinstance(grad, DTensor):
        if grad is not None:
            raise ValueError(
                f"the gradient of {label(param)} is a {type(grad).__name__}, but the parameter is a DTensor; set "
                ".grad to a DTensor, as autograd does"
            )
        return _match_layout(param, piece, grad, to_sum) if to_sum else None
    if grad.placements != param.placements or (to_sum and (_partial_axes(piece) or settled_sums(piece))):
        return _match_layout(param, piece, grad, to_sum)
    local = grad._local_tensor if type(grad._local_tensor) is Tensor else waited(grad._local_tensor)
    if to_sum:
        follow_version(grad, local)
    return local


def sum_partial_gradient(param: DTensor) -> None:
    """Replace ``param.grad`` by its sum, in the placements of the parameter, if it is a DTensor that is partial.

    If the parameter is declared with partial axes, the gradient is unchanged, because the caller sums it. If the gradient
    is partial on a rank, it must be partial on all ranks of the mesh.

    Collectives: for a partial gradient, an all-reduce per partial mesh dim, or a reduce-scatter if this mesh dim shards the
    parameter.
    """
    grad, declared = param.grad, annotation_of(param)
    if not isinstance(grad, DTensor) or (declared is not None and declared.spec.partial):
        return
    if any(_is_sum(has) and has != wanted for _, has, wanted in _zip_placements(param, grad)):
        with torch.no_grad():
            summed = grad.redistribute(placements=param.placements)
            param.grad = _wrap_like(param, waited(summed._local_tensor))


def return_gradient(param: DTensor, piece: nn.Parameter) -> None:
    """Move the gradient of the local parameter ``piece`` to the DTensor ``param``; discard it if ``param`` has one."""
    if piece.grad is not None:
        if param.grad is None:
            param.grad = _wrap_like(param, piece.grad.to(param.grad_dtype or param.dtype))
        piece.grad = None


def accumulate_like_piece(param: DTensor, piece: nn.Parameter) -> None:
    """Make backward accumulate ``param.grad`` in ``piece.grad_dtype``, from the second micro-batch on.

    The first gradient of ``param`` is cast. A parameter of `fully_shard` is unchanged: autograd does not accumulate its
    gradient, and `fully_shard` sets gradients in the parameter's dtype. Only autograd calls the first hook below;
    `fully_shard` calls hooks of the second kind itself.
    """

    def before(grad: Tensor) -> None:
        first.remove()
        second.append(param.register_post_accumulate_grad_hook(after))

    def after(param: Tensor) -> None:
        second[0].remove()
        if piece.grad_dtype not in (None, param.grad_dtype):
            grad, param.grad = param.grad, None
            param.grad_dtype = piece.grad_dtype
            param.grad = None if grad is None else grad.to(piece.grad_dtype)

    unserializable: Any = unserializable_hook  # else torch.save of the parameter warns that the hook is not saved
    first, second = param.register_hook(unserializable(before)), list[RemovableHandle]()


def poison_gradient(param: DTensor, piece: nn.Parameter) -> None:
    """Set the gradient of the local parameter ``piece`` to NaN, so that all ranks skip the step.

    Call it on a rank on which ``share_gradient(param, piece, to_sum=True)`` raised before its all-reduces.

    Collectives: the all-reduces that `share_gradient` issues on other ranks for this parameter.
    """
    if sum_axes := _sharded_sum_axes(piece):
        _all_reduce(torch.full_like(_zeros(param, piece, sum_axes), torch.nan), param, sum_axes)
    piece.grad = torch.full_like(piece, torch.nan, dtype=piece.grad_dtype or piece.dtype)


# Agreement of all ranks on partial axes ----------------------------------------------------------------------------------


def sums_seen(params: Iterable[Tensor]) -> Sums:
    """Implement `local_parameters.sums_seen`."""
    seen = {}
    for key, param in _keyed(params):
        if isinstance(grad := param.grad, DTensor):
            declared = {*_partial_axes(local_parameter(param))} - {*settled_sums(local_parameter(param))}
            placements = list(_zip_placements(param, grad))
            sums = [axis for axis, has, _ in placements if _is_sum(has) and axis not in declared]
            for axis, has, wanted in placements:
                _check(param, axis, has, wanted, {*declared, *sums}, declared)
            _check_slice(param, [axis for axis, has, wanted in placements if has != wanted and _is_shard(wanted)])
            seen[key] = tuple(sums)
    return seen


def settle(params: Iterable[Tensor], seen: Sequence[Sums]) -> bool:
    """Implement `local_parameters.settle_sums`."""
    changed = False
    for key, param in _keyed(params):
        settled = settled_sums(local_parameter(param))
        axes = {axis for sums in seen for axis in sums.get(key, ())}.difference(settled)
        if axes:
            settle_sums(param, tuple(axis for axis in mesh_axes(param) if axis in {*settled, *axes}))
            changed = True
    return changed


def _keyed(params: Iterable[Tensor]) -> Iterator[tuple[tuple[tuple[int, ...], int], DTensor]]:
    counts: dict[tuple[int, ...], int] = {}
    for param in params:
        if isinstance(param, DTensor):
            ranks = mesh_ranks(param)
            yield (ranks, counts.setdefault(ranks, 0)), param
            counts[ranks] += 1


# Conversion of one gradient to the parameter's placements ----------------------------------------------------------------


def _match_layout(param: DTensor, piece: nn.Parameter, grad: DTensor | None, to_sum: bool) -> Tensor | None:
    """Convert a gradient to the placements of the parameter, and return its local tensor.

    The result stays partial over the partial axes in the spec of ``piece``, because the step sums it over them. Arguments,
    result, errors and collectives are those of `local_gradient`.
    """
    partial_axes, settled, sum_axes = {*_partial_axes(piece)}, {*settled_sums(piece)}, _sharded_sum_axes(piece)
    if grad is None:
        if not sum_axes:
            return None
        return _take_slice(_all_reduce(_zeros(param, piece, sum_axes), param, sum_axes), param, sum_axes)
    given = local = waited(grad._local_tensor)
    follow_version(grad, local)
    coordinate = param.device_mesh.get_coordinate() or ()
    stays_partial, sliced_axes = False, []
    summed, declared = (partial_axes | settled, partial_axes - settled) if to_sum else (partial_axes, set[str]())
    for index, (axis, has, wanted) in enumerate(_zip_placements(param, grad)):
        _check(param, axis, has, wanted, summed, declared)
        if has.is_partial("avg"):
            local = local / param.device_mesh.size(index)
        elif to_sum and axis in settled and not _is_sum(has) and coordinate[index] > 0:
            local = torch.zeros_like(local)
        if axis in sum_axes and has == wanted:
            raise ValueError(
                f"the gradient of {label(param)} was partial over {axis!r} in the first step, and is {has!r} now; make "
                "backward return the same placements in every step"
            )
        stays_partial |= _is_sum(has) and axis in partial_axes and not to_sum
        sliced_axes += [axis] if has != wanted and _is_shard(wanted) else []
    _check_slice(param, sliced_axes)
    if to_sum and sum_axes:
        local = _all_reduce(local.to(_sum_dtype(param, piece)), param, sum_axes)
    if sliced_axes:
        local = _take_slice(local, param, sliced_axes)
    if not stays_partial and (local is not given or grad.placements != param.placements):
        param.grad = _wrap_like(param, local.to(param.grad_dtype or local.dtype))
    return local


def _check(
    param: DTensor, axis: str, has: Placement, wanted: Placement, summed: Iterable[str], declared: Iterable[str]
) -> None:
    """Raise ValueError if a gradient's placement over ``axis`` can't be converted to the parameter's placement.

    The gradient may be partial over the axes ``summed``, and must be partial over the axes ``declared``.
    """
    if _is_sum(has):
        if axis not in summed:
            hint = "redistribute the gradient" if _is_shard(wanted) else f"declare the parameter P(partial={axis!r})"
            raise ValueError(
                f"{_describe_mismatch(param, axis, has, wanted)}; {hint}, or let ParallelOptimizer sum the gradient, which "
                "needs the same placements in every step"
            )
    elif axis in declared:
        raise ValueError(
            f"{label(param)} is declared partial over {axis!r}, but its gradient is complete ({has!r}) and would be "
            f"summed twice; leave {axis!r} out of partial="
        )
    elif has != wanted and not (has.is_replicate() and _is_shard(wanted)):
        raise ValueError(f"{_describe_mismatch(param, axis, has, wanted)}; redistribute the gradient")


def _describe_mismatch(param: DTensor, axis: str, has: Placement, wanted: Placement) -> str:
    return f"the gradient of {label(param)} is {has!r} over {axis!r}, but the parameter is {wanted!r}"


def _zip_placements(param: DTensor, grad: DTensor) -> Iterator[tuple[str, Placement, Placement]]:
    """Iterate over the mesh dims, as (name, placement of the gradient, placement of the parameter) triples."""
    return zip(mesh_axes(param), grad.placements, param.placements, strict=True)


def _is_sum(placement: Placement) -> bool:
    return placement.is_partial("sum") or placement.is_partial("avg")


def _is_shard(placement: Placement) -> bool:
    return not placement.is_replicate() and not placement.is_partial()


def _partial_axes(piece: nn.Parameter) -> tuple[str, ...]:
    annotation = annotation_of(piece)
    return () if annotation is None else annotation.spec.partial


def _sharded_sum_axes(piece: nn.Parameter) -> list[str]:
    """Return the axes of `settle_sums` that shard the parameter, and so are no partial axes in the spec of ``piece``."""
    return [axis for axis in settled_sums(piece) if axis not in _partial_axes(piece)]


def _all_reduce(local: Tensor, param: DTensor, axes: Sequence[str]) -> Tensor:
    """Return the sum of ``local`` over the mesh dims ``axes``. If ``local`` is contiguous, the sum overwrites it."""
    local = local.contiguous()
    for axis in axes:
        dist.all_reduce(local, group=param.device_mesh.get_group(axis))
    return local


def _sum_dtype(param: DTensor, piece: nn.Parameter) -> torch.dtype:
    """Return the dtype in which all ranks sum a partial gradient, also ranks on which autograd has accumulated none."""
    return piece.grad_dtype or param.grad_dtype or param.dtype


def _zeros(param: DTensor, piece: nn.Parameter, axes: Sequence[str]) -> Tensor:
    """Return zeros for a local gradient of a DTensor parameter, as if ``axes`` did not shard the parameter."""
    shape = [sum(length for _, length in _spans(param, dim, length, axes)) for dim, length in enumerate(param.shape)]
    return torch.zeros(shape, dtype=_sum_dtype(param, piece), device=param.device)


def _take_slice(local: Tensor, param: DTensor, axes: Sequence[str]) -> Tensor:
    """Return this rank's shard of ``local`` over the mesh dims ``axes``, which shard ``param``; not a view.

    Over all other axes, ``local`` has the layout of ``param``.
    """
    spec = placement_spec(param)
    for dim in range(param.dim()):
        rest = [axis for axis in spec.dim_axes(dim) if axis not in axes]
        if len(rest) < len(spec.dim_axes(dim)):
            parts = [local.narrow(dim, *span) for span in _spans(param, dim, local.shape[dim], rest)]
            local = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return local.clone() if local._is_view() else local  # a view would keep the memory of the full gradient


def _check_slice(param: DTensor, axes: Sequence[str]) -> None:
    """Raise ValueError if `_take_slice` can't compute this rank's shard from a gradient that is not sharded over ``axes``.

    If some of ``axes`` shard a tensor dim, they must come after all other axes of this dim in the parameter's spec.
    """
    spec = placement_spec(param)
    for dim in range(param.dim()):
        over = tuple(axis for axis in spec.dim_axes(dim) if axis in axes)
        if over and spec.dim_axes(dim)[-len(over) :] != over:
            later = [axis for axis in spec.dim_axes(dim)[spec.dim_axes(dim).index(over[0]) :] if axis not in over]
            raise ValueError(
                f"{label(param)} is sharded as {spec}, but its gradient is sharded over {', '.join(map(repr, later))} and "
                f"not over {over[0]!r}, an earlier axis of the same dim; redistribute the gradient to the placements of "
                "the parameter"
            )


def _spans(param: DTensor, dim: int, length: int, without: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return the (offset, length) spans of this rank's shard of a dim of ``length``, as if ``without`` did not shard it."""
    spec, mesh = placement_spec(param), param.device_mesh
    where = zip(mesh_axes(param), mesh.shape, mesh.get_coordinate() or (), strict=True)
    indices = {axis: (size, index) for axis, size, index in where}
    spans: tuple[tuple[int, int], ...] = ((0, length),)
    for axis in spec.dim_axes(dim):
        if axis not in without:
            spans = cut_spans(spans, *indices[axis], spec.block_sizes(axis))
    return spans


def _wrap_like(param: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


# Local parameters and gradients of a list, with a cache ---------------------------------------------------------------

# For a thousand small DTensors, looking up local parameters and gradients takes longer than the norm. Each DTensor
# therefore caches its result. The cached result is valid while five objects are the same: the local tensor, torch's
# DTensorSpec of the parameter, torch's DTensorSpec of the gradient, the annotation, and the topology.


class _Seen(NamedTuple):
    """Result of `of_each` for one DTensor parameter, cached on the parameter.

    The result is the first three fields. It is valid while the other fields are the current objects. ``annotation`` is that
    of the local parameter ``piece``, ``declared`` that of the DTensor itself.
    """

    piece: Tensor
    annotation: Annotation | None
    size: int
    local: Tensor
    layout: object
    declared: Annotation | None
    topology: Topology
    grad_layout: object


_LOCAL_TENSOR, _SPEC, _MEMBERS = attrgetter("_local_tensor"), attrgetter("_spec"), attrgetter("__dict__")


LocalLists = tuple[list[Tensor], list[Tensor | None], list[Annotation | None], tuple[int, ...] | None]
"""The fields of `meshstep.parallel.interop.local_parameters.Gradients`."""


def of_each(params: Iterable[Tensor], topology: Topology, *, sum_partial: bool) -> LocalLists:
    """Return the fields of `local_parameters.local_gradients` for lists with DTensors, and cache them on the DTensors."""
    params = list(params)
    if (valid := _valid_columns(params, topology)) is not None:
        return valid
    found = [_look_up(param, topology, sum_partial) for param in params]
    return [piece for piece, _, _ in found], [grad for _, grad, _ in found], [noted for _, _, noted in found], None


def _valid_columns(params: list[Any], topology: Topology) -> LocalLists | None:
    """Return the cached results of all parameters with their present local gradients; None if a result is not valid.

    The checks are passes over lists in C, because Python code per parameter would be slow.
    """
    members = [*map(_MEMBERS, params)]
    seen: list[_Seen | None] = [of_param.get(SEEN) for of_param in members]
    if not all(seen):
        return None
    grads = [param.grad for param in params]
    try:
        local_grads, grad_layouts = [*map(_LOCAL_TENSOR, grads)], map(_SPEC, grads)
    except AttributeError:
        return None  # a gradient is missing or is a plain tensor
    pieces, annotations, sizes, locals_, layouts, declared, topologies, cached_grad_layouts = zip(*seen, strict=True)
    is_valid = (
        {*map(type, local_grads)} == {Tensor}
        and {*map(id, topologies)} == {id(topology)}
        and all(map(is_, grad_layouts, cached_grad_layouts))
        and all(map(is_, map(_LOCAL_TENSOR, params), locals_))
        and all(map(is_, map(_SPEC, params), layouts))
        and all(map(is_, [of_param.get(ATTRIBUTE) for of_param in members], declared))
    )
    return (list(pieces), local_grads, list(annotations), sizes) if is_valid else None


def _look_up(param: Tensor, topology: Topology, sum_partial: bool) -> tuple[Tensor, Tensor | None, Annotation | None]:
    """Return the local parameter, local gradient and annotation of one parameter.

    The result is cached on a DTensor whose gradient is dense, real and in the placements of the parameter.
    """
    if not isinstance(param, DTensor):
        return param, param.grad, annotation_of(param)
    if (valid := _valid_columns([param], topology)) is not None:
        (piece,), (local_grad,), (annotation,), _ = valid
        return piece, local_grad, annotation
    if sum_partial:
        sum_partial_gradient(param)
    piece, grad = local_parameter(param, topology), param.grad
    annotation, local_grad = annotation_of(piece), local_gradient(param, piece)
    is_plain = local_grad is not None and local_grad.layout == torch.strided and not local_grad.is_complex()
    if is_plain and isinstance(grad, DTensor) and grad.placements == param.placements:
        valid_for = (param._local_tensor, param._spec, annotation_of(param), topology, grad._spec)
        setattr(param, SEEN, _Seen(piece, annotation, grad._local_tensor.numel(), *valid_for))
    return piece, local_grad, annotation
