"""Learning rate schedules with a warm-up, on torch's own scheduler class; they move when a step was taken.

    schedule = CosineAnnealingLR(optimizer, total_steps=1000, warmup_steps=50)
    for batch in loader:
        ...
        optimizer.step()
        schedule.step()

Every schedule is a closed formula of t, the number of steps taken so far, which rate the next step has. With base rate b
of a param group and W warm-up steps::

    rate(t) = warm(t) * (b * decay(t) + floor * (1 - decay(t))),   warm(t) = min(1, (t + 1) / (W + 1))

The first step has rate b / (W + 1) and not 0, which would waste it; the rate is b at t = W and never above it.
`CosineAnnealingLR` and `PolynomialLR` decay from there on: with total_steps = T::

    x(t) = min(1, max(0, t - W) / max(1, T - W))

so that a warm-up which is as long as the run or longer is still a warm-up, and after T the rate stays what it is there.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..parallel_optimizer import ParallelOptimizer
from .taken_steps import HostCopy, TakenSteps


class WarmupLR(LRScheduler):
    """Base of the schedules here: the warm-up, the floor, and when to move.

    Given a `ParallelOptimizer`, `step` moves only when the optimizer has stepped since it last moved: not in the middle of
    an accumulation window, and not when the step was skipped because the norm was not finite. On a GPU it does not wait
    for that verdict: it moves, and takes the move back before the optimizer's next `step` if there was none to count. So
    the host can run ahead of the device by one step; `get_last_lr` and `state_dict` wait for the verdict, and in between
    the ``"lr"`` of a param group is the one that holds if the step was taken. On the CPU nothing is deferred.
    Any other optimizer is taken at its word: each call of `step` moves.

    Args:
        optimizer: A `ParallelOptimizer` (for the one it wraps: `watch`) or any torch optimizer. Base rates: param groups'
            ``"lr"``, or ``"initial_lr"`` where a schedule has set it; numbers or 0-dim tensors.
        warmup_steps: W >= 0.
        floor: Absolute rate, >= 0, at which decay ends (the warm-up may begin below it).
        hold_on_skip: False: count skipped steps too, and never read the host.
    Raises:
        ValueError: An argument is out of range, or floor is above a base rate; the optimizer is left as it was.
        TypeError: The optimizer is none of torch's.
    Collectives: none; all ranks find the same steps skipped, so their schedules agree. Host reads: one flag a step, as said
    above, with ``hold_on_skip`` and a ParallelOptimizer.
    """

    def __init__(
        self, optimizer: Optimizer, *, warmup_steps: int = 0, floor: float = 0.0, hold_on_skip: bool = True
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"{type(optimizer).__name__} is no torch optimizer; give the optimizer, not its parameters")
        self.warmup_steps = _whole(warmup_steps, "warmup_steps", 0)
        self.floor = _checked_floor(floor, optimizer)
        self.hold_on_skip = hold_on_skip
        self._verdict: HostCopy | None = None
        self._taken: TakenSteps | None = None
        super().__init__(optimizer)
        if isinstance(optimizer, ParallelOptimizer):
            self.watch(optimizer)

    def watch(self, optimizer: ParallelOptimizer) -> None:
        """Move when this optimizer steps. For a schedule that was made before its torch optimizer was wrapped.

        Raises:
            ValueError: It does not wrap this schedule's optimizer.
        """
        if self.optimizer is not optimizer and self.optimizer is not optimizer.optimizer:
            raise ValueError(
                f"the schedule is of another {type(self.optimizer).__name__}; give the ParallelOptimizer that wraps it"
            )
        self._taken = TakenSteps(optimizer)
        optimizer.register_step_pre_hook(self._before_step)

    @abstractmethod
    def decay(self, step: int) -> float:
        """What is left, in 0..1, of the way from the base rate down to the floor after ``step`` taken steps."""

    def rate(self, base: float | Tensor, step: int) -> float | Tensor:
        """The closed formula: the rate of a param group with this base rate after ``step`` taken steps."""
        warm = min(1.0, (step + 1) / (self.warmup_steps + 1))
        left = self.decay(step)
        return warm * (base * left + self.floor * (1 - left))  # exactly the base rate where all is left

    def get_lr(self) -> list[float | Tensor]:
        """By param group: the rate for ``last_epoch`` taken steps."""
        return [self.rate(base, self.last_epoch) for base in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        """Move by one, if the optimizer has stepped since the last move; see the class.

        Args:
            epoch: As in torch: move there, whatever the optimizer did.
        Collectives, host reads: as the class says.
        """
        if self._taken is None or epoch is not None:
            super().step(epoch)
            return
        if self._taken.in_window:
            return
        self._settle()
        skipped = self._taken.all_skipped if self.hold_on_skip else None
        verdict = None if skipped is None else HostCopy(skipped)
        self._taken.start_over()
        if verdict is None or not verdict.is_here:
            super().step()
            self._verdict = verdict
        elif not verdict.read():
            super().step()

    def _before_step(self, *_: object) -> None:
        if self._verdict is not None and self._verdict.may_wait:
            self._settle()

    def _settle(self) -> None:
        """Take the last move back if no step was taken."""
        verdict, self._verdict = self._verdict, None
        if verdict is not None and verdict.read():
            self.last_epoch -= 1
            self._write_rates()

    def _write_rates(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # the same object: a CUDA graph reads it
            else:
                group["lr"] = rate
        self._last_lr = [_copied(group["lr"]) for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float | Tensor]:
        """By param group: the rate that the next step has. Host reads: one flag, where it has not been read yet."""
        self._settle()
        return super().get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Steps taken and base rates. The formula's other numbers are the constructor's, so that a run can be extended.

        Host reads: one flag, where it has not been read yet.
        """
        self._settle()
        return {
            "last_epoch": self.last_epoch,
            "base_lrs": [_copied(base) for base in self.base_lrs],
            "_step_count": self._step_count,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from there; the rates are written into the optimizer, before or after it loads its own state.

        Raises:
            ValueError: It is of another number of param groups; nothing is changed.
        """
        bases = state_dict["base_lrs"]
        if len(bases) != len(self.optimizer.param_groups):
            raise ValueError(
                f"the saved schedule has {len(bases)} param groups, the optimizer {len(self.optimizer.param_groups)}; "
                "build the optimizer with the param groups it was saved with"
            )
        self._verdict = None
        self.last_epoch, self.base_lrs = state_dict["last_epoch"], [_copied(base) for base in bases]
        self._step_count = state_dict["_step_count"]
        self._write_rates()


class ConstantLR(WarmupLR):
    """The base rate, after a linear warm-up.

    Args, errors, collectives, host reads: as in `WarmupLR`.
    """

    def __init__(self, optimizer: Optimizer, warmup_steps: int = 0, *, hold_on_skip: bool = True) -> None:
        super().__init__(optimizer, warmup_steps=warmup_steps, hold_on_skip=hold_on_skip)

    def decay(self, step: int) -> float:
        """1."""
        return 1.0


class MultiStepLR(WarmupLR):
    """Multiplies the rate by gamma at each milestone; the warm-up's factor comes on top.

        decay(t) = gamma ** |{m in milestones: m <= t}|

    Args:
        milestones: Taken steps, from the start of the run, >= 0, in any order; one that comes twice counts twice.
        warmup_steps: W >= 0.
        gamma: In (0, 1].
    Other args, errors, collectives, host reads: as in `WarmupLR`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        milestones: Iterable[int],
        warmup_steps: int = 0,
        gamma: float = 0.1,
        *,
        hold_on_skip: bool = True,
    ) -> None:
        self.milestones = sorted(_whole(milestone, "a milestone", 0) for milestone in milestones)
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma={gamma}: give a number in (0, 1]")
        self.gamma = gamma
        super().__init__(optimizer, warmup_steps=warmup_steps, hold_on_skip=hold_on_skip)

    def decay(self, step: int) -> float:
        """gamma to the power of the milestones that were reached."""
        return float(self.gamma ** sum(milestone <= step for milestone in self.milestones))


class PolynomialLR(WarmupLR):
    """Decays as a power of what is left of the run: (1 - x(t)) ** power, with x as the module says.

    Args:
        total_steps: T >= 1, the warm-up among them.
        warmup_steps: W >= 0.
        power: > 0; 1 is linear.
        eta_min: The floor, absolute, in 0..every base rate.
    Other args, errors, collectives, host reads: as in `WarmupLR`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        power: float = 1.0,
        eta_min: float = 0.0,
        *,
        hold_on_skip: bool = True,
    ) -> None:
        self.total_steps = _whole(total_steps, "total_steps", 1)
        if not 0 < power < math.inf:
            raise ValueError(f"power={power}: give a finite number > 0")
        self.power = power
        super().__init__(optimizer, warmup_steps=warmup_steps, floor=eta_min, hold_on_skip=hold_on_skip)

    def decay(self, step: int) -> float:
        """(1 - x) ** power."""
        return float((1 - _progress(step, self.warmup_steps, self.total_steps)) ** self.power)


class LinearWarmupLR(PolynomialLR):
    """Up to the base rate in a straight line, and down to 0 in another.

    Args:
        total_steps: T >= 1, the warm-up among them.
        warmup_steps: W >= 0.
    Other args, errors, collectives, host reads: as in `WarmupLR`.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, *, hold_on_skip: bool = True
    ) -> None:
        super().__init__(optimizer, total_steps, warmup_steps, hold_on_skip=hold_on_skip)


class CosineAnnealingLR(WarmupLR):
    """Decays along half a cosine: (1 + cos(pi x(t))) / 2, with x as the module says.

    Without a warm-up it is torch's CosineAnnealingLR up to t = T, after which torch's rises again.

    Args:
        total_steps: T >= 1, the warm-up among them.
        warmup_steps: W >= 0.
        eta_min: The floor, absolute, in 0..every base rate.
    Other args, errors, collectives, host reads: as in `WarmupLR`.
    Reference: Loshchilov and Hutter 2017, "SGDR", arXiv:1608.03983, without restarts.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        *,
        hold_on_skip: bool = True,
    ) -> None:
        self.total_steps = _whole(total_steps, "total_steps", 1)
        super().__init__(optimizer, warmup_steps=warmup_steps, floor=eta_min, hold_on_skip=hold_on_skip)

    def decay(self, step: int) -> float:
        """(1 + cos(pi x)) / 2."""
        return (1 + math.cos(math.pi * _progress(step, self.warmup_steps, self.total_steps))) / 2


def _progress(step: int, warmup_steps: int, total_steps: int) -> float:
    """x: 0 until the end of the warm-up, 1 from the end of the run on."""
    return min(1.0, max(0, step - warmup_steps) / max(1, total_steps - warmup_steps))


def _whole(value: int, name: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: give a whole number of steps >= {least}")
    return value


def _checked_floor(floor: float, optimizer: Optimizer) -> float:
    if not 0 <= floor < math.inf:
        raise ValueError(f"eta_min={floor}: give a finite rate >= 0")
    for index, group in enumerate(optimizer.param_groups):
        base = float(group.get("initial_lr", group["lr"]))
        if floor > base:
            raise ValueError(f"eta_min={floor} is above the base rate {base} of param group {index}; give a lower one")
    return float(floor)


def _copied(rate: float | Tensor) -> float | Tensor:
    return rate.clone() if isinstance(rate, Tensor) else rate
