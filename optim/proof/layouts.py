"""The spec that says what was found of a parameter, ready for `declare`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

from ...parallel.layout.spec import P
from ...parallel.mesh.topology import Topology
from .measured import Known
from .ways import Way

Shape = tuple[int, ...]
Beside = Mapping[str, tuple[Shape, bool]]


def spec_of_way(known: Known, way: Way, topology: Topology, beside: Beside) -> tuple[P, bool]:
    """The spec, and whether it is told which dims are cut; the norm and the step are right in either case.

    Args:
        beside: Of the other parameters of its module the local shape, and whether they are cut over the same axes.
    """
    partial, owned, tied, cutting = [], dict[str, int | str](), dict[str, tuple[int, ...]](), []
    for axis, along in way.by_axis:
        held = known.coordinates(axis, topology)
        if along.apart:
            if axis not in topology.pipe_axes:
                cutting.append(axis)
        elif len(held) == 1:
            if axis not in topology.pipe_axes:
                owned[axis] = held[0]
        elif len(held) < topology.size(axis) or (axis in topology.pipe_axes and along.products == "sum"):
            tied[axis] = held
        elif along.products == "sum" and axis not in topology.data_axes:
            partial.append(axis)
    for axis, other in _diagonals(known, cutting, topology):
        cutting = [cut for cut in cutting if cut != axis]
        owned[axis] = other
    entries, told = _entries(known, cutting, topology, beside)
    return P(*entries, partial=tuple(partial), owned=owned, tied=tied), told


def _diagonals(known: Known, cutting: Sequence[str], topology: Topology) -> Iterator[tuple[str, str]]:
    """(axis, the axis whose coordinate is the owner's) where holders lie on a diagonal."""
    done: set[str] = set()
    for other in cutting:
        for axis in cutting:
            pairs = {(topology.coordinate_of(rank, axis), topology.coordinate_of(rank, other)) for rank in known.seen}
            if axis != other and not {axis, other} & done and all(a == b for a, b in pairs):
                done |= {axis, other}
                yield axis, other


def _entries(
    known: Known, cutting: Sequence[str], topology: Topology, beside: Beside
) -> tuple[list[tuple[str, ...]], bool]:
    """Of each dim the axes that cut it, and whether that is told."""
    shape = known.first.shape
    dims = len(shape)
    if not cutting:
        return [], True
    fitting = list(cuts_that_fit(known, cutting, topology))
    told = len(fitting) == 1
    if not told and known.full is None and dims == 2 and len(cutting) == 1:
        # As in nn.Linear, dim 0 makes the output features: a bias of as many elements is cut where it is, or whole.
        biases = [cut for length, cut in beside.values() if length == shape[:1]]
        if biases:
            fitting, told = [(0,) if biases[0] else (1,)], True
    chosen = fitting[0] if fitting else (0,) * len(cutting)
    entries = [tuple(axis for axis, at in zip(cutting, chosen, strict=True) if at == dim) for dim in range(dims)]
    return entries, told


def cuts_that_fit(known: Known, cutting: Sequence[str], topology: Topology) -> Iterator[tuple[int, ...]]:
    """For each of the axes the dim that it may cut, by the shape of the logical tensor: all dims where that is unknown."""
    for dims in product(range(len(known.first.shape)), repeat=len(cutting)):
        parts = [
            prod(topology.size(axis) for axis, at in zip(cutting, dims, strict=True) if at == dim)
            for dim in range(len(known.first.shape))
        ]
        largest = [max(lengths) for lengths in zip(*(seen.shape for seen in known.seen.values()), strict=True)]
        whole = zip(known.full or (), parts, strict=True) if known.full is not None else None
        if whole is None or [-(-length // by) for length, by in whole] == largest:
            yield dims
