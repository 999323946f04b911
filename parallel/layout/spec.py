"""How one parameter is laid out over the mesh: `P`.

`P` has one entry per tensor dim, as JAX's PartitionSpec: the mesh axis that shards the dim, a tuple of axes, or None.
Axes that a spec does not name hold replicas. What the spec can't say by dims it says by keyword:

    P("tensor", None)                      dim 0 is sharded over `tensor`
    P(("col", "row"))                      dim 0 is sharded over both axes, `col` slowest
    P("data")                              over all axes of the topology's alias `data`, at once
    P(blocks("tensor", 2))                 dim 0 is two blocks, each of which is sharded over `tensor`
    P("col", owned={"row": 0})             sharded over `col`; only coordinate 0 of `row` holds it at all
    P("col", owned={"row": "col"})         sharded over `col`; only ranks whose `row` is the same as their `col` hold it
    P(partial="tensor")                    whole on every rank, but its gradient is a pending sum over `tensor`
    P("tensor", None, tied={"pipe": (0, -1)})   one parameter, present on the first and the last stage
    P()                                    replicated, said on purpose
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ..mesh.aliases import by_axis
from ..mesh.topology import Topology
from .blocks import Blocks, Span, blocks_repr, cut_spans
from .entries import Entry, Part, Together, alone, axes_of, blocks_of, together_of
from .owned import Owned, owned_by_axis, owns


@dataclass(frozen=True, init=False, repr=False)
class P:
    """The layout of one parameter.

    Args:
        entries: For each tensor dim the mesh axis that shards it, a tuple of axes (the first is the slowest), or None.
            Dims past the last entry are not sharded. In place of an axis `blocks` says that it cuts each of several blocks,
            and a tuple within the tuple that axes cut at once, which differs where the dim doesn't divide.
        partial: Axis or axes over which the gradient is still a sum to be made when backward ends.
        owned: ``{axis: coordinate}``: only that coordinate of the axis holds the parameter. ``{axis: other}``, where the
            other axis shards it: only the coordinate that is the other's too, so that the pieces lie on a diagonal.
        tied: ``{axis: (coordinate, ...)}``: the same logical parameter is held at exactly these coordinates (negative
            ones count from the end), each of which contributes a part of its gradient.

    Wherever an axis is named an alias may be, which stands for its axes (`on`).

    Attributes:
        entries: For each tensor dim its axes.
        together: Those of them that cut at once.
        blocks: ``(axis, sizes)`` pairs of the axes that cut a dim of several blocks.

    Raises:
        ValueError: An axis is named twice, an entry is not an axis name, a tuple of names or None, or the owner follows an
            axis that does not shard the parameter.
    """

    entries: tuple[tuple[str, ...], ...]
    together: tuple[Together, ...]
    blocks: tuple[tuple[str, tuple[int, ...]], ...]
    partial: tuple[str, ...]
    owned: Owned
    tied: tuple[tuple[str, tuple[int, ...]], ...]

    def __init__(
        self,
        *entries: Entry,
        partial: str | tuple[str, ...] | None = None,
        owned: Mapping[str, int | str] | None = None,
        tied: Mapping[str, Iterable[int]] | None = None,
    ) -> None:
        dims = [axes_of(entry) for entry in entries]
        while dims and not dims[-1]:  # P("tensor", None) and P("tensor") say the same: one spelling, one hash
            dims.pop()
        object.__setattr__(self, "entries", tuple(dims))
        object.__setattr__(self, "together", tuple(sorted(part for entry in entries for part in together_of(entry))))
        object.__setattr__(self, "blocks", tuple(sorted(pair for entry in entries for pair in blocks_of(entry))))
        object.__setattr__(self, "partial", tuple(sorted(axes_of(partial))))
        object.__setattr__(self, "owned", tuple(sorted((owned or {}).items())))
        object.__setattr__(self, "tied", tuple(sorted((axis, tuple(where)) for axis, where in (tied or {}).items())))
        for axis, where in self.tied:
            if not where:
                raise ValueError(f"{self}: tied over {axis!r} names no coordinate; write tied={{{axis!r}: (0, -1)}}")
        named = self.named_axes
        twice = sorted({axis for axis in named if named.count(axis) > 1})
        if twice:
            raise ValueError(f"{self}: axis {twice[0]!r} is named twice; an axis can say one thing about a parameter")
        for axis, at in self.owned:
            if isinstance(at, str) and at not in self.sharded_axes:
                raise ValueError(
                    f"{self}: the owner along {axis!r} is where {at!r} says, which must shard the parameter; give one "
                    f"coordinate, as owned={{{axis!r}: 0}}, or shard a dim over {at!r}"
                )

    @cached_property
    def sharded_axes(self) -> tuple[str, ...]:
        """The axes that shard some dim, in the order of the dims."""
        return tuple(axis for axes in self.entries for axis in axes)

    @cached_property
    def named_axes(self) -> tuple[str, ...]:
        """All axes that the spec mentions."""
        return (*self.sharded_axes, *self.partial, *dict(self.owned), *dict(self.tied))

    def dim_axes(self, dim: int) -> tuple[str, ...]:
        """The axes that shard tensor dim ``dim`` (>= 0), slowest first; () where it is whole."""
        return self.entries[dim] if dim < len(self.entries) else ()

    def block_sizes(self, axis: str) -> tuple[int, ...]:
        """The sizes, one to another, of the blocks that ``axis`` cuts; (1,) where it cuts the dim as one."""
        return dict(self.blocks).get(axis, (1,))

    def cuts(self, dim: int) -> tuple[Together, ...]:
        """The axes that shard tensor dim ``dim``, slowest first, those that cut it at once in one tuple."""
        found: list[Together] = []
        for axis in self.dim_axes(dim):
            together = next((axes for axes in self.together if axis in axes), (axis,))
            if axis == together[0]:
                found.append(together)
        return tuple(found)

    def with_dims(
        self,
        dims: Iterable[Iterable[str | Together]],
        *,
        partial: tuple[str, ...] | None = None,
        blocks: Iterable[tuple[str, tuple[int, ...]]] = (),
    ) -> P:
        """The spec with other `cuts` of each dim, and pending sums if they are given; axes that cut a dim in blocks still
        do, and so do those of ``blocks``."""
        cut = dict(self.blocks) | dict(blocks)
        entries = (tuple(Blocks((a,), cut[a]) if a in cut else a for a in map(alone, cuts)) for cuts in dims)
        partial = self.partial if partial is None else partial
        return P(*entries, partial=partial, owned=dict(self.owned), tied=dict(self.tied))

    def with_partial(self, partial: tuple[str, ...]) -> P:
        """The spec with other pending sums."""
        return self.with_dims(map(self.cuts, range(len(self.entries))), partial=partial)

    def renamed(self, names: Mapping[str, str]) -> P:
        """The spec with other names for axes."""
        new = {axis: names.get(axis, axis) for axis in self.named_axes}
        blocks = dict(self.blocks)

        def part(axes: Together) -> Part:
            return Blocks((new[axes[0]],), blocks[axes[0]]) if axes[0] in blocks else alone(tuple(new[a] for a in axes))

        return P(
            *(tuple(map(part, self.cuts(dim))) for dim in range(len(self.entries))),
            partial=tuple(new[axis] for axis in self.partial),
            owned={new[axis]: new[at] if isinstance(at, str) else at for axis, at in self.owned},
            tied={new[axis]: where for axis, where in self.tied},
        )

    def on(self, topology: Topology, dims: Mapping[str, Together] | None = None) -> P:
        """The spec in the axes of ``topology``: each alias by what it stands for. Itself, where it names none.

        Args:
            dims: What names that are no aliases stand for as well: dims of a device mesh.

        Raises:
            ValueError: It names an axis by itself and in an alias, or in two; or an alias is tied at coordinates that are
                no product of coordinates of its axes.
        """
        aliases = {**topology.aliases, **(dims or {})}
        if not aliases or aliases.keys().isdisjoint(self.named_axes):
            return self
        self._check_coordinates(topology, repr(topology), aliases)
        blocks = dict(self.blocks)

        def atoms(*names: str) -> tuple[str, ...]:
            return tuple(atom for name in names for atom in aliases.get(name, (name,)))

        def cuts(axes: Together) -> bool:  # a mesh's dim of size 1 may be no axis
            return bool(atoms(*axes))

        def part(axes: Together) -> Part:
            return Blocks(atoms(*axes), blocks[axes[0]]) if axes[0] in blocks else alone(atoms(*axes))

        def held(held: Iterable[tuple[str, tuple[int, ...]]]) -> Iterator[tuple[str, tuple[int, ...]]]:
            for axis, where in held:
                sizes = {atom: topology.size(atom) for atom in atoms(axis)}
                yield from by_axis(where, sizes) if axis in aliases else [(axis, where)]

        try:
            return P(
                *(tuple(map(part, filter(cuts, self.cuts(dim)))) for dim in range(len(self.entries))),
                partial=atoms(*self.partial),
                owned=owned_by_axis(self.owned, topology, aliases),
                tied=dict(held(self.tied)),
            )
        except ValueError as problem:
            raise ValueError(f"{self} on {topology!r}: {problem}") from None

    def spans(self, dim: int, length: int, topology: Topology, coordinate: Mapping[str, int]) -> tuple[Span, ...]:
        """Which elements of dim ``dim``, of ``length`` in the full tensor, the rank at ``coordinate`` holds, in its order.

        What doesn't divide is cut as `torch.chunk` does, axis by axis; by all axes of an alias at once.

        Raises:
            ValueError: Blocks don't divide.
        """
        spans: tuple[Span, ...] = ((0, length),)
        spec = self.on(topology)
        for axes in spec.cuts(dim):
            index = 0
            for axis in axes:
                index = index * topology.size(axis) + coordinate[axis]
            try:
                spans = cut_spans(spans, topology.size(*axes), index, spec.block_sizes(axes[0]))
            except ValueError as problem:
                over = " x ".join(map(repr, axes))
                raise ValueError(f"{self} can't cut dim {dim}, of length {length}, over {over}: {problem}") from None
        return spans

    def tied_coordinates(self, axis: str, topology: Topology) -> tuple[int, ...]:
        """The coordinates of ``axis`` that hold the parameter, ascending, none negative."""
        size = topology.size(axis)
        return tuple(sorted({index % size for index in dict(self.tied)[axis]}))

    def holds(self, coordinate: Mapping[str, int], topology: Topology) -> bool:
        """Whether the rank at ``coordinate`` (axis -> index) holds this parameter."""
        spec = self.on(topology)
        return owns(spec.owned, coordinate) and all(
            coordinate[axis] in spec.tied_coordinates(axis, topology) for axis, _ in spec.tied
        )

    def distinct_axes(self, topology: Topology) -> tuple[str, ...]:
        """The axes along which the pieces differ: the sharded ones, and the pipeline's unless it is tied or owned."""
        spec = self.on(topology)
        along_pipe = [axis for axis in topology.pipe_axes if axis not in spec.named_axes]
        named = {*spec.sharded_axes, *along_pipe}
        return tuple(axis for axis in topology.axes if axis in named)

    def replica_axes(self, topology: Topology) -> tuple[str, ...]:
        """The axes along which every coordinate holds a copy; a tied axis is not among them."""
        spec = self.on(topology)
        gone = {*spec.distinct_axes(topology), *dict(spec.owned), *dict(spec.tied)}
        return tuple(axis for axis in topology.axes if axis not in gone)

    def holders(self, topology: Topology) -> int:
        """How many ranks hold a copy of each distinct piece."""
        spec = self.on(topology)
        copies = prod(topology.size(axis) for axis in spec.replica_axes(topology))
        return copies * prod(len(spec.tied_coordinates(axis, topology)) for axis, _ in spec.tied)

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
            if axis not in topology.axes and axis not in topology.aliases:
                there = ", ".join(topology.axes) + (
                    f" (aliases: {', '.join(topology.aliases)})" if topology.aliases else ""
                )
                raise ValueError(f"{name}: {self} names axis {axis!r}, but the axes are {there}{topology.hint(axis)}")
        self._check_coordinates(topology, name, topology.aliases)
        self.on(topology)

    def _check_coordinates(self, topology: Topology, name: str, aliases: Mapping[str, Together]) -> None:
        def size_of(axis: str) -> int:
            return topology.size(*aliases.get(axis, (axis,)))

        held = [*self.owned, *((axis, index) for axis, where in self.tied for index in where)]
        for axis, index in held:
            size = size_of(axis)
            if isinstance(index, str):
                if size_of(index) > size:
                    raise ValueError(
                        f"{name}: {self} has a piece for each of the {size_of(index)} coordinates of {index!r}, but "
                        f"{axis!r}, along which the owner has the same one, has size {size}: name one as large"
                    )
                continue
            if not -size <= index < size or (index < 0 and axis in dict(self.owned)):
                raise ValueError(f"{name}: {self} names coordinate {index} of {axis!r}; write one of 0 to {size - 1}")

    def __repr__(self) -> str:
        parts = [self._entry_repr(dim) for dim in range(len(self.entries))]
        if self.partial:
            parts.append(f"partial={self.partial[0]!r}" if len(self.partial) == 1 else f"partial={self.partial!r}")
        if self.owned:
            parts.append(f"owned={dict(self.owned)}")
        if self.tied:
            parts.append(f"tied={dict(self.tied)}")
        return f"P({', '.join(parts)})"

    def _entry_repr(self, dim: int) -> str:
        sizes = dict(self.blocks)
        found = [
            repr(axes) if len(axes) > 1 else blocks_repr(axes[0], sizes[axes[0]]) if axes[0] in sizes else repr(axes[0])
            for axes in self.cuts(dim)
        ]
        if len(found) == 1:
            return f"({found[0]},)" if self.together and len(self.cuts(dim)[0]) > 1 else found[0]
        return f"({', '.join(found)})" if found else "None"
