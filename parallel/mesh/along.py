"""Which axes of a topology a list of ranks is, whatever somebody else calls it."""

from __future__ import annotations

from itertools import product

from .topology import Topology


def axes_along(ranks: tuple[int, ...], topology: Topology) -> tuple[str, ...] | None:
    """The axes, larger than 1, along which these ranks lie in this order, the first the slowest; None: there are none."""
    strides = {topology.peers(0, axis)[1]: axis for axis in topology.axes if topology.size(axis) > 1}
    found: tuple[str, ...] = ()
    while topology.size(*found) < len(ranks):
        axis = strides.get(ranks[topology.size(*found)] - ranks[0])
        if axis is None or axis in found:
            return None
        found = (axis, *found)
    places = product(*(range(topology.size(axis)) for axis in found))
    at = topology.coordinate(ranks[0])
    grid = tuple(topology.rank(**{**at, **dict(zip(found, place, strict=True))}) for place in places)
    return found if grid == ranks else None
