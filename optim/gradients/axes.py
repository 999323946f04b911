"""Over which ranks a gradient must be summed before it is whole, and what it is divided by.

The loss is taken to be the mean over the data axes of what each rank computed. So every gradient is divided by the size
of all data axes and summed over those that do not shard the parameter, over its partial axes and over its tied copies:

    grad = 1/|data| * sum over (data axes not sharding it) x (partial axes) x (tied copies) of the local gradient

Data axes over which a DTensor's gradient has been averaged already (`fully_shard` does) are left out of both.
"""

from __future__ import annotations

from math import prod

from ...parallel.layout.spec import P
from ...parallel.mesh.topology import Topology
from ..norm.plan import Bucket


def sync_axes(spec: P, topology: Topology, average_data: bool, averaged: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The axes over which a gradient must be summed before it is whole (a tied axis: over its tied coordinates)."""
    spec = spec.on(topology)
    done = {*spec.named_axes, *averaged}
    data = [axis for axis in topology.data_axes if axis not in done] if average_data else []
    named = {*data, *spec.partial, *dict(spec.tied)}
    return tuple(axis for axis in topology.axes if axis in named)


def sync_ranks(
    spec: P, topology: Topology, rank: int, average_data: bool, averaged: tuple[str, ...] = ()
) -> tuple[int, ...]:
    """The ranks, ascending, whose gradients are summed into the one that ``rank`` has of a parameter laid out so."""
    spec = spec.on(topology)
    peers = topology.peers(rank, *sync_axes(spec, topology, average_data, averaged))
    if not spec.tied:
        return tuple(peers)
    where = {axis: spec.tied_coordinates(axis, topology) for axis, _ in spec.tied}
    return tuple(peer for peer in peers if all(topology.coordinate_of(peer, axis) in where[axis] for axis in where))


def layout_kind(spec: P, topology: Topology) -> Bucket:
    """The kind of layout, of which one flat bucket holds parameters; axes of size 1 distinguish nothing."""
    kind, large = Bucket.of(spec, topology), {axis for axis in topology.axes if topology.size(axis) > 1}
    return Bucket(
        tuple(axis for axis in kind.distinct if axis in large),
        tuple((axis, index) for axis, index in kind.owned if axis in large),
        tuple((axis, where) for axis, where in kind.tied if axis in large),
    )


def sync_scale(topology: Topology, average_data: bool, averaged: tuple[str, ...] = ()) -> float:
    """What the local gradient is multiplied by before it is summed."""
    data = [axis for axis in topology.data_axes if axis not in averaged] if average_data else []
    return 1 / prod(topology.size(axis) for axis in data)
