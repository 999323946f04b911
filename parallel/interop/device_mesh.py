"""The dims of a DTensor's device mesh as axes of the topology, whatever they are called."""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from ..layout.annotation import annotation_of
from ..mesh.along import axes_along
from ..mesh.refinement import ranks_along
from ..mesh.topology import Topology


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
