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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Literal, NoReturn, get_args

from .table import render

Role = Literal["pipe", "data", "model"]
_OF_REGISTRIES = frozenset({"topology", "global_rank", "rank", "ranks", "group", "group_of", "device", "device_mesh"})

_DATA = ("data", "replica", "dp", "ddp", "dp_replicate", "dp_shard", "fsdp", "hsdp", "edp", "efsdp")
_SEQUENCE = ("cp", "context")  # a sample's sequence is split over them, so the model itself communicates along them
_EXPERT = ("expert", "experts", "ep")
_DEFAULT_ROLES: Mapping[str, Role] = {
    **dict.fromkeys(("pipe", "pipeline", "pp"), "pipe"),
    **dict.fromkeys((*_DATA, *_SEQUENCE), "data"),
}


@dataclass(frozen=True, init=False, repr=False)
class Topology:
    """An immutable, hashable layout of ranks on named axes.

    Args:
        roles: Role of an axis where it isn't the default: ``"pipe"`` (every coordinate owns other parameters),
            ``"data"`` (coordinates hold replicas whose gradients are averaged) or ``"model"`` (parameters are split or
            replicated as their spec says). By default ``pipe``, ``pipeline`` and ``pp`` are pipeline axes; ``data``,
            ``replica``, ``dp``, ``ddp``, ``dp_replicate``, ``dp_shard``, ``fsdp``, ``hsdp``, ``edp``, ``efsdp``, ``cp``
            and ``context`` are data axes; every other name (``tensor``, ``tp``, ``sp``, ``row``, ...) is a model axis. So
            is ``expert``, but that is for you to say; see `untold_expert_axes`.
        **axes: Number of coordinates on each axis, slowest axis first. None at all is a world of one rank.

    Raises:
        ValueError: A size isn't an integer >= 1, a name isn't an identifier, or a role names no axis.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    roles: tuple[Role, ...]
    world_size: int = field(compare=False)
    _told: frozenset[str] = field(compare=False)
    _strides: tuple[int, ...] = field(compare=False)

    def __init__(self, *, roles: Mapping[str, Role] | None = None, **axes: int) -> None:
        for axis, size in axes.items():
            if not axis.isidentifier():
                raise ValueError(f"{axis!r} can't name an axis; use an identifier such as 'data' or 'row'")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"axis {axis!r} has size {size!r}; write an integer >= 1, such as {axis}=2")
        given = dict(roles or {})
        for axis, role in given.items():
            if axis not in axes:
                raise ValueError(f"roles names {axis!r}, which is no axis here (axes: {_listed(axes)})")
            if role not in get_args(Role):
                raise ValueError(
                    f"axis {axis!r} has role {role!r}; write one of {', '.join(map(repr, get_args(Role)))}"
                )
        sizes = tuple(axes.values())
        values = {
            "axes": tuple(axes),
            "sizes": sizes,
            "roles": tuple(given.get(axis, default_role(axis)) for axis in axes),
            "world_size": prod(sizes),
            "_told": frozenset(given),
            "_strides": tuple(prod(sizes[i + 1 :]) for i in range(len(sizes))),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def parse(cls, text: str, *, roles: Mapping[str, Role] | None = None) -> Topology:
        """The topology that ``"row=2,col=2"`` or ``"row=2 col=2"`` describes; an empty text is one rank.

        Raises:
            ValueError: A part isn't ``axis=size`` or an axis comes twice.
        """
        axes: dict[str, int] = {}
        for part in re.split(r"[\s,]+", text.strip(" \t\n,")):
            if not part:
                continue
            axis, equals, size = part.partition("=")
            if not equals or not size.isdecimal():
                raise ValueError(f"{part!r} doesn't say axis=size; write for example 'data=2,row=2,col=2'")
            if axis in axes:
                raise ValueError(f"axis {axis!r} is given twice in {text!r}; name each axis once")
            axes[axis] = int(size)
        if "self" in axes or "roles" in axes:
            raise ValueError(f"'self' and 'roles' can't name an axis; rename it in {text!r}")
        return cls(roles=roles, **axes)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """What a registry has and a topology lacks: somebody was given the one in the place of the other."""
            said = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _OF_REGISTRIES:
                said += f": this is the layout alone; give ProcessGroupRegistry({self!r}), which has the groups"
            raise AttributeError(said, name=name, obj=self)

    def size(self, *axes: str) -> int:
        """Number of coordinates on these axes together; 1 for none.

        Raises:
            ValueError: An unknown axis, or the same axis twice.
        """
        self.check_axes(axes)
        return prod(self.sizes[self._dim(axis)] for axis in axes)

    def role(self, axis: str) -> Role:
        """``"pipe"``, ``"data"`` or ``"model"``."""
        return self.roles[self._dim(axis)]

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
        return tuple(axis for axis in self.data_axes if axis not in _SEQUENCE)

    @property
    def model_axes(self) -> tuple[str, ...]:
        """Axes that a parameter's spec speaks about."""
        return self._axes_with("model")

    @property
    def untold_expert_axes(self) -> tuple[str, ...]:
        """Axes larger than 1 that are named ``expert``, ``experts`` or ``ep`` and were given no role.

        They are model axes: their ranks are taken to see the same samples, and the gradient of what is copied along them is
        not averaged. Where their ranks see different samples, as with most experts, the role is ``"data"``.
        """
        named = (axis for axis in self.axes if axis in _EXPERT and axis not in self._told)
        return tuple(axis for axis in named if self.size(axis) > 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where ``rank`` is: its coordinate on every axis, in axis order.

        Raises:
            ValueError: The rank isn't in the world.
        """
        self._check_rank(rank)
        steps = zip(self.axes, self._strides, self.sizes, strict=True)
        return {axis: rank // stride % size for axis, stride, size in steps}

    def coordinate_of(self, rank: int, axis: str) -> int:
        """Coordinate of ``rank`` on one axis."""
        self._check_rank(rank)
        dim = self._dim(axis)
        return rank // self._strides[dim] % self.sizes[dim]

    def rank(self, **coordinate: int) -> int:
        """The rank at this coordinate; every axis must be given.

        Raises:
            ValueError: An axis is missing or unknown, or a coordinate is out of range.
        """
        missing = [axis for axis in self.axes if axis not in coordinate]
        if missing:
            raise ValueError(
                f"rank() needs a coordinate for every axis; {_listed(missing)} is missing. "
                "Use filter() for all ranks that match some axes"
            )
        return sum(self._offset(axis, value) for axis, value in coordinate.items())

    def peers(self, rank: int, *axes: str) -> tuple[int, ...]:
        """All ranks that differ from ``rank`` only along ``axes``, itself included, ascending.

        The order in which the axes are named doesn't matter. O(number of peers).
        """
        self._check_rank(rank)
        self.check_axes(axes)
        base = rank - sum(self._offset(axis, self.coordinate_of(rank, axis)) for axis in axes)
        return tuple(base + offset for offset in self._offsets(axes))

    def filter(self, **coordinate: int) -> Iterator[int]:
        """Ranks that are at these coordinates, ascending; all ranks for none.

        >>> list(Topology(data=2, tensor=2).filter(tensor=1))
        [1, 3]
        """
        base = sum(self._offset(axis, value) for axis, value in coordinate.items())
        free = tuple(axis for axis in self.axes if axis not in coordinate)
        return (base + offset for offset in self._offsets(free))

    def groups(self, *axes: str) -> Iterator[tuple[int, ...]]:
        """The groups along ``axes``: they partition the world; ordered by their first rank.

        >>> list(Topology(data=2, tensor=2).groups("data"))
        [(0, 2), (1, 3)]
        """
        self.check_axes(axes)
        offsets = tuple(self._offsets(axes))
        rest = tuple(axis for axis in self.axes if axis not in axes)
        return (tuple(base + offset for offset in offsets) for base in self._offsets(rest))

    def table(self, rank: int | None = None) -> str:
        """A rank grid and the groups along each axis, for people; elided where the world is big.

        Args:
            rank: Mark this rank, and show its own groups only.
        """
        return render(self, rank)

    def check_axes(self, axes: tuple[str, ...]) -> None:
        """Raise a ValueError that says what to write when an axis is unknown or named twice."""
        for axis in axes:
            self._dim(axis)
        if len(set(axes)) != len(axes):
            raise ValueError(f"an axis is named twice in {_listed(axes)}; name each axis once")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} isn't in {self!r}; its ranks are 0..{self.world_size - 1}")

    def _dim(self, axis: str) -> int:
        if axis in self.axes:
            return self.axes.index(axis)
        close = difflib.get_close_matches(str(axis), self.axes, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown axis {axis!r}{hint} (axes: {_listed(self.axes)})")

    def _offset(self, axis: str, value: int) -> int:
        size = self.sizes[self._dim(axis)]
        if not 0 <= value < size:
            raise ValueError(f"coordinate {axis}={value} is out of range; axis {axis!r} goes from 0 to {size - 1}")
        return value * self._strides[self._dim(axis)]

    def _offsets(self, axes: tuple[str, ...]) -> Iterator[int]:
        # In axis order, whatever the caller's: then the sums come out ascending.
        ordered = [
            range(0, size * stride, stride)
            for axis, stride, size in zip(self.axes, self._strides, self.sizes, strict=True)
            if axis in axes
        ]
        # itertools.product holds its ranges in memory, which is the sum of the sizes and not their product.
        return map(sum, itertools.product(*ordered))

    def _axes_with(self, role: Role) -> tuple[str, ...]:
        return tuple(axis for axis, found in zip(self.axes, self.roles, strict=True) if found == role)

    def __repr__(self) -> str:
        parts = [f"{axis}={size}" for axis, size in zip(self.axes, self.sizes, strict=True)]
        other = {axis: role for axis, role in zip(self.axes, self.roles, strict=True) if role != default_role(axis)}
        return f"Topology({', '.join(parts + ([f'roles={other}'] if other else []))})"


def default_role(axis: str) -> Role:
    """The role that an axis of this name has unless it is given another."""
    return _DEFAULT_ROLES.get(axis, "model")


def only_splits_the_batch(axis: str) -> bool:
    """Whether a model issues no collectives of its own over an axis of this name, unless its specs name it."""
    return default_role(axis) == "data" and axis not in _SEQUENCE


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(str, names)) or "none"
