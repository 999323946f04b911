"""The harness itself: results come back by rank, and a rank that fails or hangs is an error with its traceback."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from world import World, WorldError


def rank_and_sum(scale: float) -> tuple[int, float]:
    value = torch.tensor(scale * dist.get_rank())
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("planted")
    dist.barrier()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_by_rank(world: World, size: int) -> None:
    total = 2.0 * sum(range(size))
    assert world.run(size, rank_and_sum, 2.0) == [(rank, total) for rank in range(size)]


def test_a_failing_rank_is_reported_and_the_pool_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("world.MOMENT", 0.5)  # all of which the other rank waits
    world = World()
    with pytest.raises(WorldError, match=r"rank 1: .*(?s:.*)planted"):
        world.run(2, fail_on_one)
    assert len(world.run(2, rank_and_sum, 1.0)) == 2
    world.close()
