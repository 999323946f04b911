"""Which parts of a parameter are matrices of their own: experts of a stack, blocks of a fused weight, heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

from ...parallel.layout.pieces import Box, Shape
from ...parallel.layout.spec import P

Blocks = Mapping[str, int | Sequence[int]]
"""By glob over names: how many equal blocks a fused weight has along its rows (dim -2), or their sizes."""


def matrices_of(name: str | None, shape: Shape, blocks: Blocks, spec: P | None) -> list[Box]:
    """The matrices of a tensor, one after another: as ``blocks`` says for its name, else as its layout cuts it.

    2 dims are a matrix; 3 a stack of them; 4 and more one of rows of all the other dims.

    Raises:
        ValueError: The blocks don't add up to its rows.
    """
    if len(shape) > 3:
        return [Box((0,) * len(shape), shape)]
    dim, sizes = _blocks(name, shape, blocks, spec)
    stack = [(index,) for index in range(shape[0])] if len(shape) == 3 else [()]
    found = []
    for which in stack:
        for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
            offsets, lengths = [*which, 0, 0], [*(1 for _ in which), *shape[-2:]]
            offsets[dim], lengths[dim] = start, size
            found.append(Box(tuple(offsets), tuple(lengths)))
    return found


def _blocks(name: str | None, shape: Shape, blocks: Blocks, spec: P | None) -> tuple[int, tuple[int, ...]]:
    """The dim that is made of blocks, -2 or -1, and their sizes."""
    rows = shape[-2]
    said = next((given for pattern, given in blocks.items() if name is not None and fnmatchcase(name, pattern)), None)
    if said is not None:
        sizes = (rows // said,) * said if isinstance(said, int) else tuple(said)
        if sum(sizes) != rows or min(sizes) < 1:
            raise ValueError(f"{name} has {rows} rows, which blocks={said!r} do not add up to")
        return -2, sizes
    spec = spec or P()
    for dim in (-2, -1):  # layers in two dimensions keep [in, out]
        for parts in map(spec.block_sizes, spec.dim_axes(len(shape) + dim)):
            if parts != (1,):
                return dim, tuple(shape[dim] * part // sum(parts) for part in parts)
    return -2, (rows,)
