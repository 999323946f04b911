"""What a parameter may be along its axes, by who holds it and whether their values are equal, the likeliest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ...parallel.mesh.topology import Topology
from .layouts import cuts_that_fit, cutting_axes
from .measured import Known
from .ways import AVERAGED, AVERAGED_PIECE, COPY, PIECE, TERM, Along, Way, larger_axes


def candidates(known: Known, topology: Topology, split: Sequence[str], first: Way | None) -> Iterator[Way]:
    """Every way that the values leave open.

    Args:
        split: The axes that certainly split another parameter of the same module; where values are constant, and don't
            tell a piece from a term of a sum, it is then the piece that is likelier.
        first: Tried first: what is declared.
    """
    if first is not None:
        yield first
    axes = larger_axes(topology)
    choices = [_along(known, axis, topology, axis in split) for axis in axes]
    # What is odd along a data axis, whose gradients the optimizer averages, is likelier so along another of its size.
    odd = [axis in topology.data_axes for axis in axes]
    for chosen in sorted(product(*map(range, map(len, choices))), key=lambda chosen: _count(chosen, odd)):
        way = Way(tuple((axis, choice[at]) for axis, choice, at in zip(axes, choices, chosen, strict=True)))
        cutting = cutting_axes(known, way, topology)
        if way != first and (known.full is None or any(True for _ in cuts_that_fit(known, cutting, topology))):
            yield way


def _count(chosen: Sequence[int], odd: Sequence[bool]) -> int:
    return sum(1 for at, counts in zip(chosen, odd, strict=True) if at and counts)


def _along(known: Known, axis: str, topology: Topology, split: bool) -> tuple[Along, ...]:
    if len(known.coordinates(axis, topology)) == 1:
        return (AVERAGED_PIECE, TERM) if axis in topology.data_axes else (TERM,)  # one holder, whose product counts
    if not known.shared_along(axis, topology) or not known.equal_along(axis, topology):
        return (AVERAGED_PIECE, PIECE) if axis in topology.data_axes else (PIECE,)
    alike: tuple[Along, ...] = (AVERAGED, COPY, TERM) if axis in topology.data_axes else (COPY, TERM)
    if not known.constant:
        return alike
    pieces = (AVERAGED_PIECE, PIECE) if axis in topology.data_axes else (PIECE,)
    return (*pieces, *alike) if split or known.full is not None else (*alike, *pieces)


def split_beside(known: Known, everything: Sequence[Known], topology: Topology) -> tuple[str, ...]:
    """The axes along which another parameter of its module has pieces: held by all, with values that differ."""
    beside = [
        other
        for other in everything
        if other is not known and other.module == known.module and other.stage == known.stage
    ]
    return tuple(
        axis for axis in larger_axes(topology) if any(not other.equal_along(axis, topology) for other in beside)
    )
