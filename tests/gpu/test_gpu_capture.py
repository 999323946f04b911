"""Steps in a CUDA graph (`CpuGraph` on the CPU), compared with eager steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from cpu_graph import CpuGraph
from graph_runs import SETTINGS, CudaGraph, Graph, Run, by_replays, by_steps
from loops import using
from precision_modes import differences


@pytest.fixture(params=["auto", "torch"], autouse=True)
def _kernels(request: pytest.FixtureRequest, device: torch.device) -> Iterator[None]:
    """Run each test with meshstep's and with torch's kernels; on the CPU only with torch's, which `CpuGraph` can record."""
    if device.type == "cpu" and request.param == "auto":
        pytest.skip("the substitute of a CUDA graph records torch operators only")
    with using(request.param):
        yield


def graph_on(device: torch.device) -> Callable[[], Graph]:
    return CudaGraph if device.type == "cuda" else CpuGraph


@pytest.mark.parametrize("before", [3, 20])
@pytest.mark.parametrize("name", SETTINGS)
def test_graph_replays_are_bitwise_identical_to_eager_steps(device: torch.device, name: str, before: int) -> None:
    steps = before + (100 if device.type == "cuda" else 2)
    expected = by_steps(Run(SETTINGS[name], device), steps=steps)
    found = by_replays(Run(SETTINGS[name], device), before, graph_on(device), steps=steps)
    assert differences(expected, found) == []


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "fp16_naive"])
def test_accumulation_with_two_graphs_is_bitwise_identical_to_eager_steps(device: torch.device, name: str) -> None:
    steps = 103 if device.type == "cuda" else 5
    expected = by_steps(Run(SETTINGS[name], device), 3, steps)
    assert differences(expected, by_replays(Run(SETTINGS[name], device), 3, graph_on(device), 3, steps)) == []


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_optimizer_can_step_after_rejected_graph_capture(device: torch.device) -> None:
    run = Run(SETTINGS["fp32"], device)
    graph = graph_on(device)()
    with pytest.raises(RuntimeError, match="no step was made since"), graph.captured():
        run.optimizer.step()
    run.steps(range(3, 5))
    assert run.optimizer.skipped_steps == 0
