"""Named mesh axes: the coordinate of each rank, and the groups of ranks along axes.

A topology is computed from the sizes of the axes. Except for `Topology.of_meshes`, this needs no process group. Ranks
are row-major over the axes in the order of the arguments: the last axis varies fastest, as in
``torch.arange(world_size).reshape(sizes)``::

    >>> t = Topology(data=2, row=2, col=2)
    >>> t.coordinate(6)
    {'data': 1, 'row': 1, 'col': 0}
    >>> t.peers(6, "row")          # the ranks that differ from rank 6 only along `row`
    (4, 6)

The time to compute a coordinate does not depend on the number of ranks. Listing a group takes O(members).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from operator import contains
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, get_args, overload

from .deprecation import renamed_members
from .refinement import dims_of, gathered, refined
from .text import render
from .value_checks import is_whole

# A topology as one line of text: ``edp=2,mid=2,tensor=2,data=edp+mid`` ------------------------------------------------

_RESERVED = ("self", "roles", "aliases")


def parse_topology(text: str) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """Return the size per axis and the axes per alias in a text such as ``"row=2,col=2,grid=row+col"``."""
    axes: dict[str, int] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    for part in re.split(r"[\s,]+", text.strip(" \t\n,")):
        if not part:
            continue
        name, _, value = part.partition("=")
        if name in axes or name in aliases:
            raise ValueError(f"{name!r} appears twice in {text!r}; name each axis and alias once")
        if value.isdecimal():
            axes[name] = int(value)
        elif "+" in value and all(axis.isidentifier() for axis in value.split("+")):
            aliases[name] = tuple(value.split("+"))
        else:
            raise ValueError(
                f"{part!r} is neither axis=size nor alias=axis+axis; write for example 'data=2,row=2,col=2,grid=row+col'"
            )
    for name in _RESERVED:
        if name in axes:
            raise ValueError(f"{name!r} is reserved and can't name an axis; rename it in {text!r}")
    return axes, aliases


# The role of each axis, from the arguments and from usual names -------------------------------------------------------

Role = Literal["pipe", "data", "model"]
"""Role of a mesh axis. ``"pipe"``: ranks along the axis are pipeline stages. ``"data"``: ranks along the axis process
different samples, or parts of samples. ``"model"``: parameters are sharded or replicated over the axis, by their
specs."""

_DATA = ("data", "replica", "dp", "ddp", "dp_replicate", "dp_shard", "fsdp", "hsdp", "edp", "efsdp")
_SEQUENCE = ("cp", "context")  # axes that shard the sequence of each sample; the model communicates along them
_EXPERT = ("expert", "experts", "ep")
_ROLE_BY_NAME: Mapping[str, Role] = {
    **dict.fromkeys(("pipe", "pipeline", "pp"), "pipe"),
    **dict.fromkeys((*_DATA, *_SEQUENCE), "data"),
    **dict.fromkeys(("tensor", "tp", "sp", "row", "col"), "model"),
}

Aliases = Mapping[str, tuple[str, ...]]


def roles_of(axes: Iterable[str], aliases: Aliases, explicit: Mapping[str, Role]) -> dict[str, Role]:
    """Return the role of each axis.

    The names of an axis are its own name and the aliases that contain it. The role of an axis is the entry of
    ``explicit`` for one of these names. If there is none, it is the default role of one of these names (see
    `Topology`). If they have no default role, it is ``"model"``. Names with different roles raise ValueError.
    """
    axes = tuple(axes)
    for name, role in explicit.items():
        if name not in axes and name not in aliases:
            known = f"axes: {', '.join(axes) or 'none'}" + (f"; aliases: {', '.join(aliases)}" if aliases else "")
            raise ValueError(
                f"roles= has an entry for {name!r}, which is neither an axis nor an alias of this topology "
                f"({known}); use one of these names"
            )
        if role not in get_args(Role):
            raise ValueError(
                f"roles= gives {name!r} the role {role!r}; write one of the roles {', '.join(map(repr, get_args(Role)))}"
            )
    return {axis: _role(axis, names_of(axis, aliases), explicit) for axis in axes}


def _role(axis: str, names: tuple[str, ...], explicit: Mapping[str, Role]) -> Role:
    for source, origin, advice in (
        (explicit, "from the entry of roles= for", "leave out one of these entries"),
        (_ROLE_BY_NAME, "from the name", f"write roles={{{axis!r}: ...}}"),
    ):
        found = {name: source[name] for name in names if name in source}
        if len({*found.values()}) > 1:
            conflict = " and ".join(f"{role!r} {origin} {name!r}" for name, role in found.items())
            raise ValueError(f"axis {axis!r} has more than one role: {conflict}; {advice}")
        if found:
            return next(iter(found.values()))
    return "model"


def names_of(axis: str, aliases: Aliases) -> tuple[str, ...]:
    """Return the name of the axis and all aliases that contain the axis."""
    return (axis, *(alias for alias, atoms in aliases.items() if axis in atoms))


def has_default_role(axis: str, aliases: Aliases) -> bool:
    """Return True if the axis, or an alias that contains it, has a name with a default role."""
    return any(name in _ROLE_BY_NAME for name in names_of(axis, aliases))


def default_role(axis: str, aliases: Aliases) -> Role | None:
    """Return the role of an axis without ``roles=``; None if its name and its aliases have different default roles."""
    try:
        return _role(axis, names_of(axis, aliases), {})
    except ValueError:
        return None


# Aliases, names for several axes: for example ``data`` for ``edp x mid``, and ``expert`` for ``mid x tensor`` ---------

# With aliases one topology describes several meshes of the same ranks: each mesh dim is an axis, or an alias for several
# axes. The first axis of an alias varies slowest, as in ``torch.arange(n).reshape(sizes)``.


def resolve_aliases(
    aliases: Mapping[str, str | tuple[str, ...]], axes: tuple[str, ...]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the aliases as (alias, tuple of axes) pairs; raise ValueError if one is not valid."""
    checked = []
    for alias, entry in aliases.items():
        atoms = (entry,) if isinstance(entry, str) else tuple(entry)
        if not isinstance(alias, str) or not alias.isidentifier():
            raise ValueError(f"alias {alias!r} is not an identifier; use an identifier such as 'data'")
        if alias in axes:
            raise ValueError(f"{alias!r} is an axis and can't be an alias too; rename one of them")
        unknown = [axis for axis in atoms if axis not in axes]
        if unknown or not atoms:
            problem = f"contains {unknown[0]!r}, which is not an axis" if unknown else "is empty"
            raise ValueError(
                f"alias {alias!r} {problem}; an alias must consist of one or more of the axes {', '.join(axes)}"
            )
        ordered = tuple(axis for axis in axes if axis in atoms)
        if atoms != ordered:
            raise ValueError(
                f"alias {alias!r} is {atoms!r}, but the order of the axes is {', '.join(axes)}; write {ordered!r}, "
                "with each axis once in this order"
            )
        checked.append((alias, atoms))
    return tuple(checked)


class Coordinate(dict[str, int]):
    """Coordinate of a rank: its index on every axis, in the order of the axes.

    ``coordinate[alias]`` is the row-major index over the axes of an alias. ``in``, ``get`` and iteration ignore
    aliases. ``sizes_by_alias`` has, per alias, the size of each of its axes, slowest axis first.
    """

    def __init__(self, by_axis: Mapping[str, int], sizes_by_alias: Mapping[str, Mapping[str, int]]) -> None:
        super().__init__(by_axis)
        self._sizes_by_alias = sizes_by_alias

    def __missing__(self, alias: str) -> int:
        index = 0
        for axis, size in self._sizes_by_alias[alias].items():
            index = index * size + self[axis]
        return index


def by_axis(where: Iterable[int], sizes: Mapping[str, int]) -> list[tuple[str, tuple[int, ...]]]:
    """Split coordinates of an alias into coordinates per axis; raise ValueError if they are not all combinations of these.

        >>> by_axis((2, 3), {"edp": 2, "mid": 2})
        [('edp', (1,)), ('mid', (0, 1))]

    Negative coordinates count from the end. ``sizes`` has the axes of the alias, slowest first.
    """
    size = prod(sizes.values())
    points = dict(enumerate(product(*map(range, sizes.values()))))
    wanted = {points[index % size] for index in where}
    found = [tuple(sorted(set(coordinates))) for coordinates in zip(*wanted, strict=True)]
    if prod(map(len, found)) != len(wanted):
        combined = [index for index, point in points.items() if all(map(contains, found, point))]
        raise ValueError(
            f"coordinates {sorted(index % size for index in where)} of the alias for "
            f"{' x '.join(f'{axis}={n}' for axis, n in sizes.items())} must be all combinations of their coordinates on "
            f"these axes, {combined}; give such coordinates, or name the axes instead of the alias"
        )
    return list(zip(sizes, found, strict=True))


# The ranks of a group as a lazy sequence, because a group of a large job may have 131,072 members ---------------------


class Peers(Sequence[int]):
    """Lazy ascending sequence of the ranks of a group; it compares equal to the tuple of these ranks.

        peers = Topology(data=131072, tensor=8).peers(5, "data")
        len(peers), peers[2], peers.index(21), 22 in peers      # 131072, 21, 2, False

    The operations above take O(axes). Iteration, ``hash`` and comparisons may take O(ranks). A rank is
    ``base + sum(index * stride)``, with an index in 0..size-1 per (size, stride) pair of ``dims``. The largest stride is
    first. The ranks ascend if each stride is larger than the sum of ``(size - 1) * stride`` over all pairs after it.
    """

    __slots__ = ("_base", "_dims", "_len")

    def __init__(self, base: int, dims: Sequence[tuple[int, int]]) -> None:
        self._base, self._dims, self._len = base, tuple(dims), 1
        for size, _ in self._dims:
            self._len *= size

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        # `product` stores each range in memory: as many numbers as the sum of the sizes, not their product.
        steps = (range(0, size * stride, stride) for size, stride in self._dims)
        return map(sum, product((self._base,), *steps))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self[at] for at in range(*index.indices(self._len)))
        at = index + self._len if index < 0 else index
        if not 0 <= at < self._len:
            raise IndexError(f"index {index} is out of range for {self._len} ranks")
        found = self._base
        for size, stride in reversed(self._dims):
            at, digit = divmod(at, size)
            found += digit * stride
        return found

    def index(self, value: int, start: int = 0, stop: int | None = None) -> int:
        """Return the index of the rank ``value``, in O(axes)."""
        rest, at = value - self._base, 0
        for size, stride in self._dims:
            digit = min(max(rest // stride, 0), size - 1)
            rest -= digit * stride
            at = at * size + digit
        if rest:
            raise ValueError(
                f"rank {value} isn't in this group of {self._len} ranks between {self._base} and {self[-1]}"
            )
        if at not in range(*slice(start, stop).indices(self._len)):
            raise ValueError(
                f"rank {value} has index {at} in this group of {self._len} ranks, outside start={start}, stop={stop}"
            )
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

_REGISTRY_ATTRIBUTES = frozenset(
    {
        "topology",
        "global_rank",
        "rank",
        "ranks",
        "group",
        "group_of",
        "create_groups",
        "connect",
        "device",
        "device_mesh",
    }
)


class _Axis(NamedTuple):
    """Size, stride and role of an axis. The stride is the difference between neighbouring ranks along it."""

    size: int
    stride: int
    role: Role

    def coordinate(self, rank: int) -> int:
        return rank // self.stride % self.size


@renamed_members(
    atoms="expand_aliases",
    on_axes="expand_coordinate",
    untold_expert_axes="expert_axes_without_role",
    only_splits_the_batch="is_batch_only_axis",
)
@dataclass(frozen=True, init=False, repr=False)
class Topology:
    """The arrangement of all ranks on named mesh axes; immutable and hashable.

        topology = Topology(data=2, tensor=4)
        topology.coordinate(5)          # {'data': 1, 'tensor': 1}
        topology.peers(5, "tensor")     # (4, 5, 6, 7)

    An axis has one of three roles:

    ```text
    role       meaning of a coordinate                         default for the names
    "pipe"     a stage with its own parameters                 pipe, pipeline, pp
    "data"     other samples, or other parts of samples;       data, replica, dp, ddp, dp_replicate, dp_shard, fsdp,
               gradients are averaged                          hsdp, edp, efsdp, cp, context
    "model"    parameters sharded or replicated by their spec  all others: tensor, tp, sp, row, col, ...
    ```

    If the name of an axis is not in the table, but an alias that contains the axis is, the axis has the default role of
    the alias. Pass the role of an ``expert`` axis yourself: by default it is a model axis (see
    `expert_axes_without_role`).

    Args:
        roles: Role per axis, or per alias for all axes of the alias. Axes without an entry have their default roles.
            None: all axes have their default roles.
        aliases: Names for one or several axes, valid wherever an axis is: ``{"data": ("edp", "mid")}``. The axes of an
            alias must be in the order of the topology. An axis may be in several aliases. By default there are no
            aliases.
        **axes: Number of coordinates per axis, slowest axis first. Without axes the world has one rank.

    Attributes:
        axes: Names of the axes, slowest first.
        sizes: Number of coordinates per axis.
        roles: Role per axis.
        world_size: Number of ranks, the product of the sizes.

    Raises:
        ValueError: A size is not an integer >= 1; a name is not an identifier; ``roles`` or ``aliases`` names an unknown
            axis; a role is unknown; the name of an axis and its aliases give it different roles; an alias has the name
            of an axis; or the axes of an alias are empty, repeated, or in another order.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    roles: tuple[Role, ...]
    _aliases: tuple[tuple[str, tuple[str, ...]], ...]
    world_size: int = field(compare=False)
    _explicit: frozenset[str] = field(compare=False)
    _by_axis: Mapping[str, _Axis] = field(compare=False)

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
            if not is_whole(size, 1):
                raise ValueError(f"axis {axis!r} has size {size!r}; write an integer >= 1, such as {axis}=2")
        sizes = tuple(axes.values())
        atoms_by_alias = dict(resolve_aliases(aliases or {}, tuple(axes)))
        axis_roles = roles_of(axes, atoms_by_alias, roles or {})
        by_axis: dict[str, _Axis] = {}
        stride = prod(sizes)
        for axis, size in axes.items():
            stride //= size
            by_axis[axis] = _Axis(size, stride, axis_roles[axis])
        values = {
            "axes": tuple(axes),
            "sizes": sizes,
            "roles": tuple(axis_roles.values()),
            "_aliases": tuple(atoms_by_alias.items()),
            "world_size": prod(sizes),
            "_explicit": frozenset(atom for name in roles or () for atom in atoms_by_alias.get(name, (name,))),
            "_by_axis": by_axis,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def parse(cls, text: str, *, roles: Mapping[str, Role] | None = None) -> Topology:
        """Return the topology that a text describes.

            Topology.parse("row=2,col=2,grid=row+col")      # grid is an alias

        Args:
            text: ``axis=size`` and ``alias=axis+axis`` entries, separated by commas or white space. Empty: one rank.
            roles: Role per axis or alias, as in the constructor. None: default roles.
        Raises:
            ValueError: An entry has neither form; two entries have the same name; an axis is named ``self``, ``roles``
                or ``aliases``; or the constructor rejects an argument.
        """
        axes, aliases = parse_topology(text)
        return cls(roles=roles, aliases=aliases, **axes)

    @classmethod
    def of_meshes(cls, *meshes: DeviceMesh, roles: Mapping[str, Role] | None = None) -> Topology:
        """Return one topology in which each mesh dim of several device meshes is an axis or an alias for several axes.

        Every rank of the world must call this method. The topology has as few axes as possible. A mesh dim that consists
        of several axes becomes an alias:

            Topology.of_meshes(dense, experts)      # meshes (data=4, tensor=2) and (edp=2, expert=4)
            # Topology(edp=2, data_1=2, tensor=2, aliases={"data": ("edp", "data_1"), "expert": ("data_1", "tensor")})

        If a mesh dim is one axis, the axis has the name of the mesh dim. If several mesh dims are the same axis, the
        axis has the name of the first mesh dim, and the names of the other ones become aliases. If an axis is only a part
        of mesh dims, it is named after the first of these mesh dims, with its position in the mesh dim: ``data_1``.

        Args:
            meshes: torch's device meshes with names of mesh dims, in the same order on all ranks of the world.
            roles: Role per axis or alias, as in the constructor. None: default roles.
        Raises:
            ValueError: On every rank: a mesh has no names of mesh dims; the groups along a mesh dim have different sizes
                or strides, or can't be groups of a row-major mesh; no common axes exist; mesh dims with the same name have
                different ranks; an axis is part of no mesh dim; or the constructor rejects an argument.
            TypeError: An item is not a device mesh. Other ranks raise ValueError.
        Collectives: one object all-gather over the world.
        Host synchronization: yes.
        """
        axes, aliases = refined(gathered(lambda: dims_of(meshes)))
        return cls(roles=roles, aliases=aliases, **axes)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError. For an attribute of registries, the message says to pass a registry."""
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _REGISTRY_ATTRIBUTES:
                message += f": a topology has no process groups; give ProcessGroupRegistry({self!r}) instead"
            raise AttributeError(message, name=name, obj=self)

    @property
    def aliases(self) -> dict[str, tuple[str, ...]]:
        """Return a dict from each alias to its axes, slowest axis first."""
        return dict(self._aliases)

    @property
    def pipe_axes(self) -> tuple[str, ...]:
        """Return the pipeline axes: each coordinate on such an axis is a stage with its own parameters."""
        return self._axes_with("pipe")

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Return the data-parallel axes: ranks along them process different samples, or different parts of samples."""
        return self._axes_with("data")

    @property
    def sample_axes(self) -> tuple[str, ...]:
        """Return the data-parallel axes along which ranks process different samples.

        An axis is left out if it is named ``cp`` or ``context``, or if an alias with this name contains it. Ranks along
        such an axis process different parts of the same samples.
        """
        return tuple(axis for axis in self.data_axes if {*self._names(axis)}.isdisjoint(_SEQUENCE))

    @property
    def model_axes(self) -> tuple[str, ...]:
        """Return the model-parallel axes: parameters are sharded or replicated over them as their specs declare."""
        return self._axes_with("model")

    @property
    def expert_axes_without_role(self) -> tuple[str, ...]:
        """Return the expert axes larger than 1 that have neither an explicit nor a default role.

        An expert axis is named ``expert``, ``experts`` or ``ep``, or an alias with one of these names contains it. It
        has an explicit role if ``roles=`` has an entry for the axis or for an alias that contains it. Without a role,
        the axis is a model axis: gradients are not averaged over it. This is correct only if the ranks along the axis
        process the same samples. If they process different samples, as in most expert-parallel models, pass
        ``roles={axis: "data"}``.
        """
        names = {axis: {*self._names(axis)} for axis in self.axes if axis not in self._explicit}
        experts = (axis for axis, own in names.items() if not own.isdisjoint(_EXPERT) and own.isdisjoint(_ROLE_BY_NAME))
        return tuple(axis for axis in experts if self.size(axis) > 1)

    def is_batch_only_axis(self, axis: str) -> bool:
        """Return True if the name of ``axis`` implies that ranks along it differ only in their samples.

        The name must have the default role ``"data"``, such as ``dp``. Neither the axis nor an alias that contains it
        may be named ``cp`` or ``context``.
        """
        return _ROLE_BY_NAME.get(axis) == "data" and {*self._names(axis)}.isdisjoint(_SEQUENCE)

    def expand_aliases(self, *names: str) -> tuple[str, ...]:
        """Return ``names`` with every alias replaced by its axes.

        Args:
            names: Names of axes or aliases.
        Raises:
            ValueError: A name is unknown, or an axis is named twice, directly or by an alias.
        """
        atoms = tuple(atom for name in names for atom in self._atoms(name))
        if len(set(atoms)) != len(atoms):
            twice = next(atom for atom in atoms if atoms.count(atom) > 1)
            where = "" if names.count(twice) > 1 else f" ({twice!r} is in several of these)"
            raise ValueError(f"an axis is named twice in {_join_names(names)}{where}; name each axis once")
        return atoms

    def size(self, *axes: str) -> int:
        """Return the product of the sizes of ``axes``; 1 without axes.

        Args:
            axes: Names of axes or aliases.
        Raises:
            ValueError: A name is unknown, or an axis is named twice, directly or by an alias.
        """
        # `prod` gets a list, because torch.compile can't trace `prod` of a generator.
        return prod([self._by_axis[axis].size for axis in self.expand_aliases(*axes)])

    def role(self, axis: str) -> Role:
        """Return the role of an axis or alias: ``"pipe"``, ``"data"`` or ``"model"``.

        Args:
            axis: Name of an axis, or of an alias whose axes have the same role.
        Raises:
            ValueError: The name is unknown, or the axes of the alias have different roles.
        """
        found = {atom: self._by_axis[atom].role for atom in self._atoms(axis)}
        if len({*found.values()}) > 1:
            raise ValueError(
                f"the axes of {axis!r} have several roles, {', '.join(f'{a} {r!r}' for a, r in found.items())}; name "
                "one of these axes"
            )
        return next(iter(found.values()))

    def coordinate(self, rank: int) -> Coordinate:
        """Return the coordinate of ``rank``: a dict of its index per axis, in the order of the axes.

        ``coordinate[alias]`` is the row-major index over the axes of an alias. ``in``, ``get`` and iteration ignore
        aliases.

        Args:
            rank: A global rank.
        Raises:
            ValueError: The rank is not in the world.
        """
        self._check_rank(rank)
        sizes_by_alias = {alias: {atom: self.size(atom) for atom in atoms} for alias, atoms in self._aliases}
        return Coordinate({name: axis.coordinate(rank) for name, axis in self._by_axis.items()}, sizes_by_alias)

    def coordinate_of(self, rank: int, axis: str) -> int:
        """Return the index of ``rank`` on an axis. For an alias, return the row-major index over the axes of the alias.

        Args:
            rank: A global rank.
            axis: Name of an axis or alias.
        Raises:
            ValueError: The rank is not in the world, or the name is unknown.
        """
        self._check_rank(rank)
        index = 0
        for atom in self._atoms(axis):
            index = index * self._by_axis[atom].size + self._by_axis[atom].coordinate(rank)
        return index

    def expand_coordinate(self, coordinate: Mapping[str, int]) -> dict[str, int]:
        """Return a coordinate with every alias replaced by its axes, as a dict of the index per axis.

        Args:
            coordinate: Index per axis or alias. The index of an alias is the row-major index over its axes.
        Raises:
            ValueError: A name is unknown; an axis is named twice, directly or by an alias; or an index is out of range.
        """
        self.expand_aliases(*coordinate)
        found = {}
        for name, value in coordinate.items():
            size = self.size(name)
            if not 0 <= value < size:
                raise ValueError(f"coordinate {name}={value} is out of range; give a number from 0 to {size - 1}")
            for atom in reversed(self._atoms(name)):
                value, found[atom] = divmod(value, self.size(atom))
        return found

    def rank(self, **coordinate: int) -> int:
        """Return the rank at a coordinate.

            Topology(data=2, tensor=4).rank(data=1, tensor=3)       # 7

        Args:
            coordinate: Index per axis or alias. Every axis must be named, directly or by an alias that contains it.
        Raises:
            ValueError: An axis is missing or named twice; a name is unknown; or an index is out of range.
        """
        by_axis = self.expand_coordinate(coordinate)
        missing = [axis for axis in self.axes if axis not in by_axis]
        if missing:
            raise ValueError(
                f"rank() needs an index for every axis; {_join_names(missing)} {'is' if len(missing) == 1 else 'are'} "
                "missing. For all ranks with given indices on some axes, call filter()"
            )
        return self._offset(by_axis)

    def peers(self, rank: int, *axes: str) -> Peers:
        """Return all ranks that differ from ``rank`` only along ``axes``, including ``rank``, ascending.

        Args:
            rank: A global rank.
            axes: Names of axes or aliases, in any order.
        Returns:
            A lazy sequence that compares equal to the tuple of the ranks. The time to create it does not depend on
            their number.
        Raises:
            ValueError: The rank is not in the world; a name is unknown; or an axis is named twice, directly or by an
                alias.
        """
        self._check_rank(rank)
        atoms = self.expand_aliases(*axes)
        base = rank - self._offset({axis: self.coordinate_of(rank, axis) for axis in atoms})
        return Peers(base, self._dims(atoms))

    def filter(self, **coordinate: int) -> Iterator[int]:
        """Return an iterator over the ranks at ``coordinate``, ascending; without arguments, over all ranks.

        >>> list(Topology(data=2, tensor=2).filter(tensor=1))
        [1, 3]

        Args:
            coordinate: Index per axis or alias. The iterator has ranks with every index on the axes that are not named.
        Raises:
            ValueError: A name is unknown; an axis is named twice, directly or by an alias; or an index is out of range.
        """
        by_axis = self.expand_coordinate(coordinate)
        free = tuple(axis for axis in self.axes if axis not in by_axis)
        return iter(Peers(self._offset(by_axis), self._dims(free)))

    def groups(self, *axes: str) -> Iterator[tuple[int, ...]]:
        """Return an iterator over all groups of ranks along ``axes``, in the order of their first rank.

        A group consists of ranks that differ only along ``axes``. Every rank is in one group.

        >>> list(Topology(data=2, tensor=2).groups("data"))
        [(0, 2), (1, 3)]

        Args:
            axes: Names of axes or aliases.
        Raises:
            ValueError: A name is unknown, or an axis is named twice, directly or by an alias.
        """
        atoms = self.expand_aliases(*axes)
        offsets = tuple(Peers(0, self._dims(atoms)))
        rest = tuple(axis for axis in self.axes if axis not in atoms)
        return (tuple(base + offset for offset in offsets) for base in Peers(0, self._dims(rest)))

    def table(self, rank: int | None = None) -> str:
        """Return a text with the grid of ranks and the groups along each axis. Long lists are shortened by ``...``.

            print(Topology(data=2, tensor=4).table())

        Args:
            rank: A rank to mark; the text then has only the groups that contain this rank. None: no rank is marked, and
                the text has the groups of all ranks.
        Raises:
            ValueError: The rank is not in the world.
        """
        return render(self, rank)

    def _axes_with(self, role: Role) -> tuple[str, ...]:
        return tuple(name for name, axis in self._by_axis.items() if axis.role == role)

    def _names(self, axis: str) -> tuple[str, ...]:
        return names_of(axis, self.aliases)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} isn't in {self!r}; its ranks are 0..{self.world_size - 1}")

    def _atoms(self, name: str) -> tuple[str, ...]:
        if name in self.axes:
            return (name,)
        atoms = self.aliases.get(name)
        if atoms is None:
            raise ValueError(f"unknown axis {name!r}; {self.advice_on(name)} ({self.named()})")
        return atoms

    def advice_on(self, name: str) -> str:
        """Return the advice of an error about an unknown axis."""
        close = difflib.get_close_matches(str(name), (*self.axes, *self.aliases), n=1)
        if close:
            return f"did you mean {close[0]!r}?"
        other = ", or name the axis that you mean" if self.axes else ""
        return f"add it to the topology ({name}=1 if it has one rank){other}"

    def named(self) -> str:  # part of error messages
        return f"axes: {_join_names(self.axes)}" + (f"; aliases: {_join_names(self.aliases)}" if self._aliases else "")

    def _offset(self, coordinate: Mapping[str, int]) -> int:
        return sum(value * self._by_axis[axis].stride for axis, value in coordinate.items())

    def _dims(self, axes: tuple[str, ...]) -> list[tuple[int, int]]:
        """Return (size, stride) of each of ``axes``, in the order of the topology."""
        return [(axis.size, axis.stride) for name, axis in self._by_axis.items() if name in axes]

    def __repr__(self) -> str:
        parts = [f"{axis}={self.size(axis)}" for axis in self.axes]
        roles = {axis: self.role(axis) for axis in self.axes if self.role(axis) != default_role(axis, self.aliases)}
        parts += [f"{name}={value}" for name, value in (("roles", roles), ("aliases", self.aliases)) if value]
        return f"Topology({', '.join(parts)})"


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(map(str, names)) or "none"


# The axes of a group that another library created ---------------------------------------------------------------------


def axes_along(ranks: tuple[int, ...], topology: Topology) -> tuple[str, ...] | None:
    """Return the axes along which the ranks of a process group are ordered, slowest axis first.

    These are the axes larger than 1 for which the row-major order of the group is exactly ``ranks``, its global ranks in
    the order of the group. They may be in another order than in the topology. Return () for a group of one rank, and None
    if there are no such axes.
    """
    strides = {topology.peers(0, axis)[1]: axis for axis in topology.axes if topology.size(axis) > 1}
    found: tuple[str, ...] = ()
    while topology.size(*found) < len(ranks):
        axis = strides.get(ranks[topology.size(*found)] - ranks[0])
        if axis is None or axis in found:
            return None
        found = (axis, *found)
    base = topology.peers(ranks[0], *found)[0]
    along = [topology._by_axis[axis] for axis in found]
    grid = product((base,), *(range(0, axis.size * axis.stride, axis.stride) for axis in along))
    return found if tuple(map(sum, grid)) == ranks else None
