"""When a schedule moves: once for each of its `step` calls, unless the optimizer took no step since the last one.

It holds in the middle of an accumulation window, and where the norm was not finite and the update was skipped. Only the
device knows the latter at first, and the host shall not wait for it there::

    host     step k      schedule.step()             step k + 1             schedule.step()
    device   ...step k computes... verdict k                  ...step k + 1 computes... verdict k + 1
                                  ^ on its way            ^ read here, before the rate is used

On the CPU the verdict is there at once, and nothing is deferred.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod, finalize

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ..parallel_optimizer import ParallelOptimizer

# Whether an optimizer really stepped since a schedule last moved, found out without making the host wait --------------


def hook_weakly(register: Callable[[Callable[..., None]], Any], method: Callable[..., None]) -> None:
    """Register a bound method as a step hook that doesn't keep its object alive, and goes when that does.

    Args:
        register: Of an optimizer, ``register_step_pre_hook`` or ``register_step_post_hook``.
    """
    owner: Any = method.__self__  # type: ignore[attr-defined]
    finalize(owner, register(weakly(method)).remove).atexit = False


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A call of a bound method that doesn't keep its object alive; nothing where that is gone."""
    weak = WeakMethod(method)

    def call(*args: object) -> None:
        alive = weak()
        if alive is not None:
            alive(*args)

    return call


class TakenSteps:
    """Watches a `ParallelOptimizer` by its step hooks: which of its calls ended a window, and were all of them skipped?

    Where `step` ran without its hook (a replayed CUDA graph) the last verdict tensor holds what the replay wrote.

    Attributes:
        called: `step` was called since `start_over`.
        in_window: `step` was called since `start_over`, but only in the middle of accumulation windows, or it raised before
            it had measured anything.
        all_skipped: 0-dim float32 on the device: 1 when every window that ended since `start_over` was skipped (or, when
            none ended, in the last period in which one did). None before the first.
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
        self._look()  # a call that raised has not come to its post hook
        return self.called and not self._ended

    def start_over(self) -> None:
        """Begin a new period: what is asked from now on is about calls from now on."""
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
    """A flag on its way from the device to the host.

    Attributes:
        is_here: Reading it waits for nothing.
    """

    def __init__(self, flag: Tensor) -> None:
        self.is_here = not flag.is_cuda
        # Pinned by torch where it is asynchronous.
        self._flag = flag.to("cpu", non_blocking=flag.is_cuda)
        self._arrived: torch.cuda.Event | None = None
        if flag.is_cuda:
            self._arrived = torch.cuda.Event()
            # Not the stream of the current device, which may be another device than the flag's.
            self._arrived.record(torch.cuda.current_stream(flag.device))

    @property
    def may_wait(self) -> bool:
        """Not while a CUDA graph is captured, which forbids to wait for an event."""
        return self._arrived is None or not torch.cuda.is_current_stream_capturing()

    def read(self) -> bool:
        """Its value. Host reads: this one; it waits until the device has computed it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._flag)


# Hold -----------------------------------------------------------------------------------------------------------------


class Hold:
    """Calls ``move`` once for each call of `step` that follows a step which the optimizer has taken.

    Where the verdict is still on its way, a schedule that can take a move back moves at once, as if the step had been
    taken, and `settle` may take it back. One that can't moves in `settle`, which is called before the optimizer's next
    `step`; where no hook of it ran since the last call (a replayed CUDA graph), that may be too late, so `step` waits.

    Args:
        optimizer: Whose steps count; it does not keep this object, nor the schedule, alive.
        move: Moves the schedule by one.
        take_back: Undoes the last move; None where that can't be done.
        hold_on_skip: False: skipped steps count too, and nothing reads the host.
    Collectives: none; all ranks find the same steps skipped. Host reads: one flag a step, with ``hold_on_skip``.
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
        self._verdict: FlagCopy | None = None  # of the last period, until it has been read
        self._has_moved = False  # as if that verdict were "taken"
        self._taken = TakenSteps(optimizer)
        hook_weakly(optimizer.register_step_pre_hook, self._before_step)

    def step(self) -> None:
        """The schedule's `step`. Host reads: as the class says."""
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
        """Make the rates those that hold for sure. Host reads: one flag, where it has not been read yet."""
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
        """Drop a verdict that has not been read yet: the schedule was put elsewhere."""
        self._verdict = None

    def start_over(self) -> None:
        """The schedule was put elsewhere, and moves from there on by what the optimizer does from now on."""
        self.forget()
        self._taken.start_over()

    def _before_step(self, *_: object) -> None:
        if self._verdict is not None and self._verdict.may_wait:
            self.settle()


# Torch's own schedules, held where the optimizer did not step ---------------------------------------------------------


class HoldOnSkip(LRScheduler):
    """A schedule that moves only where its `ParallelOptimizer` has stepped, whatever schedule it is.

        schedule = HoldOnSkip(OneCycleLR(optimizer, max_lr=0.1, total_steps=1000))

    It holds in the middle of an accumulation window, and when the step was skipped because the norm was not finite.
    On a GPU the host does not wait for that verdict: the schedule moves before the optimizer's next `step`, or when
    `get_last_lr` or `state_dict` is called, and until then the param groups have the rates of the step before. Where
    steps are replayed by a CUDA graph, `step` waits.

    Args:
        schedule: Any torch schedule whose ``step`` takes no argument, made on the `ParallelOptimizer` (or, with a
            `Booster`, as `boost` returned it); not one of meshstep's, which hold by themselves. Step this one only.
    Raises:
        ValueError: Its optimizer is no `ParallelOptimizer`, which alone says what it skipped.
    Collectives: none; all ranks find the same steps skipped, so their schedules agree. Host reads: one flag a step.
    """

    def __init__(self, schedule: LRScheduler) -> None:
        # Not torch's constructor, which would move the rates to their start again: the schedule did that in its own.
        if not isinstance(schedule.optimizer, ParallelOptimizer):
            raise ValueError(
                f"{type(schedule).__name__} is of a {type(schedule.optimizer).__name__}, which doesn't say whether it "
                "skipped a step; make the schedule on the ParallelOptimizer"
            )
        self.schedule, self.optimizer = schedule, schedule.optimizer
        self._hold = Hold(schedule.optimizer, schedule.step)

    def __getstate__(self) -> dict[str, Any]:
        """For copies, and pickle. Host reads: one flag, where it has not been read yet."""
        self._hold.settle()
        return {key: value for key, value in self.__dict__.items() if key != "_hold"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        assert isinstance(self.optimizer, ParallelOptimizer)
        self._hold = Hold(self.optimizer, self.schedule.step)

    def step(self) -> None:  # type: ignore[override]
        """Move by one, if the optimizer has stepped since the last call; see the class."""
        self._hold.step()

    def get_last_lr(self) -> list[float | Tensor]:
        """By param group: the rate that the next step has. Host reads: one flag, where it has not been read yet."""
        self._hold.settle()
        return self.schedule.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The schedule's own. Host reads: one flag, where it has not been read yet."""
        self._hold.settle()
        return self.schedule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from there, as the schedule itself does it."""
        self._hold.forget()
        self.schedule.load_state_dict(state_dict)
