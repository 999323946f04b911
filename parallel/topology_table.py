"""A topology as text for a terminal: the grid of ranks, and the groups along each axis."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .topology import Topology


def render(topology: Topology, rank: int | None = None) -> str:
    lines = [repr(topology)]
    for axis in topology.axes:
        groups = [topology.peers(rank, axis)] if rank is not None else list(islice(topology.groups(axis), 8))
        lines.append(f"{axis}: {groups}")
    return "\n".join(lines)
