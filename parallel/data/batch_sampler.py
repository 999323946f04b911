"""Which samples each data coordinate takes in each step of each epoch. Pure arithmetic; no process.

In each step the D coordinates take the next ``batch_size * D`` samples of the epoch's order, the first coordinate the
first ``batch_size`` of them and so on: a step's samples are the same for every D as long as the product is. The last step
has what is left, in D parts whose sizes differ by at most one. Nothing is padded and no sample comes twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.data import Sampler


class Batch(list[int]):
    """Indices of samples, with what seeds the random draws in loading them; picklable, for workers."""

    def __init__(self, indices: Sequence[int], seed: int, epoch: int) -> None:
        super().__init__(indices)
        self.seed, self.epoch = seed, epoch


class ShardedBatchSampler(Sampler[Batch]):
    """The batches of one data coordinate, the same number on all coordinates, none of them empty.

    Args:
        samples: Number of samples N.
        batch_size: B, on each coordinate.
        rank: This coordinate, 0..ranks-1.
        ranks: Number of data coordinates D.
        shuffle: Another order in every epoch.
        drop_last: Leave out a last step of less than B * D samples.
        seed: Of the orders.
    Raises:
        ValueError: batch_size or seed is out of range; or a batch would be empty: N < D, or B = 1 and D does not divide
            N; with drop_last, N < B * D.

    Attributes:
        epoch, position: Where the next iteration begins: in which epoch, after how many samples of its order.
    """

    def __init__(
        self, samples: int, batch_size: int, rank: int, ranks: int, *, shuffle: bool, drop_last: bool, seed: int
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size={batch_size!r}: give a whole number >= 1")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed={seed!r}: give a whole number, the same on every rank")
        self.samples, self.batch_size, self.rank, self.ranks = samples, batch_size, rank, ranks
        self.shuffle, self.drop_last, self.seed = shuffle, drop_last, seed
        self.bounds = step_bounds(samples, batch_size, ranks, drop_last)
        self.epoch = self.position = 0

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __iter__(self) -> Iterator[Batch]:
        epoch, order = self.epoch, self.order(self.epoch)
        for start, stop in pairwise(self.bounds_from(self.position)):
            yield Batch(order[start:stop].tensor_split(self.ranks)[self.rank].tolist(), self.seed, epoch)

    def bounds_from(self, position: int) -> list[int]:
        """[steps + 1]: where in an epoch's order the steps begin and the last one ends, of what is left after ``position``
        samples. Of ``bounds`` it is a part where the position is one of them.

        Raises:
            ValueError: A batch would be empty.
        """
        left = step_bounds(self.samples - position, self.batch_size, self.ranks, self.drop_last)
        return [position + bound for bound in left]

    def order(self, epoch: int) -> Tensor:
        """[N] int64: the samples in the order of an epoch, the same on every rank."""
        if not self.shuffle:
            return torch.arange(self.samples)
        return torch.randperm(self.samples, generator=torch.Generator().manual_seed(mixed(self.seed, epoch)))


def step_bounds(samples: int, batch_size: int, ranks: int, drop_last: bool) -> list[int]:
    """[steps + 1]: where in an epoch's order each step begins, and where the last one ends.

    A last step of fewer samples than ranks gets as many as it lacks from the step before.

    Raises:
        ValueError: A batch would be empty.
    """
    bounds = list(range(0, samples + 1, batch_size * ranks))
    if bounds[-1] < samples and not drop_last:
        bounds.append(samples)
        if len(bounds) > 2 and batch_size > 1:
            bounds[-2] = min(bounds[-2], samples - ranks)
    last = bounds[-1] - bounds[-2] if len(bounds) > 1 else 0
    if last >= ranks:
        return bounds
    given = f"{samples} samples in batches of {batch_size} on {ranks} data coordinates"
    if not last:
        raise ValueError(
            f"{given}{', drop_last=True' * drop_last}: that is no step; give more samples or smaller batches"
        )
    raise ValueError(
        f"{given}: the last step has only {last} samples, and a coordinate's batch would be empty; give drop_last=True, "
        "a larger batch_size or more samples"
    )


def mixed(*numbers: int) -> int:
    """A 32-bit seed that depends on all the numbers, and on nothing else: the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest(), "little")
