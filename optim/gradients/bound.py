"""The gradients that one plan speaks of: complete them, measure them, change them in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...parallel.mesh.agreement import on_all_ranks
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..clip.decision import Decision
from ..clip.functional import clamp_gradients, scale_gradients
from ..norm.global_norm import GlobalNorm, Norms, Reduction
from ..norm.plan import ReductionPlan
from ..norm.replicas import ReplicaCheck, ReplicaMismatchError
from ..step.window import weight_slots
from .checks import check_kinds, nonfinite_names, poison_bad_kinds
from .sync import GradientSync


class BoundGradients:
    """A plan with the tensors that it is the plan of; made anew when parameters are added.

    Args:
        params: The tensors whose gradients are stepped with, in the order of the plan's entries.
        compared: For each of them the tensor whose copies must be equal.
        plan: Agreed by all ranks.
        registry: The groups.
        average_data: False where something else averages over the data axes.
        reduction, per_parameter_norms: As for `GlobalNorm`.
        check_replicas: Compare copies of parameters and gradients whenever something is measured.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        compared: Sequence[Tensor],
        plan: ReductionPlan,
        registry: ProcessGroupRegistry,
        *,
        average_data: bool,
        reduction: Reduction,
        per_parameter_norms: bool,
        check_replicas: bool,
    ) -> None:
        self.params, self.plan, self.registry = list(params), plan, registry
        self._compared = list(compared)
        self.reduction, self.per_parameter_norms = reduction, per_parameter_norms
        self._sync = GradientSync(self.params, plan, registry, average_data)
        self._replicas = ReplicaCheck(plan) if check_replicas else None
        self._measurers: dict[float, GlobalNorm] = {}
        self._checked_kinds = False

    def complete(self, averaged: bool = True) -> TypeError | None:
        """Reduce the gradients; once for each backward.

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
            problem = poison_bad_kinds(self.params, self.plan.entries)
        else:
            on_all_ranks(lambda: check_kinds(self.params, self.plan.entries), self.registry)
            self._checked_kinds = True
        sync = self._sync if averaged else GradientSync(self.params, self.plan, self.registry)
        sync()
        return problem

    def measure(self, norm_type: float, weight: float | Tensor) -> Norms:
        """The norms of the gradients as they are; ``extra`` has the sum of all ranks' ``weight``.

        Raises:
            ReplicaMismatchError: On every rank, if copies are compared and differ.
        Collectives: one.
        """
        if norm_type not in self._measurers:
            self._measurers[norm_type] = GlobalNorm(
                self.plan, self.registry, norm_type, self.reduction, self.per_parameter_norms
            )
        gradients = [param.grad for param in self.params]
        extra = [weight_slots(weight, self.registry)]
        if self._replicas:
            extra.append(self._replicas.slots(self._compared, gradients, self.registry.device))
        norms = self._measurers[norm_type](gradients, torch.cat(extra))
        if self._replicas and (mismatches := self._replicas.mismatches(norms.extra[len(extra[0]) :])):
            raise ReplicaMismatchError(mismatches)
        return norms._replace(extra=norms.extra[: len(extra[0])])

    def apply(self, decision: Decision, clip_value: float | None = None) -> None:
        """Multiply the gradients by the decision's factors, unless they are not finite, and clamp them."""
        if decision.group_factors is not None:
            for group, factor in enumerate(decision.group_factors):
                entries = zip(self.params, self.plan.entries, strict=True)
                scale_gradients([param for param, entry in entries if entry.group == group], factor)
        elif decision.factor is not None:
            scale_gradients(self.params, decision.factor)
        if clip_value is not None:
            clamp_gradients(self.params, clip_value)

    def nonfinite_names(self) -> list[str]:
        """The parameters whose gradients are not finite on any rank. Collectives, host reads: some."""
        return nonfinite_names(self.params, self.plan.entries, self.registry)
