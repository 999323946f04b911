"""Create a process-group registry whose mesh axes are derived from the device meshes of a model's DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from ..layout.annotation import annotate, annotation_of
from ..layout.spec import P
from ..mesh.refinement import Dim, dims_of, gathered, refined
from ..mesh.registry import ProcessGroupRegistry
from ..mesh.text import without_wrappers
from ..mesh.topology import Role, Topology, axes_along, default_role, has_default_role, names_of
from .local_parameters import fully_shard_meshes, loaded_class

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class _Inferred(NamedTuple):
    """A registry, the device meshes from which its axes were derived, and the default process group at that time."""

    world: object
    meshes: tuple[DeviceMesh, ...]
    registry: ProcessGroupRegistry


class _View(NamedTuple):
    """The device meshes and parameters of one rank, in a form that ranks can exchange.

    Attributes:
        sliced_off: If the mesh of a DTensor is a slice of a larger mesh, the other mesh dims of the larger mesh.
        averaged: For each mesh dim over which `fully_shard` averages gradients, the global ranks along it.
        parameters: Per parameter, its placements as text ("" for a plain tensor) and its shape.
    """

    dims: list[Dim]
    sliced_off: list[Dim]
    averaged: list[tuple[int, ...]]
    parameters: tuple[tuple[str, tuple[int, ...]], ...]


_known: list[_Inferred] = []  # registries that `registry_of_meshes` has created


def _infer(view: Callable[[], _View], any_roles: bool) -> ProcessGroupRegistry:
    """Return a new registry whose axes are derived from the device meshes of DTensors.

    The axes are the largest such that every mesh dim is one axis or a product of axes (see `Topology.of_meshes`). The
    meshes may be slices of a mesh, flattened meshes, or meshes of some of the ranks, such as one mesh per pipeline stage.
    If a mesh is a slice of a larger mesh, the other dims of the larger mesh become axes too, if possible. If no mesh dim
    connects some ranks, such as different stages, they are connected by a further axis.

    The role of an axis is the default role of its name (see `Topology`). If the name has none, an axis over which
    `fully_shard` averages gradients is a data axis. Another axis that is on no DTensor's mesh is a data axis if the
    parameters of the ranks along it have the same placements and shapes, else a pipeline axis. Every other axis is a
    model axis.

    Args:
        view: Returns this rank's meshes and parameters. If it raises on a rank, all ranks raise.
        any_roles: True: an axis whose names have different default roles, such as ``tp`` of one mesh and ``edp`` of another
            mesh, is a model axis. This is right if nothing is averaged, as in clipping. False: such an axis is an error.
    Collectives: one object all-gather over the world. If ``torch.distributed`` is not initialized there is none, and the
    registry has one rank.
    """
    if not dist.is_initialized():
        return ProcessGroupRegistry(Topology())
    return ProcessGroupRegistry(_topology(gathered(view), any_roles))


def registry_of_meshes(params: Sequence[Tensor]) -> ProcessGroupRegistry:
    """Return the registry for the device meshes of ``params``, for norms and clipping.

    The first call with these mesh objects derives the axes from the meshes, and caches the registry. If meshes have
    different names for an axis, with different default roles (such as ``tp`` and ``edp``), it is a model axis. Later calls
    return the cached registry, until the default process group is replaced.

    Collectives: in the first call with these meshes, one object all-gather over the world, so all ranks must make this call
    at the same point. None in later calls, or if ``torch.distributed`` is not initialized.
    Host synchronization: yes, if there is a collective.
    """
    meshes = _meshes_of(params)
    world = dist.group.WORLD if dist.is_initialized() else None
    for known in _known:
        if known.world is world and len(known.meshes) == len(meshes) and all(map(is_, known.meshes, meshes)):
            return known.registry
    registry = _infer(lambda: _view(params, ()), any_roles=True)
    _known[:] = [known for known in _known if known.world is world]  # registries of earlier default groups are invalid
    _known.append(_Inferred(world, meshes, registry))
    return registry


def registry_for(model: nn.Module) -> ProcessGroupRegistry:
    """Return a registry derived from the device meshes of a model, and declare the model's undeclared parameters ``P()``.

    ``P()`` declares a plain parameter replicated. It declares a DTensor replicated over all axes outside its device mesh.
    For a model that contains a Transformers model sharded by `from_pretrained`, the function returns
    `transformers.registry_of` of the model instead. Call the function on all ranks.

    Raises:
        ValueError: On every rank: no axes exist of which all mesh dims are products; the names of an axis have different
            default roles; or the name of a mesh dim can't be the name of an axis.
        TypeError: ``model`` is not a module. Other ranks raise ValueError.
    Collectives: one object all-gather over the world. None for a Transformers model, or if ``torch.distributed`` is not
    initialized.
    Host synchronization: yes, if there is a collective.
    """
    is_module = isinstance(model, nn.Module)
    if is_module and any(vars(module).get("_mesh_manager") is not None for module in model.modules()):
        from .transformers import registry_of

        return registry_of(model)

    def view() -> _View:
        if not is_module:
            raise TypeError(f"the model is a {type(model).__name__}; give the nn.Module that has the parameters")
        return _view([*model.parameters()], fully_shard_meshes(model))

    if not is_module and not dist.is_initialized():
        view()  # raises TypeError here; with process groups the gather raises it, so that no other rank waits
    registry = _infer(view, any_roles=False)
    for name, param in model.named_parameters():
        if annotation_of(param) is None:
            annotate(param, P(), without_wrappers(name))
    return registry


def averaging_modules(model: nn.Module) -> list[nn.Module]:
    """Return the outermost `DistributedDataParallel` and `fully_shard` modules of ``model``, which average gradients."""
    names = (("torch.nn.parallel.distributed", "DistributedDataParallel"), ("torch.distributed.fsdp", "FSDPModule"))
    kinds = tuple(kind for kind in (loaded_class(*name) for name in names) if kind is not None)
    found = [module for module in model.modules() if isinstance(module, kinds)]
    inner = {id(other) for module in found for other in module.modules() if other is not module}
    return [module for module in found if id(module) not in inner]


def _meshes_of(params: Iterable[Tensor]) -> tuple[DeviceMesh, ...]:
    """Return the distinct device meshes of the DTensors in ``params``, in the order of their first use."""
    kind: Any = loaded_class("torch.distributed.tensor", "DTensor")
    if kind is None:
        return ()
    params = list(params)
    # `map` and a set of types are used, because a Python loop over thousands of parameters would be slow.
    if all(issubclass(cls, kind) for cls in {*map(type, params)}):
        dtensors = params
    else:
        dtensors = [param for param in params if isinstance(param, kind)]
    found = {id(mesh): mesh for mesh in map(attrgetter("_spec.mesh"), dtensors)}
    return tuple(found.values())


def _view(params: Sequence[Tensor], averaging: Sequence[DeviceMesh]) -> _View:
    """Return this rank's `_View`. Over the meshes ``averaging``, `fully_shard` averages gradients."""
    # Mesh dims with equal names and ranks count as one dim, even if they are dims of different meshes.
    meshes = _meshes_of(params)
    dims = dict.fromkeys(dim._replace(mesh=0) for dim in dims_of(meshes, need_names=False))
    roots = [root for root in map(_root_of, meshes) if root.mesh_dim_names is not None]
    others = dict.fromkeys(dim for dim in (dim._replace(mesh=0) for dim in dims_of(roots)) if dim not in dims)
    layouts = tuple((str(getattr(param, "placements", "")), tuple(param.shape)) for param in params)
    averaged = [dim.ranks for dim in dims_of(averaging, need_names=False)]
    return _View(list(dims), list(others), averaged, layouts)


def _root_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of which ``mesh`` is a slice, or ``mesh``. torch has no public function for it."""
    root_of = getattr(mesh, "_get_root_mesh", None)
    return mesh if root_of is None else root_of()


def _topology(views: Sequence[_View], any_roles: bool) -> Topology:
    """Return the topology of all ranks' device meshes, as `_infer` describes; ``views`` is indexed by global rank.

    If no common axes exist, the dims in `_View.sliced_off` are left out, because no DTensor is on them.
    """
    if any(view.sliced_off for view in views):
        with suppress(ValueError):
            return _refined_topology(views, [[*view.dims, *view.sliced_off] for view in views], any_roles)
    return _refined_topology(views, [view.dims for view in views], any_roles)


def _refined_topology(views: Sequence[_View], dims: Sequence[Sequence[Dim]], any_roles: bool) -> Topology:
    """Return the topology with the largest axes of which every mesh dim in ``dims`` (per global rank) is a product."""
    roles: dict[str, Role] = {}

    def name_of(ranks: Sequence[int]) -> str:
        role = _role_along(ranks, views)
        kind = "stage" if role == "pipe" else "replica"
        name = f"{kind}_{'x'.join(map(str, (len(ranks), ranks[1] - ranks[0])))}"
        roles[name] = role
        return name

    axes, aliases = refined(_with_unique_names(dims), name_of)
    in_meshes = {dim.name for view in views for dim in view.dims}
    for dim in (dim for view in views for dim in view.sliced_off if dim.name in axes and dim.name not in in_meshes):
        if not has_default_role(dim.name, aliases):
            roles[dim.name] = "pipe" if "pipe" in (roles.get(dim.name), _role_along(dim.ranks, views)) else "data"
    ambiguous = [axis for axis in axes if axis not in roles and default_role(axis, aliases) is None]
    if ambiguous and not any_roles:
        names = " and ".join(map(repr, names_of(ambiguous[0], aliases)))
        raise ValueError(
            f"mesh dims {names} are along the same ranks, but their names have more than one role; use "
            "ParallelOptimizer(optimizer, registry) instead of for_model, with "
            f"ProcessGroupRegistry(Topology.of_meshes(mesh, other_mesh, roles={{{ambiguous[0]!r}: 'model'}})), or the role "
            "'data' if these ranks process different samples"
        )
    roles.update(dict.fromkeys(ambiguous, "model"))
    topology = Topology(roles=roles, aliases=aliases, **axes)
    averaged = [ranks for view in views for ranks in view.averaged]
    for axis in dict.fromkeys(axis for ranks in averaged for axis in axes_along(ranks, topology) or ()):
        if axis not in roles and not has_default_role(axis, aliases):
            roles[axis] = "data"
    return Topology(roles=roles, aliases=aliases, **axes)


def _role_along(ranks: Sequence[int], views: Sequence[_View]) -> Role:
    """Return "pipe" if two of ``ranks`` have parameters with different placements or shapes, else "data"."""
    return "pipe" if len({views[rank].parameters for rank in ranks}) > 1 else "data"


def _with_unique_names(views: Sequence[Sequence[Dim]]) -> list[list[Dim]]:
    """Return ``views``, the mesh dims per rank, with unique names.

    Dims with the same name, whose groups of ranks have different sizes or strides, get different names, such as
    ``tp_on_mesh_0`` and ``tp_on_mesh_1``. `dtensor.check_mesh` later finds the axes of a renamed dim by its ranks.
    """
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for dims in views:
        for dim in dims:
            known = shapes.setdefault(dim.name, [])
            if _offsets(dim) not in known:
                known.append(_offsets(dim))

    def renamed(dim: Dim) -> Dim:
        known = shapes[dim.name]
        number = known.index(_offsets(dim))
        return dim._replace(mesh=number, name=f"{dim.name}_on_mesh_{number}" if len(known) > 1 else dim.name)

    return [[renamed(dim) for dim in dims] for dims in views]


def _offsets(dim: Dim) -> tuple[int, ...]:
    return tuple(rank - dim.ranks[0] for rank in dim.ranks)
