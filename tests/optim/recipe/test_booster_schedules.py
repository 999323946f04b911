"""LR schedules with and without a Booster, including torch's warnings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from meshstep.amp import Mode, NaiveFp16
from meshstep.optim import Booster, CosineAnnealingLR, LinearWarmupLR, ParallelOptimizer
from small_models import classifier
from torch import nn
from torch.optim import lr_scheduler as torch_lr

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: torch_lr.StepLR(optimizer, 2, 0.5),
    "lambda": lambda optimizer: torch_lr.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one cycle": lambda optimizer: torch_lr.OneCycleLR(optimizer, 0.3, total_steps=20),
    "sequence": lambda optimizer: torch_lr.SequentialLR(
        optimizer, [torch_lr.LinearLR(optimizer), torch_lr.ExponentialLR(optimizer, 0.7)], [3]
    ),
    "chain": lambda optimizer: torch_lr.ChainedScheduler(
        [torch_lr.ConstantLR(optimizer, 0.5, 2), torch_lr.ExponentialLR(optimizer, 0.9)]
    ),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 9, warmup_steps=2),
}


def rates(
    schedule: Any, optimizer: torch.optim.Optimizer, model: nn.Module, booster: Booster | None
) -> Iterator[float]:
    for _ in range(6):
        loss = model(torch.ones(2, 6)).square().mean()
        if booster is None:
            loss.backward()
        else:
            assert isinstance(optimizer, ParallelOptimizer)
            booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        yield optimizer.param_groups[0]["lr"]
        schedule.step()


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_boosted_schedule_has_rates_of_plain_schedule(kind: str, precision: Mode) -> None:
    """This also holds if master weights replace the parameters whose learning rate the schedule writes."""
    model, dense = classifier(), classifier()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(dense.parameters(), lr=0.1, momentum=0.9)
    expected = list(rates(SCHEDULES[kind](plain), plain, dense, None))
    booster = Booster(precision)
    model, optimizer, _, _, schedule = booster.boost(model, optimizer, lr_scheduler=SCHEDULES[kind](optimizer))
    assert list(rates(schedule, optimizer, model, booster)) == expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize("fused", [True, False])
def test_schedules_do_not_warn_if_first_steps_are_skipped(fused: bool) -> None:
    """torch's schedules advance in skipped steps, as with GradScaler; meshstep's wait for an applied step."""
    model = classifier()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    booster = Booster(NaiveFp16(init_scale=2.0**40))
    theirs, ours = torch_lr.StepLR(optimizer, 1, 0.5), LinearWarmupLR(optimizer, 10, 2)
    model, optimizer, _, _, theirs = booster.boost(model, optimizer, lr_scheduler=theirs)
    ours.watch(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            booster.backward(model(torch.ones(2, 6)).square().mean(), optimizer)
            optimizer.step()
            theirs.step()
            ours.step()
    assert optimizer.skipped_steps == 3
    assert theirs.last_epoch == 3
    assert ours.last_epoch == 0


def test_schedule_advances_once_per_accumulation_window_without_warning() -> None:
    model = classifier()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    booster = Booster(accumulation_steps=3)
    ours: Any = LinearWarmupLR(sgd, 10, 2)
    model, optimizer, _, _, ours = booster.boost(model, sgd, lr_scheduler=ours)
    for _ in range(7):
        booster.backward(model(torch.ones(2, 6)).square().mean(), optimizer)
        optimizer.step()
        ours.step()
        optimizer.zero_grad()
    assert ours.last_epoch == 2


@pytest.mark.parametrize("way", ["norm", "value"])
@pytest.mark.parametrize("micro_batches", [2, 5])
def test_clipping_called_per_micro_batch_clips_once_per_window(way: str, micro_batches: int) -> None:
    """The reference in torch clips once per accumulation window. The last window may be shorter."""
    model, dense = classifier(), classifier()
    sgd, plain = (torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (model, dense))
    booster = Booster(accumulation_steps=3)
    _, optimizer, _, _, _ = booster.boost(model, sgd)
    inputs = torch.randn(micro_batches, 4, 6, generator=torch.Generator().manual_seed(5))
    for index, x in enumerate(inputs):
        booster.backward(model(x).square().mean(), optimizer)
        stats = optimizer.clip_grad_by_norm(0.1) if way == "norm" else optimizer.clip_grad_by_value(0.02)
        assert (stats is None) == (index != 2)
        optimizer.step(final=index == micro_batches - 1)
        optimizer.zero_grad()
    for part in inputs.split(3):
        plain.zero_grad()
        dense(part.flatten(0, 1)).square().mean().backward()
        if way == "norm":
            assert nn.utils.clip_grad_norm_(dense.parameters(), 0.1) > 0.1
        else:
            nn.utils.clip_grad_value_(dense.parameters(), 0.02)
        plain.step()
    for param, expected in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-5, atol=1e-7)


def test_boosted_schedule_stepped_before_optimizer_warns_as_in_torch() -> None:
    model = classifier()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, _, _, schedule = Booster().boost(model, sgd, lr_scheduler=torch_lr.StepLR(sgd, 2))
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step"):
        schedule.step()
