"""How one parameter is laid out over the mesh: `P`.

`P` has one entry per tensor dim, as JAX's PartitionSpec: the mesh axis that shards the dim, a tuple of axes, or None.
Axes that a spec does not name hold replicas. What the spec can't say by dims it says by keyword:

    P("tensor", None)                      dim 0 is sharded over `tensor`
    P(("col", "row"))                      dim 0 is sharded over both axes, `col` slowest
    P(blocks("tensor", 2))                 dim 0 is two blocks, each of which is sharded over `tensor`
    P("col", owned={"row": 0})             sharded over `col`; only coordinate 0 of `row` holds it at all
    P(partial="tensor")                    whole on every rank, but its gradient is a pending sum over `tensor`
    P("tensor", None, tied={"pipe": (0, -1)})   one parameter, present on the first and the last stage
    P()                                    replicated, said on purpose
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from ..mesh.topology import Topology
from .blocks import Blocks, Span, blocks_repr, cut_spans

Axes = str | Blocks
Entry = Axes | tuple[Axes, ...] | None


@dataclass(frozen=True, init=False, repr=False)
class P:
    """The layout of one parameter.

    Args:
        entries: For each tensor dim the mesh axis that shards it, a tuple of axes (the first is the slowest), or None.
            Dims past the last entry are not sharded. In place of an axis `blocks` says that it cuts each of several blocks.
        partial: Axis or axes over which the gradient is still a sum to be made when backward ends.
        owned: ``{axis: coordinate}``: only that coordinate of the axis holds the parameter.
        tied: ``{axis: (coordinate, ...)}``: the same logical parameter is held at exactly these coordinates (negative
            ones count from the end), each of which contributes a part of its gradient.

    Attributes:
        entries: For each tensor dim its axes.
        blocks: ``(axis, sizes)`` pairs of the axes that cut a dim of several blocks.

    Raises:
        ValueError: An axis is named twice, or an entry is not an axis name, a tuple of names or None.
    """

    entries: tuple[tuple[str, ...], ...]
    blocks: tuple[tuple[str, tuple[int, ...]], ...]
    partial: tuple[str, ...]
    owned: tuple[tuple[str, int], ...]
    tied: tuple[tuple[str, tuple[int, ...]], ...]

    def __init__(
        self,
        *entries: Entry,
        partial: str | tuple[str, ...] | None = None,
        owned: Mapping[str, int] | None = None,
        tied: Mapping[str, Iterable[int]] | None = None,
    ) -> None:
        dims = [_axes_of(entry) for entry in entries]
        while dims and not dims[-1]:  # P("tensor", None) and P("tensor") say the same: one spelling, one hash
            dims.pop()
        object.__setattr__(self, "entries", tuple(dims))
        object.__setattr__(self, "blocks", tuple(sorted(pair for entry in entries for pair in _blocks_of(entry))))
        object.__setattr__(self, "partial", tuple(sorted(_axes_of(partial))))
        object.__setattr__(self, "owned", tuple(sorted((owned or {}).items())))
        object.__setattr__(self, "tied", tuple(sorted((axis, tuple(where)) for axis, where in (tied or {}).items())))
        for axis, where in self.tied:
            if not where:
                raise ValueError(f"{self}: tied over {axis!r} names no coordinate; write tied={{{axis!r}: (0, -1)}}")
        named = self.named_axes
        twice = sorted({axis for axis in named if named.count(axis) > 1})
        if twice:
            raise ValueError(f"{self}: axis {twice[0]!r} is named twice; an axis can say one thing about a parameter")

    @property
    def sharded_axes(self) -> tuple[str, ...]:
        """The axes that shard some dim, in the order of the dims."""
        return tuple(axis for axes in self.entries for axis in axes)

    @property
    def named_axes(self) -> tuple[str, ...]:
        """All axes that the spec mentions."""
        return (*self.sharded_axes, *self.partial, *dict(self.owned), *dict(self.tied))

    def dim_axes(self, dim: int) -> tuple[str, ...]:
        """The axes that shard tensor dim ``dim`` (>= 0), slowest first; () where it is whole."""
        return self.entries[dim] if dim < len(self.entries) else ()

    def block_sizes(self, axis: str) -> tuple[int, ...]:
        """The sizes, one to another, of the blocks that ``axis`` cuts; (1,) where it cuts the dim as one."""
        return dict(self.blocks).get(axis, (1,))

    def with_dims(
        self,
        dims: Iterable[tuple[str, ...]],
        *,
        partial: tuple[str, ...] | None = None,
        blocks: Iterable[tuple[str, tuple[int, ...]]] = (),
    ) -> P:
        """The spec with other axes for each dim, and pending sums if they are given; axes that cut a dim in blocks still do,
        and so do those of ``blocks``."""
        cut = dict(self.blocks) | dict(blocks)
        entries = (tuple(Blocks((a,), cut[a]) if a in cut else a for a in axes) for axes in dims)
        partial = self.partial if partial is None else partial
        return P(*entries, partial=partial, owned=dict(self.owned), tied=dict(self.tied))

    def spans(self, dim: int, length: int, topology: Topology, coordinate: Mapping[str, int]) -> tuple[Span, ...]:
        """Which elements of dim ``dim``, of ``length`` in the full tensor, the rank at ``coordinate`` holds, in its order.

        What doesn't divide is cut as `torch.chunk` does, axis by axis.

        Raises:
            ValueError: Blocks don't divide.
        """
        spans: tuple[Span, ...] = ((0, length),)
        for axis in self.dim_axes(dim):
            try:
                spans = cut_spans(spans, topology.size(axis), coordinate[axis], self.block_sizes(axis))
            except ValueError as problem:
                raise ValueError(f"{self} can't cut dim {dim}, of length {length}, over {axis!r}: {problem}") from None
        return spans

    def tied_coordinates(self, axis: str, topology: Topology) -> tuple[int, ...]:
        """The coordinates of ``axis`` that hold the parameter, ascending, none negative."""
        size = topology.size(axis)
        return tuple(sorted({index % size for index in dict(self.tied)[axis]}))

    def holds(self, coordinate: Mapping[str, int], topology: Topology) -> bool:
        """Whether the rank at ``coordinate`` (axis -> index) holds this parameter."""
        return all(coordinate[axis] == index for axis, index in self.owned) and all(
            coordinate[axis] in self.tied_coordinates(axis, topology) for axis, _ in self.tied
        )

    def distinct_axes(self, topology: Topology) -> tuple[str, ...]:
        """The axes along which the pieces differ: the sharded ones, and the pipeline's unless it is tied or owned."""
        along_pipe = [axis for axis in topology.pipe_axes if axis not in self.named_axes]
        named = {*self.sharded_axes, *along_pipe}
        return tuple(axis for axis in topology.axes if axis in named)

    def replica_axes(self, topology: Topology) -> tuple[str, ...]:
        """The axes along which every coordinate holds a copy; a tied axis is not among them."""
        gone = {*self.distinct_axes(topology), *dict(self.owned), *dict(self.tied)}
        return tuple(axis for axis in topology.axes if axis not in gone)

    def holders(self, topology: Topology) -> int:
        """How many ranks hold a copy of each distinct piece."""
        copies = prod(topology.size(axis) for axis in self.replica_axes(topology))
        return copies * prod(len(self.tied_coordinates(axis, topology)) for axis, _ in self.tied)

    def validate(self, ndim: int, topology: Topology, name: str = "parameter") -> None:
        """Check the spec against a tensor's number of dims and a topology.

        Raises:
            ValueError: An axis is unknown, a coordinate is out of range or there are more entries than dims.
        """
        if len(self.entries) > ndim:
            raise ValueError(
                f"{name}: {self} has {len(self.entries)} entries but the tensor has {ndim} dims; give one entry a dim"
            )
        for axis in self.named_axes:
            if axis not in topology.axes:
                raise ValueError(f"{name}: {self} names axis {axis!r}, but the axes are {', '.join(topology.axes)}")
        held = [(axis, index) for axis, index in self.owned] + [(axis, i) for axis, where in self.tied for i in where]
        for axis, index in held:
            size = topology.size(axis)
            if not -size <= index < size or (index < 0 and axis in dict(self.owned)):
                raise ValueError(f"{name}: {self} names coordinate {index} of {axis!r}, which has size {size}")

    def __repr__(self) -> str:
        parts = [_entry_repr(axes, self) for axes in self.entries]
        if self.partial:
            parts.append(f"partial={_entry_repr(self.partial)}")
        if self.owned:
            parts.append(f"owned={dict(self.owned)}")
        if self.tied:
            parts.append(f"tied={dict(self.tied)}")
        return f"P({', '.join(parts)})"


def _parts_of(entry: Entry) -> tuple[Axes, ...]:
    parts = () if entry is None else (entry,) if isinstance(entry, str | Blocks) else entry
    if not isinstance(parts, tuple) or not all(isinstance(part, str | Blocks) and part for part in parts):
        raise ValueError(f"{entry!r} is no entry of a spec; give an axis name, a tuple of axis names or None")
    return parts


def _axes_of(entry: Entry) -> tuple[str, ...]:
    return tuple(axis for part in _parts_of(entry) for axis in (part.axes if isinstance(part, Blocks) else (part,)))


def _blocks_of(entry: Entry) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part in _parts_of(entry):
        if isinstance(part, Blocks) and len(part.sizes) > 1:
            yield from ((axis, part.sizes) for axis in part.axes)


def _entry_repr(axes: tuple[str, ...], spec: P | None = None) -> str:
    sizes = {} if spec is None else dict(spec.blocks)
    found = [blocks_repr(axis, sizes[axis]) if axis in sizes else repr(axis) for axis in axes]
    return found[0] if len(found) == 1 else f"({', '.join(found)})" if found else "None"
