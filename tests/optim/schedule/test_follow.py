"""meshstep's schedules on a `ParallelOptimizer` and skipped steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from arguments import arguments
from meshstep.optim import (
    LinearWarmupLR,
    ParallelOptimizer,
)
from meshstep.optim import schedule as taken_steps
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from optimizers import BASES, optimizer_of, rates
from probes import no_host_reads
from torch import Tensor, nn
from world import World


class Training:
    """Trains one parameter with given gradients. The base rate is 1; the schedule's rates are 1, 0.9, 0.8, ..."""

    def __init__(self, hold_on_skip: bool = True, **options: Any) -> None:
        self.weight = nn.Parameter(torch.ones(3))
        sgd = torch.optim.SGD([self.weight], lr=1.0, fused=True)
        self.optimizer = ParallelOptimizer(sgd, ProcessGroupRegistry(Topology()), **arguments(**options))
        self.schedule = LinearWarmupLR(self.optimizer, 10, hold_on_skip=hold_on_skip)

    def step(self, gradient: float = 1.0) -> float:
        """Run one micro-batch and return by how much it lowered the weight's first element."""
        before = self.weight.detach().clone()
        self.optimizer.backward((self.weight * gradient).sum())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float((before - self.weight.detach())[0])

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


def test_skipped_step_does_not_advance_schedule() -> None:
    run = Training()
    found = []
    for gradient in (1.0, math.inf, math.nan, 1.0, 1.0):
        found.append(run.step(gradient))
        run.schedule.step()
        assert run.schedule.get_last_lr() == [run.rate]
    assert found == pytest.approx([1.0, 0.0, 0.0, 0.9, 0.8])
    assert run.schedule.last_epoch == 3


def test_schedule_with_hold_on_skip_false_needs_no_host_synchronization() -> None:
    run = Training(hold_on_skip=False)
    run.step()
    with no_host_reads():
        for _ in range(3):
            run.optimizer.backward((run.weight * math.inf).sum())
            run.optimizer.step()
            run.schedule.step()
    assert run.rate == pytest.approx(0.7)


def test_skip_flag_that_arrives_late_corrects_rate_before_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[bool] = []

    class OnTheWay(taken_steps.FlagCopy):
        """A skip flag that reaches the host later, as on a GPU."""

        def __init__(self, flag: Tensor) -> None:
            super().__init__(flag)
            self.is_here = False

        def read(self) -> bool:
            reads.append(super().read())
            return reads[-1]

    monkeypatch.setattr("meshstep.optim.schedule.FlagCopy", OnTheWay)
    run = Training()
    assert run.step(math.inf) == 0.0
    run.schedule.step()
    assert run.rate == pytest.approx(0.9), "the flag has not arrived yet"
    assert not reads
    assert run.step() == pytest.approx(1.0), "the next step must have the right rate"
    assert reads == [True]
    run.schedule.step()
    assert run.schedule.get_last_lr() == pytest.approx([0.9])
    run.step(math.nan)
    run.schedule.step()
    assert run.schedule.state_dict()["last_epoch"] == 1
    run.step(math.nan)
    run.schedule.step()
    run.schedule.step()  # no step in between: the last step decision still applies
    assert run.schedule.get_last_lr() == pytest.approx([0.9])


def test_micro_batches_do_not_advance_schedule() -> None:
    run = Training(accumulation_steps=3)
    found = []
    for _ in range(7):
        found.append(run.step())
        run.schedule.step()
    assert found == pytest.approx([0, 0, 1.0, 0, 0, 0.9, 0])
    run.optimizer.step(final=True)
    run.schedule.step()
    assert run.rate == pytest.approx(0.7)


def test_epoch_schedule_advances_if_any_step_was_applied() -> None:
    run = Training(accumulation_steps=2)
    # Each epoch ends within an accumulation window, which the next epoch completes.
    epochs = [
        [1.0, 1.0, math.inf, 1.0, 1.0],
        [math.nan, 1.0],
        [1.0, math.nan, 1.0, 1.0],
    ]
    expected = [0.9, 0.9, 0.8]
    for gradients, rate in zip(epochs, expected, strict=True):
        for gradient in gradients:
            run.step(gradient)
        run.schedule.step()
        assert run.rate == pytest.approx(rate)


def test_schedule_on_plain_optimizer_advances_with_every_call() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = LinearWarmupLR(optimizer, 10)
    optimizer.step()
    for _ in range(3):
        schedule.step()
    assert rates(optimizer) == pytest.approx([0.7])


@pytest.mark.parametrize("fused", [True, False])
def test_schedule_created_before_wrapping_holds_in_skipped_steps_after_watch(fused: bool) -> None:
    weight = nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([weight], lr=1.0, fused=fused)
    schedule = LinearWarmupLR(sgd, 10)
    optimizer = ParallelOptimizer(sgd, ProcessGroupRegistry(Topology()))
    schedule.watch(optimizer)
    for gradient, rate in zip([math.inf, 1.0, math.nan, 1.0], [1.0, 0.9, 0.9, 0.8], strict=True):
        weight.grad = torch.full((1,), gradient)
        optimizer.step()
        schedule.step()
        assert rates(optimizer) == pytest.approx([rate])
    with pytest.raises(ValueError, match="of another optimizer than the SGD with which this schedule was created"):
        LinearWarmupLR(optimizer_of(BASES), 10).watch(optimizer)


def overflow_on_one_rank() -> list[float]:
    weight = nn.Parameter(torch.ones(2))
    annotate(weight, P())
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        optimizer = ParallelOptimizer(torch.optim.SGD([weight], lr=1.0, fused=True), registry)
        schedule = LinearWarmupLR(optimizer, 10)
        found = []
        for step in range(4):
            weight.grad = torch.full((2,), math.inf if step == 1 and registry.global_rank == 1 else 1.0)
            optimizer.step()
            schedule.step()
            found.append(float(optimizer.param_groups[0]["lr"]))
    return found


def test_schedules_of_all_ranks_hold_on_overflow_of_one_rank(world: World) -> None:
    first, second = world.run(2, overflow_on_one_rank)
    assert first == second == pytest.approx([0.9, 0.9, 0.8, 0.7])
