"""Blocks: a dim along which several tensors lie one after the other, each of which is cut by itself.

A fused weight is such a stack: gate and up of a gated MLP in one matrix, or q, k and v. Cut as one tensor, the first of
two ranks would have all of gate and the other all of up. What it computes with is its part of each:

    blocks("tensor", 2)             tensor=2    gggguuuu -> gguu | gguu
    blocks("tensor", (4, 1, 1))     tensor=2    qqqqqqqqkkvv -> qqqqkv | qqqqkv
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

Span = tuple[int, int]
"""(offset, length) of consecutive elements of a dim."""


@dataclass(frozen=True)
class Blocks:
    """Part of an entry of a spec: ``axes`` cut a dim of blocks whose lengths are to each other as ``sizes``."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]


def blocks(axes: str | tuple[str, ...], sizes: int | Sequence[int]) -> Blocks:
    """An entry of `P` for a dim of blocks, each of which is cut over ``axes``: a rank's piece is its part of every block.

        P(blocks("tensor", 2))              gate and up in one matrix
        P(blocks("tensor", (4, 1, 1)))      q, k and v, four query heads for each key head
        P((blocks("tensor", 2), "data"))    and the piece that comes out is cut once more, as it is

    Args:
        axes: A mesh axis or several, the first the slowest.
        sizes: Of the blocks, one to another (heads, or features: only their ratio counts); a number n is n equal ones.

    Raises:
        ValueError: The sizes are no positive integers.
    """
    ratio: Any = (1,) * sizes if isinstance(sizes, int) and not isinstance(sizes, bool) else sizes
    if not isinstance(ratio, Sequence) or not ratio or not all(type(size) is int and size > 0 for size in ratio):
        raise ValueError(
            f"blocks({axes!r}, {sizes!r}): give a number of equal blocks or the blocks' sizes, as 2 or (4, 1, 1)"
        )
    divisor = gcd(*ratio)  # heads and features say the same: one spelling, one hash
    return Blocks((axes,) if isinstance(axes, str) else tuple(axes), tuple(size // divisor for size in ratio))


def blocks_repr(axis: str, sizes: tuple[int, ...]) -> str:
    """As one writes it."""
    return f"blocks({axis!r}, {len(sizes) if set(sizes) == {1} else sizes})"


def cut_spans(spans: Sequence[Span], parts: int, index: int, sizes: tuple[int, ...]) -> tuple[Span, ...]:
    """Part number ``index`` of ``parts`` of what ``spans`` hold, in order; of each block where there are several ``sizes``.

    One block that doesn't divide is cut as `torch.chunk` does.

    Raises:
        ValueError: Several blocks don't divide.
    """
    total = sum(length for _, length in spans)
    if len(sizes) == 1:
        chunk = -(-total // parts)
        start = min(index * chunk, total)
        return _narrowed(spans, start, min(chunk, total - start))
    if total % sum(sizes):
        raise ValueError(
            f"length {total} is no multiple of {sum(sizes)}, which blocks of sizes {sizes} add up to; give their sizes"
        )
    found: list[Span] = []
    at = 0
    for number, size in enumerate(sizes):
        length = total // sum(sizes) * size
        if length % parts:
            raise ValueError(
                f"block {number} of {len(sizes)} has length {length}, which doesn't divide over {parts} ranks; cut over "
                "fewer, or give the block a parameter of its own"
            )
        found += _narrowed(spans, at + index * (length // parts), length // parts)
        at += length
    return _joined(found)


def _narrowed(spans: Sequence[Span], start: int, length: int) -> tuple[Span, ...]:
    """Elements ``start`` to ``start + length`` of what ``spans`` hold."""
    found: list[Span] = []
    for offset, numel in spans:
        first, last = max(start, 0), min(start + length, numel)
        if first < last:
            found.append((offset + first, last - first))
        start -= numel
    return _joined(found) if found else ((sum(spans[-1]), 0),)


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Neighbours made one, and none that is empty but where all are."""
    found: list[Span] = []
    for offset, length in spans:
        if found and (not length or sum(found[-1]) == offset):
            found[-1] = (found[-1][0], found[-1][1] + length)
        elif found and not found[-1][1]:
            found[-1] = (offset, length)
        else:
            found.append((offset, length))
    return tuple(found)
