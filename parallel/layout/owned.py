"""Who alone holds a parameter: one coordinate of an axis, or the one that is another axis' too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..mesh.aliases import by_axis
from ..mesh.topology import Topology

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
