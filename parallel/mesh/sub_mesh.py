"""torch's `DeviceMesh` of some axes, on groups that are there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from .topology import Topology

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Groups(Protocol):
    """What is needed of a registry."""

    topology: Topology

    @property
    def device(self) -> torch.device: ...
    def ranks(self, *axes: str) -> tuple[int, ...]: ...
    def group(self, *axes: str) -> dist.ProcessGroup: ...


def sub_mesh(registry: Groups, dims: Sequence[tuple[str, ...]]) -> DeviceMesh:
    """The mesh of this rank's sub-grid, each dim of which is some axes together.

    Raises:
        ValueError: Axes are joined in another order than theirs, or there is no such axis.
    """
    from torch.distributed.device_mesh import DeviceMesh

    topology, names = registry.topology, tuple("_".join(dim) for dim in dims)
    ranks = registry.ranks(*(axis for dim in dims for axis in dim))
    by_dim = [topology.atoms(*dim) for dim in dims]
    if [tuple(axis for axis in topology.axes if axis in dim) for dim in by_dim] != by_dim:
        raise ValueError(
            f"a mesh of {dims} joins axes in another order than theirs ({topology.named()}); write them in that order"
        )
    groups = [registry.group(*dim) for dim in dims]
    if len(dims) == 1:
        return DeviceMesh.from_group(groups[0], registry.device.type, mesh_dim_names=names)
    atoms = [axis for dim in by_dim for axis in dim]
    ordered = [axis for axis in topology.axes if axis in atoms]
    grid = torch.tensor(ranks, dtype=torch.int).reshape([topology.size(axis) for axis in ordered])
    # Contiguous because torch reads the mesh's strides as they lie in memory.
    grid = grid.permute([ordered.index(axis) for axis in atoms]).contiguous()
    grid = grid.reshape([topology.size(*dim) for dim in by_dim])
    return DeviceMesh.from_group(groups, registry.device.type, mesh=grid, mesh_dim_names=names)
