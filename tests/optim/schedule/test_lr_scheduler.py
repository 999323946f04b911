"""Learning rates equal their closed formulas, and move when the optimizer stepped and not otherwise."""

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
    ParallelOptimizer,
    PolynomialLR,
    WarmupLR,
)
from meshstep.optim.schedule import taken_steps
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from optimizers import arguments
from probes import no_host_reads
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR as TorchCosine
from world import World

BASES = [0.3, 0.02]
STEPS = st.integers(0, 40)


def optimizer_of(bases: list[float]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))], "lr": base} for base in bases])


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def trace(schedule: WarmupLR, steps: int) -> list[list[float]]:
    """The rate of each of the first steps."""
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


@settings(max_examples=40)
@given(total=st.integers(1, 40), warmup=STEPS, floor=st.floats(0, 0.02))
@example(total=1, warmup=0, floor=0.0)
@example(total=5, warmup=9, floor=0.01)
@example(total=7, warmup=7, floor=0.02)
def test_cosine_is_its_formula(total: int, warmup: int, floor: float) -> None:
    def formula(base: float, t: int) -> float:
        if t < warmup:
            return base * (t + 1) / (warmup + 1)
        if t == warmup:
            return base
        if t >= total:
            return floor
        return floor + (base - floor) * math.cos(math.pi / 2 * (t - warmup) / (total - warmup)) ** 2

    assert_follows(CosineAnnealingLR(optimizer_of(BASES), total, warmup, floor), formula)


@settings(max_examples=40)
@given(total=st.integers(1, 40), warmup=STEPS, power=st.floats(0.3, 4))
@example(total=3, warmup=20, power=1.0)
def test_polynomial_and_linear_are_their_formula(total: int, warmup: int, power: float) -> None:
    def formula(base: float, t: int, power: float, floor: float) -> float:
        if t <= warmup:
            return base * (t + 1) / (warmup + 1)
        left = max(0, total - t) / (total - warmup) if total > warmup else 0
        return floor + (base - floor) * left**power if left else floor

    polynomial = PolynomialLR(optimizer_of(BASES), total, warmup, power, eta_min=0.005)
    found, expected = trace(polynomial, 60), [[formula(b, t, power, 0.005) for b in BASES] for t in range(60)]
    for t, (row, right) in enumerate(zip(found, expected, strict=True)):
        if t < warmup:  # the warm-up is the base rate's, whatever the floor
            assert row == pytest.approx([b * (t + 1) / (warmup + 1) for b in BASES], rel=1e-12)
        else:
            assert row == pytest.approx(right, rel=1e-9, abs=1e-12)
    assert_follows(LinearWarmupLR(optimizer_of(BASES), total, warmup), lambda b, t: formula(b, t, 1.0, 0.0))


@settings(max_examples=40)
@given(milestones=st.lists(st.integers(0, 50), max_size=4), warmup=STEPS, gamma=st.floats(0.05, 1))
def test_multi_step_and_constant_are_their_formula(milestones: list[int], warmup: int, gamma: float) -> None:
    def warm(t: int) -> float:
        return (t + 1) / (warmup + 1) if t < warmup else 1.0

    assert_follows(
        MultiStepLR(optimizer_of(BASES), milestones, warmup, gamma),
        lambda b, t: b * warm(t) * math.prod(gamma for m in milestones if m <= t),
    )
    assert_follows(ConstantLR(optimizer_of(BASES), warmup), lambda b, t: b * warm(t))


def test_without_warmup_cosine_is_torchs_until_the_end_and_stays_there() -> None:
    mine, torchs = optimizer_of(BASES), optimizer_of(BASES)
    schedule, reference = CosineAnnealingLR(mine, total_steps=12, eta_min=0.01), TorchCosine(torchs, 12, eta_min=0.01)
    for _ in range(12):
        assert rates(mine) == pytest.approx(rates(torchs))
        for optimizer, its in ((mine, schedule), (torchs, reference)):
            optimizer.step()
            its.step()
    assert trace(schedule, 5) == [[0.01, 0.01]] * 5


def test_a_tensor_rate_is_changed_in_place() -> None:
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


# Only when the step was taken ----------------------------------------------------------------------------------------


class Training:
    """One parameter, stepped with gradients of our choice; the base rate is 1 and the schedule goes 1, 0.9, 0.8, ..."""

    def __init__(self, hold_on_skip: bool = True, **options: Any) -> None:
        self.weight = nn.Parameter(torch.ones(3))
        sgd = torch.optim.SGD([self.weight], lr=1.0, fused=True)
        self.optimizer = ParallelOptimizer(sgd, ProcessGroupRegistry(Topology()), **arguments(**options))
        self.schedule = LinearWarmupLR(self.optimizer, 10, hold_on_skip=hold_on_skip)

    def step(self, gradient: float = 1.0) -> float:
        """One (micro-)batch; the weight's change."""
        before = self.weight.detach().clone()
        self.optimizer.backward((self.weight * gradient).sum())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float((before - self.weight.detach())[0])

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


def test_a_skipped_step_does_not_move_the_schedule() -> None:
    run = Training()
    found = []
    for gradient in (1.0, math.inf, math.nan, 1.0, 1.0):
        found.append(run.step(gradient))
        run.schedule.step()
        assert run.schedule.get_last_lr() == [run.rate]
    assert found == pytest.approx([1.0, 0.0, 0.0, 0.9, 0.8])
    assert run.schedule.last_epoch == 3


def test_counting_skipped_steps_reads_nothing() -> None:
    run = Training(hold_on_skip=False)
    run.step()
    with no_host_reads():
        for _ in range(3):
            run.optimizer.backward((run.weight * math.inf).sum())
            run.optimizer.step()
            run.schedule.step()
    assert run.rate == pytest.approx(0.7)


def test_a_deferred_verdict_is_in_time_for_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[bool] = []

    class OnTheWay(taken_steps.HostCopy):
        """As on a GPU: the flag arrives later."""

        def __init__(self, flag: Tensor) -> None:
            super().__init__(flag)
            self.is_here = False

        def read(self) -> bool:
            reads.append(super().read())
            return reads[-1]

    monkeypatch.setattr("meshstep.optim.schedule.hold.HostCopy", OnTheWay)
    run = Training()
    assert run.step(math.inf) == 0.0
    run.schedule.step()
    assert run.rate == pytest.approx(0.9), "not known yet"
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
    run.schedule.step()  # nothing stepped in between: the verdict of the last step holds
    assert run.schedule.get_last_lr() == pytest.approx([0.9])


def test_micro_batches_do_not_move_the_schedule() -> None:
    run = Training(accumulation_steps=3)
    found = []
    for _ in range(7):
        found.append(run.step())
        run.schedule.step()
    assert found == pytest.approx([0, 0, 1.0, 0, 0, 0.9, 0])
    run.optimizer.step(last=True)
    run.schedule.step()
    assert run.rate == pytest.approx(0.7)


def test_one_taken_step_among_several_moves_a_schedule_of_epochs() -> None:
    run = Training(accumulation_steps=2)
    epochs = [[1.0, 1.0, math.inf, 1.0, 1.0], [math.nan, 1.0], [1.0, math.nan, 1.0, 1.0]]  # the first ends in a window
    expected = [0.9, 0.9, 0.8]
    for gradients, rate in zip(epochs, expected, strict=True):
        for gradient in gradients:
            run.step(gradient)
        run.schedule.step()
        assert run.rate == pytest.approx(rate)


def test_without_a_parallel_optimizer_every_call_moves() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = LinearWarmupLR(optimizer, 10)
    optimizer.step()
    for _ in range(3):
        schedule.step()
    assert rates(optimizer) == pytest.approx([0.7])


@pytest.mark.parametrize("fused", [True, False])
def test_a_schedule_made_before_wrapping_watches_the_wrapper(fused: bool) -> None:
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
    with pytest.raises(ValueError, match="the schedule is of another SGD"):
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


def test_all_ranks_hold_together(world: World) -> None:
    first, second = world.run(2, overflow_on_one_rank)
    assert first == second == pytest.approx([0.9, 0.9, 0.8, 0.7])


# State and arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_state_round_trip(optimizer_first: bool) -> None:
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


def test_a_resumed_run_can_be_extended() -> None:
    schedule = LinearWarmupLR(optimizer_of(BASES), 10)
    trace(schedule, 10)
    longer = LinearWarmupLR(optimizer_of(BASES), 20)
    longer.load_state_dict(schedule.state_dict())
    assert rates(longer.optimizer) == pytest.approx([base / 2 for base in BASES])


def test_state_of_other_param_groups_is_refused() -> None:
    schedule = LinearWarmupLR(optimizer_of(BASES), 10)
    with pytest.raises(ValueError, match="saved schedule has 1 param groups, the optimizer 2"):
        schedule.load_state_dict(LinearWarmupLR(optimizer_of([0.1]), 10).state_dict())
    assert rates(schedule.optimizer) == BASES


BAD: list[tuple[Callable[[Any], object], str]] = [
    (lambda o: CosineAnnealingLR(o, 0), "total_steps=0: give a whole number of steps >= 1"),
    (lambda o: CosineAnnealingLR(o, 10, 1e-5), "warmup_steps=1e-05"),  # type: ignore[arg-type]
    (lambda o: CosineAnnealingLR(o, 10, eta_min=0.1), "eta_min=0.1 is above the base rate 0.02 of param group 1"),
    (lambda o: CosineAnnealingLR(o, 10, eta_min=math.nan), "eta_min=nan: give a finite rate >= 0"),
    (lambda o: LinearWarmupLR(o, 10, -1), "warmup_steps=-1"),
    (lambda o: PolynomialLR(o, 10, power=0), "power=0: give a finite number > 0"),
    (lambda o: MultiStepLR(o, [3, -1]), "a milestone=-1"),
    (lambda o: MultiStepLR(o, [3], gamma=2), "gamma=2: give a number in"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_arguments_change_nothing(make: Callable[[Any], object], message: str) -> None:
    optimizer = optimizer_of(BASES)
    with pytest.raises(ValueError, match=message):
        make(optimizer)
    assert rates(optimizer) == BASES
    assert "initial_lr" not in optimizer.param_groups[0]


def test_no_optimizer() -> None:
    with pytest.raises(TypeError, match="list is no torch optimizer"):
        ConstantLR([nn.Parameter(torch.ones(1))])  # type: ignore[arg-type]
