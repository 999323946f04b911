"""Holding of a learning-rate schedule while the optimizer takes no step.

A schedule moves once per call of its `step`, unless the optimizer took no step since the last call. It holds in the
middle of an accumulation window, and after a skipped step. The decision to skip is computed on the device, and the host
must not wait for it::

    host     step k      schedule.step()             step k + 1             schedule.step()
    device   ...step k computes... decision k                 ...step k + 1 computes... decision k + 1
                                  ^ being copied          ^ read here, before the rate is used

On a CPU the decision is known at once, and nothing is deferred.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any
from weakref import WeakMethod, finalize

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ..parallel_optimizer import ParallelOptimizer

# Detection of taken steps without host synchronization ----------------------------------------------------------------


def hook_weakly(register: Callable[[Callable[..., None]], Any], method: Callable[..., None]) -> None:
    """Register a bound method as a step hook that does not keep its object alive, and is removed with the object.

    Args:
        register: ``register_step_pre_hook`` or ``register_step_post_hook`` of an optimizer.
        method: The bound method.
    """
    owner: Any = method.__self__  # type: ignore[attr-defined]
    finalize(owner, register(weakly(method)).remove).atexit = False


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a bound method without keeping its object alive.

    It does nothing after the object is gone.
    """
    weak = WeakMethod(method)

    def call(*args: object) -> None:
        alive = weak()
        if alive is not None:
            alive(*args)

    return call


class TakenSteps:
    """Observes through step hooks whether a `ParallelOptimizer` took or skipped its steps.

    If `step` ran without its hooks (a replayed CUDA graph), the last decision tensor has the value that the replay
    wrote.

    Attributes:
        called: True if `step` was called since `start_over`.
        in_window: True if all calls of `step` since `start_over` were in the middle of an accumulation window, or
            raised before they measured anything.
        all_skipped: 0-dim float32 on the device: 1 if every window that ended since `start_over` was skipped. If none
            ended, the value of the last period in which one did. None before the first window.
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
        """Return True if `step` was called since `start_over`, but ended no window."""
        self._look()  # a call that raised did not run the post hook
        return self.called and not self._ended

    def start_over(self) -> None:
        """Begin a new period; the attributes then describe later calls only."""
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


class FlagCopy:
    """A flag that is being copied from the device to the host.

    Attributes:
        is_here: True if reading it does not wait.
    """

    def __init__(self, flag: Tensor) -> None:
        self.is_here = not flag.is_cuda
        # torch pins the memory of an asynchronous copy
        self._flag = flag.to("cpu", non_blocking=flag.is_cuda)
        self._arrived: torch.cuda.Event | None = None
        if flag.is_cuda:
            self._arrived = torch.cuda.Event()
            # Not the stream of the current device, which may be another device than the flag's.
            self._arrived.record(torch.cuda.current_stream(flag.device))

    @property
    def may_wait(self) -> bool:
        """Return False while a CUDA graph is captured, which forbids waiting for an event."""
        return self._arrived is None or not torch.cuda.is_current_stream_capturing()

    def read(self) -> bool:
        """Return the value.

        Host synchronization: waits until the device has computed it.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._flag)


# Hold -----------------------------------------------------------------------------------------------------------------


class Hold:
    """Calls ``move`` once per call of `step` that follows a step taken by the optimizer.

    While the decision is still being copied, a schedule with ``take_back`` moves at once, and `settle` undoes the move
    if the step was skipped. A schedule without it moves in `settle`, which runs before the optimizer's next `step`. If
    no hook of the optimizer ran since the last call (a replayed CUDA graph), that may be too late, so `step` waits for
    the decision.

    Args:
        optimizer: The optimizer; it keeps neither this object nor the schedule alive.
        move: Moves the schedule by one step.
        take_back: Undoes the last move. None: not possible.
        hold_on_skip: False: skipped steps count too, without host synchronization. Default: True.

    Collectives: none; all ranks see the same skipped steps.
    Host synchronization: with ``hold_on_skip``, one per step.
    """

    def __init__(
        self,
        optimizer: ParallelOptimizer,
        move: Callable[[], None],
        take_back: Callable[[], None] | None = None,
        *,
        hold_on_skip: bool = True,
    ) -> None:
        self._move, self._take_back, self._hold_on_skip = move, take_back, hold_on_skip
        self._verdict: FlagCopy | None = None  # decision of the last period, until it is read
        self._has_moved = False  # whether the schedule moved before the decision was read
        self._taken = TakenSteps(optimizer)
        hook_weakly(optimizer.register_step_pre_hook, self._before_step)

    def step(self) -> None:
        """Move or hold the schedule.

        Host synchronization: see the class.
        """
        if self._taken.in_window:
            return
        self.settle()
        skipped, called = self._taken.all_skipped, self._taken.called
        self._taken.start_over()
        if skipped is None or not self._hold_on_skip:
            self._move()
            return
        self._verdict, self._has_moved = FlagCopy(skipped), False
        if self._verdict.is_here or (self._take_back is None and not called):
            self.settle()
        elif self._take_back is not None:
            self._has_moved = True
            self._move()

    def settle(self) -> None:
        """Read a pending decision, and correct the learning rates if necessary.

        Host synchronization: one if a decision is pending.
        """
        verdict, self._verdict = self._verdict, None
        if verdict is None:
            return
        skipped = verdict.read()
        if skipped and self._has_moved:
            assert self._take_back is not None
            self._take_back()
        elif not skipped and not self._has_moved:
            self._move()

    def forget(self) -> None:
        """Drop a pending decision, because the schedule was set to another position."""
        self._verdict = None

    def start_over(self) -> None:
        """Drop a pending decision and begin a new period, because the schedule was set to another position."""
        self.forget()
        self._taken.start_over()

    def _before_step(self, *_: object) -> None:
        if self._verdict is not None and self._verdict.may_wait:
            self.settle()


# Wrapper for torch's schedules ----------------------------------------------------------------------------------------


class HoldOnSkip(LRScheduler):
    """Wrapper that lets any torch schedule move only when its `ParallelOptimizer` took a step.

        schedule = HoldOnSkip(OneCycleLR(optimizer, max_lr=0.1, total_steps=1000))

    The schedule holds in the middle of an accumulation window, and when a step was skipped because the gradient norm
    was not finite. On a GPU the host does not wait for that decision: the schedule moves before the optimizer's next
    `step`, or when `get_last_lr` or `state_dict` is called. Until then the param groups have the learning rates of the
    previous step. If a CUDA graph replays the steps, `step` waits.

    Args:
        schedule: A torch schedule whose ``step`` takes no argument, created with the `ParallelOptimizer` (the one that
            `boost` returned if you use a `Booster`). meshstep's schedules hold by themselves and are not supported.
            Call ``step`` of the wrapper only.

    Raises:
        ValueError: The schedule's optimizer is no `ParallelOptimizer`.
        TypeError: The schedule's ``step`` needs an argument, as that of `ReduceLROnPlateau` does.

    Collectives: none; all ranks see the same skipped steps, so their schedules agree.
    Host synchronization: one per step.
    """

    def __init__(self, schedule: LRScheduler) -> None:
        # torch's constructor is not called, because it would reset the rates to their initial values
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
        """Return the state for copies and pickles.

        Host synchronization: one if a decision is pending.
        """
        self._hold.settle()
        return {key: value for key, value in self.__dict__.items() if key != "_hold"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        assert isinstance(self.optimizer, ParallelOptimizer)
        self._hold = Hold(self.optimizer, self.schedule.step)

    def step(self) -> None:  # type: ignore[override]
        """Move by one step if the optimizer took a step since the last call."""
        self._hold.step()

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the learning rate of the next step, per param group.

        Host synchronization: one if a decision is pending.
        """
        self._hold.settle()
        return self.schedule.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped schedule's state.

        Host synchronization: one if a decision is pending.
        """
        self._hold.settle()
        return self.schedule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the wrapped schedule."""
        self._hold.forget()
        self.schedule.load_state_dict(state_dict)
