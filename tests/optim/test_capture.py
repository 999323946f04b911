"""Steps in a CUDA graph: its replays do what steps do. On the CPU, with `CpuGraph` in the place of a graph."""

from __future__ import annotations

import pytest
import torch
from cpu_graph import CpuGraph
from graph_runs import PLACED, SETTINGS, Run, Setting, by_replays, by_steps
from meshstep.parallel import ProcessGroupRegistry, Topology
from precision_modes import differences
from torch import Tensor
from world import World

CPU = torch.device("cpu")


@pytest.mark.parametrize("before", [3, 20])
@pytest.mark.parametrize("name", SETTINGS)
def test_replays_leave_the_bits_that_steps_leave(name: str, before: int) -> None:
    steps = by_steps(Run(SETTINGS[name], CPU))
    replays = by_replays(Run(SETTINGS[name], CPU), before, CpuGraph)
    assert differences(steps, replays) == []
    assert steps["skipped"] == 5


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "fp16_naive"])
def test_inner_and_last_micro_batches_are_two_graphs(name: str) -> None:
    """Their weights add up in the replays, and so do the gradients."""
    steps = by_steps(Run(SETTINGS[name], CPU), micro=3)
    assert differences(steps, by_replays(Run(SETTINGS[name], CPU), 3, CpuGraph, micro=3)) == []


def on_ranks(name: str, placed: str, micro: int, before: int | None) -> dict[str, Tensor]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        run = Run(Setting(SETTINGS[name].precision, {**PLACED[placed], "max_norm": 0.5}), CPU, registry)
        return by_steps(run, micro) if before is None else by_replays(run, before, CpuGraph, micro)


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("name", ["fp32", "fp16_naive"])
def test_replays_on_two_ranks(world: World, name: str, placed: str, micro: int) -> None:
    steps, replays = (world.run(2, on_ranks, name, placed, micro, before) for before in (None, 3))
    for of_steps, of_replays in zip(steps, replays, strict=True):
        assert differences(of_steps, of_replays) == []
