"""Steps in a CUDA graph: replays leave the bits that steps leave. On the CPU with `CpuGraph` in its place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cpu_graph import CpuGraph
from graph_runs import SETTINGS, CudaGraph, Graph, Run, by_replays, by_steps
from precision_modes import differences

pytestmark = pytest.mark.usefixtures("torchs_kernels")


def graph_on(device: torch.device) -> Callable[[], Graph]:
    return CudaGraph if device.type == "cuda" else CpuGraph


@pytest.mark.parametrize("before", [3, 20])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_hundred_replays_leave_the_bits_that_steps_leave(device: torch.device, name: str, before: int) -> None:
    steps = before + (100 if device.type == "cuda" else 2)
    expected = by_steps(Run(SETTINGS[name], device), steps=steps)
    found = by_replays(Run(SETTINGS[name], device), before, graph_on(device), steps=steps)
    assert differences(expected, found) == []


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "fp16_naive"])
def test_inner_and_last_micro_batches_are_two_graphs(device: torch.device, name: str) -> None:
    steps = 103 if device.type == "cuda" else 5
    expected = by_steps(Run(SETTINGS[name], device), 3, steps)
    assert differences(expected, by_replays(Run(SETTINGS[name], device), 3, graph_on(device), 3, steps)) == []


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_that_is_refused_leaves_an_optimizer_that_steps(device: torch.device) -> None:
    run = Run(SETTINGS["fp32"], device)
    graph = graph_on(device)()
    with pytest.raises(RuntimeError, match="no step was made before"), graph.captured():
        run.optimizer.step()
    run.steps(range(3, 5))
    assert run.optimizer.skipped_steps == 0
