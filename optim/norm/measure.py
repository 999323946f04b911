"""What is measured, as the caller says it."""

from __future__ import annotations

from dataclasses import dataclass

from .global_norm import Reduction, checked_norm_type, checked_reduction


@dataclass(frozen=True)
class Measure:
    """What is measured of the gradients in every step, and how.

    Args:
        norm_type: p >= 1, or inf.
        reduction: ``"packed"`` or ``"per_group"``; see `GlobalNorm`.
        per_parameter: Put the norm of every logical parameter into GradStats.
        check_replicas: Compare the bits of all replicas before every step and raise `ReplicaMismatchError`, on every rank,
            where they differ. For debugging: it reads everything once more and costs one host read a step.
    """

    norm_type: float = 2.0
    reduction: Reduction = "packed"
    per_parameter: bool = False
    check_replicas: bool = False

    def check(self) -> None:
        """Raise ValueError for arguments that are out of range."""
        checked_norm_type(self.norm_type)
        checked_reduction(self.reduction)
