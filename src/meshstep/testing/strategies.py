"""Hypothesis strategies for topologies and parameter layouts.

    @given(layout=layouts(most_ranks=4))
    def test_norm(ranks, layout):
        norms = ranks.run(norm_of_shards, layout.topology.world_size, layout)
        assert norms == pytest.approx([dense_norm(layout)] * len(norms))

The strategies need ``pip install hypothesis``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import Literal, NamedTuple, get_args

import torch
from hypothesis import strategies as st

from ..parallel.layout.spec import P
from ..parallel.mesh.topology import Topology

# Layouts of a parameter over one axis. "copied": replicated. "owned": only ranks at one coordinate of the axis hold the
# parameter. "diagonal": only ranks with equal coordinates on this axis and on another axis hold the parameter.
Kind = Literal["copied", "sharded", "partial", "owned", "diagonal", "tied"]
AXES = ("col", "data", "expert", "pipe", "row", "tensor")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Layout(NamedTuple):
    """A topology, and the shape and spec of a full tensor on it."""

    topology: Topology
    shape: tuple[int, ...]
    spec: P


@st.composite
def topologies(
    draw: st.DrawFn, most_ranks: int = 8, axes: Sequence[str] = AXES, most_axes: int = 4, largest: int = 4
) -> Topology:
    """Return a strategy that draws a topology: some of the axes, in any order, with random sizes and default roles.

    Args:
        most_ranks: Largest number of ranks. Default: 8.
        axes: Names to choose from. Default: `AXES`.
        most_axes: Largest number of axes; a topology has at least one axis. Default: 4.
        largest: Largest size of an axis. Default: 4.
    """
    names = draw(st.permutations(sorted(axes)))[: draw(st.integers(1, min(most_axes, len(axes))))]
    sizes: dict[str, int] = {}
    for name in names:
        room = min(most_ranks // prod(sizes.values()), largest)
        # 2 is first, because hypothesis shrinks to the first value, and 2 is the smallest size that can reveal an error.
        sizes[name] = draw(st.sampled_from([2, 1, *range(3, room + 1)] if room > 1 else [1]))
    return Topology(roles=None, **sizes)


def shapes(most_dims: int = 3, largest: int = 9, smallest: int = 1) -> st.SearchStrategy[tuple[int, ...]]:
    """Return a strategy that draws tensor shapes.

    Args:
        most_dims: Largest number of dims; a shape may have no dims. Default: 3.
        largest: Largest length of a dim. Default: 9.
        smallest: Smallest length of a dim. Default: 1.
    """
    return st.lists(st.integers(smallest, largest), max_size=most_dims).map(tuple)


def dtypes(among: Sequence[torch.dtype] = DTYPES) -> st.SearchStrategy[torch.dtype]:
    """Return a strategy that draws one of the dtypes ``among``; by default float32, bfloat16 or float16."""
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
    """Return a strategy that draws a spec. Over each axis the tensor is replicated, or has a layout from ``kinds``.

    Over data-parallel axes the tensor is always replicated. It is tied only over pipeline axes. Along a pipeline axis that
    the spec does not name, stages hold different tensors.

    Args:
        topology: Provides the axes.
        shape: Shape of the full tensor.
        kinds: The layouts over one axis to choose from. Default: all. Replicated (``"copied"``) is always possible.
        uneven: True: also shard dims whose length is not a multiple of the axes' sizes. False: all shards have equal shape.
    """
    entries: list[list[str]] = [[] for _ in shape]
    partial: list[str] = []
    owned: dict[str, int | str] = {}
    tied: dict[str, tuple[int, ...]] = {}
    pipe, data = topology.pipe_axes, topology.data_axes
    # "sharded" is listed twice, so that it is drawn more often, because "diagonal" needs another axis that is sharded.
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
    """Return a strategy that draws a `Layout`: a topology, a shape, and a spec that fits both.

    Args:
        most_ranks: Largest number of ranks. Default: 8.
        axes: Names of axes to choose from. Default: `AXES`.
        kinds: The layouts over one axis to choose from. Default: all. Replicated is always possible.
        uneven: True: also shard dims whose length is not a multiple of the axes' sizes. False: all shards have equal shape.
    """
    topology = draw(topologies(most_ranks, axes))
    shape = draw(shapes(largest=8))
    return Layout(topology, shape, draw(specs(topology, shape, kinds, uneven=uneven)))


def _divides(length: int, axes: Sequence[str], topology: Topology) -> bool:
    return length % topology.size(*axes) == 0
