"""`Topology.of_meshes`: its axes are the common refinement of the mesh dims; each mesh dim is an axis or an alias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshstep.parallel import ProcessGroupRegistry, Topology
from meshstep.parallel.mesh.refinement import Dim, refined
from meshstep.parallel.mesh.topology import axes_along
from torch.distributed.device_mesh import init_device_mesh
from world import World

Grids = Mapping[tuple[str, ...], Any]


def row_major(*sizes: int) -> Any:
    return torch.arange(int(torch.tensor(sizes).prod())).view(sizes).tolist()


def views(world_size: int, grids: Grids) -> list[list[Dim]]:
    """Return the mesh dims that each rank sees, for meshes given as nested lists of ranks."""
    found: list[list[Dim]] = [[] for _ in range(world_size)]
    for number, (names, ranks) in enumerate(grids.items()):
        grid = torch.tensor(ranks)
        for rank, dims in enumerate(found):
            for at in (grid == rank).nonzero().tolist():
                for index, name in enumerate(names):
                    line = grid[tuple(slice(None) if i == index else where for i, where in enumerate(at))]
                    dims.append(Dim(number, name, tuple(line.tolist())))
    return found


@pytest.mark.parametrize(
    ("world_size", "grids", "expected"),
    [
        (4, {("data", "tensor"): row_major(2, 2)}, Topology(data=2, tensor=2)),
        (
            8,
            {("data", "tensor"): row_major(4, 2), ("edp", "expert"): row_major(2, 4)},
            Topology(edp=2, data_1=2, tensor=2, aliases={"data": ("edp", "data_1"), "expert": ("data_1", "tensor")}),
        ),
        (
            8,
            {
                ("dp", "cp", "tp"): row_major(2, 2, 2),
                ("dp_cp", "tp"): row_major(4, 2),
                ("dp_tp", "cp"): [[0, 2], [1, 3], [4, 6], [5, 7]],
            },
            Topology(dp=2, cp=2, tp=2, aliases={"dp_cp": ("dp", "cp"), "dp_tp": ("dp", "tp")}),
        ),
        (4, {("a", "b"): [[0, 2], [1, 3]]}, Topology(b=2, a=2)),
        (4, {("a", "one"): row_major(4, 1), ("dp",): row_major(4)}, Topology(a=4, one=1, aliases={"dp": "a"})),
    ],
)
def test_topology_axes_are_common_refinement_of_all_meshes(world_size: int, grids: Grids, expected: Topology) -> None:
    axes, aliases = refined(views(world_size, grids))
    assert Topology(roles=None, aliases=aliases, **axes) == expected


@pytest.mark.parametrize(
    ("world_size", "grids", "message"),
    [
        (
            6,
            {("a", "b"): row_major(3, 2), ("c", "d"): row_major(2, 3)},
            "the meshes have no common axes: .* is 2, .* is 3, and 2 doesn't divide 3",
        ),
        (
            4,
            {("a",): [0, 3, 1, 2]},
            r"ranks \(0, 3, 1, 2\) along mesh dim 'a' can't be .*: the differences of the ranks do not form",
        ),
        (
            4,
            {("a",): [1, 2]},
            r"ranks \(1, 2\) along mesh dim 'a' can't be .*: no group of size 2 and stride 1 begins at rank 1",
        ),
        # Of the groups along 'b', (0, 1) is valid and (3, 4) is not.
        (
            5,
            {("a", "b"): [[0, 1], [3, 4]]},
            r"ranks \(3, 4\) along mesh dim 'b' can't be .* and stride 1 begins at rank 3",
        ),
        (10, {("a",): [4, 5, 8, 9]}, r"ranks \(4, 5, 8, 9\) .* no group of size 2 and stride 4 begins at rank 4"),
        (
            8,
            {("a", "b"): row_major(2, 2)},
            r"ranks \(0, 4\) differ along no dim of these meshes, so the mesh axis of these ranks has no name",
        ),
        (
            4,
            {("dp", "tp"): row_major(2, 2), ("tp", "x"): row_major(2, 2)},
            "two meshes have a dim named 'tp', but these dims group different ranks",
        ),
    ],
)
def test_incompatible_meshes_raise_error_that_names_the_conflict(world_size: int, grids: Grids, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refined(views(world_size, grids))


def test_stages_with_different_tensor_sizes_raise_error_that_shows_both() -> None:
    """One stage has two tensor ranks, and the other stage has four."""
    seen = [[Dim(0, "tp", (0, 1))]] * 2 + [[Dim(0, "tp", (2, 3, 4, 5))]] * 4
    with pytest.raises(
        ValueError,
        match=r"along mesh dim 'tp' have different sizes or strides: ranks \(0, 1\) and ranks \(2, 3, 4, 5\).*same number",
    ):
        refined(seen)


def test_axes_along_returns_axes_of_given_ranks_or_none() -> None:
    topology = Topology(a=2, one=1, b=3, c=2)
    assert axes_along((0, 2, 4), topology) == ("b",)
    assert axes_along((1, 3, 5, 7, 9, 11), topology) == ("a", "b")
    assert axes_along((4, 10, 5, 11), topology) == ("c", "a")
    assert axes_along((7,), topology) == ()
    assert axes_along((0, 3), topology) is None
    assert axes_along((2, 4, 6), topology) is None
    assert axes_along((2, 0), topology) is None


def of_real_meshes() -> list[Topology]:
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    experts = init_device_mesh("cpu", (1, 4), mesh_dim_names=("edp", "ep"))
    flat = dense["dp", "tp"]._flatten("all_ranks")
    found = [Topology.of_meshes(dense, experts), Topology.of_meshes(dense["dp"], dense["tp"], flat)]
    with ProcessGroupRegistry(found[0]) as registry:
        total = torch.tensor(float(registry.global_rank))
        dist.all_reduce(total, group=registry.group("ep"))
        assert total == 6
    unnamed = init_device_mesh("cpu", (4,))
    with pytest.raises(ValueError, match="has no dim names"):
        Topology.of_meshes(dense if registry.global_rank else unnamed)
    return found


def test_of_meshes_accepts_device_meshes_and_slices(world: World) -> None:
    for found in world.run(4, of_real_meshes):
        assert found == [
            Topology(dp=2, tp=2, edp=1, aliases={"ep": ("dp", "tp")}),
            Topology(dp=2, tp=2, aliases={"all_ranks": ("dp", "tp")}),
        ]
