"""A fake world of any size, of which this process is one rank, for testing plans, registries and shapes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from .launched import ProcessGroups

_worlds = itertools.count(1)
_NAMES_OF_A_WORLD = 10**6


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """Context manager in which this process is one rank of a world, over torch's fake backend.

    Collectives return immediately without communication: their results have the right shape, but not the right values.

        with fake_world(4096, rank=77), ProcessGroupRegistry(Topology(data=64, tensor=64)) as registry:
            print(registry.coordinate)                 # {'data': 1, 'tensor': 13}

    An existing default process group is suspended in the ``with`` block and restored afterwards. Fake worlds may be nested.

    Args:
        size: Number of ranks.
        rank: Rank of this process. Default: the first rank.
    Raises:
        ValueError: ``rank`` is not in 0..size-1.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} isn't in a world of {size} ranks; give a rank from 0 to {size - 1}")
    groups = ProcessGroups(-_NAMES_OF_A_WORLD * next(_worlds))
    try:
        with groups.activate():
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
            yield
    finally:
        groups.end()
