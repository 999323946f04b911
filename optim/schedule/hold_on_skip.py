"""Torch's own schedules, held where the optimizer did not step."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ..parallel_optimizer import ParallelOptimizer
from .hold import Hold


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
