"""Create a process-group registry from the device meshes of DTensors, which determine the mesh axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from ..mesh.topology import Role, Topology, axes_along, default_role, has_default_role
from .local_parameters import fully_shard_meshes, loaded_class

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class _Inferred(NamedTuple):
    """A registry, the device meshes from which it was inferred, and the default process group at that time (or None)."""

    world: object
    meshes: tuple[DeviceMesh, ...]
    registry: ProcessGroupRegistry


class _View(NamedTuple):
    """The device meshes and parameters of one rank.

    Args:
        dims: The dims of the meshes.
        sliced_off: The other dims of the meshes from which they were sliced.
        averaged: The ranks along each mesh dim over which `fully_shard` averages gradients.
        parameters: A (placements, shape) pair per parameter.
    """

    dims: list[Dim]
    sliced_off: list[Dim]
    averaged: list[tuple[int, ...]]
    parameters: tuple[tuple[str, tuple[int, ...]], ...]


_known: list[_Inferred] = []


def infer_registry(
    params: Sequence[Tensor], *, any_roles: bool = False, averaging: Sequence[DeviceMesh] = ()
) -> ProcessGroupRegistry:
    """Return a new registry whose axes are the common refinement of the DTensors' device meshes.

    `Topology.of_meshes` describes the common refinement. The meshes may be slices of a mesh, flattened meshes, or meshes of
    some of the ranks, such as one mesh per pipeline stage. If a mesh is a slice, the other dims of the mesh from which it
    was sliced become axes too. Ranks that no mesh connects form a further axis. An axis that no DTensor's mesh has, and
    whose name has no default role, is a data axis if the parameters along it have the same placements and shapes, else a
    pipeline axis.

    Args:
        params: This rank's parameters: DTensors and plain tensors.
        any_roles: True: an axis whose names have different default roles, such as ``tp`` of one mesh and ``edp`` of another
            mesh, is a model axis. This is right if nothing is averaged, as in clipping. Default: False.
        averaging: Meshes over which `fully_shard` averages gradients. Their dims become data axes, unless their names have
            another default role. Default: none.
    Raises:
        ValueError: On every rank: the meshes have no common refinement; or without ``any_roles``, the names of an axis
            have different default roles.
    Collectives: one object all-gather over the world, so every rank must call it. None without ``torch.distributed``, which
    gives the registry of one rank.
    Host synchronization: yes.
    """
    if not dist.is_initialized():
        return ProcessGroupRegistry(Topology())
    return ProcessGroupRegistry(_topology(gathered(lambda: _view(params, averaging)), any_roles))


def registry_of_meshes(params: Sequence[Tensor]) -> ProcessGroupRegistry:
    """Return the registry that `infer_registry` returned for the first parameters with the same device meshes.

    The registry is for norms and clipping: it has ``any_roles``.

    The first call with these meshes calls `infer_registry`. Later calls return the same registry object.

    Raises: As in `infer_registry`, in the first call.
    Collectives: those of `infer_registry` in the first call with these meshes, which all ranks must make at the same point;
    none in later calls.
    Host synchronization: in the first call.
    """
    meshes = _meshes_of(params)
    world = dist.group.WORLD if dist.is_initialized() else None
    for known in _known:
        if known.world is world and len(known.meshes) == len(meshes) and all(map(is_, known.meshes, meshes)):
            return known.registry
    registry = infer_registry(params, any_roles=True)
    _known[:] = [known for known in _known if known.world is world]  # registries of earlier default groups are invalid
    _known.append(_Inferred(world, meshes, registry))
    return registry


def registry_for(model: nn.Module) -> ProcessGroupRegistry:
    """Return the registry of `infer_registry` for a model, and declare its undeclared parameters ``P()``, as replicated.

    For a DTensor, this declares it replicated over all axes outside its device mesh.

    For a Transformers model that `from_pretrained` has sharded, `transformers.registry_of` is called instead.

    Args:
        model: A model with DTensors, or a model whose ranks hold replicas or pipeline stages.
    Raises, collectives, host synchronization: as in `infer_registry` and `registry_of`.
    """
    if any(vars(module).get("_mesh_manager") is not None for module in model.modules()):
        from .transformers import registry_of

        return registry_of(model)
    registry = infer_registry([*model.parameters()], averaging=fully_shard_meshes(model))
    for name, param in model.named_parameters():
        if annotation_of(param) is None:
            annotate(param, P(), without_wrappers(name))
    return registry


def averaging_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules within ``model`` that average gradients, except those inside another module that does.

    These are `DistributedDataParallel` modules, and modules to which `fully_shard` was applied.
    """
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
    dtensors = [param for param in params if isinstance(param, kind)]
    found = {id(mesh): mesh for mesh in map(attrgetter("_spec.mesh"), dtensors)}
    return tuple(found.values())


def _view(params: Sequence[Tensor], averaging: Sequence[DeviceMesh]) -> _View:
    """Return the `_View` of this rank. Dims of meshes without dim names are called as in `dim_names`."""
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
    """Return the topology with the largest axes of which every mesh dim is a product, and an axis between the meshes.

    If no such axes exist, the dims in `_View.sliced_off` are left out, because no DTensor is on them.
    """
    if any(view.sliced_off for view in views):
        with suppress(ValueError):
            return _refined_topology(views, [[*view.dims, *view.sliced_off] for view in views], any_roles)
    return _refined_topology(views, [view.dims for view in views], any_roles)


def _refined_topology(views: Sequence[_View], dims: Sequence[Sequence[Dim]], any_roles: bool) -> Topology:
    """Return the topology whose axes are the common refinement of ``dims``, which has a list per rank."""
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
    if any_roles:
        roles.update({axis: "model" for axis in axes if axis not in roles and default_role(axis, aliases) is None})
    topology = Topology(roles=roles, aliases=aliases, **axes)
    averaged = [ranks for view in views for ranks in view.averaged]
    for axis in dict.fromkeys(axis for ranks in averaged for axis in axes_along(ranks, topology) or ()):
        if axis not in roles and not has_default_role(axis, aliases):
            roles[axis] = "data"
    return Topology(roles=roles, aliases=aliases, **axes)


def _role_along(ranks: Sequence[int], views: Sequence[_View]) -> Role:
    """Return "pipe" if the parameters of these ranks have different placements or shapes, else "data"."""
    return "pipe" if len({views[rank].parameters for rank in ranks}) > 1 else "data"


def _with_unique_names(views: Sequence[Sequence[Dim]]) -> list[list[Dim]]:
    """Return the mesh dims per rank. Dims with equal names but groups of different sizes or strides get different names.

    `check_mesh` later finds the axes of a renamed dim by its ranks.
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
