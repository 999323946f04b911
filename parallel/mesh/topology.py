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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, overload

from .aliases import Coordinate, checked_aliases
from .notation import parsed
from .peers import Peers
from .refinement import agreed_dims, refined
from .roles import ByRole, Role, roles_of, said_role
from .table import render

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
