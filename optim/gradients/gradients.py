"""The gradients that one plan speaks of: complete them, measure them, change them in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...parallel.layout.pieces import Region
from ...parallel.mesh.agreement import on_all_ranks
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..norm.global_norm import GlobalNorm, Level, Norms, Reduction, checked_norm_type, checked_reduction
from ..norm.plan import ReductionPlan
from ..norm.replicas import ReplicaCheck, ReplicaMismatchError
from ..norm.units import UnitDim, Units
from .in_place import is_complete, mark_complete, scale_gradients
from .kinds import check_kinds, nonfinite_names, poison_bad_kinds
from .sync import GradientSync


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


@dataclass(frozen=True)
class Needs:
    """What one measurement needs besides the total and the groups; the key under which its `GlobalNorm` is kept."""

    norm_type: float
    level: Level = "total"
    weights: bool = False
    unit_dim: UnitDim = 0

    def __hash__(self) -> int:
        return hash((self.norm_type, self.level, self.weights, repr(self.unit_dim)))


class Gradients:
    """A plan with the tensors that it is the plan of; made anew when parameters are added.

    Args:
        params: The tensors whose gradients are stepped with, in the order of the plan's entries.
        compared: For each of them the tensor whose copies must be equal.
        regions: For each of them which part of the logical tensor it is; None where pieces are of unequal sizes.
        plan: Agreed by all ranks.
        registry: The groups.
        measure: What is measured.
        sync: Completes the gradients of ``params``.
        early: Completes first those of the model's parameters that can be reduced while backward runs, if that is wanted.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        compared: Sequence[Tensor],
        regions: Sequence[Region | None],
        plan: ReductionPlan,
        registry: ProcessGroupRegistry,
        measure: Measure,
        sync: GradientSync,
        early: GradientSync | None = None,
    ) -> None:
        self.params, self.plan, self.registry, self.measure_how = list(params), plan, registry, measure
        self.early, self._sync = early, sync
        self._compared, self._regions = list(compared), list(regions)
        self._replicas = ReplicaCheck(plan) if measure.check_replicas else None
        self._measurers: dict[Needs, GlobalNorm] = {}
        self._units: Units | None = None
        self._checked_kinds = False

    def replan(self, plan: ReductionPlan) -> None:
        """The same plan, of which more is known now."""
        self.plan = plan
        self._measurers.clear()

    def complete_early(self, reduced: bool) -> None:
        """Reduce what can be reduced while backward runs, unless it was (``reduced``); before anybody else takes, or looks
        at, the gradients of the model's parameters: a rank has the same order of collectives whether it ran a backward or
        not. Collectives: those of `GradientSync`."""
        if self.early is not None:
            self.early.finish() if reduced else self.early()

    def complete(self, averaged: bool = True) -> TypeError | None:
        """Reduce the gradients, or those that are left; once for each window.

        Args:
            averaged: False where something else was to average over the data axes, but has not.
        Returns:
            What is wrong with the gradients of this rank alone, after all ranks have been served.
        Raises:
            TypeError: On every rank, the first time, where on any a gradient is sparse or complex.
        Collectives: those of `GradientSync`; the first time an object all-gather.
        """
        problem = None
        if self._checked_kinds:
            grads = (param.grad for param in self.params)
            kinds = {(grad.layout, grad.dtype) for grad in grads if grad is not None}
            if any(layout is not torch.strided or dtype.is_complex for layout, dtype in kinds):
                problem = poison_bad_kinds(self.params, self.plan.entries)
        else:
            on_all_ranks(lambda: check_kinds(self.params, self.plan.entries), self.registry)
            self._checked_kinds = True
        if not averaged:
            GradientSync(self.params, self.plan, self.registry)()
        else:
            self._sync()
        return problem

    def measure(self, needs: Needs, extra: Tensor) -> Norms:
        """The norms of the gradients as they are; ``Norms.extra`` is the sum of all ranks' ``extra``.

        Raises:
            ReplicaMismatchError: On every rank, if copies are compared and differ.
        Collectives: one.
        """
        if needs not in self._measurers:
            self._measurers[needs] = self._measurer(needs)
        self._units = self._measurers[needs].units
        gradients = [param.grad for param in self.params]
        slots = [extra]
        if self._replicas:
            slots.append(self._replicas.slots(self._compared, gradients, self.registry.device))
        weights = self.params if needs.weights else ()
        norms = self._measurers[needs](gradients, torch.cat(slots), weights)
        if self._replicas and (mismatches := self._replicas.mismatches(norms.extra[len(extra) :])):
            raise ReplicaMismatchError(mismatches)
        return norms._replace(extra=norms.extra[: len(extra)])

    def _measurer(self, needs: Needs) -> GlobalNorm:
        units = Units.of(self.plan, self._regions, needs.unit_dim) if needs.level == "units" else None
        return GlobalNorm(
            self.plan,
            self.registry,
            needs.norm_type,
            self.measure_how.reduction,
            self.measure_how.per_parameter or needs.level == "parameters",
            units,
            needs.level if needs.weights else None,
        )

    def multiply_(self, level: Level, factors: Tensor) -> None:
        """Multiply the gradients by factors at that level, in place; units are those that were measured last."""
        # All at once: gradients that are views of one buffer are written to together, as far as torch can tell.
        complete = [param for param in self.params if is_complete(param)]
        self._multiply_(level, factors)
        for param in complete:
            mark_complete(param)

    def _multiply_(self, level: Level, factors: Tensor) -> None:
        if level == "total":
            scale_gradients(self.params, factors)
        elif level == "units":
            assert self._units is not None, "units are measured before they are multiplied"
            for index, param in enumerate(self.params):
                if param.grad is not None:
                    self._units.multiply_(index, param.grad, factors)
        else:
            slots = [entry.group for entry in self.plan.entries] if level == "groups" else self.plan.parameter_slots
            together: dict[int, list[Tensor]] = {}
            for slot, param in zip(slots, self.params, strict=True):
                together.setdefault(slot, []).append(param)
            for slot, params in together.items():
                scale_gradients(params, factors[slot])

    def nonfinite_names(self) -> list[str]:
        """The parameters whose gradients are not finite on any rank. Collectives, host reads: some."""
        return nonfinite_names(self.params, self.plan.entries, self.registry)
