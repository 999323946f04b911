"""The layout of one parameter on the mesh: `P`.

Like JAX's PartitionSpec, `P` has one entry per tensor dim: the mesh axis that shards the dim, a tuple of axes, or None.
Keywords describe layouts other than sharding. The parameter is replicated over data and model axes that the spec does
not name. Along a pipeline axis that the spec does not name, stages hold different parameters. Examples:

    P("tensor", None)                      dim 0 is sharded over `tensor`
    P(("col", "row"))                      dim 0 is sharded over both axes, `col` slowest
    P("data")                              dim 0 is sharded jointly over all axes of the topology's alias `data`
    P(blocks("tensor", 2))                 dim 0 consists of two blocks, and each block is sharded over `tensor`
    P("col", owned={"row": 0})             sharded over `col`; only ranks with coordinate 0 on `row` hold a shard
    P("col", owned={"row": "col"})         sharded over `col`; only ranks with equal coordinates on both axes hold it
    P(partial="tensor")                    replicated, but its gradient is partial: it must be summed over `tensor`
    P("tensor", tied={"pipe": (0, -1)})    sharded over `tensor`; the first and the last stage hold one logical parameter
    P()                                    replicated over all data and model axes, declared explicitly
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from typing import Any

from ..mesh.deprecation import renamed_members
from ..mesh.topology import Topology, by_axis

# Blocks: a dim that consists of several concatenated tensors, each of which is sharded separately ---------------------

# An example is a fused weight: the gate and up weights of a gated MLP in one matrix, or the q, k and v weights. If the
# matrix of gate and up weights were sharded over two ranks as one block, one rank would hold the gate weight, and the other
# rank the up weight. But each rank needs its shard of both weights:
#
#     blocks("tensor", 2)             tensor=2    gggguuuu -> gguu | gguu
#     blocks("tensor", (4, 1, 1))     tensor=2    qqqqqqqqkkvv -> qqqqkv | qqqqkv

Span = tuple[int, int]
"""(offset, length) of consecutive elements of a dim."""


@dataclass(frozen=True)
class Blocks:
    """Part of a spec entry: ``axes`` shard each block of a dim separately; ``sizes`` are relative block lengths."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]


def blocks(axes: str | tuple[str, ...], sizes: int | Sequence[int]) -> Blocks:
    """Return an entry of `P` for a dim that consists of several blocks, each of which is sharded over ``axes``.

    A rank's shard of the dim is the concatenation of its shards of all blocks.

        P(blocks("tensor", 2))              # gate and up in one matrix
        P(blocks("tensor", (4, 1, 1)))      # q, k and v, with four query heads per key head
        P((blocks("tensor", 2), "data"))    # the shard over `tensor` is sharded again over `data`, as one block

    Args:
        axes: A mesh axis, or a tuple of axes, slowest axis first.
        sizes: Number of equal blocks; or one positive integer per block, such as its number of heads. The lengths of the
            blocks are proportional to these integers.

    Raises:
        ValueError: ``sizes`` is neither a positive integer nor a sequence of positive integers.
    """
    ratio: Any = (1,) * sizes if isinstance(sizes, int) and not isinstance(sizes, bool) else sizes
    if not isinstance(ratio, Sequence) or not ratio or not all(type(size) is int and size > 0 for size in ratio):
        raise ValueError(
            f"blocks({axes!r}, {sizes!r}): sizes must be positive integers; give a number of equal blocks, such "
            "as 2, or the sizes of the blocks, such as (4, 1, 1)"
        )
    divisor = gcd(*ratio)  # makes blocks(axis, (2, 1)) and blocks(axis, (4, 2)) equal, with equal hashes
    return Blocks((axes,) if isinstance(axes, str) else tuple(axes), tuple(size // divisor for size in ratio))


def blocks_repr(axis: str, sizes: tuple[int, ...]) -> str:
    return f"blocks({axis!r}, {len(sizes) if set(sizes) == {1} else sizes})"


def cut_spans(spans: Sequence[Span], parts: int, index: int, sizes: tuple[int, ...]) -> tuple[Span, ...]:
    """Split the elements in ``spans`` into ``parts`` shards, and return the spans of shard number ``index``.

    ``sizes`` has the relative lengths of the blocks in ``spans``. With several blocks, each block is split into ``parts``,
    and the shard is the concatenation of one part per block. A single block is split as `torch.chunk` does.
    """
    total = sum(length for _, length in spans)
    if len(sizes) == 1:
        chunk = -(-total // parts)
        start = min(index * chunk, total)
        return _narrow(spans, start, min(chunk, total - start))
    if total % sum(sizes):
        raise ValueError(
            f"length {total} is not a multiple of {sum(sizes)}, so the dim can't consist of blocks with the ratio {sizes}; "
            "pass the sizes of the blocks of this dim to blocks()"
        )
    found: list[Span] = []
    at = 0
    for number, size in enumerate(sizes):
        length = total // sum(sizes) * size
        if length % parts:
            raise ValueError(
                f"block {number + 1} of {len(sizes)} has length {length}, which is not divisible by the {parts} ranks; "
                "shard over fewer ranks, or make the block a separate parameter"
            )
        found += _narrow(spans, at + index * (length // parts), length // parts)
        at += length
    return _merge(found)


def _narrow(spans: Sequence[Span], start: int, length: int) -> tuple[Span, ...]:
    """Return the spans of ``length`` elements of the concatenated ``spans``, from element ``start`` on.

    If the result has no elements, return one span of length 0.
    """
    found: list[Span] = []
    for offset, numel in spans:
        first, last = max(start, 0), min(start + length, numel)
        if first < last:
            found.append((offset + first, last - first))
        start -= numel
    return _merge(found) if found else ((sum(spans[-1]), 0),)


def _merge(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return spans with adjacent spans merged and empty spans dropped. If all are empty, return one empty span."""
    found: list[Span] = []
    for offset, length in spans:
        if found and (not length or sum(found[-1]) == offset):
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((offset, length))
    return tuple(found)


# Entries of a spec ----------------------------------------------------------------------------------------------------

# An entry of a spec has the axes that shard one tensor dim:
#   ("a", "b")        a shards the dim, then b shards each shard of a
#   (("a", "b"),)     a and b shard the dim jointly, like one axis of size a * b
#   blocks("a", n)    a shards each of n blocks of the dim
#
# The first two entries differ only if the length of the dim is not a multiple of a * b.

Together = tuple[str, ...]
"""Axes that shard a dim jointly, like one axis whose size is the product of their sizes."""
Part = str | Blocks | Together
Entry = str | Blocks | tuple[Part, ...] | None


def parts_of(entry: Entry) -> tuple[Part, ...]:
    """Return the parts of an entry of a spec: axis names, `Blocks`, and tuples of axes that shard the dim jointly."""
    parts = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    if not all(map(_is_part, parts)):
        raise ValueError(
            f"P(...) has the entry {entry!r}; give the name of a mesh axis, a tuple of names, blocks(...), or None for a "
            "dim that is not sharded"
        )
    return parts


def _is_part(part: object) -> bool:
    if isinstance(part, tuple):
        return bool(part) and all(isinstance(axis, str) and axis for axis in part)
    return bool(part) and isinstance(part, str | Blocks)


def _axes_of_part(part: Part) -> tuple[str, ...]:
    return (part,) if isinstance(part, str) else part.axes if isinstance(part, Blocks) else part


def _partial_axes(partial: str | tuple[str, ...] | None) -> tuple[str, ...]:
    axes = (partial,) if isinstance(partial, str) else () if partial is None else partial
    if not isinstance(axes, tuple) or not all(isinstance(axis, str) and axis for axis in axes):
        raise ValueError(f"P(..., partial={partial!r}): give the name of a mesh axis, or a tuple of names")
    return axes


def unwrap_axis(axes: str | Together) -> str | Together:
    return axes[0] if isinstance(axes, tuple) and len(axes) == 1 else axes


# Owner ranks: the only ranks along an axis that hold a parameter ------------------------------------------------------

Owned = tuple[tuple[str, int | str], ...]
"""(axis, coordinate) pairs: only ranks with this coordinate on the axis hold the parameter. In place of a coordinate, a
pair may have the name of another axis: then only ranks with equal coordinates on the two axes hold the parameter."""


def owner_of(owned: Owned, coordinate: Mapping[str, int]) -> dict[str, int]:
    """Return the coordinates of an owner rank on the owned axes, as {axis: coordinate}.

    The owner rank is the one that has the same coordinates on all other axes as the rank at ``coordinate``.
    """
    return {axis: coordinate[at] if isinstance(at, str) else at for axis, at in owned}


def owns(owned: Owned, coordinate: Mapping[str, int]) -> bool:
    """Return True if the rank at ``coordinate`` is an owner rank; always True without owned axes."""
    return all(coordinate[axis] == at for axis, at in owner_of(owned, coordinate).items())


def owned_by_axis(owned: Owned, topology: Topology, aliases: Mapping[str, tuple[str, ...]]) -> dict[str, int | str]:
    """Return ``owned`` as a dict, with every alias replaced by its axes.

    A key is an axis. Its value is the owner's coordinate on this axis, or the name of another axis on which the owner
    has the same coordinate. For example, if ``grid`` is an alias for ``row`` and ``col``, both of size 2, then
    ``(("grid", 3),)`` becomes ``{"row": 1, "col": 1}``.
    """
    found: dict[str, int | str] = {}
    for axis, at in owned:
        if axis not in aliases and at not in aliases:
            found[axis] = at
            continue
        axes = aliases.get(axis, (axis,))
        sizes = {atom: topology.size(atom) for atom in axes}
        others = aliases.get(at, (at,)) if isinstance(at, str) else ()
        if not others:  # `at` is an integer, or a mesh dim of size 1 that is no axis of the topology
            index = at if isinstance(at, int) else 0
            found |= ((atom, index_of_atom) for atom, (index_of_atom,) in by_axis((index,), sizes))
        elif [*sizes.values()] != [topology.size(atom) for atom in others]:
            raise ValueError(
                f"owned={{{axis!r}: {at!r}}}: {axis!r} is {_sized(axes, topology)}, but {at!r} is "
                f"{_sized(others, topology)}; the owner's coordinates along the first are those along the second, so both "
                "must consist of axes of the same sizes in the same order: name single axes of the topology instead"
            )
        else:
            found |= zip(axes, others, strict=True)
    return found


def _sized(axes: Sequence[str], topology: Topology) -> str:
    return " x ".join(f"{axis} ({topology.size(axis)})" for axis in axes)


# The spec `P` ---------------------------------------------------------------------------------------------------------


@renamed_members(holders="num_replicas", on="resolve", cuts="joint_dim_axes", together="joint_axes")
@dataclass(frozen=True, init=False, repr=False)
class P:
    """The layout of one parameter on the mesh; immutable and hashable.

        P("tensor", None)                       # dim 0 is sharded over `tensor`
        P(partial="tensor")                     # replicated, with a partial gradient
        P("tensor", None, tied={"pipe": (0, -1)})   # held by the first and the last stage

    Aliases of the topology are valid wherever an axis is; `resolve` replaces them by their axes. Over data and model
    axes that the spec does not name, the parameter is replicated.

    Args:
        entries: One entry per tensor dim: the mesh axis that shards the dim, a tuple of axes (slowest first), or None.
            Dims after the last entry are not sharded. Instead of an axis, an entry may have `blocks`, or a nested tuple
            of axes that shard the dim jointly, like one axis whose size is the product of their sizes. Joint sharding
            differs from sharding axis by axis only if the length of the dim is not a multiple of this product.
        partial: Axis or axes over which the gradient is partial at the end of backward: it must still be summed. None: no
            axis.
        owned: ``{axis: coordinate}``: only ranks with this coordinate on the axis hold the parameter. ``{axis: other}``:
            only ranks with equal coordinates on both axes hold it; ``other`` must shard the parameter. None: no axis.
        tied: ``{axis: (coordinate, ...)}``: the ranks at these coordinates, and no others, hold one logical parameter.
            The gradient is the sum of their gradients. Negative coordinates count from the end. None: no axis.

    Attributes:
        entries: Axes per tensor dim, up to the last dim that is sharded.
        joint_axes: Tuples of axes that shard a dim jointly.
        blocks: (axis, relative block lengths) pairs of the axes that shard a dim of several blocks.
        partial: The axes of the argument, as a sorted tuple.
        owned, tied: The items of the argument, as a sorted tuple of pairs.

    Raises:
        ValueError: An axis is named twice; an entry or ``partial`` has another form; ``other`` in ``owned`` does not
            shard the parameter; or a tied axis has no coordinates.
    """

    entries: tuple[tuple[str, ...], ...]
    joint_axes: tuple[Together, ...]
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
        by_dim = [parts_of(entry) for entry in entries]
        dims = [tuple(axis for part in parts for axis in _axes_of_part(part)) for parts in by_dim]
        while dims and not dims[-1]:  # makes P("tensor", None) and P("tensor") equal, with equal hashes
            dims.pop()
        parts = [part for parts in by_dim for part in parts]
        several = [part for part in parts if isinstance(part, Blocks) and len(part.sizes) > 1]
        values = {
            "entries": tuple(dims),
            "joint_axes": tuple(sorted(part for part in parts if isinstance(part, tuple) and len(part) > 1)),
            "blocks": tuple(sorted((axis, part.sizes) for part in several for axis in part.axes)),
            "partial": tuple(sorted(_partial_axes(partial))),
            "owned": tuple(sorted((owned or {}).items())),
            "tied": tuple(sorted((axis, tuple(where)) for axis, where in (tied or {}).items())),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        for axis, where in self.tied:
            if not where:
                raise ValueError(
                    f"{self}: tied={{{axis!r}: ()}} has no coordinates; write for example tied={{{axis!r}: (0, -1)}}"
                )
        named = self.named_axes
        twice = sorted({axis for axis in named if named.count(axis) > 1})
        if twice:
            raise ValueError(f"{self}: axis {twice[0]!r} is named twice; name each axis once")
        for axis, at in self.owned:
            if isinstance(at, str) and at not in self.sharded_axes:
                raise ValueError(
                    f"{self}: owned={{{axis!r}: {at!r}}} needs a tensor dim that is sharded over {at!r}, but there is "
                    f"none; shard a dim over {at!r}, or give a coordinate, such as owned={{{axis!r}: 0}}"
                )

    @cached_property
    def sharded_axes(self) -> tuple[str, ...]:
        """Return all axes that shard a dim of the parameter, in the order of the dims."""
        return tuple(axis for axes in self.entries for axis in axes)

    @cached_property
    def named_axes(self) -> tuple[str, ...]:
        """Return all axes that the spec names: axes that shard a dim, then partial, owned and tied axes."""
        return (*self.sharded_axes, *self.partial, *dict(self.owned), *dict(self.tied))

    def dim_axes(self, dim: int) -> tuple[str, ...]:
        """Return the axes that shard tensor dim ``dim`` (>= 0), slowest axis first; () if the dim is not sharded."""
        return self.entries[dim] if dim < len(self.entries) else ()

    def block_sizes(self, axis: str) -> tuple[int, ...]:
        """Return the relative lengths of the blocks that ``axis`` shards; (1,) if it shards one block or no dim."""
        return dict(self.blocks).get(axis, (1,))

    def joint_dim_axes(self, dim: int) -> tuple[Together, ...]:
        """Return the axes that shard tensor dim ``dim`` as tuples, slowest tuple first.

        Axes that shard the dim jointly are in one tuple. Any other axis has a tuple of its own.
        """
        found: list[Together] = []
        for axis in self.dim_axes(dim):
            together = next((axes for axes in self.joint_axes if axis in axes), (axis,))
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
        """Return a copy of the spec in which other axes shard the tensor dims.

        Args:
            dims: Per tensor dim, the new axes: axis names, or tuples of axes as `joint_dim_axes` returns them. An axis
                that shards blocks in this spec shards the same blocks in the new spec.
            partial: Axes over which the gradient is partial. None: unchanged.
            blocks: (axis, relative block lengths) pairs of further axes that shard blocks; axes that shard no dim are
                ignored. Default: no further axes.
        """
        sizes = dict(self.blocks) | dict(blocks)
        entries = (tuple(Blocks((a,), sizes[a]) if a in sizes else a for a in map(unwrap_axis, cuts)) for cuts in dims)
        partial = self.partial if partial is None else partial
        return P(*entries, partial=partial, owned=dict(self.owned), tied=dict(self.tied))

    def with_partial(self, partial: tuple[str, ...]) -> P:
        """Return a copy of the spec with ``partial`` as the axes over which the gradient is partial."""
        return self.with_dims(map(self.joint_dim_axes, range(len(self.entries))), partial=partial)

    def renamed(self, names: Mapping[str, str]) -> P:
        """Return a copy of the spec with renamed axes.

        Args:
            names: New name per axis. Other axes keep their names.
        """
        return self._replace_axes(
            {axis: (name,) for axis, name in names.items()},
            {names.get(axis, axis): names.get(at, at) if isinstance(at, str) else at for axis, at in self.owned},
            {names.get(axis, axis): where for axis, where in self.tied},
        )

    def _replace_axes(
        self, atoms: Mapping[str, Together], owned: Mapping[str, int | str], tied: Mapping[str, tuple[int, ...]]
    ) -> P:
        """Return the spec with other ``owned`` and ``tied``, and with each axis in ``atoms`` replaced by its axes."""
        blocks = dict(self.blocks)

        def replaced(axes: Together) -> Together:
            return tuple(atom for axis in axes for atom in atoms.get(axis, (axis,)))

        def part(axes: Together) -> Part:
            new = replaced(axes)
            return Blocks(new, blocks[axes[0]]) if axes[0] in blocks else unwrap_axis(new)

        # `replaced` returns () for a mesh dim of size 1 that is no axis of the topology.
        dims = (filter(replaced, self.joint_dim_axes(dim)) for dim in range(len(self.entries)))
        return P(*(tuple(map(part, parts)) for parts in dims), partial=replaced(self.partial), owned=owned, tied=tied)

    def resolve(self, topology: Topology, dims: Mapping[str, Together] | None = None) -> P:
        """Return the spec with every alias replaced by its axes; the spec itself if it names no alias.

        Args:
            topology: Provides the aliases.
            dims: Further aliases: axes per mesh dim of a device mesh. None: no further aliases.

        Raises:
            ValueError: The spec names an alias, and an axis is named twice, directly or by an alias; an owned or tied
                axis is unknown; a coordinate is out of range; the coordinates of a tied alias are not a product of
                coordinates of its axes; in ``owned={name: other}``, ``other`` is larger than ``name``, or one of them is
                an alias, and the sizes of their axes differ.
        """
        aliases = {**topology.aliases, **(dims or {})}
        if not aliases or aliases.keys().isdisjoint(self.named_axes):
            return self
        self._check_coordinates(topology, repr(topology), aliases)
        try:
            owned = owned_by_axis(self.owned, topology, aliases)
            tied: dict[str, tuple[int, ...]] = {}
            for axis, where in self.tied:
                if axis in aliases:
                    tied |= by_axis(where, {atom: topology.size(atom) for atom in aliases[axis]})
                else:
                    tied[axis] = where
            return self._replace_axes(aliases, owned, tied)
        except ValueError as problem:
            raise ValueError(f"{self} on {topology!r}: {problem}") from None

    def spans(self, dim: int, length: int, topology: Topology, coordinate: Mapping[str, int]) -> tuple[Span, ...]:
        """Return the (offset, length) spans of tensor dim ``dim`` that the rank at ``coordinate`` holds.

        If ``length`` is not a multiple of the sizes of the axes, the dim is sharded as `torch.chunk` does: by one axis
        after the other. The axes of an alias or of a nested tuple shard it jointly, like one axis.

        Args:
            dim: Tensor dim (>= 0).
            length: Length of the dim in the full tensor.
            topology: Provides the sizes of the axes.
            coordinate: Index per axis of the rank.
        Returns:
            The spans in the order of the shard. There are several spans if the dim consists of blocks.
        Raises:
            ValueError: The dim has several blocks that its axes can't divide evenly; an axis is unknown; or
                `resolve` rejects the spec.
        """
        spans: tuple[Span, ...] = ((0, length),)
        spec = self.resolve(topology)
        for axes in spec.joint_dim_axes(dim):
            index = 0
            for axis in axes:
                index = index * topology.size(axis) + coordinate[axis]
            try:
                spans = cut_spans(spans, topology.size(*axes), index, spec.block_sizes(axes[0]))
            except ValueError as problem:
                over = " x ".join(map(repr, axes))
                raise ValueError(f"{self} can't shard dim {dim}, of length {length}, over {over}: {problem}") from None
        return spans

    def tied_coordinates(self, axis: str, topology: Topology) -> tuple[int, ...]:
        """Return the coordinates on the tied axis ``axis`` at which ranks hold the parameter, ascending and >= 0."""
        size = topology.size(axis)
        return tuple(sorted({index % size for index in dict(self.tied)[axis]}))

    def holds(self, coordinate: Mapping[str, int], topology: Topology) -> bool:
        """Return True if the rank at ``coordinate`` holds the parameter.

        Args:
            coordinate: Index per axis of the rank.
            topology: Provides the sizes of the axes.
        """
        spec = self.resolve(topology)
        return owns(spec.owned, coordinate) and all(
            coordinate[axis] in spec.tied_coordinates(axis, topology) for axis, _ in spec.tied
        )

    def distinct_axes(self, topology: Topology) -> tuple[str, ...]:
        """Return the axes along which ranks hold different parameters or shards.

        These are the axes that shard the parameter, and the pipeline axes that the spec does not name.
        """
        spec = self.resolve(topology)
        pipe_axes = [axis for axis in topology.pipe_axes if axis not in spec.named_axes]
        distinct = {*spec.sharded_axes, *pipe_axes}
        return tuple(axis for axis in topology.axes if axis in distinct)

    def replica_axes(self, topology: Topology) -> tuple[str, ...]:
        """Return the axes over which the parameter is replicated.

        These are all axes that are not in `distinct_axes`, and that are neither owned nor tied.
        """
        spec = self.resolve(topology)
        excluded = {*spec.distinct_axes(topology), *dict(spec.owned), *dict(spec.tied)}
        return tuple(axis for axis in topology.axes if axis not in excluded)

    def num_replicas(self, topology: Topology) -> int:
        """Return the replication factor: the number of ranks that hold the same shard, on all tied stages together."""
        spec = self.resolve(topology)
        replicas = prod(topology.size(axis) for axis in spec.replica_axes(topology))
        return replicas * prod(len(spec.tied_coordinates(axis, topology)) for axis, _ in spec.tied)

    def validate(self, ndim: int, topology: Topology, name: str = "parameter") -> None:
        """Raise ValueError unless the spec fits a tensor with ``ndim`` dims and a topology.

        Args:
            ndim: Number of dims of the tensor.
            topology: Provides axes, aliases and sizes.
            name: Name of the parameter in errors. Default: ``"parameter"``.
        Raises:
            ValueError: The spec has more than ``ndim`` entries, an unknown axis, or a coordinate out of range;
                ``other`` in ``owned={axis: other}`` is larger than ``axis``; or `resolve` rejects the spec.
        """
        if len(self.entries) > ndim:
            raise ValueError(
                f"{name}: {self} has more entries ({len(self.entries)}) than the tensor has dims ({ndim}); give at most "
                "one entry per dim"
            )
        for axis in self.named_axes:
            if axis not in topology.axes and axis not in topology.aliases:
                known = f"the axes are {', '.join(topology.axes)}" if topology.axes else "the topology has no axes"
                known += f" (aliases: {', '.join(topology.aliases)})" if topology.aliases else ""
                raise ValueError(f"{name}: {self} names axis {axis!r}, but {known}; {topology.advice_on(axis)}")
        self._check_coordinates(topology, name, topology.aliases)
        self.resolve(topology)

    def _check_coordinates(self, topology: Topology, name: str, aliases: Mapping[str, Together]) -> None:
        def size_of(axis: str) -> int:
            return topology.size(*aliases.get(axis, (axis,)))

        pairs = [*self.owned, *((axis, index) for axis, where in self.tied for index in where)]
        for axis, index in pairs:
            size = size_of(axis)
            if isinstance(index, str):
                if size_of(index) > size:
                    raise ValueError(
                        f"{name}: in {self}, owned={{{axis!r}: {index!r}}} needs size({axis!r}) >= size({index!r}) = "
                        f"{size_of(index)}, but {axis!r} has size {size}; use a larger axis as the key"
                    )
                continue
            if not -size <= index < size or (index < 0 and axis in dict(self.owned)):
                raise ValueError(
                    f"{name}: {self} names coordinate {index} of {axis!r}, which is out of range; write a number from 0 to "
                    f"{size - 1}"
                )

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
            for axes in self.joint_dim_axes(dim)
        ]
        if len(found) == 1:
            return f"({found[0]},)" if len(self.joint_dim_axes(dim)[0]) > 1 else found[0]
        return f"({', '.join(found)})" if found else "None"
