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

from ..parallel_optimizer import ParallelOptimizer
from .taken_steps import HostCopy, TakenSteps, hook_weakly


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
        self._verdict: HostCopy | None = None  # of the last period, until it has been read
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
        self._verdict, self._has_moved = HostCopy(skipped), False
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
