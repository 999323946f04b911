"""Named process axes: rank <-> coordinate, and who shares which coordinates with whom.

Pure arithmetic on a handful of integers; no process, no torch. Ranks are laid out row-major over the axes in the order
they were named, the last axis fastest, as in ``torch.arange(world_size).reshape(sizes)``::

    >>> t = Topology(data=2, row=2, col=2)
    >>> t.coordinate(6)
    {'data': 1, 'row': 1, 'col': 0}
    >>> t.peers(6, "row")          # the group that differs from rank 6 only along `row`
    (4, 6)

Nothing here grows with the world: an answer about one rank costs O(axes), a group costs O(its members).
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, overload

from .refinement import agreed_dims, refined
from .table import render

# A topology as one line of text: ``edp=2,mid=2,tensor=2,data=edp+mid`` ------------------------------------------------

_RESERVED = ("self", "roles", "aliases")


def parsed(text: str) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """The sizes of the axes, and the axes of the aliases.

    Raises:
        ValueError: A part is neither ``axis=size`` nor ``alias=axis+axis``, or a name comes twice.
    """
    axes: dict[str, int] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    for part in re.split(r"[\s,]+", text.strip(" \t\n,")):
        if not part:
            continue
        name, _, value = part.partition("=")
        if name in axes or name in aliases:
            raise ValueError(f"axis {name!r} is given twice in {text!r}; name each axis once")
        if value.isdecimal():
            axes[name] = int(value)
        elif "+" in value and all(axis.isidentifier() for axis in value.split("+")):
            aliases[name] = tuple(value.split("+"))
        else:
            raise ValueError(
                f"{part!r} doesn't say axis=size; write for example 'data=2,row=2,col=2', and an alias as 'grid=row+col'"
            )
    for name in _RESERVED:
        if name in axes:
            raise ValueError(f"{name!r} can't name an axis; rename it in {text!r}")
    return axes, aliases


# What the coordinates of an axis hold: the role of each axis, from what was told and from names -----------------------

Role = Literal["pipe", "data", "model"]

_DATA = ("data", "replica", "dp", "ddp", "dp_replicate", "dp_shard", "fsdp", "hsdp", "edp", "efsdp")
_SEQUENCE = ("cp", "context")  # a sample's sequence is split over them, so the model itself communicates along them
_EXPERT = ("expert", "experts", "ep")
_SAID: Mapping[str, Role] = {
    **dict.fromkeys(("pipe", "pipeline", "pp"), "pipe"),
    **dict.fromkeys((*_DATA, *_SEQUENCE), "data"),
    **dict.fromkeys(("tensor", "tp", "sp", "row", "col"), "model"),
}

Aliases = Mapping[str, tuple[str, ...]]


def roles_of(axes: Iterable[str], aliases: Aliases, told: Mapping[str, Role]) -> tuple[Role, ...]:
    """The role of each axis: the one told of it or of an alias of it; else the one that names say; else ``"model"``.

    Args:
        told: By axis or alias.
    Raises:
        ValueError: A role is none, or told of nothing that there is; or two are told, or said by names, of one axis.
    """
    axes = tuple(axes)
    for name, role in told.items():
        if name not in axes and name not in aliases:
            there = f"axes: {', '.join(axes) or 'none'}" + (f"; aliases: {', '.join(aliases)}" if aliases else "")
            raise ValueError(f"roles names {name!r}, which is no axis here ({there}); write one of these")
        if role not in get_args(Role):
            raise ValueError(f"axis {name!r} has role {role!r}; write one of {', '.join(map(repr, get_args(Role)))}")
    return tuple(_role(axis, names_of(axis, aliases), told) for axis in axes)


def _role(axis: str, names: tuple[str, ...], told: Mapping[str, Role]) -> Role:
    for source, how in ((told, "told of"), (_SAID, "by the name")):
        found = {name: source[name] for name in names if name in source}
        if len({*found.values()}) > 1:
            said = " and ".join(f"{role!r} {how} {name!r}" for name, role in found.items())
            raise ValueError(f"axis {axis!r} is {said}: say once which it is, roles={{{axis!r}: ...}}")
        if found:
            return next(iter(found.values()))
    return "model"


def names_of(axis: str, aliases: Aliases) -> tuple[str, ...]:
    """Its name, and the aliases of which it is a part."""
    return (axis, *(alias for alias, atoms in aliases.items() if axis in atoms))


def said_role(axis: str, aliases: Aliases) -> Role | None:
    """The role that an axis has unless it is told another; None: names say several."""
    try:
        return _role(axis, names_of(axis, aliases), {})
    except ValueError:
        return None


class ByRole:
    """The axes of a topology by their roles."""

    axes: tuple[str, ...]
    roles: tuple[Role, ...]
    _aliases: tuple[tuple[str, tuple[str, ...]], ...]
    _told: frozenset[str]

    def size(self, *axes: str) -> int:
        raise NotImplementedError

    @property
    def pipe_axes(self) -> tuple[str, ...]:
        """Axes whose coordinates own different parameters."""
        return self._axes_with("pipe")

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes whose coordinates hold replicas that see different samples, or different parts of them."""
        return self._axes_with("data")

    @property
    def sample_axes(self) -> tuple[str, ...]:
        """The data axes whose coordinates see different samples: all but ``cp`` and ``context``, whose see different parts
        of the same ones."""
        return tuple(axis for axis in self.data_axes if {*self._names(axis)}.isdisjoint(_SEQUENCE))

    @property
    def model_axes(self) -> tuple[str, ...]:
        """Axes that a parameter's spec speaks about."""
        return self._axes_with("model")

    @property
    def untold_expert_axes(self) -> tuple[str, ...]:
        """Axes larger than 1 that are named ``expert``, ``experts`` or ``ep``, by themselves or in an alias, while no role
        was given to them and none of their names says one.

        They are model axes: their ranks are taken to see the same samples, and the gradient of what is copied along them is
        not averaged. Where their ranks see different samples, as with most experts, the role is ``"data"``.
        """
        names = {axis: {*self._names(axis)} for axis in self.axes if axis not in self._told}
        untold = (axis for axis, said in names.items() if not said.isdisjoint(_EXPERT) and said.isdisjoint(_SAID))
        return tuple(axis for axis in untold if self.size(axis) > 1)

    def only_splits_the_batch(self, axis: str) -> bool:
        """Whether a model issues no collectives of its own over this axis, going by its names, unless its specs name it."""
        return _SAID.get(axis) == "data" and {*self._names(axis)}.isdisjoint(_SEQUENCE)

    def _axes_with(self, role: Role) -> tuple[str, ...]:
        return tuple(axis for axis, found in zip(self.axes, self.roles, strict=True) if found == role)

    def _names(self, axis: str) -> tuple[str, ...]:
        return names_of(axis, dict(self._aliases))


# Names for several axes together: ``data`` for ``edp x mid``, beside ``expert`` for ``mid x tensor`` ------------------

# Two meshes of the same ranks are so one topology: its axes are the common refinement, and a dim of either mesh is an
# alias. An alias stands for its axes, of which the first is the slowest, as in ``torch.arange(n).reshape(sizes)``.


def checked_aliases(
    given: Mapping[str, str | tuple[str, ...]], axes: tuple[str, ...]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(alias, its axes) pairs.

    Raises:
        ValueError: An alias is no identifier or the name of an axis; it names no axis, one that there isn't, or axes in
            another order than theirs.
    """
    checked = []
    for alias, named in given.items():
        atoms = (named,) if isinstance(named, str) else tuple(named)
        if not isinstance(alias, str) or not alias.isidentifier():
            raise ValueError(f"{alias!r} can't name axes; use an identifier such as 'data'")
        if alias in axes:
            raise ValueError(f"{alias!r} is an axis and can't be an alias too; rename one of them")
        unknown = [axis for axis in atoms if axis not in axes]
        if unknown or not atoms:
            raise ValueError(
                f"alias {alias!r} stands for {unknown[0] if unknown else atoms!r}, which is no axis; an alias stands for "
                f"one axis or more of {', '.join(axes)}"
            )
        ordered = tuple(axis for axis in axes if axis in atoms)
        if atoms != ordered:
            raise ValueError(
                f"alias {alias!r} stands for {atoms!r}, but the order of the axes is {', '.join(axes)}: write {ordered!r}, "
                "each once; then its coordinates are in the order of the ranks"
            )
        checked.append((alias, atoms))
    return tuple(checked)


class Coordinate(dict[str, int]):
    """Where a rank is: its coordinate on every axis, in axis order; indexed by an alias, that on its axes together."""

    def __init__(self, by_axis: Mapping[str, int], together: Mapping[str, Mapping[str, int]]) -> None:
        """``together``: for each alias the sizes of its axes."""
        super().__init__(by_axis)
        self._together = together

    def __missing__(self, alias: str) -> int:
        index = 0
        for axis, size in self._together[alias].items():
            index = index * size + self[axis]
        return index


def by_axis(where: Iterable[int], sizes: Mapping[str, int]) -> list[tuple[str, tuple[int, ...]]]:
    """Coordinates of an alias, by the axes of these sizes that it stands for: whose product they are.

        >>> by_axis((2, 3), {"edp": 2, "mid": 2})
        [('edp', (1,)), ('mid', (0, 1))]

    Raises:
        ValueError: They are no product.
    """
    size = prod(sizes.values())
    points = dict(enumerate(product(*map(range, sizes.values()))))
    wanted = {points[index % size] for index in where}
    found = [tuple(sorted(set(coordinates))) for coordinates in zip(*wanted, strict=True)]
    if prod(map(len, found)) != len(wanted):
        raise ValueError(
            f"coordinates {sorted(index % size for index in where)} are no product of coordinates of "
            f"{' x '.join(f'{axis}={n}' for axis, n in sizes.items())}, which alone can be said; name these axes"
        )
    return list(zip(sizes, found, strict=True))


# The ranks of one group, of which nobody has to make a list: a group of a data axis may have 131,072 ------------------


class Peers(Sequence[int]):
    """Ranks ``base + sum of a multiple of each stride``, ascending; equal to the tuple of them, and shown as it.

        peers = Topology(data=131072, tensor=8).peers(5, "data")
        len(peers), peers[2], peers.index(21), 22 in peers      # 131072, 21, 2, False

    All of these cost O(axes); what goes through all ranks (``==``, ``hash``, ``list``) O(ranks).

    Args:
        base: The first rank.
        dims: (size, stride) of each axis, the largest stride first; a stride is at least as large as the axes after it
            reach.
    """

    __slots__ = ("_base", "_dims", "_len")

    def __init__(self, base: int, dims: Sequence[tuple[int, int]]) -> None:
        self._base, self._dims, self._len = base, tuple(dims), 1
        for size, _ in self._dims:
            self._len *= size

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        # itertools.product holds its ranges in memory, which is the sum of the sizes and not their product.
        steps = (range(0, size * stride, stride) for size, stride in self._dims)
        return map(sum, itertools.product((self._base,), *steps))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self[at] for at in range(*index.indices(self._len)))
        at = index + self._len if index < 0 else index
        if not 0 <= at < self._len:
            raise IndexError(f"there are {self._len} ranks, none at {index}")
        found = self._base
        for size, stride in reversed(self._dims):
            at, digit = divmod(at, size)
            found += digit * stride
        return found

    def index(self, value: int, start: int = 0, stop: int | None = None) -> int:
        """Where ``value`` is among them; ValueError where it is not."""
        rest, at = value - self._base, 0
        for size, stride in self._dims:
            digit = min(max(rest // stride, 0), size - 1)
            rest -= digit * stride
            at = at * size + digit
        if rest or at not in range(*slice(start, stop).indices(self._len)):
            raise ValueError(f"rank {value} isn't among these {self._len}")
        return at

    def __contains__(self, value: object) -> bool:
        try:
            return isinstance(value, int) and self.index(value) >= 0
        except ValueError:
            return False

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Peers) and (self._base, self._dims) == (other._base, other._dims):
            return True
        return isinstance(other, (Peers, tuple)) and self._len == len(other) and tuple(self) == tuple(other)

    def __lt__(self, other: Sequence[int]) -> bool:
        return tuple(self) < tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


# Topology -------------------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_OF_REGISTRIES = frozenset({"topology", "global_rank", "rank", "ranks", "group", "group_of", "device", "device_mesh"})


@dataclass(frozen=True, init=False, repr=False)
class Topology(ByRole):
    """An immutable, hashable layout of ranks on named axes.

    Args:
        roles: Role of an axis, or of all axes of an alias, where it isn't the default: ``"pipe"`` (every coordinate owns
            other parameters), ``"data"`` (coordinates hold replicas whose gradients are averaged) or ``"model"``
            (parameters are split or replicated as their spec says). By default ``pipe``, ``pipeline`` and ``pp`` are
            pipeline axes; ``data``, ``replica``, ``dp``, ``ddp``, ``dp_replicate``, ``dp_shard``, ``fsdp``, ``hsdp``,
            ``edp``, ``efsdp``, ``cp`` and ``context`` are data axes, and so is an axis of an unknown name in an alias of
            such a name; every other name (``tensor``, ``tp``, ``sp``, ``row``, ...) is a model axis. So is ``expert``, but
            that is for you to say; see `untold_expert_axes`.
        aliases: Names for several axes together, which are taken wherever an axis is: ``{"data": ("edp", "mid")}``. The
            axes stand in their own order, and an axis may be in several aliases.
        **axes: Number of coordinates on each axis, slowest axis first. None at all is a world of one rank.

    Raises:
        ValueError: A size isn't an integer >= 1, a name isn't an identifier; a role or an alias names no axis; an axis has
            two roles by its names, or was told two.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    roles: tuple[Role, ...]
    _aliases: tuple[tuple[str, tuple[str, ...]], ...]
    world_size: int = field(compare=False)
    _told: frozenset[str] = field(compare=False)
    _strides: tuple[int, ...] = field(compare=False)

    @overload
    def __init__(self, *, roles: Mapping[str, Role] | None = None, **axes: int) -> None: ...

    @overload
    def __init__(
        self, *, roles: Mapping[str, Role] | None = None, aliases: Mapping[str, str | tuple[str, ...]], **axes: int
    ) -> None: ...

    def __init__(self, *, roles: Mapping[str, Role] | None = None, aliases: Any = None, **axes: int) -> None:
        for axis, size in axes.items():
            if not axis.isidentifier():
                raise ValueError(f"{axis!r} can't name an axis; use an identifier such as 'data' or 'row'")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"axis {axis!r} has size {size!r}; write an integer >= 1, such as {axis}=2")
        sizes = tuple(axes.values())
        named = dict(checked_aliases(aliases or {}, tuple(axes)))
        values = {
            "axes": tuple(axes),
            "sizes": sizes,
            "roles": roles_of(axes, named, roles or {}),
            "_aliases": tuple(named.items()),
            "world_size": prod(sizes),
            "_told": frozenset(atom for name in roles or () for atom in named.get(name, (name,))),
            "_strides": tuple(prod(sizes[i + 1 :]) for i in range(len(sizes))),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def parse(cls, text: str, *, roles: Mapping[str, Role] | None = None) -> Topology:
        """The topology that ``"row=2,col=2"`` or ``"row=2 col=2"`` describes, ``grid=row+col`` an alias; no text: one rank.

        Raises:
            ValueError: A part is neither ``axis=size`` nor ``alias=axis+axis``, or a name comes twice.
        """
        axes, aliases = parsed(text)
        return cls(roles=roles, aliases=aliases, **axes)

    @classmethod
    def of_meshes(cls, *meshes: DeviceMesh, roles: Mapping[str, Role] | None = None) -> Topology:
        """The topology whose axes are the refinement of these meshes, with aliases for dims that are several axes.

            Topology.of_meshes(dense, experts)      # of (data=4, tensor=2) and (edp=2, expert=4)
            Topology(edp=2, data_1=2, tensor=2, aliases={"data": ("edp", "data_1"), "expert": ("data_1", "tensor")})

        An axis has the name of the first dim that it is (others are aliases of it too); else that of the first dim it is a
        part of, and its place in it. All ranks give their meshes in the same order.

        Raises:
            ValueError: On every rank: a dim's groups are no product of axes; dims don't nest, or have one name; a mesh has
                no names; the meshes leave ranks out. Or as the constructor.
        Collectives: an object all-gather over the world.
        """
        axes, aliases = refined(agreed_dims(meshes))
        return cls(roles=roles, aliases=aliases, **axes)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """What a registry has and a topology lacks: somebody was given the one in the place of the other."""
            said = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _OF_REGISTRIES:
                said += f": this is the layout alone; give ProcessGroupRegistry({self!r}), which has the groups"
            raise AttributeError(said, name=name, obj=self)

    @property
    def aliases(self) -> dict[str, tuple[str, ...]]:
        """The axes that each alias stands for."""
        return dict(self._aliases)

    def atoms(self, *names: str) -> tuple[str, ...]:
        """The axes that these names, of axes or aliases, stand for, in the order given.

        Raises:
            ValueError: An unknown axis, or the same axis twice.
        """
        atoms = tuple(atom for name in names for atom in self._atoms(name))
        if len(set(atoms)) != len(atoms):
            twice = next(atom for atom in atoms if atoms.count(atom) > 1)
            where = "" if names.count(twice) > 1 else f" ({twice!r} is in several of them)"
            raise ValueError(f"an axis is named twice in {_listed(names)}{where}; name each axis once")
        return atoms

    def size(self, *axes: str) -> int:
        """Number of coordinates on these axes together; 1 for none.

        Raises:
            ValueError: An unknown axis, or the same axis twice.
        """
        return prod(self.sizes[self.axes.index(axis)] for axis in self.atoms(*axes))

    def role(self, axis: str) -> Role:
        """``"pipe"``, ``"data"`` or ``"model"``.

        Raises:
            ValueError: An unknown axis, or an alias whose axes have several roles.
        """
        found = {atom: self.roles[self.axes.index(atom)] for atom in self._atoms(axis)}
        if len({*found.values()}) > 1:
            raise ValueError(
                f"the axes of {axis!r} have several roles, {', '.join(f'{a} {r!r}' for a, r in found.items())}; ask for one"
            )
        return next(iter(found.values()))

    def coordinate(self, rank: int) -> Coordinate:
        """Where ``rank`` is: its coordinate on every axis, in axis order; indexed by an alias, that on its axes together.

        Raises:
            ValueError: The rank isn't in the world.
        """
        self._check_rank(rank)
        steps = zip(self.axes, self._strides, self.sizes, strict=True)
        together = {alias: {atom: self.size(atom) for atom in atoms} for alias, atoms in self._aliases}
        return Coordinate({axis: rank // stride % size for axis, stride, size in steps}, together)

    def coordinate_of(self, rank: int, axis: str) -> int:
        """Coordinate of ``rank`` on one axis; on an alias, that on its axes together, the first the slowest."""
        self._check_rank(rank)
        index = 0
        for dim in map(self.axes.index, self._atoms(axis)):
            index = index * self.sizes[dim] + rank // self._strides[dim] % self.sizes[dim]
        return index

    def on_axes(self, coordinate: Mapping[str, int]) -> dict[str, int]:
        """The coordinates of the axes, from those of axes and aliases.

        Raises:
            ValueError: An unknown axis, the same axis twice, or a coordinate out of range.
        """
        self.atoms(*coordinate)
        found = {}
        for name, value in coordinate.items():
            size = self.size(name)
            if not 0 <= value < size:
                raise ValueError(f"coordinate {name}={value} is out of range; axis {name!r} goes from 0 to {size - 1}")
            for atom in reversed(self._atoms(name)):
                value, found[atom] = divmod(value, self.size(atom))
        return found

    def rank(self, **coordinate: int) -> int:
        """The rank at this coordinate; every axis must be given, by itself or in an alias.

        Raises:
            ValueError: An axis is missing or unknown, or a coordinate is out of range.
        """
        given = self.on_axes(coordinate)
        missing = [axis for axis in self.axes if axis not in given]
        if missing:
            raise ValueError(
                f"rank() needs a coordinate for every axis; {_listed(missing)} is missing. "
                "Use filter() for all ranks that match some axes"
            )
        return self._offset(given)

    def peers(self, rank: int, *axes: str) -> Peers:
        """All ranks that differ from ``rank`` only along ``axes``, itself included, ascending: as a tuple is, but not made.

        The order in which the axes are named doesn't matter. O(axes).
        """
        self._check_rank(rank)
        atoms = self.atoms(*axes)
        base = rank - self._offset({axis: self.coordinate_of(rank, axis) for axis in atoms})
        return Peers(base, self._dims(atoms))

    def filter(self, **coordinate: int) -> Iterator[int]:
        """Ranks that are at these coordinates, ascending; all ranks for none.

        >>> list(Topology(data=2, tensor=2).filter(tensor=1))
        [1, 3]
        """
        given = self.on_axes(coordinate)
        free = tuple(axis for axis in self.axes if axis not in given)
        return iter(Peers(self._offset(given), self._dims(free)))

    def groups(self, *axes: str) -> Iterator[tuple[int, ...]]:
        """The groups along ``axes``: they partition the world; ordered by their first rank.

        >>> list(Topology(data=2, tensor=2).groups("data"))
        [(0, 2), (1, 3)]
        """
        atoms = self.atoms(*axes)
        offsets = tuple(Peers(0, self._dims(atoms)))
        rest = tuple(axis for axis in self.axes if axis not in atoms)
        return (tuple(base + offset for offset in offsets) for base in Peers(0, self._dims(rest)))

    def table(self, rank: int | None = None) -> str:
        """A rank grid and the groups along each axis, for people; elided where the world is big.

        Args:
            rank: Mark this rank, and show its own groups only.
        """
        return render(self, rank)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} isn't in {self!r}; its ranks are 0..{self.world_size - 1}")

    def _atoms(self, name: str) -> tuple[str, ...]:
        if name in self.axes:
            return (name,)
        atoms = self.aliases.get(name)
        if atoms is None:
            raise ValueError(f"unknown axis {name!r}{self.hint(name)} ({self.named()})")
        return atoms

    def hint(self, name: str) -> str:  # for errors
        close = difflib.get_close_matches(str(name), (*self.axes, *self.aliases), n=1)
        return f"; did you mean {close[0]!r}?" if close else ""

    def named(self) -> str:  # for errors
        return f"axes: {_listed(self.axes)}" + (f"; aliases: {_listed(self.aliases)}" if self._aliases else "")

    def _offset(self, coordinate: Mapping[str, int]) -> int:
        return sum(value * self._strides[self.axes.index(axis)] for axis, value in coordinate.items())

    def _dims(self, axes: tuple[str, ...]) -> list[tuple[int, int]]:
        """(size, stride) of these axes, in axis order whatever the caller's: then ranks come out ascending."""
        steps = zip(self.axes, self.sizes, self._strides, strict=True)
        return [(size, stride) for axis, size, stride in steps if axis in axes]

    def __repr__(self) -> str:
        parts = [f"{axis}={size}" for axis, size in zip(self.axes, self.sizes, strict=True)]
        told = zip(self.axes, self.roles, strict=True)
        other = {axis: role for axis, role in told if role != said_role(axis, self.aliases)}
        parts += [f"{name}={value}" for name, value in (("roles", other), ("aliases", self.aliases)) if value]
        return f"Topology({', '.join(parts)})"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(str, names)) or "none"


# Which axes of a topology a list of ranks is, whatever somebody else calls it -----------------------------------------


def axes_along(ranks: tuple[int, ...], topology: Topology) -> tuple[str, ...] | None:
    """The axes, larger than 1, along which these ranks lie in this order, the first the slowest; None: there are none."""
    strides = {topology.peers(0, axis)[1]: axis for axis in topology.axes if topology.size(axis) > 1}
    found: tuple[str, ...] = ()
    while topology.size(*found) < len(ranks):
        axis = strides.get(ranks[topology.size(*found)] - ranks[0])
        if axis is None or axis in found:
            return None
        found = (axis, *found)
    places = product(*(range(topology.size(axis)) for axis in found))
    at = topology.coordinate(ranks[0])
    grid = tuple(topology.rank(**{**at, **dict(zip(found, place, strict=True))}) for place in places)
    return found if grid == ranks else None
