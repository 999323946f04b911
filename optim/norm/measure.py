"""What is measured, as the caller says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .global_norm import Reduction, checked_norm_type, checked_reduction


@dataclass(frozen=True)
class Measure:
    """What is measured of the gradients in every step, and how.

    Args:
        norm_type: p >= 1, or inf.
        reduction: ``"packed"`` or ``"per_group"``; see `GlobalNorm`.
        per_parameter: Put the norm of every logical parameter into GradStats.
        check_replicas: Compare the bits of all copies, of parameters and of their completed gradients, and raise
            `ReplicaMismatchError` on every rank, before anything is stepped, where they differ. ``"first"``: in the first
            step, and in the first after parameters were added; it finds other seeds on replicas, a forgotten all-reduce, a
            split weight declared ``P()``, other batches on tensor peers. True: before every step, for debugging; it reads
            everything once more and costs one host read. False: never, where copies may differ by rounding (which
            `align_copies` undoes from time to time).
    """

    norm_type: float = 2.0
    reduction: Reduction = "packed"
    per_parameter: bool = False
    check_replicas: bool | Literal["first"] = "first"

    def check(self) -> None:
        """Raise ValueError for arguments that are out of range."""
        checked_norm_type(self.norm_type)
        checked_reduction(self.reduction)
        if self.check_replicas not in (True, False, "first"):
            raise ValueError(f"check_replicas={self.check_replicas!r}: give 'first', True or False")
