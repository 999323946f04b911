"""Hypothesis strategies for process layouts and what lies on them. They need ``pip install hypothesis``.

@given(layout=layouts(most_ranks=4))
def test_norm(ranks, layout):
    norms = ranks.run(norm_of_pieces, layout.topology.world_size, layout)
    assert norms == pytest.approx([dense_norm(layout)] * len(norms))
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import Literal, NamedTuple, get_args

import torch
from hypothesis import strategies as st

from ..parallel.layout.spec import P
from ..parallel.mesh.topology import Topology

# How a parameter may lie along an axis. Owned by a fixed coordinate, or on a diagonal; copied is what no entry says.
Kind = Literal["copied", "sharded", "partial", "owned", "diagonal", "tied"]
AXES = ("col", "data", "expert", "pipe", "row", "tensor")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Layout(NamedTuple):
    """A mesh, and a logical tensor on it."""

    topology: Topology
    shape: tuple[int, ...]
    spec: P


@st.composite
def topologies(
    draw: st.DrawFn, most_ranks: int = 8, axes: Sequence[str] = AXES, most_axes: int = 4, largest: int = 4
) -> Topology:
    """Some of the axes in any order, of any sizes with at most ``most_ranks`` ranks; roles as their names say.

    Args:
        axes: Names to choose from.
        most_axes: How many are chosen at most; at least one is.
        largest: Size of an axis, at most.
    """
    names = draw(st.permutations(sorted(axes)))[: draw(st.integers(1, min(most_axes, len(axes))))]
    sizes: dict[str, int] = {}
    for name in names:
        room = min(most_ranks // prod(sizes.values()), largest)
        # Two first: what hypothesis shrinks to, and the smallest size with which something can be wrong.
        sizes[name] = draw(st.sampled_from([2, 1, *range(3, room + 1)] if room > 1 else [1]))
    return Topology(roles=None, **sizes)


def shapes(most_dims: int = 3, largest: int = 9, smallest: int = 1) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of up to ``most_dims`` dims, each of ``smallest`` to ``largest`` elements."""
    return st.lists(st.integers(smallest, largest), max_size=most_dims).map(tuple)


def dtypes(among: Sequence[torch.dtype] = DTYPES) -> st.SearchStrategy[torch.dtype]:
    """Of gradients: float32 and the half-precision ones."""
    return st.sampled_from(among)


@st.composite
def specs(
    draw: st.DrawFn,
    topology: Topology,
    shape: Sequence[int],
    kinds: Collection[Kind] = get_args(Kind),
    *,
    uneven: bool = False,
) -> P:
    """Specs of a tensor of ``shape``: along each axis it is copied, or of another one of ``kinds``.

    Data axes neither cut nor own a parameter here, and it is tied along axes with the role ``pipe`` only.

    Args:
        uneven: Dims may be cut that don't divide, as `torch.chunk` does.
    """
    entries: list[list[str]] = [[] for _ in shape]
    partial: list[str] = []
    owned: dict[str, int | str] = {}
    tied: dict[str, tuple[int, ...]] = {}
    pipe, data = topology.pipe_axes, topology.data_axes
    # Sharded twice: it is the kind that leads to the others.
    uses: list[Kind] = [kind for kind in ("copied", "sharded", *get_args(Kind)[1:]) if kind in {*kinds, "copied"}]
    for axis in draw(st.permutations(topology.axes)):
        use, size = draw(st.sampled_from(uses)), topology.size(axis)
        dims = [dim for dim in range(len(shape)) if uneven or _divides(shape[dim], [*entries[dim], axis], topology)]
        cut = [other for other in topology.axes if topology.size(other) <= size and any(other in e for e in entries)]
        if use == "sharded" and dims and axis not in data:
            entries[draw(st.sampled_from(dims))].append(axis)
        elif use == "partial" and axis not in (*pipe, *data):
            partial.append(axis)
        elif use == "diagonal" and axis not in data and cut:
            owned[axis] = draw(st.sampled_from(cut))
        elif use == "owned" and axis not in data:
            owned[axis] = draw(st.integers(0, size - 1))
        elif use == "tied" and axis in pipe:
            tied[axis] = draw(st.sampled_from([(0, -1), (0,), (-1,)]))
    return P(*(tuple(entry) or None for entry in entries), partial=tuple(partial), owned=owned, tied=tied)


@st.composite
def layouts(
    draw: st.DrawFn,
    most_ranks: int = 8,
    axes: Sequence[str] = AXES,
    kinds: Collection[Kind] = get_args(Kind),
    *,
    uneven: bool = False,
) -> Layout:
    """A mesh, a shape, and a spec that fits to both. Arguments as of `topologies` and `specs`."""
    topology = draw(topologies(most_ranks, axes))
    shape = draw(shapes(largest=8))
    return Layout(topology, shape, draw(specs(topology, shape, kinds, uneven=uneven)))


def _divides(length: int, axes: Sequence[str], topology: Topology) -> bool:
    return length % topology.size(*axes) == 0
