"""meshstep's schedules inside torch's SequentialLR and ChainedScheduler."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from meshstep.optim import CosineAnnealingLR, LinearWarmupLR, ParallelOptimizer, WarmupLR
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ExponentialLR, LRScheduler, SequentialLR


def rates(make: Callable[[torch.optim.Optimizer], LRScheduler], gradients: list[float]) -> list[float]:
    """Return the initial learning rate, and the rate after a step with each gradient."""
    weight = nn.Parameter(torch.ones(3))
    annotate(weight, P())
    optimizer = ParallelOptimizer(torch.optim.SGD([weight], lr=2.0), ProcessGroupRegistry(Topology()))
    schedule = make(optimizer)
    found = [float(optimizer.param_groups[0]["lr"])]
    for gradient in gradients:
        optimizer.zero_grad()
        optimizer.backward((weight * gradient).sum())
        optimizer.step()
        schedule.step()
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


def one_after_another(optimizer: torch.optim.Optimizer) -> SequentialLR:
    return SequentialLR(optimizer, [LinearWarmupLR(optimizer, 100, 4), CosineAnnealingLR(optimizer, 6)], [3])


def test_sequential_lr_starts_each_meshstep_schedule_at_its_beginning() -> None:
    cosine = [1 + math.cos(math.pi * step / 6) for step in range(7)]
    expected = [2 / 5, 4 / 5, 6 / 5, *cosine, 0.0]
    assert rates(one_after_another, [1.0] * 10) == pytest.approx(expected, abs=1e-12)


def test_skipped_step_after_milestone_holds_sequential_schedule() -> None:
    found = rates(one_after_another, [1.0, 1.0, 1.0, math.nan, math.nan, 1.0])
    assert found[3:] == [2.0, 2.0, 2.0, 1 + math.cos(math.pi / 6)]


@pytest.mark.parametrize(
    "others",
    [
        lambda optimizer: [ConstantLR(optimizer, 0.1, 3), CosineAnnealingLR(optimizer, 6)],
        lambda optimizer: [CosineAnnealingLR(optimizer, 6), ExponentialLR(optimizer, 0.9)],
        lambda optimizer: [LinearWarmupLR(optimizer, 9, 2), CosineAnnealingLR(optimizer, 6)],
    ],
)
def test_chained_scheduler_of_meshstep_schedule_and_another_is_rejected(
    others: Callable[[torch.optim.Optimizer], list[LRScheduler]],
) -> None:
    says = (
        r"multiplies the rates by the factors of its schedules, but \w+LR overwrites .* use SequentialLR .* "
        r"as the decay of a single WarmupLR subclass"
    )
    with pytest.raises(TypeError, match=says):
        rates(lambda optimizer: ChainedScheduler(others(optimizer)), [1.0])


def test_chained_scheduler_of_one_meshstep_schedule_gives_its_rates() -> None:
    expected = rates(lambda optimizer: CosineAnnealingLR(optimizer, 6), [1.0] * 6)
    assert rates(lambda optimizer: ChainedScheduler([CosineAnnealingLR(optimizer, 6)]), [1.0] * 6) == expected


class DecayedCosine(WarmupLR):
    def decay(self, step: int) -> float:
        return 0.9**step * (1 + math.cos(math.pi * step / 6)) / 2


def test_warmup_lr_subclass_with_product_decay_gives_product_of_two_schedules() -> None:
    product = [2 * 0.9**step * (1 + math.cos(math.pi * step / 6)) / 2 for step in range(7)]
    assert rates(DecayedCosine, [1.0] * 6) == pytest.approx(product)
