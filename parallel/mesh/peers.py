"""The ranks of one group, of which nobody has to make a list: a group of a data axis may have 131,072."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import overload


class Peers(Sequence[int]):
    """Ranks ``base + sum of a multiple of each stride``, ascending; equal to the tuple of them, and shown as it.

        peers = Topology(data=131072, tensor=8).peers(5, "data")
        len(peers), peers[2], peers.index(21), 22 in peers      # 131072, 21, 2, False

    All of these cost O(axes); what goes through all ranks (``==``, ``hash``, ``list``) O(ranks).

    Args:
        base: The first rank.
        dims: (size, stride) of each axis, the largest stride first; a stride is at least as large as the axes after it
            reach.
    """

    __slots__ = ("_base", "_dims", "_len")

    def __init__(self, base: int, dims: Sequence[tuple[int, int]]) -> None:
        self._base, self._dims, self._len = base, tuple(dims), 1
        for size, _ in self._dims:
            self._len *= size

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        # itertools.product holds its ranges in memory, which is the sum of the sizes and not their product.
        steps = (range(0, size * stride, stride) for size, stride in self._dims)
        return map(sum, itertools.product((self._base,), *steps))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self[at] for at in range(*index.indices(self._len)))
        at = index + self._len if index < 0 else index
        if not 0 <= at < self._len:
            raise IndexError(f"there are {self._len} ranks, none at {index}")
        found = self._base
        for size, stride in reversed(self._dims):
            at, digit = divmod(at, size)
            found += digit * stride
        return found

    def index(self, value: int, start: int = 0, stop: int | None = None) -> int:
        """Where ``value`` is among them; ValueError where it is not."""
        rest, at = value - self._base, 0
        for size, stride in self._dims:
            digit = min(max(rest // stride, 0), size - 1)
            rest -= digit * stride
            at = at * size + digit
        if rest or at not in range(*slice(start, stop).indices(self._len)):
            raise ValueError(f"rank {value} isn't among these {self._len}")
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
