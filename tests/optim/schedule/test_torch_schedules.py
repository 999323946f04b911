"""Schedules from torch and from meshstep on a `ParallelOptimizer` without skipped steps, compared with a plain
optimizer.
"""

from __future__ import annotations

import gc
import io
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import meshstep.optim.schedule as ours
import pytest
import torch
import torch.optim.lr_scheduler as torchs
from meshstep.optim import HoldOnSkip, ParallelOptimizer
from meshstep.parallel import ProcessGroupRegistry, Topology
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR

Make = Callable[[torch.optim.Optimizer], Any]
EPOCHS = 13


def half_of_epoch(epoch: int) -> float:
    return 1 / (1 + epoch / 2)


def wave(x: float) -> float:
    return 0.5 * (1 + math.sin(x * math.pi / 2.0))


SCHEDULES: dict[str, Make] = {
    "LambdaLR": lambda o: torchs.LambdaLR(o, half_of_epoch),
    "LambdaLR, by group": lambda o: torchs.LambdaLR(o, [half_of_epoch, lambda epoch: 0.9**epoch]),
    "MultiplicativeLR": lambda o: torchs.MultiplicativeLR(o, lambda epoch: 0.95),
    "StepLR": lambda o: torchs.StepLR(o, step_size=3, gamma=0.1),
    "MultiStepLR": lambda o: torchs.MultiStepLR(o, [2, 5, 5, 9], gamma=0.5),
    "ConstantLR": lambda o: torchs.ConstantLR(o, factor=0.5, total_iters=4),
    "LinearLR": lambda o: torchs.LinearLR(o, start_factor=0.25, end_factor=0.8, total_iters=6),
    "ExponentialLR": lambda o: torchs.ExponentialLR(o, gamma=0.9),
    "PolynomialLR": lambda o: torchs.PolynomialLR(o, total_iters=8, power=0.9),
    "CosineAnnealingLR": lambda o: torchs.CosineAnnealingLR(o, T_max=10, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2),
    "CyclicLR": lambda o: torchs.CyclicLR(o, [0.01, 0.02], [0.1, 0.3], step_size_up=3, cycle_momentum=True),
    "CyclicLR, exp_range": lambda o: torchs.CyclicLR(
        o, 0.01, 0.1, step_size_up=3, step_size_down=2, mode="exp_range", gamma=0.9
    ),
    "CyclicLR, scaled": lambda o: torchs.CyclicLR(o, 0.01, 0.1, step_size_up=2, scale_fn=wave, scale_mode="iterations"),
    "OneCycleLR": lambda o: torchs.OneCycleLR(o, max_lr=0.5, total_steps=EPOCHS + 1),
    "OneCycleLR, linear": lambda o: torchs.OneCycleLR(
        o, max_lr=[0.5, 0.2], epochs=7, steps_per_epoch=2, anneal_strategy="linear", three_phase=True
    ),
    "SequentialLR": lambda o: torchs.SequentialLR(
        o, [torchs.ConstantLR(o, 0.5, 2), torchs.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    "SequentialLR of three": lambda o: torchs.SequentialLR(
        o,
        [torchs.LinearLR(o, 0.1, 1.0, 3), torchs.StepLR(o, 2), torchs.CosineAnnealingWarmRestarts(o, 2)],
        milestones=[3, 7],
    ),
    "ChainedScheduler": lambda o: torchs.ChainedScheduler(
        [torchs.StepLR(o, 3, 0.5), torchs.ConstantLR(o, 0.1, 4), torchs.MultiStepLR(o, [6], 0.5)], o
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=4),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, factor=0.5, patience=1, cooldown=1, min_lr=[1e-3, 1e-2]),
    "meshstep's ConstantLR": lambda o: ours.ConstantLR(o, warmup_steps=3),
    "meshstep's MultiStepLR": lambda o: ours.MultiStepLR(o, [4, 7], warmup_steps=2, gamma=0.5),
    "meshstep's LinearWarmupLR": lambda o: ours.LinearWarmupLR(o, total_steps=EPOCHS, warmup_steps=3),
    "meshstep's PolynomialLR": lambda o: ours.PolynomialLR(o, total_steps=EPOCHS, power=2.0),
    "meshstep's CosineAnnealingLR": lambda o: ours.CosineAnnealingLR(
        o, total_steps=EPOCHS, warmup_steps=2, eta_min=1e-3
    ),
    "meshstep's, then torch's": lambda o: torchs.SequentialLR(
        o, [ours.ConstantLR(o, warmup_steps=3), torchs.ExponentialLR(o, 0.9)], milestones=[4]
    ),
    "torch's, then meshstep's": lambda o: torchs.SequentialLR(
        o, [torchs.ExponentialLR(o, 0.9), ours.CosineAnnealingLR(o, total_steps=8)], milestones=[4]
    ),
}
# Schedules that HoldOnSkip supports: not meshstep's own, which hold by themselves, and not ReduceLROnPlateau.
HELD = [name for name in SCHEDULES if not name.startswith("meshstep's ") and "Plateau" not in name]
every_schedule = pytest.mark.parametrize("name", SCHEDULES)


@pytest.fixture
def registry() -> Iterator[ProcessGroupRegistry]:
    with ProcessGroupRegistry(Topology()) as registry:
        yield registry


def plain(tensor_rates: bool = False) -> torch.optim.Optimizer:
    rates: list[Any] = [0.05, 0.5]
    rates = [torch.tensor(rate) for rate in rates] if tensor_rates else rates
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, momentum=0.9, foreach=False if tensor_rates else None)


def trained(optimizer: torch.optim.Optimizer, schedule: Any, epochs: range) -> list[Any]:
    """Return per epoch the rates and momenta of the step, the last rates of the schedule, and the parameters."""
    found = []
    for epoch in epochs:
        now = [(float(group["lr"]), group["momentum"]) for group in optimizer.param_groups]
        optimizer.zero_grad()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        sum(param.square().sum() for param in params).backward()
        optimizer.step()
        schedule.step(*([1.0 if epoch > 2 else 1.0 / (1 + epoch)] if isinstance(schedule, ReduceLROnPlateau) else []))
        last = [float(rate) for rate in schedule.get_last_lr()]
        assert last == [float(group["lr"]) for group in optimizer.param_groups]
        found.append([now, last, [param.tolist() for param in params]])
    return found


@every_schedule
@pytest.mark.parametrize("tensor_rates", [False, True])
def test_schedule_on_parallel_optimizer_gives_rates_of_plain_optimizer(
    registry: ProcessGroupRegistry, name: str, tensor_rates: bool
) -> None:
    inner = plain(tensor_rates)
    expected = trained(inner, SCHEDULES[name](inner), range(EPOCHS))
    optimizer = ParallelOptimizer(plain(tensor_rates), registry)
    assert trained(optimizer, SCHEDULES[name](optimizer), range(EPOCHS)) == expected
    assert len({str(last) for _, last, _ in expected}) > 1, "the rates must change"
    if tensor_rates:
        assert all(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups)


@every_schedule
def test_schedule_created_before_wrapping_gives_rates_of_plain_optimizer(
    registry: ProcessGroupRegistry, name: str
) -> None:
    inner, other = plain(), plain()
    schedule = SCHEDULES[name](other)
    wrapped = ParallelOptimizer(other, registry)
    assert trained(wrapped, schedule, range(EPOCHS)) == trained(inner, SCHEDULES[name](inner), range(EPOCHS))


@pytest.mark.parametrize("name", HELD)
def test_hold_on_skip_without_skipped_steps_gives_rates_of_plain_optimizer(
    registry: ProcessGroupRegistry, name: str
) -> None:
    inner = plain()
    optimizer = ParallelOptimizer(plain(), registry)
    held = HoldOnSkip(SCHEDULES[name](optimizer))
    assert trained(optimizer, held, range(EPOCHS)) == trained(inner, SCHEDULES[name](inner), range(EPOCHS))


@every_schedule
@pytest.mark.parametrize("at", [0, 1, 6])
def test_schedule_state_dict_resumes_on_another_optimizer(registry: ProcessGroupRegistry, name: str, at: int) -> None:
    optimizer = ParallelOptimizer(plain(), registry)
    schedule = SCHEDULES[name](optimizer)
    trained(optimizer, schedule, range(at))
    stream = io.BytesIO()
    torch.save([optimizer.state_dict(), schedule.state_dict()], stream)
    params = [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]
    expected = trained(optimizer, schedule, range(at, EPOCHS))

    resumed = ParallelOptimizer(plain(), registry)
    other = SCHEDULES[name](resumed)
    stream.seek(0)
    saved, of_schedule = torch.load(stream, weights_only=not needs_pickle(name))
    resumed.load_state_dict(saved)
    other.load_state_dict(of_schedule)
    with torch.no_grad():
        for group, param in zip(resumed.param_groups, params, strict=True):
            group["params"][0].copy_(param)
    assert trained(resumed, other, range(at, EPOCHS)) == expected


def needs_pickle(name: str) -> bool:
    """Return True if torch puts objects into the schedule state."""
    return name.startswith(("SWALR", "CyclicLR", "ReduceLROnPlateau"))


@pytest.mark.parametrize("name", ["StepLR", "CosineAnnealingLR", "meshstep's CosineAnnealingLR"])
def test_schedule_stepped_before_optimizer_warns_as_on_plain_optimizer(
    registry: ProcessGroupRegistry, name: str
) -> None:
    def said(optimizer: torch.optim.Optimizer, first: bool) -> list[str]:
        schedule: LRScheduler = SCHEDULES[name](optimizer)
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            calls = (schedule.step, optimizer.step) if first else (optimizer.step, schedule.step)
            for call in calls:
                call()
        return [str(warning.message)[:60] for warning in caught]

    assert said(plain(), first=True), "torch must warn"
    for first in (True, False):
        assert said(ParallelOptimizer(plain(), registry), first) == said(plain(), first)


@every_schedule
def test_schedule_on_parallel_optimizer_creates_no_additional_reference_cycle(
    registry: ProcessGroupRegistry, name: str
) -> None:
    """A schedule may create a cycle only if it does so on a plain optimizer, as torch's lambdas and composed schedules
    do."""

    def gone(optimizer: torch.optim.Optimizer) -> bool:
        schedule = SCHEDULES[name](optimizer)
        seen = weakref.ref(schedule)
        del schedule
        return seen() is None

    gc.disable()
    try:
        assert gone(ParallelOptimizer(plain(), registry)) >= gone(plain())
    finally:
        gc.enable()
