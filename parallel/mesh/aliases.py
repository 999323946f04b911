"""Names for several axes together: ``data`` for ``edp x mid``, beside ``expert`` for ``mid x tensor``.

Two meshes of the same ranks are so one topology: its axes are the common refinement, and a dim of either mesh is an alias.
An alias stands for its axes, of which the first is the slowest, as in ``torch.arange(n).reshape(sizes)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from math import prod


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
