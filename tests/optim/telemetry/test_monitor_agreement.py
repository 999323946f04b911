"""A monitor that only some ranks create or call raises an error that names the calls."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from meshstep.optim import Monitor, ParallelOptimizer
from meshstep.parallel import ProcessGroupRegistry, Topology
from small_models import parameter
from world import World


def run(how: str) -> str:
    """Run steps with a monitor that only rank 0 creates, before the first or the fourth step, or that only rank 0 calls.
    Return the error."""
    with ProcessGroupRegistry(Topology(data=2), timeout=timedelta(seconds=5), exclusive_groups=True) as registry:
        w = parameter("w", 64, value=1.0)
        optimizer = ParallelOptimizer(torch.optim.SGD([w], lr=0.1), registry)
        first = registry.global_rank == 0
        monitor: Monitor | None = None
        try:
            if how == "called alone" or (how == "made alone" and first):
                monitor = Monitor(registry, every=2)
            for step in range(8):
                if how == "made alone later" and step == 3 and first:
                    monitor = Monitor(registry, every=2)
                optimizer.zero_grad()
                optimizer.backward(w.square().sum())
                stats: Any = optimizer.step()
                if monitor is not None and first:
                    monitor(stats, 1.0)
        except RuntimeError as error:
            return str(error)
        return "no error"


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("how", ["made alone", "made alone later", "called alone"])
def test_monitor_on_one_rank_only_raises_on_every_rank(world: World, how: str) -> None:
    for text in world.run(2, run, how):
        assert "Monitor" in text
        assert "Every rank must make the same calls in the same order" in text


def made_with(every: tuple[Any, Any]) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        try:
            Monitor(registry, every=every[registry.global_rank])
        except ValueError as error:
            return str(error)
        return "no error"


def test_monitors_with_different_intervals_raise(world: World) -> None:
    for text in world.run(2, made_with, (2, 3)):
        assert text.startswith("every= of Monitor is 2 on rank 0 and 3 on rank 1")
    first, second = world.run(2, made_with, (2, 0))
    assert "every=0" in first
    assert "every=0" in second
    assert world.run(2, made_with, (2, 2)) == ["no error"] * 2
