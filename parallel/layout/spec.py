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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from typing import Any

from ..mesh.topology import Topology, by_axis

# Blocks: a dim along which several tensors lie one after the other, each of which is cut by itself --------------------

# A fused weight is such a stack: gate and up of a gated MLP in one matrix, or q, k and v. Cut as one tensor, the first of
# two ranks would have all of gate and the other all of up. What it computes with is its part of each:
#
#     blocks("tensor", 2)             tensor=2    gggguuuu -> gguu | gguu
#     blocks("tensor", (4, 1, 1))     tensor=2    qqqqqqqqkkvv -> qqqqkv | qqqqkv

Span = tuple[int, int]
"""(offset, length) of consecutive elements of a dim."""


@dataclass(frozen=True)
class Blocks:
    """Part of an entry of a spec: ``axes`` cut a dim of blocks whose lengths are to each other as ``sizes``."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]


def blocks(axes: str | tuple[str, ...], sizes: int | Sequence[int]) -> Blocks:
    """An entry of `P` for a dim of blocks, each of which is cut over ``axes``: a rank's piece is its part of every block.

        P(blocks("tensor", 2))              gate and up in one matrix
        P(blocks("tensor", (4, 1, 1)))      q, k and v, four query heads for each key head
        P((blocks("tensor", 2), "data"))    and the piece that comes out is cut once more, as it is

    Args:
        axes: A mesh axis or several, the first the slowest.
        sizes: Of the blocks, one to another (heads, or features: only their ratio counts); a number n is n equal ones.

    Raises:
        ValueError: The sizes are no positive integers.
    """
    ratio: Any = (1,) * sizes if isinstance(sizes, int) and not isinstance(sizes, bool) else sizes
    if not isinstance(ratio, Sequence) or not ratio or not all(type(size) is int and size > 0 for size in ratio):
        raise ValueError(
            f"blocks({axes!r}, {sizes!r}): give a number of equal blocks or the blocks' sizes, as 2 or (4, 1, 1)"
        )
    divisor = gcd(*ratio)  # heads and features say the same: one spelling, one hash
    return Blocks((axes,) if isinstance(axes, str) else tuple(axes), tuple(size // divisor for size in ratio))


def blocks_repr(axis: str, sizes: tuple[int, ...]) -> str:
    """As one writes it."""
    return f"blocks({axis!r}, {len(sizes) if set(sizes) == {1} else sizes})"


def cut_spans(spans: Sequence[Span], parts: int, index: int, sizes: tuple[int, ...]) -> tuple[Span, ...]:
    """Part number ``index`` of ``parts`` of what ``spans`` hold, in order; of each block where there are several ``sizes``.

    One block that doesn't divide is cut as `torch.chunk` does.

    Raises:
        ValueError: Several blocks don't divide.
    """
    total = sum(length for _, length in spans)
    if len(sizes) == 1:
        chunk = -(-total // parts)
        start = min(index * chunk, total)
        return _narrowed(spans, start, min(chunk, total - start))
    if total % sum(sizes):
        raise ValueError(
            f"length {total} is no multiple of {sum(sizes)}, which blocks of sizes {sizes} add up to; give their sizes"
        )
    found: list[Span] = []
    at = 0
    for number, size in enumerate(sizes):
        length = total // sum(sizes) * size
        if length % parts:
            raise ValueError(
                f"block {number} of {len(sizes)} has length {length}, which doesn't divide over {parts} ranks; cut over "
                "fewer, or give the block a parameter of its own"
            )
        found += _narrowed(spans, at + index * (length // parts), length // parts)
        at += length
    return _joined(found)


def _narrowed(spans: Sequence[Span], start: int, length: int) -> tuple[Span, ...]:
    """Elements ``start`` to ``start + length`` of what ``spans`` hold."""
    found: list[Span] = []
    for offset, numel in spans:
        first, last = max(start, 0), min(start + length, numel)
        if first < last:
            found.append((offset + first, last - first))
        start -= numel
    return _joined(found) if found else ((sum(spans[-1]), 0),)


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Neighbours made one, and none that is empty but where all are."""
    found: list[Span] = []
    for offset, length in spans:
        if found and (not length or sum(found[-1]) == offset):
            found[-1] = (found[-1][0], found[-1][1] + length)
        elif found and not found[-1][1]:
            found[-1] = (offset, length)
        else:
            found.append((offset, length))
    return tuple(found)


# Entries --------------------------------------------------------------------------------------------------------------

# What a spec says of one tensor dim: the axes that cut it, one after the other, at once, or each of several blocks.

Together = tuple[str, ...]
"""Axes that cut a dim at once, as one axis of the product of their sizes would."""
Part = str | Blocks | Together
Entry = str | Blocks | tuple[Part, ...] | None


def parts_of(entry: Entry) -> tuple[Part, ...]:
    """What an entry names, slowest first. Raises ValueError where it is none."""
    parts = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    if not all(map(_is_part, parts)):
        raise ValueError(f"{entry!r} is no entry of a spec; give an axis name, a tuple of axis names or None")
    return parts


def _is_part(part: object) -> bool:
    if isinstance(part, tuple):
        return bool(part) and all(isinstance(axis, str) and axis for axis in part)
    return bool(part) and isinstance(part, str | Blocks)


def axes_of(entry: Entry) -> tuple[str, ...]:
    """All axes of an entry, slowest first. Raises ValueError where it is none."""
    return tuple(axis for part in parts_of(entry) for axis in _axes_of_part(part))


def _axes_of_part(part: Part) -> tuple[str, ...]:
    return (part,) if isinstance(part, str) else part.axes if isinstance(part, Blocks) else part


def together_of(entry: Entry) -> Iterator[Together]:
    """Those of its axes that cut at once."""
    return (part for part in parts_of(entry) if isinstance(part, tuple) and len(part) > 1)


def alone(axes: str | Together) -> str | Together:
    """One axis by its name."""
    return axes[0] if isinstance(axes, tuple) and len(axes) == 1 else axes


def blocks_of(entry: Entry) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(axis, sizes) pairs of its axes that cut several blocks."""
    for part in parts_of(entry):
        if isinstance(part, Blocks) and len(part.sizes) > 1:
            yield from ((axis, part.sizes) for axis in part.axes)


# Who alone holds a parameter: one coordinate of an axis, or the one that is another axis' too -------------------------

Owned = tuple[tuple[str, int | str], ...]
"""(axis, coordinate) or (axis, another axis whose coordinate it is) pairs of the only ranks that hold a parameter."""


def owner_of(owned: Owned, coordinate: Mapping[str, int]) -> dict[str, int]:
    """Of the ranks that are elsewhere along the owned axes only, the owner's coordinates along them."""
    return {axis: coordinate[at] if isinstance(at, str) else at for axis, at in owned}


def owns(owned: Owned, coordinate: Mapping[str, int]) -> bool:
    """Whether the rank at ``coordinate`` is the owner."""
    return all(coordinate[axis] == at for axis, at in owner_of(owned, coordinate).items())


def owned_by_axis(owned: Owned, topology: Topology, aliases: Mapping[str, tuple[str, ...]]) -> dict[str, int | str]:
    """``owned`` in the axes of a topology: each of ``aliases`` by what it stands for.

    Raises:
        ValueError: An alias' coordinate is to be that of axes of other sizes than its own.
    """
    pairs = (pair for axis, at in owned for pair in _by_axis((axis, at), topology, aliases))
    return dict(pairs)


def _by_axis(
    pair: tuple[str, int | str], topology: Topology, aliases: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, int | str]]:
    axis, at = pair
    if axis not in aliases and at not in aliases:
        yield pair
        return
    axes = aliases.get(axis, (axis,))
    sizes = {atom: topology.size(atom) for atom in axes}
    others = aliases.get(at, (at,)) if isinstance(at, str) else ()
    if not others:  # a coordinate; or the only one of a mesh's dim of size 1, which may be no axis
        yield from ((atom, index) for atom, (index,) in by_axis((at if isinstance(at, int) else 0,), sizes))
    elif [*sizes.values()] != [topology.size(atom) for atom in others]:
        raise ValueError(
            f"the owner along {axis!r}, that is {' x '.join(axes)}, can't follow {at!r}, that is {' x '.join(others)}: "
            "they are equal where each of their axes is, and so must have the same sizes; name the axes"
        )
    else:
        yield from zip(axes, others, strict=True)


# Spec -----------------------------------------------------------------------------------------------------------------


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
