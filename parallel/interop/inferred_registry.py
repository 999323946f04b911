"""The process-group registry that DTensors imply: their device meshes say how the ranks of the world are arranged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from ..layout.annotation import annotate, annotation_of
from ..layout.spec import P
from ..mesh.refinement import Dim, dims_of, refined
from ..mesh.registry import ProcessGroupRegistry
from ..mesh.text import without_wrappers
from ..mesh.topology import Role, Topology
from .local_parameters import loaded_class

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class _Inferred(NamedTuple):
    """A registry, the default process group, and the meshes from which it was inferred."""

    world: object
    meshes: tuple[DeviceMesh, ...]
    registry: ProcessGroupRegistry


class _View(NamedTuple):
    """The mesh dims that contain one rank, and what its parameters look like."""

    dims: list[Dim]
    parameters: tuple[tuple[str, tuple[int, ...]], ...]


_known: list[_Inferred] = []


def infer_registry(params: Sequence[Tensor]) -> ProcessGroupRegistry:
    """Return a new registry whose axes are those of the DTensors' device meshes.

    The axes are the common refinement of all meshes (see `Topology.of_meshes`). These may be slices of a mesh, flattened
    meshes, or meshes over some of the ranks, such as one per pipeline stage. Ranks that no mesh connects hold replicas if
    their parameters have the same layouts and shapes; else they are pipeline stages.

    Args:
        params: This rank's parameters, DTensors and plain ones.
    Raises:
        ValueError: On every rank: a mesh has no dim names, or the meshes have no common refinement.
    Collectives: one object all-gather over the world. Every rank must call it.
    Host synchronization: yes.
    """
    if not dist.is_initialized():
        return ProcessGroupRegistry(Topology())
    return ProcessGroupRegistry(_topology(_gathered(params, _meshes_of(params))))


def registry_of_meshes(params: Sequence[Tensor]) -> ProcessGroupRegistry:
    """Return the registry of `infer_registry` for the first parameters with these meshes, also for later ones.

    Raises: As `infer_registry`.
    Collectives: those of `infer_registry` if this rank's meshes are new; then they must be new on every rank.
    Host synchronization: in such calls.
    """
    meshes = _meshes_of(params)
    world = dist.group.WORLD if dist.is_initialized() else None
    for known in _known:
        if known.world is world and len(known.meshes) == len(meshes) and all(map(_is_same, known.meshes, meshes)):
            return known.registry
    registry = infer_registry(params)
    _known[:] = [known for known in _known if known.world is world]  # an older world has ended
    _known.append(_Inferred(world, meshes, registry))
    return registry


def registry_for(model: nn.Module) -> ProcessGroupRegistry:
    """Return the registry that a model's DTensors imply, and declare its other parameters replicated.

    Earlier declarations are kept. A Transformers model that `from_pretrained` has sharded has the registry of its meshes
    (`registry_of`).

    Args:
        model: A model with DTensors, or one whose ranks hold replicas or pipeline stages.
    Raises, collectives, host synchronization: as `infer_registry` and `registry_of`.
    """
    if any(vars(module).get("_mesh_manager") is not None for module in model.modules()):
        from .transformers import registry_of

        return registry_of(model)
    registry = infer_registry([*model.parameters()])
    for name, param in model.named_parameters():
        if annotation_of(param) is None:
            annotate(param, P(), without_wrappers(name))
    return registry


def averaging_modules(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that average gradients: `DistributedDataParallel` and `fully_shard` modules."""
    names = (("torch.nn.parallel.distributed", "DistributedDataParallel"), ("torch.distributed.fsdp", "FSDPModule"))
    kinds = tuple(kind for kind in (loaded_class(*name) for name in names) if kind is not None)
    found = [module for module in model.modules() if isinstance(module, kinds)]
    inner = {id(other) for module in found for other in module.modules() if other is not module}
    return [module for module in found if id(module) not in inner]


def _is_same(one: object, other: object) -> bool:
    return one is other


def _meshes_of(params: Iterable[Tensor]) -> tuple[DeviceMesh, ...]:
    """Return the device meshes of the DTensors, in the order of their first DTensor."""
    kind: Any = loaded_class("torch.distributed.tensor", "DTensor")
    if kind is None:
        return ()
    dtensors = [param for param in params if isinstance(param, kind)]
    found = {id(mesh): mesh for mesh in map(attrgetter("_spec.mesh"), dtensors)}
    return tuple(found.values())


def _gathered(params: Sequence[Tensor], meshes: Sequence[DeviceMesh]) -> list[_View]:
    """Return each rank's view. Raises, collectives: as `infer_registry`."""
    mine: _View | str
    try:
        # Dims of equal names are one dim, on whatever meshes they are.
        dims = dict.fromkeys(dim._replace(mesh=0) for dim in dims_of(meshes))
        mine = _View(list(dims), tuple((str(getattr(param, "placements", "")), tuple(param.shape)) for param in params))
    except ValueError as problem:
        mine = str(problem)
    views: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(views, mine)
    for view in views:
        if isinstance(view, str):
            raise ValueError(view)
    return views


def _topology(views: Sequence[_View]) -> Topology:
    """Return the topology that all ranks' views imply, equal on all ranks."""
    stages: list[str] = []

    def name_of(ranks: Sequence[int]) -> str:
        is_stage = len({views[rank].parameters for rank in ranks}) > 1
        name = f"{'stage' if is_stage else 'replica'}_{'x'.join(map(str, (len(ranks), ranks[1] - ranks[0])))}"
        if is_stage:
            stages.append(name)
        return name

    axes, aliases = refined(_with_unique_names([view.dims for view in views]), name_of)
    roles: dict[str, Role] = dict.fromkeys(stages, "pipe")
    return Topology(
        roles={**roles, **{name: "data" for name in axes if name.startswith("replica_")}}, aliases=aliases, **axes
    )


def _with_unique_names(views: Sequence[Sequence[Dim]]) -> list[list[Dim]]:
    """Return the dims, with other names where dims of equal names have groups of other sizes or strides.

    The DTensors of such dims are matched with axes by their ranks.
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
