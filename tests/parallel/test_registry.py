"""A registry's process groups: ranks make them alone, in any order, once per set of ranks. Also meshes and errors."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from meshstep.parallel import ProcessGroupRegistry, Topology
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from world import World

CUBE = Topology(data=2, row=2, col=2)


def combinations(topology: Topology) -> list[tuple[str, ...]]:
    return [axes for n in range(1, len(topology.axes) + 1) for axes in itertools.combinations(topology.axes, n)]


def groups_alive() -> int:
    return len(distributed_c10d._world.pg_names)


def total(registry: ProcessGroupRegistry, *axes: str) -> float:
    value = torch.tensor(float(registry.global_rank))
    dist.all_reduce(value, group=registry.group(*axes))
    return value.item()


def ask_in_own_order(topology: Topology, seed: int) -> None:
    every = combinations(topology)
    mine = random.Random(1000 * seed + dist.get_rank()).sample(every, len(every))
    with ProcessGroupRegistry(topology) as registry:
        groups = {axes: registry.group(*axes) for axes in mine}
        for axes in every:
            assert total(registry, *axes) == sum(registry.ranks(*axes))
            assert dist.get_process_group_ranks(groups[axes]) == list(registry.ranks(*axes))
            assert dist.get_rank(groups[axes]) == registry.rank(*axes)
            assert dist.get_world_size(groups[axes]) == registry.size(*axes)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("topology", [Topology(data=2, tensor=2), CUBE, Topology(pipe=4, tensor=2)])
def test_ranks_may_make_groups_in_different_orders(world: World, topology: Topology, seed: int) -> None:
    world.run(topology.world_size, ask_in_own_order, topology, seed)


PAIRS_IN_A_CIRCLE = [[(0, 1), (0, 2)], [(1, 2), (0, 1)], [(0, 2), (1, 2)]]


def ask_in_a_circle(naive: bool) -> bool:
    """Return whether this rank has its two groups after one second."""
    registry = ProcessGroupRegistry(Topology(tensor=3))

    def ask() -> None:
        for ranks in PAIRS_IN_A_CIRCLE[dist.get_rank()]:
            if naive:
                dist.new_group(list(ranks), use_local_synchronization=True)
            else:
                registry.group_of(ranks)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(1.0)
    return not thread.is_alive()


def test_circular_order_of_groups_deadlocks_torch_but_not_the_registry(world: World) -> None:
    assert world.run(3, ask_in_a_circle, False) == [True] * 3
    stuck = World()
    assert stuck.run(3, ask_in_a_circle, True) == [False] * 3
    stuck.close()


def ask_alone(topology: Topology) -> int:
    store = distributed_c10d._get_default_store()
    with ProcessGroupRegistry(topology) as registry:
        key = f"test/asked/{registry._name}"
        before = groups_alive()
        if registry.global_rank == 0:
            for axes in combinations(topology):
                registry.group(*axes)
            store.set(key, "1")
        made = groups_alive() - before
        store.wait([key])  # rank 0 has all its groups before another rank asks for one
        if "row" in topology.axes:
            assert total(registry, "row") == sum(registry.ranks("row"))
        return made


def test_rank_makes_groups_without_waiting_for_other_ranks(world: World) -> None:
    # Six groups: data, row, col and their pairs. All three axes together are the default group, which exists.
    assert world.run(8, ask_alone, CUBE) == [6] + [0] * 7


def test_registry_makes_one_group_per_set_of_ranks(world: World) -> None:
    # Three groups: (data), which is also (row, data), (tensor), and (row) of one rank. All axes are the default group.
    assert world.run(4, ask_alone, Topology(data=2, row=1, tensor=2)) == [3, 0, 0, 0]
    assert world.run(4, ask_alone, Topology(row=1, tensor=4)) == [1, 0, 0, 0]


def members_and_sharing() -> None:
    with ProcessGroupRegistry(Topology(data=2, row=1, tensor=2)) as registry:
        assert registry.group("data") is registry.group("row", "data") is registry.group_of(registry.ranks("data"))
        assert registry.group("tensor") is registry.group_of(tuple(reversed(registry.ranks("tensor"))))
        assert registry.group("tensor", "data", "row") is dist.group.WORLD
        assert total(registry, "row") == registry.global_rank
        assert registry.device == torch.device("cpu")


def test_axes_with_equal_ranks_share_a_group(world: World) -> None:
    world.run(4, members_and_sharing)


def tied_first_and_last() -> tuple[float, ...]:
    with ProcessGroupRegistry(Topology(pipe=4)) as registry:
        if registry.global_rank not in (0, 3):
            return ()
        value = torch.tensor([1.0, float(registry.global_rank)])
        dist.all_reduce(value, group=registry.group_of((0, 3)))
        return tuple(value.tolist())


def test_making_a_group_needs_only_its_members(world: World) -> None:
    assert world.run(4, tied_first_and_last) == [(2.0, 3.0), (), (), (2.0, 3.0)]


def two_registries_in_turn_and_together() -> None:
    first, second = ProcessGroupRegistry(CUBE), ProcessGroupRegistry(CUBE)
    assert first.group("row") is not second.group("row")
    assert total(first, "row") == total(second, "row") == sum(first.ranks("row"))
    first.close()
    assert total(second, "row") == sum(second.ranks("row"))
    third = ProcessGroupRegistry(Topology(row=4, data=2))
    assert total(third, "row") == sum(third.ranks("row"))
    second.close()
    third.close()


def test_registries_open_at_the_same_time_have_own_groups_with_correct_sums(world: World) -> None:
    world.run(8, two_registries_in_turn_and_together)


def ordinary_group_afterwards() -> float:
    registry = ProcessGroupRegistry(Topology(pipe=4))
    if registry.global_rank == 0:
        registry.group_of((0, 1))  # made on one rank only: torch's count of groups must not change
    group = dist.new_group([0, 1, 2, 3])
    assert isinstance(group, dist.ProcessGroup)
    value = torch.ones(())
    dist.all_reduce(value, group=group)
    registry.close()
    dist.destroy_process_group(group)
    return value.item()


def test_torch_new_group_succeeds_after_registry_made_a_group_on_one_rank(world: World) -> None:
    assert world.run(4, ordinary_group_afterwards) == [4.0] * 4


def bound_device_while_a_group_is_made() -> tuple[object, object]:
    default, new_group, seen = dist.group.WORLD, dist.new_group, []
    assert default is not None

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(default.bound_device_id)
        return new_group(*args, **kwargs)

    default.bound_device_id = torch.device("cpu", 0)
    try:
        with mock.patch.object(dist, "new_group", spy), ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
            total(registry, "tensor")
        return seen, default.bound_device_id
    finally:
        default.bound_device_id = None


def test_default_group_has_no_bound_device_while_a_group_is_made(world: World) -> None:
    # Only NCCL splits communicators, which waits for all ranks. Without a bound device it does not split.
    assert world.run(4, bound_device_while_a_group_is_made) == [([None], torch.device("cpu", 0))] * 4


def closing() -> None:
    before = groups_alive()
    with ProcessGroupRegistry(CUBE) as registry:
        assert "0 groups made" in repr(registry)
        registry.group("row")
        registry.group("row", "col")
        registry.group(*CUBE.axes)
        assert "2 groups made" in repr(registry)
        assert groups_alive() == before + 2
    assert groups_alive() == before
    registry.close()
    assert "closed" in repr(registry)
    dist.barrier()  # the default group still works
    for ask in (lambda: registry.group("row"), lambda: registry.group(*CUBE.axes), lambda: registry.device_mesh("row")):
        with pytest.raises(RuntimeError, match=r"closed registry.*make a new"):
            ask()
    assert registry.size("row") == 2


def test_registry_close_destroys_only_its_own_groups(world: World) -> None:
    world.run(8, closing)


def missing_member(inherited: bool) -> str:
    short = timedelta(seconds=1)
    if inherited:
        dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(short)  # type: ignore[union-attr]
    with ProcessGroupRegistry(Topology(data=2, tensor=2), timeout=None if inherited else short) as registry:
        if registry.global_rank != 0:  # rank 1 does not join the all-reduce of rank 0
            return ""
        start = time.monotonic()
        with pytest.raises(RuntimeError) as error:
            dist.all_reduce(torch.ones(1), group=registry.group("tensor"))
        assert 0.5 < time.monotonic() - start < 20
        return str(error.value)


def test_collective_without_one_member_raises_after_the_timeout(world: World) -> None:
    assert "timeout" in world.run(4, missing_member, False)[0].lower()


def test_groups_inherit_the_timeout_of_the_default_group() -> None:
    hasty = World()  # a world of its own, because the timeout of the default group stays changed
    assert "timeout" in hasty.run(4, missing_member, True)[0].lower()
    hasty.close()


def meet_what_was_asked_for(seed: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], int]:
    """Request four random groups on each rank, then call `connect` twice.

    Return the groups that all-reduced in the first call, the requested groups, and the number of all-reduces of the second
    call.
    """
    met: list[tuple[int, ...]] = []
    all_reduce = dist.all_reduce

    def note(tensor: torch.Tensor, *, group: dist.ProcessGroup) -> None:
        assert tensor.numel() == 1
        met.append(tuple(dist.get_process_group_ranks(group)))
        all_reduce(tensor, group=group)

    every = combinations(CUBE)
    chosen = random.Random(1000 * seed + dist.get_rank()).sample(every, 4)
    with ProcessGroupRegistry(CUBE) as registry, mock.patch.object(dist, "all_reduce", note):
        asked = [registry.ranks(*axes) for axes in chosen if registry.group(*axes) is not None]
        registry.connect("row", ("row", "col"))
        first = met.copy()
        registry.connect()
        again = len(met) - len(first)
        for axes in every:  # the other groups connect in their first collective
            assert total(registry, *axes) == sum(registry.ranks(*axes))
        return first, asked, again


@pytest.mark.parametrize("seed", range(6))
def test_registry_connect_connects_groups_in_the_same_order_on_all_ranks(world: World, seed: int) -> None:
    by_rank = world.run(8, meet_what_was_asked_for, seed)
    whole = tuple(range(8))
    for rank, (met, asked, again) in enumerate(by_rank):
        named = {tuple(CUBE.peers(rank, *axes)) for axes in (("row",), ("row", "col"))} | {whole}
        complete = {ranks for ranks in asked if all(ranks in {*by_rank[other][1]} for other in ranks)}
        others = {ranks for ranks in asked if ranks not in complete and all(ranks in {*by_rank[o][0]} for o in ranks)}
        assert met == sorted(named | complete | others)
        assert again == 0
    # The test proves nothing unless `connect` has left out at least one requested group.
    assert any({*asked} - {*met} for met, asked, _ in by_rank)


def meet_without_rank_1(given_up: Path) -> str:
    dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=2))  # type: ignore[union-attr]
    registry = ProcessGroupRegistry(Topology(data=2, tensor=2))
    if registry.global_rank == 1:
        while len([*given_up.iterdir()]) < 3:
            time.sleep(0.1)  # meanwhile another thread replies to requests
        return ""
    with pytest.raises(RuntimeError, match="got no reply in call 1 of connect") as error:
        registry.connect("tensor")
    (given_up / str(registry.global_rank)).touch()
    return str(error.value)


@pytest.mark.long
def test_registry_connect_error_names_the_missing_rank(tmp_path: Path) -> None:
    alone = World()
    for message in [found for found in alone.run(4, meet_without_rank_1, tmp_path) if found]:
        assert "rank 1: in no call of meshstep" in message
    alone.close()


def connect_with_unknown_axis_on_rank_1() -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        with pytest.raises(ValueError, match="unknown axis") as error:
            registry.connect("row" if registry.global_rank else "data")
        registry.connect("data")
        return str(error.value)


def test_registry_connect_error_on_one_rank_is_raised_on_every_rank(world: World) -> None:
    first, second = world.run(2, connect_with_unknown_axis_on_rank_1)
    assert first == f"rank 1: {second}"
    assert "unknown axis 'row'" in second


def test_registry_connect_in_one_process_only_checks_axis_names() -> None:
    ProcessGroupRegistry(Topology(data=1)).connect("data")
    with pytest.raises(
        ValueError,
        match=r"unknown axis 'tensor'; add it to the topology \(tensor=1 if it has one rank\), or name the axis that you "
        r"mean \(axes: data\)",
    ):
        ProcessGroupRegistry(Topology(data=1)).connect("tensor")


def bad_topologies() -> None:
    for topology, message in (
        (Topology(data=2, tensor=4), r"has 8 ranks but the world has 4.*must be 4: write data=1 or tensor=2"),
        (Topology(data=3), r"has 3 ranks but the world has 4.*write data=4 instead, or start 3 ranks"),
        (Topology(data=3, tensor=3), r"must be 4, or start 9 ranks"),
        (Topology(), r"has 1 ranks but the world has 4.*write Topology\(data=4\), for example, or start 1 rank$"),
    ):
        with pytest.raises(ValueError, match=message):
            ProcessGroupRegistry(topology)


def test_registry_rejects_topology_with_wrong_world_size(world: World) -> None:
    world.run(4, bad_topologies)


def bad_requests() -> None:
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        other = (registry.global_rank + 1) % 4
        calls: list[tuple[Callable[[], object], str]] = [
            (lambda: registry.group("tensr"), "did you mean 'tensor'.*axes: data, tensor"),
            (lambda: registry.size("row"), "unknown axis 'row'"),
            (lambda: registry.rank("data", "data"), "twice"),
            (lambda: registry.rank("dat"), "did you mean 'data'"),
            (
                lambda: registry.group(),
                r"no axis is given; name at least one.*for the group of all ranks, pass \*registry.topology.axes",
            ),
            (lambda: registry.size(), "no axis is given; name at least one"),
            (lambda: registry.rank(), "no axis is given; name at least one"),
            (lambda: registry.ranks(), "no axis is given; name at least one"),
            (lambda: registry.device_mesh(), "no axis is given; name at least one"),
            (lambda: registry.group_of((other,)), f"rank {registry.global_rank} requests.*is not a member"),
            (lambda: registry.group_of((registry.global_rank, 4)), r"\[4\] aren't in the world of 4"),
            (lambda: registry.group_of((registry.global_rank,) * 2), "twice"),
        ]
        for call, message in calls:
            with pytest.raises(ValueError, match=message):
                call()


@pytest.mark.parametrize("method", ["group", "size", "rank", "ranks", "device_mesh"])
def test_registry_methods_without_axes_on_topology_without_axes_name_the_one_rank(method: str) -> None:
    with pytest.raises(ValueError, match=r"the topology has none; it has one rank.*or give the topology an axis"):
        getattr(ProcessGroupRegistry(Topology()), method)()


def test_registry_methods_reject_invalid_axes_or_ranks(world: World) -> None:
    world.run(4, bad_requests)


def one_rank_disagrees() -> str:
    odd = Topology(tensor=2, data=2)
    try:
        ProcessGroupRegistry(odd if dist.get_rank() == 2 else Topology(data=2, tensor=2))
    except ValueError as error:
        return str(error)
    return ""


def test_topologies_that_differ_between_ranks_raise_on_at_least_one_rank(world: World) -> None:
    messages = [message for message in world.run(4, one_rank_disagrees) if message]
    # The rank that constructs its registry first sets the topology: if that is rank 2, the other ranks raise; else
    # rank 2 raises.
    assert len(messages) in (1, 3)
    assert all("Topology(tensor=2, data=2)" in text and "Topology(data=2, tensor=2)" in text for text in messages)
    world.run(4, ask_in_own_order, Topology(data=2, tensor=2), 0)


def test_registry_in_one_process_needs_no_torch_distributed() -> None:
    assert not dist.is_initialized()
    with ProcessGroupRegistry(Topology(data=1, tensor=1)) as registry:
        assert (registry.global_rank, registry.coordinate) == (0, {"data": 0, "tensor": 0})
        assert (registry.size("tensor"), registry.rank("data", "tensor"), registry.ranks("data")) == (1, 0, (0,))
        assert registry.device == torch.device("cpu")
        with pytest.raises(RuntimeError, match=r"size 1, .*there is no process group.* after init_distributed"):
            registry.group("tensor")
    with pytest.raises(RuntimeError, match=r"init_distributed.*nproc-per-node 2"):
        ProcessGroupRegistry(Topology(tensor=2))


def share_with_a_mesh() -> None:
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        before = groups_alive()
        mesh = registry.device_mesh("tensor", "data")
        assert groups_alive() == before + 2
        assert mesh.mesh_dim_names == ("tensor", "data")
        assert mesh.mesh.tolist() == [[0, 2], [1, 3]]
        for axis in ("tensor", "data"):
            assert mesh.get_group(axis) is registry.group(axis)
            assert mesh.get_local_rank(axis) == registry.rank(axis) == registry.coordinate[axis]
        local = torch.full((2,), float(registry.rank("tensor")))
        line = registry.device_mesh("tensor")
        assert DTensor.from_local(local, line, [Shard(0)]).full_tensor().tolist() == [0.0, 0.0, 1.0, 1.0]
        assert DTensor.from_local(local, mesh, [Shard(0), Shard(0)]).full_tensor().tolist() == [0.0] * 4 + [1.0] * 4
    assert groups_alive() == before


def test_device_mesh_shares_groups_of_the_registry(world: World) -> None:
    world.run(4, share_with_a_mesh)


def adopt_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alive = groups_alive()
    with ProcessGroupRegistry.from_device_mesh(mesh) as registry:
        assert registry.topology == Topology(dp=2, tp=2)
        assert registry.topology.data_axes == ("dp",)
        for axis in registry.topology.axes:
            assert registry.group(axis) is mesh.get_group(axis)
        assert groups_alive() == alive
        assert total(registry, "dp", "tp") == 6.0
        assert total(registry, "tp") == sum(registry.ranks("tp"))
    assert groups_alive() == alive
    dist.barrier(mesh.get_group("tp"))
    flipped = DeviceMesh("cpu", torch.arange(4).flip(0), mesh_dim_names=("dp",))
    nameless = DeviceMesh("cpu", torch.arange(4))
    for bad, message in (
        (mesh["tp"], "needs all 4 ranks of the world in row-major order"),
        (flipped, "row-major"),
        (nameless, "mesh_dim_names"),
    ):
        with pytest.raises(ValueError, match=message):
            ProcessGroupRegistry.from_device_mesh(bad)

    for group in list(distributed_c10d._world.pg_names):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def test_from_device_mesh_reuses_groups_of_the_mesh(world: World) -> None:
    world.run(4, adopt_a_mesh)


@pytest.fixture
def fake_world() -> Iterator[None]:
    """Make this process rank 77 of a fake world of 4096 ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=77, world_size=4096)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_world")
def test_registry_makes_expected_groups_in_fake_world_of_4096_ranks() -> None:
    topology = Topology(pipe=4, data=16, row=8, col=8)
    start = time.perf_counter()
    with ProcessGroupRegistry(topology) as registry:
        for axes in combinations(topology):
            assert dist.get_process_group_ranks(registry.group(*axes)) == list(topology.peers(77, *axes))
            assert registry.size(*axes) == topology.size(*axes)
            assert registry.ranks(*axes)[registry.rank(*axes)] == 77
        mesh = registry.device_mesh("col", "pipe")
        here = topology.coordinate(77)
        assert mesh.mesh.tolist() == [
            [topology.rank(**{**here, "col": col, "pipe": pipe}) for pipe in range(4)] for col in range(8)
        ]
        print(f"{len(combinations(topology))} groups in {(time.perf_counter() - start) * 1e3:.1f} ms")
        assert groups_alive() == len(combinations(topology))
    assert groups_alive() == 1


def test_deepcopy_of_registry_returns_same_object() -> None:
    registry = ProcessGroupRegistry(Topology())
    assert copy.deepcopy({"registry": registry})["registry"] is registry


def test_unpickling_returns_the_open_registry_or_a_new_one_after_close() -> None:
    registry = ProcessGroupRegistry(Topology(), timeout=timedelta(seconds=1234))  # no other test has this timeout
    assert pickle.loads(pickle.dumps(registry)) is registry
    registry.close()
    loaded = pickle.loads(pickle.dumps(registry))
    assert loaded is not registry
    assert "closed" not in repr(loaded)
