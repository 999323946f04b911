"""Steps captured in a graph and replayed, with `CpuGraph` in place of a CUDA graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_graph import CUDA_OF_THE_CPU, CpuGraph, capturing
from graph_runs import PLACED, SETTINGS, Run, Setting, by_replays, by_steps
from loops import using
from meshstep.optim import CosineAnnealingLR, HoldOnSkip, ParallelOptimizer
from meshstep.optim.kernels.device_constants import KEPT, Constants
from meshstep.parallel import ProcessGroupRegistry, Topology
from precision_modes import differences
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, StepLR
from world import World

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _torchs_kernels(torchs_kernels: None) -> None:
    """Use torch's kernels, because `CpuGraph` records and replays torch operators."""


@cache
def left_by_steps(name: str) -> dict[str, Tensor]:
    return by_steps(Run(SETTINGS[name], CPU))


@pytest.mark.parametrize("before", [3, 20])
@pytest.mark.parametrize("name", SETTINGS)
def test_graph_replays_match_eager_steps_bitwise(name: str, before: int) -> None:
    steps = left_by_steps(name)
    replays = by_replays(Run(SETTINGS[name], CPU), before, CpuGraph)
    assert differences(steps, replays) == []
    assert steps["skipped"] == 5


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "fp16_naive"])
def test_graphs_of_earlier_and_of_last_micro_batch_match_eager_steps_bitwise(name: str) -> None:
    """Each replay starts from the weights and gradients that the previous replay left."""
    steps = by_steps(Run(SETTINGS[name], CPU), micro=3)
    assert differences(steps, by_replays(Run(SETTINGS[name], CPU), 3, CpuGraph, micro=3)) == []


def on_ranks(name: str, placed: str, micro: int, before: int | None) -> dict[str, Tensor]:
    with ProcessGroupRegistry(Topology(data=2)) as registry, using("torch"):
        run = Run(Setting(SETTINGS[name].precision, {**PLACED[placed], "max_norm": 0.5}), CPU, registry)
        return by_steps(run, micro) if before is None else by_replays(run, before, CpuGraph, micro)


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("name", ["fp32", "fp16_naive"])
def test_graph_replays_on_two_ranks_match_eager_steps_bitwise(world: World, name: str, placed: str, micro: int) -> None:
    steps, replays = (world.run(2, on_ranks, name, placed, micro, before) for before in (None, 3))
    for of_steps, of_replays in zip(steps, replays, strict=True):
        assert differences(of_steps, of_replays) == []


@pytest.mark.parametrize("make", [lambda o: CosineAnnealingLR(o, 20, 4), lambda o: HoldOnSkip(StepLR(o, 3, 0.5))])
def test_schedule_rates_between_graph_replays_equal_rates_between_eager_steps(
    make: Callable[[ParallelOptimizer], LRScheduler],
) -> None:
    found: list[list[float]] = []
    for graph in (None, CpuGraph()):
        run = Run(SETTINGS["fp32"], CPU)
        schedule = make(run.optimizer)
        rates: list[float] = []
        run.after_step = partial(move, schedule, rates)
        run.steps(range(3))
        if graph is None:
            run.steps(range(3, 24))
        else:
            run.replays(range(3, 24), graph)
        found.append(rates)
    assert found[0] == found[1]
    assert len(set(found[0])) > 5


def move(schedule: LRScheduler, rates: list[float]) -> None:
    schedule.step()
    rates += [float(rate) for rate in schedule.get_last_lr()]


def test_constant_read_in_a_graph_capture_stays_in_the_cache() -> None:
    """A constant that no capture read is removed after `KEPT` other constants were used."""
    constants = Constants()
    read, other = (constants(key, lambda: [1.0, 2.0], torch.float64, CPU) for key in ("read", "other"))
    with capturing():
        assert constants("read", list, torch.float64, CPU) is read
    for key in range(KEPT + 1):
        constants(key, lambda: [3.0], torch.float64, CPU)
    assert constants("read", lambda: [1.0, 2.0], torch.float64, CPU) is read
    assert constants("other", lambda: [1.0, 2.0], torch.float64, CPU) is not other


# Recipes of CUDA_GRAPHS.md --------------------------------------------------------------------------------------------


def recipes() -> dict[str, Any]:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "CUDA_GRAPHS.md").read_text()
    namespace: dict[str, Any] = {"torch": SimpleNamespace(cuda=CUDA_OF_THE_CPU)}
    for text in re.findall(r"^```python\n(def \w+_by_graph.*?)^```$", page, re.MULTILINE | re.DOTALL):
        exec(compile(text, "CUDA_GRAPHS.md", "exec"), namespace)
    return namespace


def test_documented_cuda_graph_recipe_matches_eager_steps() -> None:
    steps, replays = (Run(SETTINGS["bf16"], CPU) for _ in range(2))
    batches = [steps.batch(number) for number in range(12, 17)]

    def given() -> Iterator[Tensor]:
        yield from batches[:4]  # three for the warm-up and one for the shape
        yield from batches

    for batch in (*batches[:3], *batches):
        steps.optimizer.zero_grad()
        steps.optimizer.backward(steps.model(batch).square().mean())
        steps.optimizer.step()
    recipes()["train_by_graph"](replays.model, replays.optimizer, given())
    for one, other in zip(steps.model.parameters(), replays.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_documented_cuda_graph_recipe_for_accumulation_matches_eager_steps() -> None:
    steps, replays = (Run(SETTINGS["fp16_naive"], CPU) for _ in range(2))
    steps.windows(range(12, 17), 3)
    replays.windows(range(12, 14), 3)
    static, weight = torch.zeros(6, 6), torch.zeros(())
    inner, last, stats = recipes()["windows_by_graph"](
        lambda batch: replays.loss(batch) * weight.clamp(min=1), replays.optimizer, static, weight
    )
    for number in range(14, 17):
        for micro, graph in enumerate((inner, inner, last)):
            static.copy_(replays.batch(number, micro))
            weight.copy_(replays._weight(number, micro))
            graph.replay()
        replays.note(stats)
    assert differences(steps.left(), replays.left()) == []


@pytest.mark.parametrize("given_up", ["zero_grad", "load_state_dict"])
def test_abandoned_accumulation_window_of_replays_does_not_affect_next_steps(given_up: str) -> None:
    """Replays add the micro-batch weights on the device, where Python cannot count them."""
    steps, replays = (Run(SETTINGS["fp16_naive"], CPU) for _ in range(2))
    for run in (steps, replays):
        run.windows(range(12, 14), 3)
    static, weight = torch.zeros(6, 6), torch.ones(())
    inner, _, _ = recipes()["windows_by_graph"](
        lambda batch: replays.loss(batch) * weight, replays.optimizer, static, weight
    )
    static.copy_(replays.batch(14, 0))
    inner.replay()
    if given_up == "load_state_dict":
        replays.optimizer.load_state_dict(replays.optimizer.state_dict())
    replays.optimizer.zero_grad(set_to_none=False)
    for run in (steps, replays):
        run.windows(range(14, 16), 3)
    assert differences(steps.left(), replays.left()) == []
