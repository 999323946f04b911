"""The schedules: each is the warm-up and floor of `WarmupLR` with a decay of the formulas below.

schedule = CosineAnnealingLR(optimizer, total_steps=1000, warmup_steps=50)
for batch in loader:
    ...
    optimizer.step()
    schedule.step()
"""

from __future__ import annotations

import math
import operator
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler

from ...parallel.mesh.call_tracker import receiver_of_caller
from ..parallel_optimizer import ParallelOptimizer
from .hold import Hold, weakly

# Learning rates as closed formulas of t, the number of steps taken so far; rate(t) is that of the next step -----------

# With base rate b of a param group, W warm-up steps and a run of T steps::
#
#     rate(t) = warmup(t) * (b * decay(t) + floor * (1 - decay(t))),    warmup(t) = min(1, (t + 1) / (W + 1))
#
#     decay(t)   constant     1
#                multi_step   gamma ** |{m in milestones: m <= t}|
#                polynomial   (1 - x) ** power
#                cosine       (1 + cos(pi x)) / 2           with x(t) = min(1, max(0, t - W) / max(1, T - W))
#
# The first step has rate b / (W + 1) and not 0, which would waste it; the rate is b at t = W and never above it. A
# warm-up that is as long as the run or longer is still a warm-up, and after T the rate stays what it is there.
#
# Plain functions of numbers: no optimizer, no state. Each is a factor in 0..1.


def warmup(step: int, warmup_steps: int) -> float:
    """min(1, (t + 1) / (W + 1))."""
    return min(1.0, (step + 1) / (warmup_steps + 1))


def constant(step: int) -> float:
    """1."""
    return 1.0


def multi_step(step: int, milestones: Iterable[int], gamma: float) -> float:
    """gamma to the power of the milestones that were reached; one that comes twice counts twice."""
    return float(gamma ** sum(milestone <= step for milestone in milestones))


def polynomial(step: int, total_steps: int, warmup_steps: int = 0, power: float = 1.0) -> float:
    """(1 - x) ** power; linear with power 1."""
    return float((1 - progress(step, total_steps, warmup_steps)) ** power)


def cosine(step: int, total_steps: int, warmup_steps: int = 0) -> float:
    """(1 + cos(pi x)) / 2: half a period.

    Reference: Loshchilov and Hutter 2017, "SGDR", arXiv:1608.03983, without restarts.
    """
    return (1 + math.cos(math.pi * progress(step, total_steps, warmup_steps))) / 2


def progress(step: int, total_steps: int, warmup_steps: int = 0) -> float:
    """x: 0 until the end of the warm-up, 1 from the end of the run on."""
    return min(1.0, max(0, step - warmup_steps) / max(1, total_steps - warmup_steps))


# Warmup lr ------------------------------------------------------------------------------------------------------------

# The base of the schedules here, on torch's own scheduler class: warm-up and floor, moving when a step was taken.


class WarmupLR(LRScheduler):
    """Base of the schedules here: the warm-up, the floor, and when to move.

    Given a `ParallelOptimizer`, `step` moves only when the optimizer has stepped since it last moved: not in the middle of
    an accumulation window, and not when the step was skipped because the norm was not finite. On a GPU it does not wait
    for that verdict: it moves, and takes the move back before the optimizer's next `step` if there was none to count. So
    the host can run ahead of the device by one step; `get_last_lr` and `state_dict` wait for the verdict, and in between
    the ``"lr"`` of a param group is the one that holds if the step was taken. On the CPU nothing is deferred.
    Any other optimizer is taken at its word: each call of `step` moves.

    torch's `SequentialLR` may be made of schedules of this class; it counts calls, so put it into `HoldOnSkip`, or its
    milestones come earlier by the steps that were skipped. `ChainedScheduler` may not: its schedules multiply the rate that
    they find, and this one writes the rate that its formula says.

    Args:
        optimizer: A `ParallelOptimizer` (for the one it wraps: `watch`) or any torch optimizer. Base rates: param groups'
            ``"lr"``, or ``"initial_lr"`` where a schedule has set it; numbers or 0-dim tensors.
        warmup_steps: W >= 0.
        floor: Absolute rate, >= 0, at which decay ends (the warm-up may begin below it).
        hold_on_skip: False: count skipped steps too, and never read the host.
        last_epoch: As in torch: -1 to begin; or n >= 0 to go on after n + 1 taken steps with the base rates that are in the
            param groups as ``"initial_lr"``.
    Raises:
        ValueError: An argument is out of range, or floor is above a base rate; the optimizer is left as it was.
        KeyError: With ``last_epoch``, a param group has no ``"initial_lr"``.
        TypeError: The optimizer is none of torch's.
    Collectives: none; all ranks find the same steps skipped, so their schedules agree. Host reads: one flag a step, as said
    above, with ``hold_on_skip`` and a ParallelOptimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        warmup_steps: int = 0,
        floor: float = 0.0,
        hold_on_skip: bool = True,
        last_epoch: int = -1,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"{type(optimizer).__name__} is no torch optimizer; give the optimizer, not its parameters")
        self.warmup_steps = whole_steps(warmup_steps, "warmup_steps", 0)
        self.floor = _checked_floor(floor, optimizer)
        self.hold_on_skip = hold_on_skip
        self._hold: Hold | None = None
        self._watched: ParallelOptimizer | None = None
        super().__init__(optimizer, whole_steps(last_epoch, "last_epoch", -1))
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
        self._watched = optimizer
        self._hold = Hold(optimizer, weakly(self._move), weakly(self._take_back), hold_on_skip=self.hold_on_skip)

    @abstractmethod
    def decay(self, step: int) -> float:
        """What is left, in 0..1, of the way from the base rate down to the floor after ``step`` taken steps."""

    def rate(self, base: float | Tensor, step: int) -> float | Tensor:
        """The closed formula: the rate of a param group with this base rate after ``step`` taken steps."""
        warm, left = warmup(step, self.warmup_steps), self.decay(step)
        return warm * (base * left + self.floor * (1 - left))  # exactly the base rate where all is left

    def get_lr(self) -> list[float | Tensor]:
        """By param group: the rate for ``last_epoch`` taken steps. A param group that has been added since begins with its
        own ``"lr"`` (or ``"initial_lr"``) as its base rate, which the schedule's present factor multiplies.

        Raises:
            ValueError: That base rate is below the floor.
        """
        self._see_new_groups()
        return self._rates_after(self.last_epoch)

    def _rates_after(self, step: int) -> list[float | Tensor]:
        return [self.rate(base, step) for base in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        """Move by one, if the optimizer has stepped since the last move; see the class.

        Args:
            epoch: As in torch: move there, whatever the optimizer did.
        Raises:
            TypeError: `ChainedScheduler` calls it, for which it would overwrite the rates of others.
        Collectives, host reads: as the class says.
        """
        _check_not_chained(self, receiver_of_caller(ChainedScheduler.step))
        if self._hold is None or epoch is not None:
            super().step(epoch)
        else:
            self._hold.step()

    def _see_new_groups(self) -> None:
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:
            _checked_floor(self.floor, self.optimizer)
            self.base_lrs.append(_copied(group.setdefault("initial_lr", _copied(group["lr"]))))

    def _update_lr(self, epoch: int | None = None) -> None:
        if epoch is not None and self._hold is not None:
            self._hold.start_over()
        super()._update_lr(epoch)

    def _move(self) -> None:
        super().step()

    def __getstate__(self) -> dict[str, Any]:
        """For copies, and pickle. Host reads: one flag, where it has not been read yet."""
        self._settle()
        return {key: value for key, value in self.__dict__.items() if key != "_hold"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._hold = None
        if self._watched is not None:
            if self.optimizer is not self._watched:
                self.optimizer = self._watched.optimizer  # a copy of the wrapper wraps a copy of its own
            self.watch(self._watched)

    def _settle(self) -> None:
        if self._hold is not None:
            self._hold.settle()

    def _take_back(self) -> None:
        self.last_epoch -= 1
        self._write_rates()

    def _write_rates(self, rates: Sequence[float | Tensor] | None = None) -> None:
        """Args: rates: Others than the formula's."""
        rates = self.get_lr() if rates is None else rates
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
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
        """Steps taken and rates. The formula's other numbers are the constructor's, so that a run can be extended.

        Host reads: one flag, where it has not been read yet.
        """
        self._settle()
        return {
            "last_epoch": self.last_epoch,
            "base_lrs": [_copied(base) for base in self.base_lrs],
            "_step_count": self._step_count,
            "formula": self._rates_after(self.last_epoch),
            "rates": [_copied(group["lr"]) for group in self.optimizer.param_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from there; the rates are written into the optimizer, before or after it loads its own state.

        They are those that the optimizer had where others had set them (in a `SequentialLR`), unless the formula is another
        one now.

        Raises:
            ValueError: It is of another number of param groups; nothing is changed.
        """
        bases = state_dict["base_lrs"]
        if len(bases) != len(self.optimizer.param_groups):
            raise ValueError(
                f"the saved schedule has {len(bases)} param groups, the optimizer {len(self.optimizer.param_groups)}; "
                "build the optimizer with the param groups it was saved with"
            )
        if self._hold is not None:
            self._hold.forget()
        self.last_epoch, self.base_lrs = state_dict["last_epoch"], [_copied(base) for base in bases]
        self._step_count = state_dict["_step_count"]
        if self.last_epoch >= 0:  # else a `SequentialLR` has not come to it
            same_formula = state_dict.get("formula") == self.get_lr()
            # Rates of the start are also those of another schedule that has been made on the optimizer since.
            others = same_formula and state_dict["rates"] != self._rates_after(0)
            self._write_rates(state_dict["rates"] if others else None)


def whole_steps(value: SupportsIndex, name: str, least: int) -> int:
    """``value``, an int of any library, checked. Raises ValueError where it is no whole number of steps >= ``least``."""
    try:
        number = -math.inf if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -math.inf
    if number < least:
        raise ValueError(f"{name}={value!r}: give a whole number of steps >= {least}")
    return int(number)


def _check_not_chained(schedule: LRScheduler, chained: ChainedScheduler | None) -> None:
    # A ChainedScheduler passes nothing to its schedules, when it is made or in `step`: only its call shows that it exists.
    if chained is not None and len(chained._schedulers) > 1:
        raise TypeError(
            f"ChainedScheduler multiplies the rates of its schedules, but {type(schedule).__name__} writes the rate that "
            "its formula says over those of the others: take SequentialLR for one after another, or say the product in one "
            "schedule, a WarmupLR with a decay of your own"
        )


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


# Schedules ------------------------------------------------------------------------------------------------------------


class ConstantLR(WarmupLR):
    """The base rate, after a linear warm-up.

    Args, errors, collectives, host reads: as in `WarmupLR`.
    """

    def __init__(
        self, optimizer: Optimizer, warmup_steps: int = 0, *, hold_on_skip: bool = True, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, warmup_steps=warmup_steps, hold_on_skip=hold_on_skip, last_epoch=last_epoch)

    def decay(self, step: int) -> float:
        """1."""
        return constant(step)


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
        last_epoch: int = -1,
    ) -> None:
        self.milestones = sorted(whole_steps(milestone, "a milestone", 0) for milestone in milestones)
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma={gamma}: give a number in (0, 1]")
        self.gamma = gamma
        super().__init__(optimizer, warmup_steps=warmup_steps, hold_on_skip=hold_on_skip, last_epoch=last_epoch)

    def decay(self, step: int) -> float:
        """gamma to the power of the milestones that were reached."""
        return multi_step(step, self.milestones, self.gamma)


class PolynomialLR(WarmupLR):
    """Decays as a power of what is left of the run: (1 - x(t)) ** power, with x as the formulas below says.

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
        last_epoch: int = -1,
    ) -> None:
        self.total_steps = whole_steps(total_steps, "total_steps", 1)
        if not 0 < power < math.inf:
            raise ValueError(f"power={power}: give a finite number > 0")
        self.power = power
        super().__init__(
            optimizer, warmup_steps=warmup_steps, floor=eta_min, hold_on_skip=hold_on_skip, last_epoch=last_epoch
        )

    def decay(self, step: int) -> float:
        """(1 - x) ** power."""
        return polynomial(step, self.total_steps, self.warmup_steps, self.power)


class LinearWarmupLR(PolynomialLR):
    """Up to the base rate in a straight line, and down to 0 in another.

    Args:
        total_steps: T >= 1, the warm-up among them.
        warmup_steps: W >= 0.
    Other args, errors, collectives, host reads: as in `WarmupLR`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        *,
        hold_on_skip: bool = True,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, warmup_steps, hold_on_skip=hold_on_skip, last_epoch=last_epoch)


class CosineAnnealingLR(WarmupLR):
    """Decays along half a cosine: (1 + cos(pi x(t))) / 2, with x as the formulas below says.

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
        last_epoch: int = -1,
    ) -> None:
        self.total_steps = whole_steps(total_steps, "total_steps", 1)
        super().__init__(
            optimizer, warmup_steps=warmup_steps, floor=eta_min, hold_on_skip=hold_on_skip, last_epoch=last_epoch
        )

    def decay(self, step: int) -> float:
        """(1 + cos(pi x)) / 2."""
        return cosine(step, self.total_steps, self.warmup_steps)


# Let torch's LR schedules, made on a plain optimizer, go on with the `ParallelOptimizer` that wraps it ----------------


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
