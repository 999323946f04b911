"""Parameters laid end to end in flat buckets that are cut into equal slices, one a rank. Pure arithmetic.

    bucket   | parameter 7 |   parameter 8   | 9 |     parameter 10      | padding |
    slices   |        rank 0        |        rank 1        |        rank 2         |

Rank 1 then holds the *segments* 8[9:], 9 and 10[:8]: in each bucket at most one contiguous run of any parameter, so that
a parameter has at most one segment on a rank. All ranks have slices of one length. Parameters and slices begin at multiples
of ``ALIGNMENT`` elements, and so do segments, in their parameter and in their slice; what lies between is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

ALIGNMENT = 8
"""16 bytes in half precision: what kernels and collectives on a GPU load at a time, from addresses that are multiples."""


@dataclass(frozen=True)
class Segment:
    """What one slice holds of one parameter: ``numel`` elements from ``start`` on of the flattened parameter, which lie
    from ``offset`` on in the slice. ``position`` is the parameter's in the bucket."""

    position: int
    start: int
    numel: int
    offset: int


@dataclass(frozen=True)
class FlatBucket:
    """Parameters (by index) end to end, cut into ``slices`` equal slices."""

    indices: tuple[int, ...]
    numels: tuple[int, ...]
    slices: int

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter starts."""
        return tuple(accumulate((_aligned(numel) for numel in self.numels[:-1]), initial=0))

    @property
    def end(self) -> int:
        """Where the last parameter ends."""
        return self.offsets[-1] + self.numels[-1]

    @property
    def numel(self) -> int:
        """Elements without padding."""
        return sum(self.numels)

    @property
    def slice_numel(self) -> int:
        """Elements of each slice, padding included."""
        return _aligned(-(-self.end // self.slices))

    @property
    def padded_numel(self) -> int:
        """Elements of all slices."""
        return self.slice_numel * self.slices

    def segments(self, index: int) -> list[Segment]:
        """What slice ``index`` holds, in the order of the parameters; none of a parameter without elements."""
        low, high = index * self.slice_numel, (index + 1) * self.slice_numel
        found = []
        for position, (offset, numel) in enumerate(zip(self.offsets, self.numels, strict=True)):
            first, last = max(low, offset), min(high, offset + numel)
            if first < last:
                found.append(Segment(position, first - offset, last - first, first - low))
        return found


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def flat_buckets(indices: Sequence[int], numels: Sequence[int], slices: int, bucket_numel: int) -> list[FlatBucket]:
    """Buckets of about ``bucket_numel`` elements, at least one parameter each; the last parameters come first.

    Backward makes the gradients of the last parameters first, so the first bucket of the list is the first to be full.

    Args:
        indices: Of the parameters, ascending.
        numels: Of each of them.
        slices: How many slices.
        bucket_numel: A larger parameter gets a bucket of its own.
    """
    runs: list[list[int]] = []
    size = 0
    for position in reversed(range(len(indices))):
        if not runs or size + numels[position] > bucket_numel:
            runs.append([])
            size = 0
        runs[-1].append(position)
        size += numels[position]
    return [
        FlatBucket(tuple(indices[p] for p in reversed(run)), tuple(numels[p] for p in reversed(run)), slices)
        for run in runs
    ]
