"""Gathering of objects over ranks, and their descriptions."""

from __future__ import annotations

import pickle
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from meshstep.parallel import ProcessGroupRegistry, Topology
from meshstep.parallel.mesh import process_group_collectives as objects
from meshstep.parallel.mesh.agreement import describe
from torch.distributed import distributed_c10d
from world import World

EMPTY = len(pickle.dumps(b"")) + 8  # bytes of an empty message
ROOM = objects.LARGEST


def gathered(sizes: list[int]) -> tuple[list[bytes], int]:
    """Return the bytes of all ranks and the number of rounds."""
    with ProcessGroupRegistry(Topology(tensor=len(sizes))) as registry:
        own = random.Random(registry.global_rank).randbytes(sizes[registry.global_rank])
        with (
            mock.patch.object(distributed_c10d, "gather", wraps=distributed_c10d.gather) as brought,
            mock.patch.object(distributed_c10d, "broadcast", wraps=distributed_c10d.broadcast) as told,
        ):
            found = objects.all_gather_objects(own, registry.group("tensor"), registry.device)
        assert brought.call_count == told.call_count
        return found, told.call_count


# pickle stores the length of a bytes object in 1 byte up to 255 bytes, and in 4 bytes above.
@pytest.mark.parametrize(
    ("sizes", "rounds"),
    [
        ([0, 0, 0], 1),
        ([5, 0, 300], 1),
        ([1, ROOM - EMPTY - 3, 0], 1),
        ([1, ROOM - EMPTY - 2, 0], 2),
        ([0, 100_000, ROOM], 2),
        ([70_001, 70_000, 65_536], 2),
    ],
)
def test_all_gather_objects_returns_objects_in_rank_order(world: World, sizes: list[int], rounds: int) -> None:
    expected = [random.Random(rank).randbytes(size) for rank, size in enumerate(sizes)]
    assert world.run(len(sizes), gathered, sizes) == [(expected, rounds)] * len(sizes)


def both_ways() -> bool:
    """Return whether gather and broadcast give the result of torch's all-gather, in all groups of this rank."""
    found = []
    with ProcessGroupRegistry(Topology(data=2, tensor=3)) as registry:
        for axes in (("data",), ("tensor",), ("data", "tensor")):
            group = registry.group(*axes)
            own = torch.randint(256, (40,), dtype=torch.uint8) + registry.global_rank
            short, plain = torch.zeros(2, group.size() * 40, dtype=torch.uint8)
            objects._gather_and_broadcast(short, own, group)
            objects._all_gather(plain, own, group)
            found.append(torch.equal(short, plain) and bool(plain.any()))
    return all(found)


def test_gather_followed_by_broadcast_equals_all_gather(world: World) -> None:
    assert world.run(6, both_ways) == [True] * 6


def of_a_large_world(size: int) -> int:
    """Return the size in bytes of the first message in a world of ``size`` ranks."""
    sent: list[int] = []

    def note(own: torch.Tensor, of_each: list[torch.Tensor], **_: object) -> None:
        sent.append(own.numel())
        assert len(of_each) == size
        of_each[0].as_strided((size, own.numel()), (own.numel(), 1)).copy_(own)

    with (
        mock.patch.object(distributed_c10d, "gather", note),
        mock.patch.object(distributed_c10d, "broadcast"),
        mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:nccl"),
    ):
        group = mock.Mock(size=lambda: size, rank=lambda: 0)
        assert objects.all_gather_objects("said by all", group, torch.device("cuda", 0)) == ["said by all"] * size
    return sent[0]


def test_all_gather_objects_sends_smaller_first_message_in_larger_world() -> None:
    assert [of_a_large_world(size) for size in (2, 512, 1024, 65_536, 100_000)] == [8192, 8192, 4096, 64, 64]


class Nested:
    def __init__(self, inner: object) -> None:
        self.inner = inner


def test_describe_shows_four_levels_of_nested_objects_by_default() -> None:
    shown, hidden = Nested(Nested(Nested(Nested(5)))), Nested(Nested(Nested(Nested(Nested(5)))))
    assert describe(shown) == "Nested(inner=Nested(inner=Nested(inner=Nested(inner=5))))"
    assert describe(hidden) == "Nested(inner=Nested(inner=Nested(inner=Nested(inner=Nested))))"
    assert describe([shown], depth=1) == "(Nested(inner=Nested))"
