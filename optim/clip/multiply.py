"""Multiply gradients by the factors of a rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..gradients.in_place import scale_each
from ..norm.named import Named
from ..norm.norms import Level
from ..norm.plan import ReductionPlan
from ..norm.units import Units


def multiply_(
    gradients: Sequence[Tensor | None],
    level: Level,
    factors: Tensor,
    plan: ReductionPlan,
    units: Units | None = None,
    named: Named | None = None,
) -> None:
    """Multiply gradients, one for each entry of the plan, by factors at that level, in place. Host reads: none."""
    if level == "total":
        scale_each(gradients, factors)
    elif level == "units" and units is not None:
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                units.multiply_(index, gradient, factors)
    else:
        if torch.float64 not in {gradient.dtype for gradient in gradients if gradient is not None}:
            factors = factors.float()  # once, and not for each
        together: dict[int, list[Tensor | None]] = {}
        for slot, gradient in zip(_slots(level, plan, named), gradients, strict=True):
            together.setdefault(slot, []).append(gradient)
        for slot, members in together.items():
            scale_each(members, factors[slot])


def _slots(level: Level, plan: ReductionPlan, named: Named | None) -> Sequence[int]:
    """For each entry of the plan the place of its factor."""
    if level == "groups":
        return [entry.group for entry in plan.entries]
    if named is not None:
        return [named.groups[slot] for slot in plan.parameter_slots]
    return plan.parameter_slots
