"""Models of 2D, 2.5D and 3D layers, and a weight on the diagonal ranks, which is one parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from arguments import arguments
from grid_models import Lm, full_parameters, ids_of
from meshstep.optim import (
    ParallelOptimizer,
    ReplicaMismatchError,
    TorchStates,
    broadcast_weights,
    load_checkpoint,
    save_checkpoint,
)
from meshstep.optim.checkpoint.contents import LogicalParameters
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from world import World

MAX_NORM, RATE, DECAY = 0.4, 1e-2, 0.1
CUBE, HALF = Topology(input=2, weight=2, output=2), Topology(input=2, weight=1, output=2)
GRIDS = Topology(depth=2, row=1, col=2)


def optimizer_of(model: Lm, registry: ProcessGroupRegistry, **options: Any) -> ParallelOptimizer:
    declare(model)
    given = {"max_norm": MAX_NORM, "check_replicas": True, **options}
    adamw = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    return ParallelOptimizer(adamw, registry, **arguments(**given))


def dense_run(steps: int, width: int, tied: bool) -> tuple[Lm, list[float]]:
    """Return the dense model after some steps, and the gradient norm of each step."""
    model = Lm(None, None, width, tied)
    adamw = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    norms = []
    for step in range(steps):
        adamw.zero_grad()
        torch.autograd.backward(model(ids_of(step)))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        adamw.step()
    return model, norms


def run(model: Lm, optimizer: ParallelOptimizer, steps: range) -> list[float]:
    norms = []
    data = optimizer.registry.topology.data_axes
    for step in steps:
        optimizer.zero_grad()
        ids = ids_of(step)
        if data:
            ids = ids.chunk(optimizer.registry.size(*data))[optimizer.registry.rank(*data)]
        optimizer.backward(model(ids))
        stats = optimizer.step()
        assert stats is not None
        norms.append(float(stats.total_norm))
    return norms


def assert_is_dense(model: Lm, dense: Lm) -> None:
    found, expected = full_parameters(model), dict(dense.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=1e-9, atol=1e-10, msg=name)


def stepped(kind: str, topology: Topology, width: int, tied: bool, options: dict[str, Any]) -> None:
    dense, expected = dense_run(3, width, tied)
    assert min(expected) > MAX_NORM, "every step must be clipped"
    with ProcessGroupRegistry(topology) as registry:
        model = Lm(kind, registry, width, tied)
        optimizer = optimizer_of(model, registry, **options)
        norms = run(model, optimizer, range(3))
        torch.testing.assert_close(norms, expected, rtol=1e-6, atol=0)
        if "shard_states" not in options:
            optimizer.plan.check_numel(sum(param.numel() for param in dense.parameters()))
        assert_is_dense(model, dense)


@pytest.mark.parametrize("reduction", ["packed", "per_group"])
@pytest.mark.parametrize(
    ("kind", "topology", "width", "tied"),
    [
        ("2-D", Topology(row=1, col=3), 7, True),
        ("2-D", Topology(data=2, row=2, col=1), 6, False),
        ("2.5-D", GRIDS, 7, False),
        ("2.5-D", Topology(depth=2, row=2, col=1), 6, True),
        ("3-D", HALF, 7, False),
        ("3-D", HALF, 6, True),
        ("3-D", Topology(data=2, input=2, weight=1, output=1), 6, True),
        ("3-D", CUBE, 8, False),
    ],
)
def test_model_of_2d_2_5d_or_3d_layers_matches_dense_model(
    world: World, kind: str, topology: Topology, width: int, tied: bool, reduction: str
) -> None:
    world.run(topology.world_size, stepped, kind, topology, width, tied, {"reduction": reduction})


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "topology", "axis"),
    [
        ("2.5-D", GRIDS, "depth"),
        ("3-D", CUBE, "weight"),
        ("3-D", Topology(data=2, input=2, output=2, weight=1), "data"),
    ],
)
@pytest.mark.parametrize("gradients", [False, True])
def test_zero1_and_zero2_over_replicating_axis_of_grid_match_dense_model(
    world: World, kind: str, topology: Topology, axis: str, gradients: bool
) -> None:
    options = {"shard_states": axis, "shard_gradients": gradients}
    world.run(topology.world_size, stepped, kind, topology, 8, True, options)


def one_parameter() -> tuple[tuple[str, ...], str, int]:
    """Return all parameter names, and the region and number of this rank's stepped tensors of ``head.weight``."""
    with ProcessGroupRegistry(HALF) as registry:
        model = Lm("3-D", registry, 6, False)
        optimizer = optimizer_of(model, registry)
        pieces = [str(piece.region) for piece in optimizer.stepped_tensors() if piece.name == "head.weight"]
        return LogicalParameters(model, registry).names, "".join(pieces), len(pieces)


def test_weight_held_by_diagonal_ranks_counts_as_one_logical_parameter(world: World) -> None:
    dense = Lm(None, None, 6, False)
    names, places, counts = zip(*world.run(4, one_parameter), strict=True)
    assert all(set(found) == dict(dense.named_parameters()).keys() for found in names)
    assert places == ("0,0+9,3", "", "", "0,3+9,3")
    assert counts == (1, 0, 0, 1)


def saves(path: Path, width: int) -> None:
    with ProcessGroupRegistry(HALF) as registry:
        model = Lm("3-D", registry, width, True)
        optimizer = optimizer_of(model, registry)
        run(model, optimizer, range(2))
        save_checkpoint(path, model, optimizer)


def goes_on(path: Path, width: int, kind: str, topology: Topology, steps: range, options: dict[str, Any]) -> None:
    with ProcessGroupRegistry(topology) as registry:
        model = Lm(kind, registry, width, True)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(-1)
        optimizer = optimizer_of(model, registry, **options)
        load_checkpoint(path, model, optimizer)
        run(model, optimizer, steps)
        assert_is_dense(model, dense_run(steps.stop, width, True)[0])
        save_checkpoint(path, model, optimizer)


@pytest.mark.long
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("width", [6, 7])  # 7 features give uneven shards
def test_checkpoint_moves_between_2d_2_5d_and_3d_layouts(world: World, tmp_path: Path, width: int) -> None:
    world.run(4, saves, tmp_path, width)
    world.run(4, goes_on, tmp_path, width, "2.5-D", GRIDS, range(2, 4), {"shard_states": "depth"})
    world.run(1, goes_on, tmp_path, width, "2-D", Topology(row=1, col=1), range(4, 5), {})
    world.run(8, goes_on, tmp_path, width, "3-D", CUBE, range(5, 6), {"shard_states": "weight"})


def copies_differ(topology: Topology, axis: str) -> tuple[str, bool]:
    with ProcessGroupRegistry(topology) as registry:
        model = Lm("3-D", registry, 8, False)
        optimizer = optimizer_of(model, registry)
        head = model.head.weight
        with torch.no_grad():
            for param in [] if head is None or registry.coordinate[axis] == 0 else [head]:
                param[0, 0] += 1e-9
        with pytest.raises(ReplicaMismatchError) as error:
            run(model, optimizer, range(1))
        if axis == "data":
            broadcast_weights(model, registry)
            run(model, optimizer, range(1))
        return str(error.value.mismatches[0]), head is not None


@pytest.mark.parametrize(
    ("topology", "axis"),
    [(Topology(weight=2, input=2, output=2), "weight"), (Topology(data=2, input=2, weight=1, output=2), "data")],
)
def test_replica_check_finds_diverged_weight_on_diagonal_ranks(world: World, topology: Topology, axis: str) -> None:
    text = f"head.weight: the parameter differs along axis '{axis}'"
    assert world.run(8, copies_differ, topology, axis) == [(text, True), (text, False), (text, False), (text, True)] * 2


def states_for_torch() -> str:
    with ProcessGroupRegistry(HALF) as registry:
        model = Lm("3-D", registry, 6, False)
        optimizer = optimizer_of(model, registry)
        run(model, optimizer, range(1))
        with pytest.raises(ValueError, match=r"table.weight: a DTensor does not support owned=.axis: axis.") as error:
            TorchStates(optimizer).state_dict()
        return str(error.value)


def test_torch_states_reject_shards_on_diagonal_on_every_rank(world: World) -> None:
    assert all("use save_checkpoint" in message for message in world.run(4, states_for_torch))


def wrongly_held() -> str:
    with ProcessGroupRegistry(HALF) as registry:
        param = torch.nn.Parameter(torch.zeros(9, 3))
        model = torch.nn.ParameterDict({"head": param})
        declare(model, {"head": P(None, "output", owned={"input": "output"})})
        with pytest.raises(
            ValueError, match=r"head: rank .* has this parameter, but P.* places it on other ranks"
        ) as error:
            ParallelOptimizer(torch.optim.SGD([param]), registry)
        return str(error.value)


def test_diagonal_weight_on_rank_off_the_diagonal_is_rejected_on_every_rank(world: World) -> None:
    messages = world.run(4, wrongly_held)
    assert all("but P(None, 'output', owned={'input': 'output'}) places it" in message for message in messages)
