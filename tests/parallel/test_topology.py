"""Conversion between ranks and coordinates, compared with row-major order in torch; cost; table; command line."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from itertools import combinations
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from meshstep.parallel import Topology
from meshstep.parallel.__main__ import main

NAMES = ("pipe", "data", "depth", "tensor", "row")
topologies = st.lists(st.integers(1, 4), max_size=5).map(
    lambda sizes: Topology(roles=None, **dict(zip(NAMES, sizes, strict=False)))
)
BIG = Topology(pipe=8, data=512, row=16, col=16)


@given(topologies)
def test_ranks_and_coordinates_follow_row_major_order(topology: Topology) -> None:
    grid = torch.arange(topology.world_size).reshape(topology.sizes)
    seen = set()
    for rank in range(topology.world_size):
        coordinate = topology.coordinate(rank)
        assert tuple(coordinate) == topology.axes
        assert grid[tuple(coordinate.values())] == rank == topology.rank(**coordinate)
        assert coordinate == {axis: topology.coordinate_of(rank, axis) for axis in topology.axes}
        seen.add(tuple(coordinate.values()))
    assert len(seen) == topology.world_size


@given(topologies, st.data())
def test_groups_along_axes_partition_the_world(topology: Topology, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(topology.axes), unique=True)) if topology.axes else []
    dims = sorted(topology.axes.index(axis) for axis in axes)
    others = [dim for dim in range(len(topology.axes)) if dim not in dims]
    grid = torch.arange(topology.world_size).reshape(topology.sizes).permute(others + dims)
    expected = grid.reshape(-1, topology.size(*axes)).tolist()
    groups = list(topology.groups(*axes))
    assert [list(group) for group in groups] == expected
    assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
    for group in groups:
        assert all(topology.peers(rank, *axes) == group for rank in group)


@given(topologies, st.data())
def test_topology_filter_returns_the_ranks_at_given_coordinates(topology: Topology, data: st.DataObject) -> None:
    fixed = {
        axis: data.draw(st.integers(0, topology.size(axis) - 1)) for axis in topology.axes if data.draw(st.booleans())
    }
    index = tuple(fixed.get(axis, slice(None)) for axis in topology.axes)
    grid = torch.arange(topology.world_size).reshape(topology.sizes)
    assert list(topology.filter(**fixed)) == grid[index].flatten().tolist()


@given(topologies)
def test_topology_survives_pickle_copy_repr_and_parse(topology: Topology) -> None:
    again = Topology(roles=None, **dict(zip(topology.axes, topology.sizes, strict=True)))
    assert again == topology
    assert hash(again) == hash(topology)
    assert pickle.loads(pickle.dumps(topology)) == copy.deepcopy(topology) == topology
    assert eval(repr(topology)) == topology
    text = ", ".join(f"{axis}={size}" for axis, size in zip(topology.axes, topology.sizes, strict=True))
    assert Topology.parse(text) == Topology.parse(text.replace(",", "")) == topology


def test_topologies_of_different_axis_order_or_roles_are_unequal() -> None:
    assert Topology(row=2, col=3) != Topology(col=3, row=2)
    assert Topology(dp=2, tp=2) != Topology(dp=2, tp=2, roles={"dp": "model"})
    assert Topology(row=2) != object()


def test_topology_attributes_are_read_only() -> None:
    topology = Topology(row=2)
    for attribute in fields(topology):
        with pytest.raises(AttributeError, match=attribute.name):
            setattr(topology, attribute.name, ("col",))


def test_axes_have_roles_by_name_or_argument() -> None:
    topology = Topology(pipe=2, replica=2, data=1, row=2, batch=3, roles={"batch": "data", "row": "pipe"})
    assert topology.pipe_axes == ("pipe", "row")
    assert topology.data_axes == ("replica", "data", "batch")
    assert topology.model_axes == ()
    assert Topology(row=2, expert=2).model_axes == ("row", "expert")
    assert [topology.role(axis) for axis in topology.axes] == ["pipe", "data", "data", "pipe", "data"]
    assert eval(repr(topology)) == topology


@pytest.mark.parametrize(
    ("names", "role"),
    [
        ("data replica dp ddp dp_replicate dp_shard fsdp hsdp edp efsdp cp context", "data"),
        ("pipe pipeline pp", "pipe"),
        ("tensor tp sp row col depth expert ep etp", "model"),
    ],
)
def test_common_axis_names_have_default_roles(names: str, role: str) -> None:
    topology = Topology(roles=None, **dict.fromkeys(names.split(), 2))
    assert {axis: topology.role(axis) for axis in topology.axes} == dict.fromkeys(names.split(), role)


def test_context_axis_is_a_data_axis_but_not_a_sample_axis() -> None:
    topology = Topology(dp_replicate=2, dp_shard=2, cp=2, tp=2)
    assert topology.data_axes == ("dp_replicate", "dp_shard", "cp")
    assert topology.sample_axes == ("dp_replicate", "dp_shard")


def test_topology_table_explains_an_expert_axis_without_role() -> None:
    told: dict[str, Any] = {"ep": "model", "expert": "data"}
    assert Topology(data=2, ep=4, expert=2).expert_axes_without_role == ("ep", "expert")
    assert Topology(data=2, ep=4, expert=2, roles=told).expert_axes_without_role == ()
    assert Topology(data=2, expert=1).expert_axes_without_role == ()
    assert Topology(ep=2) == Topology(ep=2, roles={"ep": "model"})
    lines = Topology(data=2, ep=4).table().splitlines()
    assert lines[-2:] == [
        "ep has no role, so it counts as a model axis: gradients of replicas are not averaged over it.",
        'If its ranks see different samples, write roles={"ep": "data"}; if the same samples, "model".',
    ]
    assert "has no role" not in Topology(data=2, ep=4, roles={"ep": "data"}).table()


def test_topology_without_axes_has_one_rank() -> None:
    topology = Topology()
    assert (topology.world_size, topology.coordinate(0), topology.rank(), tuple(topology.peers(0))) == (1, {}, 0, (0,))
    assert list(topology.groups()) == [(0,)]
    assert Topology.parse("") == topology


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: BIG.peers(0, "coll"), "unknown axis 'coll'; did you mean 'col'.*pipe, data, row, col"),
        (lambda: BIG.size("tensor"), "unknown axis 'tensor'.*pipe, data, row, col"),
        (lambda: BIG.role("x"), "unknown axis"),
        (lambda: BIG.size("row", "row"), "twice in row, row"),
        (lambda: BIG.coordinate(2**20), "rank 1048576 .*0..1048575"),
        (lambda: BIG.peers(-1, "row"), "rank -1"),
        (lambda: BIG.coordinate_of(2**20, "row"), "rank 1048576"),
        (lambda: BIG.rank(pipe=0, row=1), "data, col are missing"),
        (lambda: BIG.rank(pipe=0, data=0, row=16, col=0), "row=16 .* from 0 to 15"),
        (lambda: BIG.filter(col=-1), "col=-1"),
        (lambda: BIG.filter(cool=1), "did you mean 'col'"),
        (lambda: Topology(row=0), "'row' has size 0"),
        (lambda: Topology(row=True), "size True"),
        (lambda: Topology(row=2.0), "size 2.0"),  # type: ignore[call-overload]
        (lambda: Topology(roles=None, **{"a-b": 2}), "can't name an axis"),
        (
            lambda: Topology(row=2, roles={"col": "data"}),
            "'col', which is neither an axis nor an alias of this topology",
        ),
        (lambda: Topology(row=2, roles={"row": "dat"}), "'pipe', 'data', 'model'"),  # type: ignore[dict-item]
        (lambda: Topology.parse("row"), "'row' is neither axis=size nor alias"),
        (lambda: Topology.parse("row=x"), "row=x"),
        (lambda: Topology.parse("row=2,row=2"), "'row' appears twice in"),
        (lambda: Topology.parse("self=2"), "'self' .*can't name an axis"),
        (lambda: Topology.parse("roles=2"), "'roles' .*can't name an axis"),
    ],
)
def test_invalid_topologies_and_queries_raise_value_error(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def lines_executed(call: Callable[[], Any]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # a garbage collection would add lines, because hypothesis has a callback for it
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def test_topology_queries_about_one_rank_do_not_scale_with_world_size() -> None:
    small, rank = Topology(pipe=1, data=1, row=16, col=16), 2**20 - 77
    assert BIG.world_size == 2**20
    for axes in combinations(("row", "col"), 2):
        assert len(BIG.peers(rank, *axes)) == 16 ** len(axes)
        assert lines_executed(lambda axes=axes: BIG.peers(rank, *axes)) == lines_executed(  # type: ignore[misc]
            lambda axes=axes: small.peers(200, *axes)  # type: ignore[misc]
        )
    assert lines_executed(lambda: BIG.coordinate(rank)) == lines_executed(lambda: small.coordinate(200)) < 20
    assert lines_executed(lambda: Topology(data=2**20)) == lines_executed(lambda: Topology(data=2))
    # `groups` is lazy, so getting the first of 8,192 groups computes only this group.
    assert next(iter(BIG.groups("pipe", "row")))[:3] == (0, 16, 32)
    start = time.perf_counter()
    for _ in range(100):
        BIG.coordinate(rank), BIG.peers(rank, "row")
    print(f"coordinate + peers of 16 at world size 2**20: {(time.perf_counter() - start) * 1e4:.1f} us")


def test_topology_peers_are_computed_lazily() -> None:
    small, large = Topology(data=2, tensor=8), Topology(data=131072, tensor=8)
    for use in (
        lambda topology: topology.peers(9, "data"),
        lambda topology: (topology.peers(9, "data")[1], 9 in topology.peers(9, "data")),
        lambda topology: (topology.peers(9, "data").index(9), topology.peers(9, "data")[:2]),
    ):
        costs = [lines_executed(lambda use=use, t=topology: use(t)) for topology in (small, large)]  # type: ignore[misc]
        assert costs[0] == costs[1] < 200
    peers = large.peers(9, "data")
    assert (len(peers), peers[-1], peers.index(2**19 + 1)) == (131072, 2**20 - 7, 2**16)


@given(topologies, st.data())
def test_topology_peers_behave_like_a_tuple(topology: Topology, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(topology.axes), unique=True)) if topology.axes else []
    rank = data.draw(st.integers(0, topology.world_size - 1))
    peers, expected = topology.peers(rank, *axes), tuple(topology.peers(rank, *axes))
    assert peers == expected == peers
    assert (hash(peers), repr(peers), len(peers)) == (hash(expected), repr(expected), len(expected))
    assert [peers[i] for i in range(-len(peers), len(peers))] == [*expected, *expected]
    assert peers[1::2] == expected[1::2]
    assert [peers.index(member) for member in expected] == [*range(len(expected))]
    assert [other for other in range(-3, topology.world_size + 3) if other in peers] == [*expected]
    assert peers != expected[1:]
    with pytest.raises(IndexError):
        peers[len(peers)]
    with pytest.raises(ValueError, match="isn't in this group of"):
        peers.index(-1)
    with pytest.raises(
        ValueError, match=rf"rank {expected[0]} has index 0 in this group of .*, outside start=1, stop=None"
    ):
        peers.index(expected[0], 1)
    assert sorted({topology.peers(one, *axes) for one in range(topology.world_size)}) == [*topology.groups(*axes)]


def test_topology_table_shows_the_grid_and_all_groups() -> None:
    assert Topology(data=2, row=2, col=2).table() == (
        "Topology(data=2, row=2, col=2): 8 ranks\n"
        "\n"
        "data 0           data 1\n"
        "      col 0 1          col 0 1\n"
        "row 0     0 1    row 0     4 5\n"
        "row 1     2 3    row 1     6 7\n"
        "\n"
        "axes       role   size  groups  ranks of each group\n"
        "data       data      2       4  0 4 | 1 5 | 2 6 | 3 7\n"
        "row        model     2       4  0 2 | 1 3 | 4 6 | 5 7\n"
        "col        model     2       4  0 1 | 2 3 | 4 5 | 6 7\n"
        "row x col  model     4       2  0 1 2 3 | 4 5 6 7"
    )
    marked = Topology(data=2, tensor=2).table(rank=3)
    assert "[3]" in marked
    assert marked.splitlines()[-2:] == [
        "data    data      2       2  1 3",
        "tensor  model     2       2  2 3",
    ]
    assert Topology().table() == "Topology(): 1 rank\n\nrank 0\n     0"


@pytest.mark.parametrize(
    "topology", [BIG, Topology(data=2**20), Topology(roles=None, **dict.fromkeys("abcdefghij", 4))]
)
@pytest.mark.parametrize("rank", [None, 77_777])
def test_topology_table_of_a_large_world_has_at_most_64_lines(topology: Topology, rank: int | None) -> None:
    lines = topology.table(rank).splitlines()
    assert len(lines) <= 64
    assert max(map(len, lines)) <= 110
    assert rank is None or any(f"[{rank}]" in line for line in lines)


@given(topologies, st.data())
def test_topology_table_of_a_small_world_shows_every_rank(topology: Topology, data: st.DataObject) -> None:
    rank = data.draw(st.none() | st.integers(0, topology.world_size - 1))
    grid = topology.table(rank).split("\n\naxes ")[0]
    shown = {int(word.strip("[]")) for word in grid.split() if word.strip("[]").isdigit()}
    assert topology.world_size > 64 or shown >= set(range(topology.world_size))


def test_topology_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["pipe=2", "data=2", "row=2", "col=2", "--rank", "5"])
    assert capsys.readouterr().out == Topology(pipe=2, data=2, row=2, col=2).table(5) + "\n"
    main(["row=2,col=2"])
    assert capsys.readouterr().out == Topology(row=2, col=2).table() + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["row=2", "--rank", "2"], "rank 2 isn't in Topology(row=2)"),
        (["row"], "'row' is neither axis=size nor alias"),
        (["row=0"], "'row' has size 0"),
        (["row=2", "--rank", "x"], "--rank"),
        ([], "axis=size"),
    ],
)
def test_topology_command_rejects_bad_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err
