"""Let torch's LR schedules, made on a plain optimizer, go on with the `ParallelOptimizer` that wraps it."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..parallel_optimizer import ParallelOptimizer
from .warmup_lr import WarmupLR


def follow(scheduler: LRScheduler, optimizer: ParallelOptimizer) -> None:
    """Make a schedule write the rates of ``optimizer``, and count its steps, in place of the optimizer it wraps.

    torch's schedules call out loud if `step` was not called on the very object that they hold. The wrapped optimizer's is
    not in the middle of a window, nor where an update is skipped or split up.

    Raises:
        TypeError, ValueError: As `followers`; nothing is changed.
    """
    held = followers(scheduler, optimizer.optimizer)
    _StepNoted(optimizer)
    for item in held:
        item.optimizer = optimizer
        if isinstance(item, WarmupLR):
            item.watch(optimizer)


def followers(scheduler: LRScheduler, optimizer: Optimizer) -> list[LRScheduler]:
    """The schedule, and those that it is made of (`SequentialLR`, `ChainedScheduler`).

    Raises:
        TypeError: It is no torch schedule.
        ValueError: One of them was made on another optimizer.
    """
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(f"lr_scheduler is a {type(scheduler).__name__}; give one of torch's or meshstep's schedules")
    if scheduler.optimizer is not optimizer:
        raise ValueError(
            f"{type(scheduler).__name__} was made on another {type(scheduler.optimizer).__name__} than the one given; make "
            "the schedule on the plain optimizer, and give both to boost"
        )
    found = [scheduler]
    for value in vars(scheduler).values():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, LRScheduler):
                found += followers(item, optimizer)
    return found


class _StepNoted(LRScheduler):
    """A schedule that changes nothing: the constructor of torch's class makes the optimizer note that it has stepped."""

    def step(self, epoch: int | None = None) -> None:
        """Nothing, not even at the start."""
