"""What is measured, and asked, in the one collective of a step, as the caller says it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from .norms import Reduction, checked_norm_type, checked_reduction
from .numbers import is_whole

Commit = Callable[[], bool | Tensor]


def check_every(every: object, said: str) -> None:
    """Raise ValueError where it is no whole number of steps >= 1; ``said``: as it was given."""
    if not is_whole(every, 1):
        raise ValueError(f"{said}: give a whole number of steps >= 1")


@dataclass(frozen=True)
class Fingerprints:
    """Watch the copies over a long run, against silent corruption of data: in the first step and in every so-many-th.

    Weights (with masters those too), optimizer states with their step counts, and completed gradients of copies are
    compared bit by bit: one flipped bit is always seen, anything else but once in 2^32. Nobody waits for it: where copies
    differ, that step and all that follow are skipped on every rank, and 16 steps later, or in `ParallelOptimizer.poll`,
    `ReplicaMismatchError` is raised on every rank. It names parameter, state, axis and ranks; weights and states are as
    they were when they were compared. Call `poll` before a checkpoint and at the end of training.

    What has no copy can't be compared: split weights on a mesh without data axes, pieces of `Sharded` states (the whole
    weights are), anything of one process; a warning says so where nothing has. A gradient that was wrong before it was
    averaged is equally wrong in all copies, and with masters a flipped bit in a half-precision weight lives for one step.
    What isn't a tensor in the optimizer's ``state`` isn't seen. Copies must step by the same bits: not where kernels add
    in no fixed order. Where `Offloaded` may step one copy on the CPU and one on the device, it is refused.

    Args:
        every: >= 1: that many steps apart. A comparison reads all of it once more; six numbers a parameter and mesh axis
            travel in the collective that measures.
    """

    every: int = 100

    def check(self) -> None:
        """Raise ValueError if it is out of range."""
        check_every(self.every, f"Fingerprints(every={self.every!r})")


@dataclass(frozen=True)
class Measure:
    """What ranks find out together in every step, in one collective: norms of the gradients, and what else is asked.

    Args:
        norm_type: p >= 1, or inf.
        reduction: ``"packed"`` or ``"per_group"``; see `GlobalNorm`.
        per_parameter: Put the norm of every logical parameter into GradStats.
        check_replicas: Compare the bits of all copies, of parameters and of their completed gradients, and raise
            `ReplicaMismatchError` on every rank, before anything is stepped, where they differ. ``"first"``: in the first
            step, and in the first after parameters were added; it finds other seeds on replicas, a forgotten all-reduce,
            a split weight declared ``P()``, other batches on tensor peers, and a replica declared sharded (ValueError).
            True: before every step, for debugging; it reads everything once more and costs one host read. False: never,
            where copies may differ by rounding (which `align_copies` undoes from time to time). `Fingerprints`: as
            "first", and every so many steps from there on, optimizer states too, without a host read.
        commit: Asked on each rank, once before each update, when gradients are complete: "did all come through?" It returns
            a bool, or a 0-dim bool tensor that the host does not read. Where any rank says False all skip, which is no
            overflow to the loss scale. What it raises is a False to the others, and is raised on its rank after the step.
    """

    norm_type: float = 2.0
    reduction: Reduction = "packed"
    per_parameter: bool = False
    check_replicas: bool | Literal["first"] | Fingerprints = "first"
    commit: Commit | None = None

    def check(self) -> None:
        """Raise ValueError for arguments that are out of range, TypeError for a ``commit`` that can't be called."""
        checked_norm_type(self.norm_type)
        checked_reduction(self.reduction)
        if isinstance(self.check_replicas, Fingerprints):
            self.check_replicas.check()
        elif self.check_replicas not in (True, False, "first"):
            raise ValueError(
                f"check_replicas={self.check_replicas!r}: give 'first', True, False or Fingerprints(every=100)"
            )
        if self.commit is not None and not callable(self.commit):
            raise TypeError(f"commit={self.commit!r}: give a function without arguments that returns True or False")
