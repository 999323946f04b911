"""Run a reduction plan: local powers -> one packed all-reduce -> global norms.

    total_norm = (sum over param groups of sum over their gradients of sum of |g|^p)^(1/p)

The packed vector holds one power per param group. On request it also holds one per parameter or unit, and powers of the
weights. Each shard's power is divided by its replication factor. The length of the vector and the ranks of the collective
are equal on all ranks, whichever shards a rank holds. A NaN or inf in any gradient makes the sum NaN or inf, so the
overflow flag needs no slot.

For p = inf, a MAX all-reduce would lose a NaN on some backends. For a high p, the powers are out of range. In both cases
one all-gather collects norms, and every rank combines them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.mesh.process_group_collectives import all_gather_flat
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..kernels.device_constants import Constants
from .groupings import Units
from .measure import Level, Norms, Reduction, checked_norm_type, checked_reduction
from .plan import ReductionPlan
from .powers import HIGH, accumulation_dtype, are_alike, local_powers, p_norm


class GlobalNorm:
    """Computes the global norms of the gradients of one plan.

        norm = GlobalNorm(optimizer.plan, optimizer.registry)
        norms = norm([row.grad_tensor.grad for row in optimizer.pieces()])

    Args:
        plan: The reduction plan. All ranks must agree on it (`norm.plan_agreement.agree`) for ``reduction="per_group"`` and
            ``per_parameter=True``, whose collectives depend on it.
        registry: The process groups.
        norm_type: p >= 1, or inf. Default: 2.
        reduction: ``"packed"`` (default): one all-reduce over all ranks (one all-gather for p >= `HIGH`). ``"per_group"``:
            one all-reduce per bucket over exactly its axes, and one all-reduce of the overflow flag over all ranks.
        per_parameter: True: compute the norm of each logical parameter too. Default: False.
        units: Compute the norms of these units too; packed only. None: no units.
        weights_at: Compute norms of the weights too, at this level: the total, or per group, parameter or unit; packed
            only. None: no norms of weights.
    Raises:
        TypeError: ``norm_type`` is not a number.
        ValueError: ``norm_type`` or ``reduction`` is invalid, or ``reduction`` does not support ``units`` or
            ``weights_at``.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        registry: ProcessGroupRegistry,
        norm_type: float = 2.0,
        reduction: Reduction = "packed",
        per_parameter: bool = False,
        units: Units | None = None,
        weights_at: Level | None = None,
    ) -> None:
        self.plan, self.registry, self.units, self.weights_at = plan, registry, units, weights_at
        self.norm_type, self.reduction = checked_norm_type(norm_type), checked_reduction(reduction)
        if reduction != "packed" and (units is not None or weights_at is not None):
            raise ValueError(f"reduction={reduction!r} supports no norms of units or weights; use reduction='packed'")
        self.per_parameter = per_parameter or weights_at == "parameters"
        parameters = len(plan.parameter_names) if self.per_parameter else 0
        sizes = {"total": 1, "groups": plan.num_groups, "parameters": parameters, "units": units.count if units else 0}
        weights = 0 if weights_at is None else sizes[weights_at]
        self._sizes = [plan.num_groups, parameters, sizes["units"], weights]
        self._slots = sum(self._sizes)
        self._by_norms = self.norm_type >= HIGH  # the collective carries norms instead of powers
        self._has_replicas = any(weight != 1 for weight in plan.replica_weights)
        self._constants = Constants()
        self._all_replica_weights: Tensor | None = None
        self._wire = registry.device
        alone = registry.topology.world_size == 1
        self._world = None if alone else registry.group(*registry.topology.axes)

    def __call__(
        self,
        gradients: Sequence[Tensor | None],
        extra: Tensor | None = None,
        weights: Sequence[Tensor] = (),
    ) -> Norms:
        """Return the global norms of ``gradients``.

        Args:
            gradients: One gradient per entry of the plan; None counts as zero.
            extra: 1-dim tensor that the same collective sums over all ranks, returned as ``Norms.extra``. None: empty.
            weights: The weights, one per entry; needed with ``weights_at``.
        Collectives: one (packed), or one per bucket and one more (per group).
        Host synchronization: none.
        """
        here = [gradient for gradient in gradients if gradient is not None]
        all_here = len(here) == len(gradients)
        present = list(range(len(here))) if all_here else [i for i, g in enumerate(gradients) if g is not None]
        device = self._wire if extra is None else extra.device
        powers = self._local_powers(here, device)
        extra = powers.new_zeros(0) if extra is None else extra.to(powers)
        if self.reduction == "packed":
            vector, extra = self._packed(
                powers, present, extra, self._unit_and_weight_powers(gradients, weights, powers)
            )
        else:
            vector, extra = self._per_group(powers, present, extra)
        total = self._combine(vector[: self.plan.num_groups])
        if not self._by_norms:
            vector = vector.pow(1 / self.norm_type)
            total = vector[0] if self.plan.num_groups == 1 else total.pow(1 / self.norm_type)
        groups, parameters, units, weight_norms = vector.split(self._sizes)
        return Norms(total, groups, parameters, extra, units, weight_norms, vector[:0])

    def _unit_and_weight_powers(
        self, gradients: Sequence[Tensor | None], weights: Sequence[Tensor], like: Tensor
    ) -> list[Tensor]:
        """Return this rank's weighted powers of units, and its weighted powers of the weights at their level."""
        found = []
        if self.units is not None:
            found.append(self._unit_powers(self.units, gradients).to(like))
        if self.weights_at == "units" and self.units is not None:
            found.append(self._unit_powers(self.units, weights).to(like))
        elif self.weights_at is not None:
            everything = list(range(len(weights)))
            powers = self._local_powers([weight.detach() for weight in weights], like.device).to(like)
            powers = self._divide_by_replicas(powers, everything)
            if self.weights_at == "parameters":
                found.append(self._parameter_powers(powers, everything))
            else:
                groups = self._group_powers(powers, everything)
                found.append(self._combine(groups).view(1) if self.weights_at == "total" else groups)
        return found

    def _unit_powers(self, units: Units, tensors: Sequence[Tensor | None]) -> Tensor:
        powers = units.powers(tensors, self.norm_type, self.plan.replica_weights)
        return powers.pow(1 / self.norm_type) if HIGH <= self.norm_type < inf else powers

    def _combine(self, values: Tensor) -> Tensor:
        """Combine several powers, or norms, into one 0-dim value."""
        if len(values) == 1:
            return values[0]
        return p_norm(values, self.norm_type) if self._by_norms else values.sum()

    def _divide_by_replicas(self, powers: Tensor, present: list[int]) -> Tensor:
        """Divide the power of each shard by its replication factor. For p = inf replicas do not change the maximum."""
        if self.norm_type == inf or not self._has_replicas:
            return powers
        weights = self._all_replica_weights if len(present) == len(self.plan.replica_weights) else None
        if weights is None or weights.device != powers.device:
            weights = self._constant("replica_weights", present, powers)
            if len(present) == len(self.plan.replica_weights):
                self._all_replica_weights = weights
        return powers * (weights.pow(1 / self.norm_type) if self._by_norms else weights)

    def _local_powers(self, gradients: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return `local_powers` of gradients of any dtypes and devices, in their order; on ``device`` if there are none."""
        if not gradients:
            return torch.zeros(0, dtype=accumulation_dtype(device), device=device)
        if are_alike(gradients):
            return local_powers(gradients, self.norm_type)
        device, kinds = gradients[0].device, {(gradient.device, gradient.dtype) for gradient in gradients}
        found, order = list[Tensor](), list[int]()
        for kind in sorted(kinds, key=str):
            indices = [i for i, gradient in enumerate(gradients) if (gradient.device, gradient.dtype) == kind]
            kind_powers = local_powers([gradients[i] for i in indices], self.norm_type)
            found, order = [*found, kind_powers.to(device, accumulation_dtype(device))], order + indices
        powers = torch.cat(found)
        return powers[self._constants(("place", *order), partial(_invert_permutation, order), torch.int64, device)]

    def _packed(self, powers: Tensor, present: list[int], extra: Tensor, more: list[Tensor]) -> tuple[Tensor, Tensor]:
        slots = [*self._local_slots(self._divide_by_replicas(powers, present), present), *more]
        if self._world is None:
            return slots[0] if len(slots) == 1 else torch.cat(slots), extra
        vector, group = torch.cat([*slots, extra]), self._world
        if self._by_norms:
            rows = self._all_gather(vector, group)
            norms = p_norm(rows[:, : self._slots], self.norm_type) if self._slots else rows[0, :0]
            return norms, rows[:, self._slots :].sum(0)
        vector = self._all_reduce(vector, group)
        return vector[: self._slots], vector[self._slots :]

    def _per_group(self, powers: Tensor, present: list[int], extra: Tensor) -> tuple[Tensor, Tensor]:
        plan = self.plan
        total = powers.new_zeros(self._slots)
        flags = torch.cat([powers.isfinite().logical_not().any().to(powers).view(1), extra])
        for index, bucket in enumerate(plan.buckets):
            counted = bucket.counts(plan.coordinate)
            mine = [k for k, i in enumerate(present) if counted and plan.bucket_indices[i] == index]
            chosen = self._constants(("mine", index, *present), mine.copy, torch.int64, powers.device)
            vector = torch.cat(self._local_slots(powers[chosen], [present[k] for k in mine]))
            axes = bucket.axes(plan.topology)
            if axes and self.registry.size(*axes) > 1 and self._by_norms:
                vector = p_norm(self._all_gather(vector, self.registry.group(*axes)), self.norm_type)
            elif axes and self.registry.size(*axes) > 1:
                vector = self._all_reduce(vector, self.registry.group(*axes))
            total = p_norm(torch.stack([total, vector]), self.norm_type) if self._by_norms else total + vector
        if plan.topology.world_size > 1:
            flags = self._all_reduce(flags, self.registry.group(*plan.topology.axes))
        # A NaN or inf on one of several replicas must make the norm non-finite on all ranks.
        return torch.where(flags[0] > 0, total + torch.nan, total), flags[1:]

    def _local_slots(self, powers: Tensor, present: list[int]) -> list[Tensor]:
        """Return this rank's summands: [param groups], and with ``per_parameter`` [parameters]."""
        groups = self._group_powers(powers, present)
        return [groups, self._parameter_powers(powers, present)] if self.per_parameter else [groups]

    def _group_powers(self, powers: Tensor, present: list[int]) -> Tensor:
        """Combine the powers of each param group, [param groups]."""
        if not present:
            return powers.new_zeros(self.plan.num_groups)
        if self.plan.num_groups == 1:
            return self._combine(powers).view(1)
        runs: dict[int, Tensor] = {}
        groups, start = [self.plan.entries[i].group for i in present], 0
        while start < len(groups):  # entries are sorted by param group
            stop = start + groups[start:].count(groups[start])
            runs[groups[start]] = self._combine(powers[start:stop])
            start = stop
        absent = powers.new_zeros(()) if len(runs) < self.plan.num_groups else powers
        return torch.stack([runs.get(group, absent) for group in range(self.plan.num_groups)])

    def _parameter_powers(self, powers: Tensor, present: list[int]) -> Tensor:
        """Put each parameter's power into its slot, [parameters]."""
        slots, count = [self.plan.parameter_slots[i] for i in present], len(self.plan.parameter_names)
        if slots == list(range(count)):
            return powers
        found = powers.new_zeros(count)
        found[self._constant("parameter_slots", present, powers)] = powers
        return found

    def _constant(
        self, kind: Literal["replica_weights", "parameter_slots"], present: list[int], like: Tensor
    ) -> Tensor:
        of_entries = getattr(self.plan, kind)
        dtype = like.dtype if kind == "replica_weights" else torch.int64
        return self._constants((kind, *present), lambda: [of_entries[i] for i in present], dtype, like.device)

    # Collectives, on the process group's device, which may differ from the gradients' device -----------------------------

    def _all_reduce(self, vector: Tensor, group: dist.ProcessGroup) -> Tensor:
        wire = vector.to(self._wire)
        dist.all_reduce(wire, group=group)
        return wire.to(vector.device)

    def _all_gather(self, vector: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Gather ``vector`` from all ranks of the group: [ranks, len(vector)]."""
        wire = vector.to(self._wire)
        gathered = wire.new_empty(group.size() * wire.numel())
        all_gather_flat(gathered, wire, group)
        return gathered.to(vector.device).view(group.size(), -1)


def _invert_permutation(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
