"""meshstep's schedules: closed formulas of the learning rates, state dicts, and rejected arguments."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from meshstep.optim import (
    ConstantLR,
    CosineAnnealingLR,
    LinearWarmupLR,
    MultiStepLR,
    PolynomialLR,
    WarmupLR,
)
from optimizers import BASES, optimizer_of, rates
from properties import number_of_cases
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR as TorchCosine

STEPS = st.integers(0, 40)


def trace(schedule: WarmupLR, steps: int) -> list[list[float]]:
    found = []
    for _ in range(steps):
        found.append(rates(schedule.optimizer))
        assert schedule.get_last_lr() == found[-1]
        schedule.optimizer.step()
        schedule.step()
    return found


def assert_follows(schedule: WarmupLR, formula: Callable[[float, int], float]) -> None:
    found = trace(schedule, 60)
    for step, row in enumerate(found):
        assert row == pytest.approx([formula(base, step) for base in BASES], rel=1e-12, abs=1e-15), f"step {step}"
        if step <= schedule.warmup_steps:
            assert all(0 <= rate <= base for rate, base in zip(row, BASES, strict=True)), "the warm-up overshoots"


@settings(max_examples=number_of_cases(40))
@given(total=st.integers(1, 40), warmup=STEPS, floor=st.floats(0, 0.02))
@example(total=1, warmup=0, floor=0.0)
@example(total=5, warmup=9, floor=0.01)
@example(total=7, warmup=7, floor=0.02)
def test_cosine_annealing_lr_follows_formula(total: int, warmup: int, floor: float) -> None:
    def formula(base: float, t: int) -> float:
        if t < warmup:
            return base * (t + 1) / (warmup + 1)
        if t == warmup:
            return base
        if t >= total:
            return floor
        return floor + (base - floor) * math.cos(math.pi / 2 * (t - warmup) / (total - warmup)) ** 2

    assert_follows(CosineAnnealingLR(optimizer_of(BASES), total, warmup, floor), formula)


@settings(max_examples=number_of_cases(40))
@given(total=st.integers(1, 40), warmup=STEPS, power=st.floats(0.3, 4))
@example(total=3, warmup=20, power=1.0)
def test_polynomial_and_linear_warmup_lr_follow_formula(total: int, warmup: int, power: float) -> None:
    def formula(base: float, t: int, power: float, floor: float) -> float:
        if t <= warmup:
            return base * (t + 1) / (warmup + 1)
        left = max(0, total - t) / (total - warmup) if total > warmup else 0
        return floor + (base - floor) * left**power if left else floor

    polynomial = PolynomialLR(optimizer_of(BASES), total, warmup, power, eta_min=0.005)
    found, expected = trace(polynomial, 60), [[formula(b, t, power, 0.005) for b in BASES] for t in range(60)]
    for t, (row, right) in enumerate(zip(found, expected, strict=True)):
        if t < warmup:  # the warm-up goes to the base rate and ignores the floor
            assert row == pytest.approx([b * (t + 1) / (warmup + 1) for b in BASES], rel=1e-12)
        else:
            assert row == pytest.approx(right, rel=1e-9, abs=1e-12)
    assert_follows(LinearWarmupLR(optimizer_of(BASES), total, warmup), lambda b, t: formula(b, t, 1.0, 0.0))


@settings(max_examples=number_of_cases(40))
@given(milestones=st.lists(st.integers(0, 50), max_size=4), warmup=STEPS, gamma=st.floats(0.05, 1))
def test_multi_step_and_constant_lr_follow_formula(milestones: list[int], warmup: int, gamma: float) -> None:
    def warm(t: int) -> float:
        return (t + 1) / (warmup + 1) if t < warmup else 1.0

    assert_follows(
        MultiStepLR(optimizer_of(BASES), milestones, warmup, gamma),
        lambda b, t: b * warm(t) * math.prod(gamma for m in milestones if m <= t),
    )
    assert_follows(ConstantLR(optimizer_of(BASES), warmup), lambda b, t: b * warm(t))


def test_cosine_annealing_lr_without_warmup_matches_torch() -> None:
    mine, torchs = optimizer_of(BASES), optimizer_of(BASES)
    schedule, reference = CosineAnnealingLR(mine, total_steps=12, eta_min=0.01), TorchCosine(torchs, 12, eta_min=0.01)
    for _ in range(12):
        assert rates(mine) == pytest.approx(rates(torchs))
        for optimizer, its in ((mine, schedule), (torchs, reference)):
            optimizer.step()
            its.step()
    assert trace(schedule, 5) == [[0.01, 0.01]] * 5


def test_schedule_changes_learning_rate_tensor_in_place() -> None:
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=rate)
    schedule = LinearWarmupLR(optimizer, 10, 4)
    for step in range(10):
        assert float(rate) == pytest.approx(0.5 * (min(1, (step + 1) / 5) if step <= 4 else (10 - step) / 6))
        optimizer.step()
        schedule.step()
    schedule.load_state_dict({**schedule.state_dict(), "last_epoch": 1})
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.2)


# State and arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_schedule_state_round_trips_through_state_dict(optimizer_first: bool) -> None:
    def build() -> tuple[torch.optim.Optimizer, CosineAnnealingLR]:
        optimizer = optimizer_of(BASES)
        return optimizer, CosineAnnealingLR(optimizer, 20, 5, eta_min=0.001)

    optimizer, schedule = build()
    trace(schedule, 8)
    saved = io.BytesIO()
    torch.save([optimizer.state_dict(), schedule.state_dict()], saved)
    rest = trace(schedule, 15)
    saved.seek(0)
    states = torch.load(saved, weights_only=True)
    optimizer, schedule = build()
    parts: list[Any] = [optimizer, schedule]
    for index in (0, 1) if optimizer_first else (1, 0):
        parts[index].load_state_dict(states[index])
    assert trace(schedule, 15) == rest


def test_resumed_schedule_can_use_more_total_steps() -> None:
    schedule = LinearWarmupLR(optimizer_of(BASES), 10)
    trace(schedule, 10)
    longer = LinearWarmupLR(optimizer_of(BASES), 20)
    longer.load_state_dict(schedule.state_dict())
    assert rates(longer.optimizer) == pytest.approx([base / 2 for base in BASES])


def test_schedule_state_with_other_number_of_param_groups_is_rejected() -> None:
    schedule = LinearWarmupLR(optimizer_of(BASES), 10)
    with pytest.raises(ValueError, match="saved schedule has 1 param groups, and the optimizer has 2"):
        schedule.load_state_dict(LinearWarmupLR(optimizer_of([0.1]), 10).state_dict())
    assert rates(schedule.optimizer) == BASES


BAD: list[tuple[Callable[[Any], object], str]] = [
    (lambda o: CosineAnnealingLR(o, 0), "total_steps=0: give a whole number of steps >= 1"),
    (lambda o: CosineAnnealingLR(o, 10, 1e-5), "warmup_steps=1e-05"),  # type: ignore[arg-type]
    (
        lambda o: CosineAnnealingLR(o, 10, eta_min=0.1),
        "eta_min=0.1 is above the initial learning rate 0.02 of param group 1",
    ),
    (
        lambda o: CosineAnnealingLR(o, 10, eta_min=math.nan),
        r"eta_min=nan \(floor= .*\): give a finite learning rate >= 0",
    ),
    (lambda o: LinearWarmupLR(o, 10, -1), "warmup_steps=-1"),
    (lambda o: PolynomialLR(o, 10, power=0), "power=0: give a finite number > 0"),
    (lambda o: MultiStepLR(o, [3, -1]), r"milestones\[1\]=-1"),
    (lambda o: MultiStepLR(o, [3], gamma=2), "gamma=2: give a number in"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_invalid_schedule_arguments_are_rejected_and_change_nothing(
    make: Callable[[Any], object], message: str
) -> None:
    optimizer = optimizer_of(BASES)
    with pytest.raises(ValueError, match=message):
        make(optimizer)
    assert rates(optimizer) == BASES
    assert "initial_lr" not in optimizer.param_groups[0]


def test_schedule_rejects_object_that_is_no_optimizer() -> None:
    with pytest.raises(TypeError, match="optimizer is a list, not a torch optimizer"):
        ConstantLR([nn.Parameter(torch.ones(1))])  # type: ignore[arg-type]
