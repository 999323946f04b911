"""Whether an optimizer really stepped since a schedule last moved, found out without making the host wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod, finalize

import torch
from torch import Tensor

from ..parallel_optimizer import ParallelOptimizer


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


class HostCopy:
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
            self._arrived.record()

    @property
    def may_wait(self) -> bool:
        """Not while a CUDA graph is captured, which forbids to wait for an event."""
        return self._arrived is None or not torch.cuda.is_current_stream_capturing()

    def read(self) -> bool:
        """Its value. Host reads: this one; it waits until the device has computed it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._flag)
