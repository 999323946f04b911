"""Aliases: one name for several axes, accepted wherever an axis name is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import slice_of
from hypothesis import given
from hypothesis import strategies as st
from meshstep.parallel import (
    P,
    ProcessGroupRegistry,
    Topology,
    all_gather_to,
    blocks,
    full_shape,
    local_shape,
    reduce_from,
    scatter_to,
    shard,
    unshard,
)
from meshstep.parallel.__main__ import main
from world import World

FOLDED = Topology(edp=2, mid=2, tensor=2, aliases={"data": ("edp", "mid"), "expert": ("mid", "tensor")})


def test_topology_methods_accept_axis_alias() -> None:
    assert FOLDED.world_size == 8
    assert (FOLDED.size("data"), FOLDED.size("data", "tensor")) == (4, 8)
    assert FOLDED.expand_aliases("tensor", "data") == ("tensor", "edp", "mid")
    assert [FOLDED.coordinate_of(rank, "expert") for rank in range(8)] == [0, 1, 2, 3] * 2
    assert FOLDED.coordinate(5) == {"edp": 1, "mid": 0, "tensor": 1}
    assert (FOLDED.coordinate(5)["data"], FOLDED.coordinate(5)["expert"]) == (2, 1)
    assert FOLDED.peers(5, "data") == (1, 3, 5, 7)
    assert list(FOLDED.groups("expert")) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert FOLDED.rank(data=2, tensor=1) == 5
    assert list(FOLDED.filter(expert=1)) == [1, 5]
    assert Topology(edp=2, mid=2, tensor=2, roles={"mid": "data"}) != FOLDED
    assert eval(repr(FOLDED)) == FOLDED == Topology.parse("edp=2,mid=2,tensor=2,data=edp+mid,expert=mid+tensor")


def test_axes_take_the_role_of_their_alias() -> None:
    assert FOLDED.data_axes == FOLDED.sample_axes == ("edp", "mid")
    assert FOLDED.model_axes == ("tensor",)
    assert (FOLDED.role("data"), FOLDED.expert_axes_without_role) == ("data", ())
    told = Topology(a=2, b=2, aliases={"both": ("a", "b")}, roles={"both": "data"})
    assert told.data_axes == ("a", "b")
    assert eval(repr(told)) == told
    split = Topology(dp=2, c1=2, c2=2, aliases={"cp": ("c1", "c2"), "fsdp": ("dp", "c1", "c2"), "ep": ("c2",)})
    assert (split.data_axes, split.sample_axes) == (("dp", "c1", "c2"), ("dp",))
    assert Topology(data=2, a=2, b=2, aliases={"ep": ("a", "b")}).expert_axes_without_role == ("a", "b")
    overruled = Topology(dp=2, aliases={"tp": "dp"}, roles={"dp": "model"})
    assert eval(repr(overruled)) == overruled
    assert overruled.model_axes == ("dp",)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Topology(a=2, aliases={"b": ("c",)}),
            "alias 'b' contains 'c', which is not an axis; .* of the axes a",
        ),
        (lambda: Topology(a=2, aliases={"b": ()}), r"alias 'b' is empty; an alias must"),
        (lambda: Topology(a=2, aliases={"a": ("a",)}), "'a' is an axis and can't be an alias too"),
        (lambda: Topology(a=2, aliases={"a-b": ("a",)}), "alias 'a-b' is not an identifier"),
        (lambda: Topology(a=2, b=2, aliases={"c": ("b", "a")}), r"order of the axes is a, b; write \('a', 'b'\)"),
        (lambda: Topology(a=2, b=2, aliases={"c": ("a", "a")}), r"write \('a',\), with each axis once"),
        (
            lambda: Topology(dp=2, aliases={"tp": "dp"}),
            "'data' from the name 'dp' and 'model' from the name 'tp'; write roles=",
        ),
        (
            lambda: Topology(x=2, aliases={"y": "x"}, roles={"x": "data", "y": "model"}),
            "'data' from the entry of roles= for 'x' and 'model' from the entry of roles= for 'y'; leave out one",
        ),
        (
            lambda: FOLDED.size("dat"),
            "unknown axis 'dat'; did you mean 'data'.*axes: edp, mid, tensor; aliases: data, expert",
        ),
        (lambda: FOLDED.peers(0, "data", "expert"), "named twice in data, expert .*'mid' is in several of these"),
        (lambda: FOLDED.role("expert"), "several roles, mid 'data', tensor 'model'"),
        (lambda: FOLDED.rank(data=4, tensor=0), "coordinate data=4 is out of range; give a number from 0 to 3"),
        (lambda: FOLDED.rank(data=1), "tensor is missing"),
        (lambda: P("exper").validate(1, FOLDED, "w"), "w: .*names axis 'exper'.*aliases: data, expert.*mean 'expert'"),
        (lambda: P("data", "expert").validate(2, FOLDED, "w"), "axis 'mid' is named twice"),
        (
            lambda: P(owned={"expert": 4}).validate(1, FOLDED, "w"),
            "w: .*coordinate 4 of 'expert', which is out of range; write a number from 0 to 3",
        ),
        (
            lambda: P(tied={"expert": (0, -1)}).validate(1, FOLDED, "w"),
            r"\[0, 3\] of the alias for mid=2 x tensor=2 must be all combinations .* axes, \[0, 1, 2, 3\]; give",
        ),
    ],
)
def test_invalid_alias_or_axis_argument_raises_value_error(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_topology_table_lists_all_aliases_of_the_same_axes() -> None:
    table = Topology(x=2, y=2, aliases={"a": ("x", "y"), "b": ("x", "y"), "c": ("x",)}).table()
    assert "\nx = c " in table
    assert "\nb = a = x x y " in table


def test_topology_command_lists_aliases(capsys: pytest.CaptureFixture[str]) -> None:
    main(["edp=2", "mid=2", "tensor=2", "data=edp+mid", "expert=mid+tensor"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        "data = edp x mid       data           4       2  0 2 4 6 | 1 3 5 7",
        "expert = mid x tensor  data+model     4       2  0 1 2 3 | 4 5 6 7",
    ]
    with pytest.raises(SystemExit):
        main(["edp=2", "data=edp+md"])
    assert "alias 'data' contains 'md'" in capsys.readouterr().err


def test_spec_resolve_replaces_aliases_by_their_axes() -> None:
    assert P("expert").resolve(FOLDED) == P((("mid", "tensor"),))
    assert P(("tensor", "data")).resolve(FOLDED) == P(("tensor", ("edp", "mid")))
    assert P(None, blocks("expert", 2)).resolve(FOLDED) == P(None, blocks(("mid", "tensor"), 2))
    assert P(partial="data").resolve(FOLDED) == P(partial=("edp", "mid"))
    assert P(owned={"expert": 2}).resolve(FOLDED) == P(owned={"mid": 1, "tensor": 0})
    assert P(tied={"expert": (2, -1)}).resolve(FOLDED) == P(tied={"mid": (1,), "tensor": (0, 1)})
    assert eval(repr(P("expert").resolve(FOLDED))) == P("expert").resolve(FOLDED)
    spec = P("tensor")
    assert spec.resolve(FOLDED) is spec
    assert P("expert").distinct_axes(FOLDED) == ("mid", "tensor")
    assert (P("expert").num_replicas(FOLDED), P(tied={"expert": (2, 3)}).num_replicas(FOLDED)) == (2, 4)
    assert [P(owned={"expert": 2}).holds(FOLDED.coordinate(rank), FOLDED) for rank in (0, 2, 6, 7)] == [0, 1, 1, 0]


@given(length=st.integers(0, 9), sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2)))
def test_sharding_over_alias_equals_sharding_over_one_axis_of_same_size(
    length: int, sizes: tuple[int, int, int]
) -> None:
    one = Topology(data=sizes[0] * sizes[1], tensor=sizes[2])
    two = Topology(edp=sizes[0], mid=sizes[1], tensor=sizes[2], aliases={"data": ("edp", "mid")})
    for spec in (P("data"), P(("tensor", "data")), P(("data", "tensor"))):
        for rank in range(one.world_size):
            expected = spec.spans(0, length, one, one.coordinate(rank))
            assert spec.spans(0, length, two, two.coordinate(rank)) == expected
            assert spec.resolve(two).spans(0, length, two, two.coordinate(rank)) == expected


def on_groups() -> None:
    with ProcessGroupRegistry(FOLDED) as registry:
        rank = registry.global_rank
        assert (registry.rank("expert"), registry.size("expert")) == (rank % 4, 4)
        assert registry.coordinate["data"] == rank // 2 == registry.rank("data")
        assert registry.group("data") is registry.group("mid", "edp")
        total = reduce_from(torch.tensor(float(rank)), registry, "data")
        assert total == sum(registry.ranks("data"))
        assert all_gather_to(torch.tensor([rank]), registry, "expert", dim=0).tolist() == list(registry.ranks("expert"))
        assert scatter_to(torch.arange(8), registry, "expert", dim=0).tolist() == [2 * (rank % 4), 2 * (rank % 4) + 1]
        registry.connect("data", ("expert",))
        full = torch.arange(32.0).view(8, 4)
        for spec in (P("expert"), P("data", "tensor"), P(blocks("expert", 2)), P("tensor", owned={"data": 3})):
            piece = shard(full, spec, registry)
            if piece.numel():
                assert torch.equal(piece, slice_of(full, spec, FOLDED, rank))
                assert piece.shape == local_shape(full.shape, spec, FOLDED)
                assert full_shape(piece.shape, spec, FOLDED) == full.shape
            assert torch.equal(unshard(piece if piece.numel() else None, spec, registry), full)


def on_meshes() -> list[Any]:
    with ProcessGroupRegistry(FOLDED) as registry:
        mesh = registry.device_mesh("tensor", "data")
        plain = registry.device_mesh(("edp", "mid"), "tensor")
        with pytest.raises(ValueError, match="has axes in another order than the topology"):
            registry.device_mesh(("mid", "edp"), "tensor")
        assert mesh.get_group("data") is registry.group("data")
        return [mesh.mesh_dim_names, mesh.mesh.tolist(), plain.mesh_dim_names, plain.mesh.tolist()]


def test_registry_collectives_and_shards_accept_an_alias(world: World) -> None:
    world.run(8, on_groups)


def test_alias_becomes_dim_of_device_mesh(world: World) -> None:
    for found in world.run(8, on_meshes):
        assert found == [
            ("tensor", "data"),
            [[0, 2, 4, 6], [1, 3, 5, 7]],
            ("edp_mid", "tensor"),
            [[0, 1], [2, 3], [4, 5], [6, 7]],
        ]
