"""One rank of a world that isn't there, of any size, in this process: for plans, registries and shapes."""

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
    """Within it, this process is rank ``rank`` of ``size``, over torch's fake backend: collectives return at once and send
    nothing, so that what they give is wrong, and its shape is right.

        with fake_world(4096, rank=77), ProcessGroupRegistry(Topology(data=64, tensor=64)) as registry:
            print(registry.coordinate)                 # {'data': 1, 'tensor': 13}

    A default process group that was there is put aside, and is there again afterwards. Worlds may be nested.

    Raises:
        ValueError: No such rank.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} isn't in a world of {size} ranks; ranks go from 0 to {size - 1}")
    groups = ProcessGroups(-_NAMES_OF_A_WORLD * next(_worlds))
    try:
        with groups.in_force():
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
            yield
    finally:
        groups.end()
