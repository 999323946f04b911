"""What a step has decided, brought to where parameters are stepped: to the CPU too, if some are there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ...amp.by_bucket import holding
from ...amp.fp8.weights import forget_rounded
from .several import asks_other_ranks, parts_of
from .update import apply_update, steps_on_device


class Update:
    """One step's update; to be called for all that the param groups hold, or for one part after another.

    Args:
        optimizer, found_inf, factor: As for `apply_update`. Where these are on a CUDA device and some parameters are not,
            they are sent to the CPU at once: a fused optimizer would send them too, but read what has not arrived.

    Attributes:
        skipped: 0-dim float32: ``found_inf``.
    Collectives: none. Host reads: those of `apply_update`; and one wait, for these two numbers, before parameters on the
    CPU are stepped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, found_inf: Tensor, factor: Tensor | None) -> None:
        self.optimizer, self.skipped, self._decided = optimizer, found_inf, (found_inf, factor)
        self._sent: tuple[Tensor, torch.cuda.Event] | None = None
        self._here: tuple[Tensor, Tensor | None] | None = None
        if found_inf.is_cuda and self._some_are_on_the_cpu():
            both = torch.stack([found_inf.double(), found_inf.double() if factor is None else factor.double()])
            host = torch.empty(2, dtype=torch.float64, pin_memory=True)
            host.copy_(both, non_blocking=True)
            self._sent = host, torch.cuda.Event()
            self._sent[1].record(torch.cuda.current_stream(found_inf.device))

    def _some_are_on_the_cpu(self) -> bool:
        return any(param.is_cpu for group in self.optimizer.param_groups for param in group["params"])

    def __call__(self) -> None:
        forget_rounded()
        if self._sent is None:
            apply_update(self.optimizer, *self._decided)
            return
        groups = enumerate(self.optimizer.param_groups)
        places = [(index, at, param.is_cpu) for index, group in groups for at, param in enumerate(group["params"])]
        sides = {on_cpu: [place for *place, here in places if here == on_cpu] for *_, on_cpu in places}
        if len(sides) == 2 and steps_in_parts(self.optimizer):
            for on_cpu, of_side in sorted(sides.items()):  # the device first: nobody waits for it
                with only(self.optimizer, of_side):
                    self._apply(on_cpu)
        else:
            self._apply(True in sides)

    def _apply(self, on_cpu: bool) -> None:
        apply_update(self.optimizer, *(self._arrived() if on_cpu else self._decided))

    def _arrived(self) -> tuple[Tensor, Tensor | None]:
        if self._here is None:
            assert self._sent is not None, "they were sent where some parameters are on the CPU"
            (host, event), (found_inf, factor) = self._sent, self._decided
            event.synchronize()
            self._here = host[0].to(found_inf.dtype), None if factor is None else host[1].to(factor.dtype)
        return self._here


def steps_in_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether to step parts of what the param groups hold one after another is the same as to step all of it at once."""
    hooks = any(part._optimizer_step_pre_hooks or part._optimizer_step_post_hooks for part in parts_of(optimizer))
    late = any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups)
    whole = any(map(asks_other_ranks, parts_of(optimizer)))
    return steps_on_device(optimizer) and not hooks and not late and not whole


def only(optimizer: torch.optim.Optimizer, places: Sequence[Sequence[int]]) -> AbstractContextManager[None]:
    """With param groups that hold only these of their parameters, by group and position."""
    bucket: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
    for index, at in places:
        bucket[index].append(optimizer.param_groups[index]["params"][at])
    return holding(optimizer, bucket)
