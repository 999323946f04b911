"""What the coordinates of an axis hold: the role of each axis, from what was told and from names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

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
