"""`HoldOnSkip` with torch's schedules, also composed of meshstep's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from arguments import arguments
from meshstep.optim import (
    Booster,
    CosineAnnealingLR,
    HoldOnSkip,
    LinearWarmupLR,
    ParallelOptimizer,
    load_checkpoint,
    save_checkpoint,
)
from meshstep.optim import schedule as taken_steps
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, declare
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from world import World

Make = Callable[[torch.optim.Optimizer], LRScheduler]

SCHEDULES: dict[str, Make] = {
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "StepLR": lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=1.0, total_steps=12),
    "SequentialLR": lambda optimizer: SequentialLR(
        optimizer, [ConstantLR(optimizer, 0.5, 2), LinearLR(optimizer, 1.0, 0.1, 5)], [2]
    ),
    "SequentialLR of meshstep's": lambda optimizer: SequentialLR(
        optimizer, [LinearWarmupLR(optimizer, 9, 3), CosineAnnealingLR(optimizer, 6)], [2]
    ),
}
GRADIENTS = [math.inf, 1.0, 1.0, math.nan, math.nan, 1.0, 1.0, math.inf, 1.0]


class Late(taken_steps.FlagCopy):
    """A skip flag that reaches the host later, as on a GPU."""

    def __init__(self, flag: Tensor) -> None:
        super().__init__(flag)
        self.is_here = False


@pytest.fixture(params=["flag on time", "flag late"])
def verdict(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "flag late":
        monkeypatch.setattr("meshstep.optim.schedule.FlagCopy", Late)
    return str(request.param)


class Training:
    """One parameter; `rates` are the (learning rate, momentum) of each step of the inner optimizer."""

    def __init__(self, make: Make, *, held: bool = True, fused: bool = True, **options: Any) -> None:
        self.weight = nn.Parameter(torch.ones(3))
        sgd = torch.optim.SGD([self.weight], lr=1.0, momentum=0.9, fused=fused)
        self.optimizer = ParallelOptimizer(sgd, ProcessGroupRegistry(Topology()), **arguments(**options))
        plain = make(self.optimizer)
        self.schedule = HoldOnSkip(plain) if held else plain
        self.rates: list[tuple[float, float]] = []
        sgd.register_step_pre_hook(lambda *_: self.note())

    def note(self) -> None:
        (group,) = self.optimizer.param_groups
        self.rates.append((float(group["lr"]), group["momentum"]))

    def run(self, gradients: list[float]) -> list[tuple[float, float]]:
        """Run one step per gradient. Return (learning rate, momentum) of each step of the inner optimizer."""
        self.rates.clear()
        for gradient in gradients:
            self.optimizer.backward((self.weight * gradient).sum())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
        return list(self.rates)


def of_taken(rates: list[tuple[float, float]], gradients: list[float]) -> list[tuple[float, float]]:
    return [rate for rate, gradient in zip(rates, gradients, strict=True) if math.isfinite(gradient)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_held_schedule_counts_applied_steps_only(name: str, verdict: str) -> None:
    taken = [gradient for gradient in GRADIENTS if math.isfinite(gradient)]
    reference = Training(SCHEDULES[name], held=False)
    expected = reference.run(taken)
    assert len(set(expected)) > 2, "the rates must change"
    held = Training(SCHEDULES[name])
    assert of_taken(held.run(GRADIENTS), GRADIENTS) == expected
    assert held.schedule.get_last_lr() == reference.schedule.get_last_lr()
    assert held.schedule.state_dict()["last_epoch"] == len(taken)
    # Control: without HoldOnSkip the schedule advances with every call.
    assert of_taken(Training(SCHEDULES[name], held=False).run(GRADIENTS), GRADIENTS) != expected


def test_held_schedule_with_unfused_optimizer_holds_in_skipped_steps(verdict: str) -> None:
    held = Training(SCHEDULES["StepLR"], fused=False)
    assert held.run(GRADIENTS) == Training(SCHEDULES["StepLR"], held=False).run([1.0] * 5)


def test_micro_batches_do_not_advance_held_schedule(verdict: str) -> None:
    held = Training(SCHEDULES["LambdaLR"], accumulation_steps=2)
    assert [rate for rate, _ in held.run([1.0, 1.0, 1.0, math.inf, 1.0, 1.0])] == pytest.approx([1, 1 / 2, 1 / 2])


def test_held_schedule_waits_for_skip_flag_that_arrives_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshstep.optim.schedule.FlagCopy", Late)
    held = Training(SCHEDULES["LambdaLR"])
    held.run([1.0])
    assert held.optimizer.param_groups[0]["lr"] == 1.0
    assert held.schedule.get_last_lr() == [0.5]
    assert held.optimizer.param_groups[0]["lr"] == 0.5
    held.run([1.0])
    held.schedule.step()  # no step hook ran since, as after a CUDA graph replay, so this call reads the flag
    assert held.optimizer.param_groups[0]["lr"] == pytest.approx(1 / 4)


def test_held_schedule_resumes_from_checkpoint(tmp_path: Any, verdict: str) -> None:
    def build() -> tuple[Training, nn.Module]:
        run = Training(SCHEDULES["OneCycleLR"])
        model = nn.Module()
        model.weight = run.weight
        declare(model, {"*": P()})
        return run, model

    run, model = build()
    run.run(GRADIENTS[:6])  # the last step is applied, but its flag may not have arrived
    save_checkpoint(tmp_path, model, run.optimizer, lr_scheduler=run.schedule)
    rest = run.run(GRADIENTS[6:])
    other, model = build()
    other.run([1.0])
    load_checkpoint(tmp_path, model, other.optimizer, lr_scheduler=other.schedule)
    assert other.run(GRADIENTS[6:]) == rest


def test_skip_flag_of_earlier_step_is_ignored_after_loading_schedule_state(verdict: str) -> None:
    held = Training(SCHEDULES["LambdaLR"])
    start = held.schedule.state_dict()
    held.run([1.0])
    held.schedule.load_state_dict(start)
    assert held.schedule.state_dict()["last_epoch"] == 0


def test_hold_on_skip_of_boosted_schedule_counts_applied_steps_only(verdict: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    booster = Booster()
    boosted, optimizer, _, _, schedule = booster.boost(model, sgd, lr_scheduler=SCHEDULES["SequentialLR"](sgd))
    held = HoldOnSkip(schedule)
    for gradient in GRADIENTS:
        booster.backward(boosted(torch.full((1, 1), gradient)).sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        held.step()
    reference = Training(SCHEDULES["SequentialLR"], held=False)
    reference.run([1.0] * 5)
    assert held.get_last_lr() == reference.schedule.get_last_lr()


def overflow_on_one_rank() -> list[float]:
    weight = nn.Parameter(torch.ones(2))
    annotate(weight, P())
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        optimizer = ParallelOptimizer(torch.optim.SGD([weight], lr=1.0, fused=True), registry)
        schedule = HoldOnSkip(StepLR(optimizer, step_size=1, gamma=0.5))
        found = []
        for step in range(4):
            weight.grad = torch.full((2,), math.inf if step == 1 and registry.global_rank == 1 else 1.0)
            optimizer.step()
            schedule.step()
            found.append(float(optimizer.param_groups[0]["lr"]))
    return found


def test_held_schedules_of_all_ranks_hold_on_overflow_of_one_rank(world: World) -> None:
    first, second = world.run(2, overflow_on_one_rank)
    assert first == second == [0.5, 0.5, 0.25, 0.125]


def test_hold_on_skip_rejects_schedule_of_plain_optimizer() -> None:
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(ValueError, match="StepLR was created with a SGD, which doesn't report skipped steps"):
        HoldOnSkip(StepLR(sgd, 2))


def test_hold_on_skip_rejects_reduce_lr_on_plateau() -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        weight = nn.Parameter(torch.ones(1))
        optimizer = ParallelOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), registry)
        with pytest.raises(TypeError, match=r"ReduceLROnPlateau.step needs metrics, and HoldOnSkip calls step\(\)"):
            HoldOnSkip(ReduceLROnPlateau(optimizer))
