"""A topology as one line of text: ``edp=2,mid=2,tensor=2,data=edp+mid``."""

from __future__ import annotations

import re

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
