"""Objects of all ranks: each gets all of them whatever their sizes, in one collective or two."""

from __future__ import annotations

import pickle
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from meshstep.parallel import ProcessGroupRegistry, Topology
from meshstep.parallel.mesh import objects
from meshstep.parallel.mesh.flat_collectives import ALL_GATHER
from torch.distributed import distributed_c10d
from world import World

EMPTY = len(pickle.dumps(b"")) + 8  # of a message
ROOM = objects.LARGEST


def gathered(sizes: list[int]) -> tuple[list[bytes], int]:
    """All ranks' bytes, and the collectives that it took."""
    with ProcessGroupRegistry(Topology(tensor=len(sizes))) as registry:
        own = random.Random(registry.global_rank).randbytes(sizes[registry.global_rank])
        with mock.patch.object(distributed_c10d, ALL_GATHER, wraps=getattr(distributed_c10d, ALL_GATHER)) as sent:
            found = objects.all_gather_objects(own, registry.group("tensor"), registry.device)
        return found, sent.call_count


# Of more than 255 bytes a pickle needs 3 more for the length.
@pytest.mark.parametrize(
    ("sizes", "collectives"),
    [
        ([0, 0, 0], 1),
        ([5, 0, 300], 1),
        ([1, ROOM - EMPTY - 3, 0], 1),
        ([1, ROOM - EMPTY - 2, 0], 2),
        ([0, 100_000, ROOM], 2),
        ([70_001, 70_000, 65_536], 2),
    ],
)
def test_each_rank_has_all_in_order(world: World, sizes: list[int], collectives: int) -> None:
    expected = [random.Random(rank).randbytes(size) for rank, size in enumerate(sizes)]
    assert world.run(len(sizes), gathered, sizes) == [(expected, collectives)] * len(sizes)


def of_a_large_world(size: int) -> int:
    """Bytes of the first message."""
    sent: list[int] = []

    def note(everything: torch.Tensor, own: torch.Tensor, group: object) -> None:
        sent.append(own.numel())
        everything.view(-1, own.numel()).copy_(own.expand(everything.numel() // own.numel(), -1))

    with (
        mock.patch.object(distributed_c10d, ALL_GATHER, note),
        mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:nccl"),
    ):
        group = mock.Mock(size=lambda: size)
        assert objects.all_gather_objects("said by all", group, torch.device("cuda", 0)) == ["said by all"] * size
    return sent[0]


def test_in_a_large_world_the_first_message_is_small() -> None:
    assert [of_a_large_world(size) for size in (2, 512, 1024, 65_536, 100_000)] == [8192, 8192, 4096, 64, 64]
