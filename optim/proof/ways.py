"""How the gradients that ranks have after a backward make up the derivative of the loss, axis by axis.

Every rank moves its part of a parameter along a direction v and takes the product <g, v> with its own gradient. What the
loss changes by is then a sum of these products, and which one it is says what the parameter is along an axis:

    along the axis                moved    products              declared
    a piece                       apart    are summed            P(axis)
    a copy, complete gradient     alike    are the same          P()
    a copy, a term of a sum       alike    are summed            P(partial=axis); tied=, between the ranks that hold it
    one holder                    -        the holder's counts   P(owned={axis: 0})
    a copy on a data axis         alike    are averaged          P()
    a piece on a data axis        apart    are averaged          P(axis): experts
    torch has averaged already    alike    are the same          a DTensor that is replicated over the axis
                                  apart    are summed            a DTensor that is sharded over it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from ...parallel.layout.spec import P
from ...parallel.mesh.topology import Topology

Sum = Literal["sum", "same", "mean"]


@dataclass(frozen=True)
class Along:
    """Of one axis: whether ranks are moved apart, and what becomes of their products."""

    apart: bool
    products: Sum


COPY, TERM, PIECE = Along(False, "same"), Along(False, "sum"), Along(True, "sum")
AVERAGED, AVERAGED_PIECE = Along(False, "mean"), Along(True, "mean")


@dataclass(frozen=True)
class Way:
    """What a parameter is along each axis that is larger than 1."""

    by_axis: tuple[tuple[str, Along], ...]

    @property
    def apart(self) -> tuple[str, ...]:
        """The axes along which ranks are moved apart."""
        return tuple(axis for axis, along in self.by_axis if along.apart)

    def along(self, axis: str) -> Along:
        """What it is along one axis."""
        return dict(self.by_axis)[axis]

    def derivative(self, products: Mapping[int, float], topology: Topology) -> tuple[float, float]:
        """What the products by rank make up together, and by how much ranks differ that should have the same.

        Args:
            products: Of all ranks that hold the parameter.
        """
        same = [axis for axis, along in self.by_axis if along.products == "same"]
        divisor = prod(topology.size(axis) for axis, along in self.by_axis if along.products == "mean")
        sums: dict[tuple[int, ...], float] = {}
        for rank, product in products.items():
            where = tuple(topology.coordinate_of(rank, axis) for axis in same)
            sums[where] = sums.get(where, 0.0) + product / divisor
        found = list(sums.values())
        return sum(found) / len(found), max(found) - min(found)


def larger_axes(topology: Topology) -> tuple[str, ...]:
    """Along which something can differ."""
    return tuple(axis for axis in topology.axes if topology.size(axis) > 1)


def declared_way(spec: P, averaged: Iterable[str], topology: Topology) -> Way:
    """What a spec, in the axes of ``topology``, says.

    Args:
        averaged: The axes over which torch averages or sums a DTensor's gradient, which is complete when backward ends.
    """
    averaged = set(averaged)

    def along(axis: str) -> Along:
        apart = axis in spec.sharded_axes
        if axis in averaged:
            return PIECE if apart else TERM if axis in spec.partial else COPY
        if axis in topology.data_axes:
            return AVERAGED_PIECE if apart else AVERAGED
        if axis in topology.pipe_axes and axis not in spec.named_axes:
            return PIECE  # each stage has parameters of its own
        if apart:
            return PIECE
        return TERM if axis in spec.named_axes else COPY

    return Way(tuple((axis, along(axis)) for axis in larger_axes(topology)))
