"""`optimizer.stepped_tensors()`: its description of each shard, in many layouts and with ZeRO, offload or master
weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from cases import slice_of
from meshstep.amp import Bf16, NaiveFp16, Precision
from meshstep.optim import Offloaded, ParallelOptimizer, Sharded, StatePlacement
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from planted import LAYOUTS, SHAPES, Key, Part, Planted, parts, run_step, start
from torch import Tensor, nn
from world import World
from zero_models import small_buckets


@dataclass(frozen=True)
class Placed:
    layout: str
    states: tuple[StatePlacement, ...] = ()
    precision: Precision | str = "fp32"


PLACED = {
    **{name: Placed(name) for name in LAYOUTS},
    "ZeRO-1": Placed("data", (Sharded("data"),)),
    "ZeRO-2 x tensor": Placed("data x tensor", (Sharded("data", gradients=True),)),
    "ZeRO over a grid": Placed("grid", (Sharded("row"),)),
    "ZeRO over a pipeline": Placed("pipe, tied", (Sharded("pipe"),)),
    "offload": Placed("tensor", (Offloaded(0.5),)),
    "masters": Placed("grid", (), Bf16()),
    "all": Placed("data x tensor", (Offloaded(0.5), Sharded("data")), NaiveFp16()),
}


def pieces_of(placed: Placed) -> tuple[list[Part], list[tuple[str, bool]], Fraction, int | None]:
    """Return four values for one layout and its placements.

    They are: this rank's shards; for each stepped tensor (name, True if its ``param`` at ``offset`` has its values); the
    sum over stepped tensors of numel divided by the number of replicas; and ``plan.counted``.
    """
    layout = LAYOUTS[placed.layout]
    with ProcessGroupRegistry(layout.topology) as registry, small_buckets(64):
        model = Planted(layout, registry.global_rank)
        mode: Any = placed.precision
        if isinstance(mode, Precision):
            mode.prepare(model, registry)
        groups: Any = model.groups()
        optimizer = ParallelOptimizer(
            torch.optim.SGD(groups, lr=0.0, fused=True), registry, precision=mode, states=placed.states
        )
        run_step(model, optimizer, 0)
        optimizer.step()
        told = []
        for piece in optimizer.stepped_tensors():
            run = piece.param.detach().flatten()[piece.offset :][: piece.tensor.numel()]
            same = model.get_parameter(piece.name) is piece.param and torch.equal(run.float(), piece.tensor.flatten())
            told.append((piece.name, same))
        weighted = sum(
            (Fraction(row.tensor.numel(), row.num_replicas) for row in optimizer.stepped_tensors()), Fraction()
        )
        return parts(layout, optimizer), told, weighted, optimizer.plan.counted


def elements(part: Part) -> tuple[int, ...]:
    """Return the flat indices of the full tensor's elements that a shard claims to hold."""
    shape = SHAPES[part.key[0]]
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    return tuple(part.of(numbers).tolist())


def assert_tiled(by_rank: list[list[Part]], placed: Placed, values_of: Any = start) -> None:
    """Assert that the distinct shards of each full tensor contain each element once, with its value."""
    found: dict[Key, dict[tuple[int, ...], int]] = {}
    for own in by_rank:
        for part in own:
            where = elements(part)
            assert len(set(where)) == len(where) == part.value.numel(), part.key
            assert torch.equal(part.value.double(), part.of(values_of(part.key))), part.key
            pieces = found.setdefault(part.key, {})
            pieces[where] = pieces.get(where, 0) + 1
    assert set(found) == set(LAYOUTS[placed.layout].keys)
    for key, pieces in found.items():
        covered = sorted(number for where in pieces for number in where)
        assert covered == list(range(torch.Size(SHAPES[key[0]]).numel())), f"{key}: {sorted(pieces)}"
        assert len(set(pieces.values())) == 1, f"{key}: shards have different numbers of replicas: {pieces}"


@pytest.mark.parametrize("name", PLACED)
def test_stepped_tensors_of_all_ranks_cover_each_full_tensor(world: World, name: str) -> None:
    placed = PLACED[name]
    by_rank = world.run(LAYOUTS[placed.layout].topology.world_size, pieces_of, placed)
    assert_tiled([own for own, *_ in by_rank], placed)
    assert all(same for _, told, *_ in by_rank for _, same in told)
    assert {piece for _, told, *_ in by_rank for piece, _ in told} == set(SHAPES)
    assert {counted for *_, counted in by_rank} == {sum(weighted for _, _, weighted, _ in by_rank)}


@pytest.mark.parametrize("states", [(), (Offloaded(0.5),), (Offloaded(1.0),)], ids=str)
def test_stepped_tensors_of_a_single_rank_cover_each_full_tensor(states: tuple[StatePlacement, ...]) -> None:
    placed = Placed("one rank", states)
    own, told, *_ = pieces_of(placed)
    assert_tiled([own], placed)
    assert all(same for _, same in told)


def test_coverage_check_detects_wrong_region_of_stepped_tensor(world: World) -> None:
    by_rank = [own for own, *_ in world.run(2, pieces_of, PLACED["ZeRO-1"])]
    moved = next(part for part in by_rank[1] if part.region is not None and part.region.start > 0)
    assert moved.region is not None
    moved.region = moved.region.run(-1, moved.region.numel)
    with pytest.raises(AssertionError):
        assert_tiled(by_rank, PLACED["ZeRO-1"])


def test_each_of_two_zero1_ranks_steps_about_half_of_the_elements(world: World) -> None:
    total = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    for own, *_ in world.run(2, pieces_of, PLACED["ZeRO-1"]):
        assert 0.25 * total < sum(part.value.numel() for part in own) < 0.75 * total
    for own, *_ in world.run(2, pieces_of, PLACED["data"]):
        assert sum(part.value.numel() for part in own) == total


def uneven_pieces(shard_states: bool) -> list[tuple[str, bool]]:
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        params: list[Tensor] = []
        for name, full in (("odd", torch.ones(5, 4)), ("even", torch.ones(6, 4))):
            local = slice_of(full, P("tensor"), registry.topology, registry.global_rank)
            params.append(nn.Parameter(local))
            annotate(params[-1], P("tensor"), name)
        states = (Sharded("data"),) if shard_states else ()
        optimizer = ParallelOptimizer(torch.optim.SGD(params, lr=0.0), registry, states=states)
        return [(piece.name, piece.region is None) for piece in optimizer.stepped_tensors()]


@pytest.mark.parametrize("shard_states", [False, True])
def test_stepped_tensors_of_uneven_shards_have_no_region(world: World, shard_states: bool) -> None:
    for told in world.run(4, uneven_pieces, shard_states):
        assert told
        assert all(unknown == (name == "odd") for name, unknown in told)
