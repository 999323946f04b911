"""Exchanges between shards and owner ranks in several rounds."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from home_runs import adafactor, soap
from meshstep.optim import ParallelOptimizer
from meshstep.optim.whole import Homes
from meshstep.optim.whole import muon as of_muon
from meshstep.optim.whole import optimizer as of_optimizer
from meshstep.optim.whole.exchange import Buffers
from meshstep.optim.whole.tensors import LogicalTensor
from meshstep.parallel import ProcessGroupRegistry
from meshstep.parallel.layout.shard import Box
from planted import Layout, Part, Planted, parts, run_step
from torch import Tensor
from whole_runs import STATES, WHOLE_LAYOUTS, Make, alone, copies_differ, largest_error, muon
from world import World

MAKES: list[Make] = [muon, soap, adafactor]


def in_small_rounds(layout: Layout, options: dict[str, Any], homes_of: list[str]) -> list[tuple[list[Part], int, bool]]:
    """Return per optimizer its shards, its number of rounds, and whether later steps reused the buffers of the
    first step."""
    found = []
    small = partial(Homes, round_bytes=1)
    with (
        ProcessGroupRegistry(layout.topology) as registry,
        mock.patch.object(of_muon, "Homes", small),
        mock.patch.object(of_optimizer, "Homes", small),
    ):
        for make, name in zip(MAKES, homes_of, strict=True):
            model = Planted(layout, registry.global_rank, torch.float64)
            optimizer = ParallelOptimizer(make(model.named_parameters()), registry, **options)
            homes: Any = getattr(optimizer.optimizer, name)
            kept = []
            for step in range(10):
                run_step(model, optimizer, step)
                optimizer.step()
                memory: dict[Any, Tensor] = homes.buffers._kept
                kept.append({use: value.data_ptr() for use, value in memory.items()})
            found.append((parts(layout, optimizer), len(homes._rounds), all(one == kept[0] for one in kept)))
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "state", "rounds"), [("tensor", "whole", 3), ("data x tensor", "ZeRO-2", 2), ("experts", "whole", 2)]
)
def test_full_tensor_exchange_in_several_rounds_matches_dense_update_and_reuses_buffers(
    world: World, name: str, state: str, rounds: int
) -> None:
    layout = WHOLE_LAYOUTS[name]
    names = ["_homes", "homes", "homes"]
    by_rank = world.run(layout.topology.world_size, in_small_rounds, layout, STATES[state], names)
    for index, make in enumerate(MAKES):
        own = [of_rank[index][0] for of_rank in by_rank]
        assert largest_error(own, alone(layout, make)) <= 1e-12, make
        assert copies_differ(own) == [], make
        assert min(of_rank[index][1] for of_rank in by_rank) >= rounds, make
        assert all(of_rank[index][2] for of_rank in by_rank), make


def test_exchange_buffers_have_size_of_largest_use_and_are_kept_on_cpu_only() -> None:
    buffers, cpu = Buffers(), torch.device("cpu")
    first = buffers.flat("sent", 10, torch.float32, cpu)
    assert buffers.flat("sent", 4, torch.float64, cpu).data_ptr() == first.data_ptr()
    assert buffers.flat("arrived", 3, torch.float64, cpu).shape == (3,)
    assert sum(kept.nbytes for kept in buffers._kept.values()) == 10 * 4 + 3 * 8
    assert buffers.flat("sent", 10, torch.float32, torch.device("meta")).is_meta
    assert sum(kept.nbytes for kept in buffers._kept.values()) == 10 * 4 + 3 * 8


def test_replicas_of_a_shard_send_it_to_owner_ranks_in_turn() -> None:
    """On ``data=2,tensor=2`` each rank has half of a matrix; two ranks have the half that an owner rank lacks."""
    halves = [Box((0, 0), (4, 6)), Box((4, 0), (4, 6))]
    tensor = LogicalTensor("w", (8, 6), torch.float32, None, {rank: (halves[rank % 2],) for rank in range(4)})
    senders = []
    for home in range(4):
        sources = {rank: boxes for rank, boxes in tensor.sources(home).items() if boxes}
        assert sources[home] == [halves[home % 2]]
        senders += [rank for rank in sources if rank != home]
    assert sorted(senders) == [0, 1, 2, 3]
