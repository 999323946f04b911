"""`fake_world`: one rank of a world of any size in one process."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshstep.optim import ParameterEntry, ReductionPlan
from meshstep.parallel import P, ProcessGroupRegistry, Topology, copy_to, local_shape
from meshstep.testing import fake_world
from torch.distributed import _functional_collectives
from world import World


def test_registry_in_fake_world_of_4096_ranks_is_made_within_20_seconds() -> None:
    topology, begin = Topology(data=64, tensor=64), time.monotonic()
    with fake_world(4096, rank=77), ProcessGroupRegistry(topology) as registry:
        assert registry.coordinate == {"data": 1, "tensor": 13}
        assert registry.group("data").size() == 64
        assert dist.get_process_group_ranks(registry.group("tensor")) == [*range(64, 128)]
        entry = ParameterEntry("weight", P("tensor"), local_shape((128, 2), P("tensor"), topology))
        (bucket,) = ReductionPlan.of([entry], topology, registry.global_rank).buckets
        assert bucket.axes(topology) == ("tensor",)
        assert copy_to(torch.ones(3), registry, "tensor").shape == (3,)
    assert not dist.is_initialized()
    assert time.monotonic() - begin < 20


def test_fake_worlds_can_be_nested() -> None:
    with fake_world(8, rank=3):
        with fake_world(2, rank=1):
            assert (dist.get_world_size(), dist.get_rank()) == (2, 1)
        assert (dist.get_world_size(), dist.get_rank()) == (8, 3)
        dist.all_reduce(torch.ones(1))
    assert not dist.is_initialized()


def sums(*groups: Any) -> list[float]:
    found = []
    for group in groups:
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        found.append(value.item())
        found.append(_functional_collectives.all_reduce(torch.ones(1), "sum", group).item())
    return found


def a_fake_world_within(fails: bool) -> list[float]:
    registry = ProcessGroupRegistry(Topology(data=2, tensor=2))
    world, half, hook = dist.group.WORLD, registry.group("tensor"), sys.excepthook
    before = dist.new_group([0, 1, 2, 3])
    try:
        with fake_world(64, rank=33), ProcessGroupRegistry(Topology(tensor=64)) as other:
            assert other.group("tensor").size() == 64
            assert dist.group.WORLD is not world
            if fails:
                raise KeyError("planted")
    except KeyError:
        assert fails
    assert dist.group.WORLD is world
    assert sys.excepthook is hook
    assert dist.get_rank() == registry.global_rank
    found = sums(world, half, before, dist.new_group([0, 1, 2, 3]), registry.group("data"))
    registry.close()
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_existing_and_new_process_groups_communicate_after_fake_world_ends(world: World, fails: bool) -> None:
    assert world.run(4, a_fake_world_within, fails) == [[4.0, 4.0, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0, 2.0, 2.0]] * 4


@pytest.mark.parametrize(("size", "rank"), [(2, 2), (2, -1), (0, 0)])
def test_fake_world_rejects_rank_out_of_range(size: int, rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} isn't in a world of {size} ranks"), fake_world(size, rank):
        pass
    assert not dist.is_initialized()
