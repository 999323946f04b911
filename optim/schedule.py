"""Learning-rate schedules that by default do not advance after a skipped step, and `HoldOnSkip` for torch's schedules.

    schedule = CosineAnnealingLR(optimizer, total_steps=1000, warmup_steps=50)
    for batch in loader:
        ...
        optimizer.step()
        schedule.step()

In this file, to advance a schedule means to set it to its next step, and to hold it means to leave it unchanged.
`schedule.step()` holds the schedule in the middle of an accumulation window (the micro-batches of one optimizer step),
and, unless ``hold_on_skip=False``, after a skipped step. Otherwise it advances the schedule. The step decision (skipped
or not) is computed on the device. The host reads it late, so that it does not have to wait::

    host     step k      schedule.step()             step k + 1             schedule.step()
    device   ...step k computes... decision k                 ...step k + 1 computes... decision k + 1
                                  ^ copy to the host starts ^ the host reads the copy, before the rate is used

On a CPU the host reads the decision at once.
"""

from __future__ import annotations

import math
import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter, signature
from types import MethodType
from typing import Any, SupportsIndex, cast
from weakref import WeakMethod, finalize

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler

from ..parallel.mesh.call_tracker import receiver_of_caller
from .parallel_optimizer import ParallelOptimizer
from .step.host_copy import HostCopy

# Detection of taken steps without host synchronization ----------------------------------------------------------------


def hook_weakly(register: Callable[[Callable[..., None]], Any], method: Callable[..., None]) -> None:
    """Register a bound method as a step hook that does not keep the method's object alive."""
    finalize(cast(MethodType, method).__self__, register(weakly(method)).remove).atexit = False


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a bound method without keeping the method's object alive."""
    weak = WeakMethod(method)

    def call(*args: object) -> None:
        alive = weak()
        if alive is not None:
            alive(*args)

    return call


class TakenSteps:
    """Records through step hooks whether a `ParallelOptimizer` took or skipped its steps.

    A period is the time from one call of `start_over` (or the constructor) to the next. A call of the optimizer's
    `step` ends an accumulation window if it updates `last_stats`. A replayed CUDA graph runs no hooks. But it
    overwrites the tensor ``GradStats.skipped`` of the captured step, so `all_skipped` stays correct if it is this
    tensor.

    Attributes:
        called: True if the optimizer's `step` was called in this period.
        in_window: True if the optimizer's `step` was called in this period, and no call ended a window.
        all_skipped: 0-dim float32 on the device: 1 if all steps of this period that ended a window were skipped, else
            0. It keeps its value in a period without such a step. None until the first window ends.
    """

    def __init__(self, optimizer: ParallelOptimizer) -> None:
        self.all_skipped: Tensor | None = None
        self._optimizer = optimizer
        self._seen = optimizer.last_stats
        self.start_over()
        hook_weakly(optimizer.register_step_pre_hook, self._before_call)
        hook_weakly(optimizer.register_step_post_hook, self._look)

    @property
    def in_window(self) -> bool:
        self._look()  # a call of `step` that raised an error did not run the post hook
        return self.called and not self._ended

    def start_over(self) -> None:
        """Begin a new period: `called` becomes False, and `all_skipped` keeps its value until a window ends."""
        self.called = self._ended = False

    def _before_call(self, *_: object) -> None:
        self.called = True

    def _look(self, *_: object) -> None:
        stats = self._optimizer.last_stats
        if stats is None or stats is self._seen:
            return
        self._seen = stats
        earlier = self.all_skipped if self._ended else None
        self.all_skipped = stats.skipped if earlier is None else torch.minimum(earlier, stats.skipped)
        self._ended = True


class FlagCopy(HostCopy):
    """Copy of a 0-dim flag on the host. The copy from a CUDA device is asynchronous.

    `is_here` is True if the flag was not on a CUDA device. Then `read` does not wait.
    """

    def __init__(self, flag: Tensor) -> None:
        super().__init__(flag)
        self.is_here = self.arrived is None

    @property
    def may_wait(self) -> bool:
        """Return True if `read` is allowed: during a CUDA graph capture, only if it need not wait for a CUDA event."""
        return self.arrived is None or not torch.cuda.is_current_stream_capturing()

    def read(self) -> bool:
        """Return the flag as a bool.

        Host synchronization: waits until the copy has arrived; none if `is_here`.
        """
        return bool(self.wait())


# Advance of a schedule, unless the optimizer's step was skipped ---------------------------------------------------------


class Hold:
    """Advances a schedule by calls of `step`, except in the middle of an accumulation window and after a skipped step.

    The step decision is whether the optimizer took or skipped its step. If the optimizer was not called since the last
    call of `step`, as when a CUDA graph replays its steps, the skip flag of the optimizer's last step is read again.

    On a GPU the step decision is not on the host yet when `step` is called. With ``take_back``, which undoes the last
    advance, `step` advances the schedule at once, and `settle` undoes the advance if the optimizer's step was skipped.
    Without ``take_back``, `settle` advances the schedule if the step was taken. A hook of the optimizer calls `settle`
    before the optimizer's next step. A replayed CUDA graph does not run this hook. So without ``take_back``, `step`
    waits for the decision if no hook ran since the last call of `step`.

    With ``hold_on_skip=False``, the schedule also advances after skipped steps, without host synchronization. The hooks
    keep neither this object nor the schedule alive.
    """

    def __init__(
        self,
        optimizer: ParallelOptimizer,
        advance: Callable[[], None],
        take_back: Callable[[], None] | None = None,
        *,
        hold_on_skip: bool = True,
    ) -> None:
        self._advance, self._take_back, self._hold_on_skip = advance, take_back, hold_on_skip
        self._verdict: FlagCopy | None = None  # the decision that is not yet read: True if the step was skipped
        self._has_advanced = False  # True if the schedule advanced before the decision was read
        self._taken = TakenSteps(optimizer)
        hook_weakly(optimizer.register_step_pre_hook, self._before_step)

    def step(self) -> None:
        """Advance the schedule by one step, or hold it, depending on the optimizer's last steps.

        Host synchronization: on a GPU, one if the previous decision is still pending. Another one if ``take_back`` is
        None and no hook of the optimizer ran since the last call.
        """
        if self._taken.in_window:
            return
        self.settle()
        skipped, called = self._taken.all_skipped, self._taken.called
        self._taken.start_over()
        if skipped is None or not self._hold_on_skip:
            self._advance()
            return
        self._verdict, self._has_advanced = FlagCopy(skipped), False
        if self._verdict.is_here or (self._take_back is None and not called):
            self.settle()
        elif self._take_back is not None:
            self._has_advanced = True
            self._advance()

    def settle(self) -> None:
        """Read the pending step decision, if there is one, and correct the schedule's position.

        Host synchronization: one if a decision is pending on a GPU.
        """
        verdict, self._verdict = self._verdict, None
        if verdict is None:
            return
        skipped = verdict.read()
        if skipped and self._has_advanced:
            assert self._take_back is not None
            self._take_back()
        elif not skipped and not self._has_advanced:
            self._advance()

    def forget(self) -> None:
        """Discard the pending step decision. Call it when the schedule is set to another position."""
        self._verdict = None

    def start_over(self) -> None:
        self.forget()
        self._taken.start_over()

    def _before_step(self, *_: object) -> None:
        if self._verdict is not None and self._verdict.may_wait:
            self.settle()


# Formulas of the learning rate; t is the number of steps taken so far, and rate(t) the rate of the next step ----------

# With base rate b of a param group, W warm-up steps and a run of T steps::
#
#     rate(t) = warmup(t) * (b * decay(t) + floor * (1 - decay(t))),    warmup(t) = min(1, (t + 1) / (W + 1))
#
#     decay(t)   constant     1
#                multi_step   gamma ** |{m in milestones: m <= t}|
#                polynomial   (1 - x) ** power
#                cosine       (1 + cos(pi x)) / 2           with x(t) = min(1, max(0, t - W) / max(1, T - W))
#
# The warm-up begins with the factor 1 / (W + 1), because a rate of 0 would waste the first step. It ends at t = W with
# the factor 1. A rate is never above b. For polynomial and cosine with W < T, the rate is constant after T steps. A
# warm-up may be as long as the run or longer (W >= T). Then polynomial and cosine have the rate b at t = W, and the
# floor from t = W + 1 on.


def progress(step: int, total_steps: int, warmup_steps: int) -> float:
    """Return the progress of the decay after ``step`` taken steps, from 0 to 1.

    It is 0 until the warm-up ends, rises linearly to 1 at ``total_steps``, and remains 1. If the warm-up is as long as
    the run or longer, it jumps from 0 to 1 in the first step after the warm-up.
    """
    return min(1.0, max(0, step - warmup_steps) / max(1, total_steps - warmup_steps))


# WarmupLR -------------------------------------------------------------------------------------------------------------


class WarmupLR(LRScheduler):
    """Base class of schedules with a linear warm-up and a decay to a floor. By default, skipped steps do not count.

    Subclasses define `decay`. Call `step` once after each call of ``optimizer.step``. With a `ParallelOptimizer`,
    `step` leaves the rates unchanged in the middle of an accumulation window, and after a skipped optimizer step (for
    example because the gradient norm was not finite). Otherwise it advances the schedule by one step. With any other
    optimizer, each call advances the schedule.

    On a CPU `step` reads at once whether the optimizer's step was skipped. On a GPU it does not wait for this decision,
    so the host can be one step ahead of the device. It advances the schedule at once. If the optimizer's step was
    skipped, the schedule goes back before the optimizer's next `step`. Until then, ``"lr"`` in the param groups is the
    rate after a taken step. `get_last_lr` and `state_dict` wait for the decision.

    torch's `SequentialLR` may contain schedules of this class. `SequentialLR` counts calls, so wrap it in `HoldOnSkip`;
    otherwise its milestones are early by the number of skipped steps. A `ChainedScheduler` of several schedules must
    not contain schedules of this class: it multiplies the current rate by factors, and this class overwrites the rate.

    Args:
        optimizer: A `ParallelOptimizer`, or any torch optimizer. The base rates are the param groups' ``"lr"``, or
            ``"initial_lr"`` if a schedule has set it; numbers or 0-dim tensors.
        warmup_steps: Number of taken steps (steps that are not skipped) until the rate reaches the base rate, >= 0.
            Default 0: no warm-up.
        floor: Absolute rate at which the decay ends, >= 0 and at most every base rate. The warm-up may start below it.
            Default: 0.
        hold_on_skip: False: `step` also advances after skipped steps, so they count as taken. This needs no host
            synchronization. Default: True.
        last_epoch: As in torch. -1: start a run. n >= 0: continue a run after n + 1 taken steps; the base rates are
            then the param groups' ``"initial_lr"``. Default: -1.

    Raises:
        ValueError: An argument is out of range, or the floor is above a base rate; the optimizer is unchanged.
        KeyError: ``last_epoch`` is >= 0 and a param group has no ``"initial_lr"``.
        TypeError: ``optimizer`` is no torch optimizer.

    Collectives: none. All ranks skip the same steps, so their schedules agree.
    Host synchronization: with ``hold_on_skip`` and a `ParallelOptimizer` on a GPU, one per step. In the constructor one
        per base rate that is a tensor on a GPU.
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
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__}, not a torch optimizer; give {type(self).__name__} the "
                "optimizer itself, not its parameters"
            )
        self.warmup_steps = whole_steps(warmup_steps, "warmup_steps", 0)
        self.floor = _checked_floor(floor, optimizer)
        self.hold_on_skip = hold_on_skip
        self._hold: Hold | None = None
        self._watched: ParallelOptimizer | None = None
        super().__init__(optimizer, whole_steps(last_epoch, "last_epoch", -1))
        if isinstance(optimizer, ParallelOptimizer):
            self.watch(optimizer)

    def watch(self, optimizer: ParallelOptimizer) -> None:
        """Let `step` take accumulation windows and skipped steps of a `ParallelOptimizer` into account.

        The constructor calls it for a `ParallelOptimizer`. Call it yourself if the schedule was created with a torch
        optimizer that was wrapped afterwards.

        Args:
            optimizer: The `ParallelOptimizer` that wraps the schedule's optimizer.

        Raises:
            ValueError: ``optimizer`` does not wrap the schedule's optimizer.
        """
        if self.optimizer is not optimizer and self.optimizer is not optimizer.optimizer:
            raise ValueError(
                "watch() was given the ParallelOptimizer of another optimizer than the "
                f"{type(self.optimizer).__name__} with which this schedule was created: give watch() the "
                "ParallelOptimizer of the schedule's optimizer"
            )
        self._watched = optimizer
        self._hold = Hold(optimizer, weakly(self._advance), weakly(self._take_back), hold_on_skip=self.hold_on_skip)

    @abstractmethod
    def decay(self, step: int) -> float:
        """Return the decay factor in 0..1 after ``step`` taken steps: 1 for the base rate, 0 for the floor."""

    def rate(self, base: float | Tensor, step: int) -> float | Tensor:
        """Return the learning rate of a param group with base rate ``base`` after ``step`` taken steps."""
        warm, left = min(1.0, (step + 1) / (self.warmup_steps + 1)), self.decay(step)
        return warm * (base * left + self.floor * (1 - left))  # exactly ``base`` if warm and left are 1

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate at the schedule's current position (``last_epoch`` taken steps), per param group.

        The base rate of a param group that was added to the optimizer later is its ``"initial_lr"``. If it has none,
        the base rate is its ``"lr"``, which this method also writes to ``"initial_lr"``.

        Raises:
            ValueError: A param group was added, and a base rate is below the floor.
        """
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:
            _checked_floor(self.floor, self.optimizer)
            self.base_lrs.append(_copied(group.setdefault("initial_lr", _copied(group["lr"]))))
        return self._rates_after(self.last_epoch)

    def _rates_after(self, step: int) -> list[float | Tensor]:
        return [self.rate(base, step) for base in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        """Advance the schedule by one step, except in the middle of an accumulation window or after a skipped step.

        With ``hold_on_skip=False`` it also advances after a skipped step.

        Args:
            epoch: None (default): advance by one step. A number: set the schedule to this position, even if the
                optimizer took no step; torch warns that this argument is deprecated.

        Raises:
            TypeError: The caller is a `ChainedScheduler` with other schedules, whose rates would be overwritten.
            ValueError: A param group was added to the optimizer, and a base rate is below the floor.

        Collectives: none.
        Host synchronization: on a GPU, one if the decision on the previous step is still pending.
        """
        # Found on the call stack, because a schedule has no reference to the ChainedScheduler that contains it.
        chained = receiver_of_caller(ChainedScheduler.step)
        if chained is not None and len(chained._schedulers) > 1:
            raise TypeError(
                f"ChainedScheduler multiplies the rates by the factors of its schedules, but {type(self).__name__} "
                "overwrites the rates; use SequentialLR to run schedules one after another, or write the product of the "
                "factors as the decay of a single WarmupLR subclass"
            )
        if self._hold is None or epoch is not None:
            super().step(epoch)
        else:
            self._hold.step()

    def _update_lr(self, epoch: int | None = None) -> None:
        if epoch is not None and self._hold is not None:
            self._hold.start_over()
        super()._update_lr(epoch)

    def _advance(self) -> None:
        super().step()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for copying and pickling, without the hooks on the optimizer.

        Host synchronization: on a GPU, one if a step decision is pending.
        """
        self._settle()
        return {key: value for key, value in self.__dict__.items() if key != "_hold"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._hold = None
        if self._watched is not None:
            if self.optimizer is not self._watched:
                # `_watched` is a copy of the `ParallelOptimizer`; use the torch optimizer inside this copy
                self.optimizer = self._watched.optimizer
            self.watch(self._watched)

    def _settle(self) -> None:
        if self._hold is not None:
            self._hold.settle()

    def _take_back(self) -> None:
        self.last_epoch -= 1
        self._write_rates(self.get_lr())

    def _write_rates(self, rates: Sequence[float | Tensor]) -> None:
        """Write learning rates to the param groups."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # in place, because a CUDA graph reads this tensor
            else:
                group["lr"] = rate
        self._last_lr = [_copied(group["lr"]) for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the learning rate of the next optimizer step, per param group.

        Host synchronization: on a GPU, one if a step decision is pending.
        """
        self._settle()
        return super().get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the schedule, the base rates and the current rates.

        The state does not include the constructor's other arguments, such as ``total_steps``. So you can load it into a
        schedule with another ``total_steps``, to extend a run.

        Host synchronization: on a GPU, one if a step decision is pending.
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
        """Load a state, and write the learning rates to the optimizer's param groups.

        You may call it before or after the optimizer loads its own state. The written rates are those of this
        schedule's formula at the saved position. Inside a `SequentialLR`, another schedule may have set the rates that
        were saved. Then the saved rates are written instead, if this schedule's formula gives the same rates as when it
        was saved, and if the saved rates are not this schedule's initial rates. A schedule that its `SequentialLR` had
        not started when the state was saved writes no rates.

        Args:
            state_dict: The result of `state_dict`.

        Raises:
            ValueError: The state has a different number of param groups than the optimizer; nothing is changed.
        """
        bases = state_dict["base_lrs"]
        if len(bases) != len(self.optimizer.param_groups):
            raise ValueError(
                f"the saved schedule has {len(bases)} param groups, and the optimizer has "
                f"{len(self.optimizer.param_groups)}; create the optimizer with the param groups that it had when the "
                "schedule was saved"
            )
        if self._hold is not None:
            self._hold.forget()
        self.last_epoch, self.base_lrs = state_dict["last_epoch"], [_copied(base) for base in bases]
        self._step_count = state_dict["_step_count"]
        if self.last_epoch >= 0:  # else this schedule is in a `SequentialLR` that had not started it
            rates = self.get_lr()
            # Saved rates that differ from this schedule's formula were set by another schedule of a `SequentialLR`, and
            # are kept. Exception: the initial rates, because the constructor of any schedule writes initial rates.
            if state_dict.get("formula") == rates and state_dict["rates"] != self._rates_after(0):
                rates = state_dict["rates"]
            self._write_rates(rates)


def whole_steps(value: SupportsIndex, name: str, least: int) -> int:
    """Return ``value``, a number of steps, as an int. ``name`` is the name of the argument in the error."""
    try:
        number = -math.inf if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -math.inf
    if number < least:
        raise ValueError(f"{name}={value!r}: give a whole number of steps >= {least}")
    return int(number)


def _checked_floor(floor: float, optimizer: Optimizer) -> float:
    if not 0 <= floor < math.inf:
        raise ValueError(f"eta_min={floor} (floor= of a WarmupLR subclass): give a finite learning rate >= 0")
    for index, group in enumerate(optimizer.param_groups):
        base = float(group.get("initial_lr", group["lr"]))
        if floor > base:
            raise ValueError(
                f"eta_min={floor} is above the initial learning rate {base} of param group {index}; give a lower eta_min"
            )
    return float(floor)


def _copied(rate: float | Tensor) -> float | Tensor:
    return rate.clone() if isinstance(rate, Tensor) else rate


# Schedules ------------------------------------------------------------------------------------------------------------


class ConstantLR(WarmupLR):
    """Schedule with a linear warm-up, then a constant rate: the base rate.

        schedule = ConstantLR(optimizer, warmup_steps=50)

    Args:
        optimizer: A `ParallelOptimizer` or a torch optimizer, whose param groups have the base rates.
        warmup_steps: Number of taken steps (steps that are not skipped) until the rate reaches the base rate, >= 0.
            Default 0: no warm-up.
        hold_on_skip: False: the schedule also advances after skipped steps, so they count as taken. Default: True.
        last_epoch: -1 (default): start a run. n >= 0: continue a run after n + 1 taken steps.

    Raises:
        ValueError, KeyError, TypeError: As in `WarmupLR`; nothing is changed.
    """

    def __init__(
        self, optimizer: Optimizer, warmup_steps: int = 0, *, hold_on_skip: bool = True, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, warmup_steps=warmup_steps, hold_on_skip=hold_on_skip, last_epoch=last_epoch)

    def decay(self, step: int) -> float:
        """Return 1, the decay factor after any number of steps."""
        return 1.0


class MultiStepLR(WarmupLR):
    """Schedule with a linear warm-up that multiplies the rate by gamma at each milestone.

        schedule = MultiStepLR(optimizer, milestones=[300, 600], warmup_steps=50)

    After t taken steps (steps that are not skipped) the base rate is multiplied by the warm-up factor and by:

    ```text
    decay(t) = gamma ** |{m in milestones: m <= t}|
    ```

    Args:
        milestones: Numbers of taken steps since the start of the run, >= 0, in any order. If a number is given n times,
            the rate is multiplied by gamma ** n there.
        gamma: Factor on the rate per milestone, in (0, 1]. Default: 0.1.
        optimizer: A `ParallelOptimizer` or a torch optimizer, whose param groups have the base rates.
        warmup_steps: Number of taken steps until the rate reaches the base rate, >= 0. Default 0: no warm-up.
        hold_on_skip: False: the schedule also advances after skipped steps, so they count as taken. Default: True.
        last_epoch: -1 (default): start a run. n >= 0: continue a run after n + 1 taken steps.

    Raises:
        ValueError, KeyError, TypeError: As in `WarmupLR`; nothing is changed.
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
        self.milestones = sorted(whole_steps(step, f"milestones[{i}]", 0) for i, step in enumerate(milestones))
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma={gamma}: give a number in (0, 1]")
        self.gamma = gamma
        super().__init__(optimizer, warmup_steps=warmup_steps, hold_on_skip=hold_on_skip, last_epoch=last_epoch)

    def decay(self, step: int) -> float:
        """Return the decay factor after ``step`` taken steps: gamma ** (number of milestones <= ``step``)."""
        return float(self.gamma ** sum(milestone <= step for milestone in self.milestones))


class PolynomialLR(WarmupLR):
    """Schedule with a linear warm-up, then a polynomial decay from the base rate to ``eta_min``.

        schedule = PolynomialLR(optimizer, total_steps=1000, warmup_steps=50, power=2.0)

    After t taken steps (steps that are not skipped) the decay factor (1 for the base rate, 0 for ``eta_min``) is:

    ```text
    decay(t) = (1 - x(t)) ** power
    x(t) = min(1, max(0, t - warmup_steps) / max(1, total_steps - warmup_steps))
    ```

    Args:
        total_steps: Number of taken steps in the run, >= 1, including the warm-up.
        power: Exponent > 0. Default 1: linear decay.
        eta_min: Final rate, not multiplied by a base rate; >= 0 and at most every base rate. Default: 0.
        optimizer: A `ParallelOptimizer` or a torch optimizer, whose param groups have the base rates.
        warmup_steps: Number of taken steps until the rate reaches the base rate, >= 0. Default 0: no warm-up.
        hold_on_skip: False: the schedule also advances after skipped steps, so they count as taken. Default: True.
        last_epoch: -1 (default): start a run. n >= 0: continue a run after n + 1 taken steps.

    Raises:
        ValueError, KeyError, TypeError: As in `WarmupLR`; nothing is changed.
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
        """Return the decay factor after ``step`` taken steps: (1 - x(step)) ** power."""
        return float((1 - progress(step, self.total_steps, self.warmup_steps)) ** self.power)


class LinearWarmupLR(PolynomialLR):
    """Schedule that rises linearly to the base rate, then decays linearly to 0.

        schedule = LinearWarmupLR(optimizer, total_steps=1000, warmup_steps=50)

    Args:
        total_steps: Number of taken steps (steps that are not skipped) in the run, >= 1, including the warm-up.
        optimizer: A `ParallelOptimizer` or a torch optimizer, whose param groups have the base rates.
        warmup_steps: Number of taken steps until the rate reaches the base rate, >= 0. Default 0: no warm-up.
        hold_on_skip: False: the schedule also advances after skipped steps, so they count as taken. Default: True.
        last_epoch: -1 (default): start a run. n >= 0: continue a run after n + 1 taken steps.

    Raises:
        ValueError, KeyError, TypeError: As in `WarmupLR`; nothing is changed.
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
    """Schedule with a linear warm-up, then a decay from the base rate to ``eta_min`` along half a cosine.

        schedule = CosineAnnealingLR(optimizer, total_steps=1000, warmup_steps=50, eta_min=1e-5)

    After t taken steps (steps that are not skipped) the decay factor (1 for the base rate, 0 for ``eta_min``) is:

    ```text
    decay(t) = (1 + cos(pi x(t))) / 2
    x(t) = min(1, max(0, t - warmup_steps) / max(1, total_steps - warmup_steps))
    ```

    Without warm-up, the rates up to t = total_steps equal those of torch's CosineAnnealingLR with
    ``T_max=total_steps``, except for rounding. After that, torch's rate rises again; the rate of this class does not.

    Args:
        total_steps: Number of taken steps in the run, >= 1, including the warm-up.
        eta_min: Final rate, not multiplied by a base rate; >= 0 and at most every base rate. Default: 0.
        optimizer: A `ParallelOptimizer` or a torch optimizer, whose param groups have the base rates.
        warmup_steps: Number of taken steps until the rate reaches the base rate, >= 0. Default 0: no warm-up.
        hold_on_skip: False: the schedule also advances after skipped steps, so they count as taken. Default: True.
        last_epoch: -1 (default): start a run. n >= 0: continue a run after n + 1 taken steps.

    Raises:
        ValueError, KeyError, TypeError: As in `WarmupLR`; nothing is changed.

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
        """Return the decay factor after ``step`` taken steps: (1 + cos(pi x)) / 2, with x = `progress` of the decay."""
        return (1 + math.cos(math.pi * progress(step, self.total_steps, self.warmup_steps))) / 2


# Wrapper for torch's schedules ----------------------------------------------------------------------------------------


class HoldOnSkip(LRScheduler):
    """Wrapper that does not advance a torch schedule if its `ParallelOptimizer` skipped the step.

        schedule = HoldOnSkip(OneCycleLR(optimizer, max_lr=0.1, total_steps=1000))

    `step` leaves the schedule unchanged in the middle of an accumulation window, and after a skipped optimizer step
    (for example because the gradient norm was not finite). On a GPU `step` does not wait for the device to decide
    whether the optimizer's step is skipped. The schedule advances later: before the optimizer's next `step`, or when
    `step`, `get_last_lr` or `state_dict` of this object is called, or the object is copied. Until then the param groups
    have the learning rates of the previous step. If a CUDA graph replays the optimizer's steps, `step` waits for the
    decision.

    Args:
        schedule: A torch schedule whose ``step`` needs no argument, created with the `ParallelOptimizer` (with a
            `Booster`: the optimizer that `boost` returned). Afterwards call ``step`` of the wrapper only. meshstep's
            own schedules do not need this wrapper.

    Raises:
        ValueError: The schedule's optimizer is not a `ParallelOptimizer`.
        TypeError: The schedule's ``step`` needs an argument, such as ``step(metrics)`` of `ReduceLROnPlateau`.

    Collectives: none. All ranks skip the same steps, so their schedules agree.
    Host synchronization: on a GPU, one per step.
    """

    def __init__(self, schedule: LRScheduler) -> None:
        # LRScheduler.__init__ is not called, because it would reset the rates to their initial values
        if not isinstance(schedule.optimizer, ParallelOptimizer):
            raise ValueError(
                f"{type(schedule).__name__} was created with a {type(schedule.optimizer).__name__}, which doesn't report "
                "skipped steps; create the schedule with the ParallelOptimizer"
            )
        required = [
            name
            for name, parameter in signature(schedule.step).parameters.items()
            if parameter.default is Parameter.empty
            and parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        ]
        if required:
            name = type(schedule).__name__
            raise TypeError(
                f"{name}.step needs {', '.join(required)}, and HoldOnSkip calls step() without arguments; call the step of "
                f"{name} yourself, after steps that were not skipped"
            )
        self.schedule, self.optimizer = schedule, schedule.optimizer
        self._hold = Hold(schedule.optimizer, schedule.step)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for copying and pickling, without the hooks on the optimizer.

        Host synchronization: on a GPU, one if a step decision is pending.
        """
        self._hold.settle()
        return {key: value for key, value in self.__dict__.items() if key != "_hold"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        assert isinstance(self.optimizer, ParallelOptimizer)
        self._hold = Hold(self.optimizer, self.schedule.step)

    def step(self) -> None:  # type: ignore[override]
        """Advance the wrapped schedule by one step, except in the middle of an accumulation window or after a skipped step.

        On a GPU the schedule advances later, when the host knows whether the step was skipped; see `HoldOnSkip`.

        Host synchronization: on a GPU, one if an earlier step decision is pending, or if a CUDA graph replayed the
        step.
        """
        self._hold.step()

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the learning rate of the next optimizer step, per param group.

        Host synchronization: on a GPU, one if a step decision is pending.
        """
        self._hold.settle()
        return self.schedule.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped schedule's state.

        Host synchronization: on a GPU, one if a step decision is pending.
        """
        self._hold.settle()
        return self.schedule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the wrapped schedule. If a step decision is pending, it is discarded."""
        self._hold.forget()
        self.schedule.load_state_dict(state_dict)


# Transfer of torch's schedules from a torch optimizer to the `ParallelOptimizer` that wraps it ------------------------


def follow(scheduler: LRScheduler, optimizer: ParallelOptimizer) -> None:
    """Replace a schedule's optimizer, a torch optimizer, by the `ParallelOptimizer` that wraps it; also in inner schedules.

    Without this, torch's schedules may warn that ``optimizer.step`` was not called, because a `ParallelOptimizer` does
    not call the wrapped optimizer's `step` in every step. After an error nothing is changed.
    """
    held = followers(scheduler, optimizer.optimizer)
    _StepNoted(optimizer)
    for item in held:
        item.optimizer = optimizer
        if isinstance(item, WarmupLR):
            item.watch(optimizer)


def followers(scheduler: LRScheduler, optimizer: Optimizer) -> list[LRScheduler]:
    """Return ``scheduler`` and all schedules inside it, for example in a `SequentialLR` or a `ChainedScheduler`."""
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(f"lr_scheduler is a {type(scheduler).__name__}; give an LRScheduler of torch or meshstep")
    if scheduler.optimizer is not optimizer:
        raise ValueError(
            f"{type(scheduler).__name__} was created with an optimizer of type {type(scheduler.optimizer).__name__} that "
            "is not the given one: create the schedule with the torch optimizer that you give to boost"
        )
    found = [scheduler]
    for value in vars(scheduler).values():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, LRScheduler):
                found += followers(item, optimizer)
    return found


class _StepNoted(LRScheduler):
    """Schedule that changes no learning rate.

    Its constructor makes torch's `LRScheduler` wrap ``optimizer.step``, so that the optimizer records whether it was
    stepped. Other schedules of this optimizer use this record to warn about a wrong order of the calls of `step`.
    """

    def step(self, epoch: int | None = None) -> None:
        """Do nothing."""
