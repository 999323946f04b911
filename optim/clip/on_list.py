"""A rule that speaks of single parameters, on a list of them that is no optimizer's: ranks agree once what is in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...amp.capture import is_captured
from ...parallel.interop.local import local_parameters
from ...parallel.layout.pieces import Region
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..norm.agreement import agreed
from ..norm.measure import Measure
from ..norm.norms import Reduction
from ..norm.plan import ReductionPlan
from ..norm.stats import GradStats
from .decide import Clipping
from .given import planned_for
from .listed import Listed, check_gradients
from .state import ClipState
from .thresholds import AgreedThresholds
from .verdict import Divisor


class OnList:
    """Measures the gradients of one list, in one collective, and applies a rule to them.

    Raises, collectives: where it is made, as `agreed`, on every rank.
    """

    def __init__(
        self, listed: Listed, registry: ProcessGroupRegistry, clip: ClipState, norm_type: float, reduction: Reduction
    ) -> None:
        def checked_plan() -> ReductionPlan:
            check_gradients(listed, registry)
            return listed.plan(registry)

        plan = planned_for(clip.rule, agreed(checked_plan, registry, names=True), registry)
        clip.bind(plan.parameter_names)
        self.registry, self.key = registry, _key(listed)
        self._annotations = listed.annotations  # their ids are in the key
        no_groups: Any = SimpleNamespace(param_groups=[])
        measure = Measure(norm_type, reduction, check_replicas=False)
        self.clipping = Clipping(
            listed.params, _regions(plan), plan, registry, measure, AgreedThresholds((), True), no_groups
        )

    def __call__(self, clip: ClipState, params: list[Tensor], listed: Listed) -> GradStats:
        """Clip in place, and what was measured. Collectives: one. Host reads: none.

        Args:
            clip: That of the first call.
            params: As they were given, DTensors among them.
            listed: The same, taken apart.
        Raises:
            ValueError, TypeError: On the rank that has another list, or gradients that can't be measured; on the others the
                step is one that is skipped.
        """
        try:
            check_gradients(listed, self.registry)
            if _key(listed) != self.key:
                raise ValueError(
                    f"{type(clip.rule).__name__} speaks of single parameters, and this is another list of them than in the "
                    "first call: give the same one in every call, or make a ClipState for each list"
                )
        except (ValueError, TypeError):
            self._clip(clip, [torch.empty(0)] * len(self._annotations), wrong=True)
            raise
        with local_parameters(params, self.registry.topology) as local:
            return self._clip(clip, local, wrong=False)

    def _clip(self, clip: ClipState, params: list[Tensor], wrong: bool) -> GradStats:
        slots = torch.full((1,), float(wrong), dtype=torch.float64, device=self.registry.device)
        self.clipping.params = params
        divisor = Divisor(slots, is_missing=lambda totals: totals[0] > 0)
        return self.clipping(clip, divisor, now=True, captured=is_captured()).stats


def _key(listed: Listed) -> tuple[object, ...]:
    return *map(id, listed.annotations), *listed.sizes


def _regions(plan: ReductionPlan) -> list[Region | None]:
    """For each entry which part of the logical tensor it is."""
    return [
        None
        if entry.full_shape is None
        else Region.of_shard(entry.full_shape, entry.shape, entry.spec, plan.topology, plan.coordinate, entry.name)
        for entry in plan.entries
    ]
