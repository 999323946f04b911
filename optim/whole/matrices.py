"""Which parts of a parameter are matrices of their own: experts of a stack, blocks of a fused weight, heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

from ...parallel.layout.pieces import Box, Shape
from ...parallel.layout.spec import P

Blocks = Mapping[str, int | Sequence[int]]
"""By glob over names: how many equal blocks a fused weight has along its rows (dim -2), or their sizes."""


def block_sizes(name: str | None, shape: Shape, blocks: Blocks, spec: P | None) -> tuple[int, ...] | None:
    """The sizes of a fused weight's blocks along its rows: as said for its name, else as its layout cuts them; None: one.

    Raises:
        ValueError: They don't add up to its rows.
    """
    if len(shape) < 2:
        return None
    rows = shape[-2]
    said = next((given for pattern, given in blocks.items() if name is not None and fnmatchcase(name, pattern)), None)
    if said is None and spec is not None:
        cut = {spec.block_sizes(axis) for axis in spec.dim_axes(len(shape) - 2)} - {(1,)}
        if cut:
            parts = max(cut, key=len)
            return tuple(rows * part // sum(parts) for part in parts)
    if said is None:
        return None
    sizes = (rows // said,) * said if isinstance(said, int) else tuple(said)
    if sum(sizes) != rows or min(sizes) < 1:
        raise ValueError(f"{name} has {rows} rows, which blocks={said!r} do not add up to")
    return sizes


def boxes_of(shape: Shape, blocks: Sequence[int] | None) -> list[Box]:
    """The matrices of a tensor. 2 dims are one; 3 a stack of them; 4 and more one of rows of all the other dims."""
    if len(shape) > 3:
        return [Box((0,) * len(shape), shape)]
    stack = [(index,) for index in range(shape[0])] if len(shape) == 3 else [()]
    sizes = blocks or (shape[-2],)
    return [
        Box((*which, start, 0), (*(1 for _ in which), size, shape[-1]))
        for which in stack
        for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False)
    ]
