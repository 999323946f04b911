"""What a spec says of one tensor dim: the axes that cut it, one after the other, at once, or each of several blocks."""

from __future__ import annotations

from collections.abc import Iterator

from .blocks import Blocks

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
