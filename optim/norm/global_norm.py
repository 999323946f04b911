"""Run the plan: local powers -> one packed all-reduce -> norms.

    total_norm = (sum over buckets of sum over their groups of sum of |g|^p)^(1/p)

The packed vector holds one power for each param group (where asked for, for each parameter or unit, and of the weights
too), every piece divided by its number of holders; what ranks hold decides only what they write into it, never its length
or who takes part. A NaN or inf in any gradient on any rank makes the sum NaN or inf, so the overflow flag costs no slot.
For p = inf a MAX all-reduce would lose a NaN on some backends, and for a high p the powers are out of range; there norms
are gathered and put together on every rank, again in one collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isnan
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.mesh.flat_collectives import all_gather_flat
from ...parallel.mesh.registry import ProcessGroupRegistry
from .constants import Constants
from .plan import ReductionPlan
from .powers import HIGH, accumulation_dtype, local_powers, p_norm
from .units import Units

Reduction = Literal["packed", "per_group"]


Level = Literal["total", "groups", "parameters", "units"]


class Norms(NamedTuple):
    """Global p-norms of gradients, device tensors of the accumulation dtype.

    Args:
        total: 0-dim.
        groups: [param groups].
        parameters: [logical parameters], or empty where they are not measured.
        extra: What travelled along.
        units: [units of all parameters], or empty.
        weights: Norms of the weights themselves, shaped as the gradients' at the level that was asked for; or empty.
    """

    total: Tensor
    groups: Tensor
    parameters: Tensor
    extra: Tensor
    units: Tensor
    weights: Tensor


class GlobalNorm:
    """Measures the gradients of one plan.

    Args:
        plan: What is summed over which ranks; agreed by all ranks (`norm.agreement.agree`) for ``reduction="per_group"``
            and ``per_parameter=True``, whose collectives depend on it.
        registry: The groups.
        norm_type: p >= 1, or inf.
        reduction: ``"packed"``: one all-reduce over the world (an all-gather for p = inf). ``"per_group"``: one
            all-reduce for each bucket over exactly its group, and one of the overflow flag over the world.
        per_parameter: Measure each logical parameter as well.
        units: Measure these units as well; packed only.
        weights_at: Measure the weights too, in total, by group, by parameter or by unit; packed only.
    Raises:
        ValueError: norm_type or reduction is none of these, or does not go with the rest.
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
            raise ValueError(
                f"reduction={reduction!r} measures gradients, groups and parameters; take 'packed' for more"
            )
        self.per_parameter = per_parameter or weights_at == "parameters"
        parameters = len(plan.parameter_names) if self.per_parameter else 0
        sizes = {"total": 1, "groups": plan.num_groups, "parameters": parameters, "units": units.count if units else 0}
        weights = 0 if weights_at is None else sizes[weights_at]
        self._sizes = [plan.num_groups, parameters, sizes["units"], weights]
        self._slots = sum(self._sizes)
        self._by_norms = self.norm_type >= HIGH  # what travels is norms, not powers
        self._constants = Constants()
        alone = registry.topology.world_size == 1
        self._world = None if alone else registry.group(*registry.topology.axes)

    def __call__(
        self,
        gradients: Sequence[Tensor | None],
        extra: Tensor | None = None,
        weights: Sequence[Tensor] = (),
    ) -> Norms:
        """The norms of ``gradients``, one for each entry of the plan, None counting as zero.

        Args:
            weights: The tensors whose gradients they are; needed with ``weights_at``.
            extra: 1-dim tensor that is summed over all ranks in the same collective, and comes back as ``Norms.extra``.
        Collectives: one (packed), or one a bucket and one more (per group). Host reads: none.
        """
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        device = self.registry.device if extra is None else extra.device
        powers = self._local_powers([gradient for gradient in gradients if gradient is not None], device)
        extra = powers.new_zeros(0) if extra is None else extra.to(powers)
        if self.reduction == "packed":
            vector, extra = self._packed(powers, present, extra, self._more(gradients, weights, powers))
        else:
            vector, extra = self._per_group(powers, present, extra)
        groups, parameters, units, of_weights = vector.split(self._sizes)
        if self._by_norms:
            return Norms(p_norm(groups, self.norm_type), groups, parameters, extra, units, of_weights)
        root = 1 / self.norm_type
        powered = (x.pow(root) for x in (groups.sum(), groups, parameters, units, of_weights))
        total, groups, parameters, units, of_weights = powered
        return Norms(total, groups, parameters, extra, units, of_weights)

    def _more(self, gradients: Sequence[Tensor | None], weights: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """This rank's weighted powers of units, and of the weights at their level."""
        found = []
        if self.units is not None:
            found.append(self._of_units(self.units, gradients).to(like))
        if self.weights_at == "units" and self.units is not None:
            found.append(self._of_units(self.units, weights).to(like))
        elif self.weights_at is not None:
            everything = list(range(len(weights)))
            powers = self._local_powers([weight.detach() for weight in weights], like.device).to(like)
            slots = self._fill_slots(self._weighted(powers, everything), everything)
            groups, parameters = slots.split(self._sizes[:2])
            whole = self._together(groups)
            found.append({"total": whole.view(1), "groups": groups, "parameters": parameters}[self.weights_at])
        return found

    def _of_units(self, units: Units, tensors: Sequence[Tensor | None]) -> Tensor:
        powers = units.powers(tensors, self.norm_type, self.plan.weights)
        return powers.pow(1 / self.norm_type) if HIGH <= self.norm_type < inf else powers

    def _together(self, values: Tensor) -> Tensor:
        """0-dim: of several powers, or norms, that of all of them."""
        return p_norm(values, self.norm_type) if self._by_norms else values.sum()

    def _weighted(self, powers: Tensor, present: list[int]) -> Tensor:
        """Each piece divided by its number of holders; for p = inf copies do no harm."""
        if self.norm_type == inf:
            return powers
        weights = self._constant("weights", present, powers)
        return powers * (weights.pow(1 / self.norm_type) if self._by_norms else weights)

    def _local_powers(self, gradients: Sequence[Tensor], device: torch.device) -> Tensor:
        """On the gradients' device; on ``device`` where there are none."""
        device = gradients[0].device if gradients else device
        kinds = {(gradient.device, gradient.dtype) for gradient in gradients}
        if len(kinds) == 1:
            return local_powers(gradients, self.norm_type)
        powers, order = torch.zeros(0, dtype=accumulation_dtype(device), device=device), list[int]()
        for kind in sorted(kinds, key=str):
            indices = [i for i, gradient in enumerate(gradients) if (gradient.device, gradient.dtype) == kind]
            of_kind = local_powers([gradients[i] for i in indices], self.norm_type)
            powers, order = torch.cat([powers, of_kind.to(powers)]), order + indices
        place = self._constants(
            ("place", *order), lambda: sorted(range(len(order)), key=order.__getitem__), *_index(powers)
        )
        return powers[place]

    def _packed(self, powers: Tensor, present: list[int], extra: Tensor, more: list[Tensor]) -> tuple[Tensor, Tensor]:
        vector = torch.cat([self._fill_slots(self._weighted(powers, present), present), *more, extra])
        if self._world is not None:
            group = self._world
            if self._by_norms:
                rows = self._rows(vector, group)
                norms = p_norm(rows[:, : self._slots], self.norm_type) if self._slots else rows[0, :0]
                vector = torch.cat([norms, rows[:, self._slots :].sum(0)])
            else:
                vector = self._sum(vector, group)
        return vector[: self._slots], vector[self._slots :]

    def _per_group(self, powers: Tensor, present: list[int], extra: Tensor) -> tuple[Tensor, Tensor]:
        plan = self.plan
        total = powers.new_zeros(self._slots)
        flags = torch.cat([powers.isfinite().logical_not().any().to(powers).view(1), extra])
        for index, bucket in enumerate(plan.buckets):
            counted = bucket.counts(plan.coordinate)
            mine = [k for k, i in enumerate(present) if counted and plan.bucket_indices[i] == index]
            chosen = self._constants(("mine", index, *present), mine.copy, *_index(powers))
            vector = self._fill_slots(powers[chosen], [present[k] for k in mine])
            axes = bucket.axes(plan.topology)
            if axes and self.registry.size(*axes) > 1 and self._by_norms:
                vector = p_norm(self._rows(vector, self.registry.group(*axes)), self.norm_type)
            elif axes and self.registry.size(*axes) > 1:
                vector = self._sum(vector, self.registry.group(*axes))
            total = p_norm(torch.stack([total, vector]), self.norm_type) if self._by_norms else total + vector
        if plan.topology.world_size > 1:
            flags = self._sum(flags, self.registry.group(*plan.topology.axes))
        # A NaN or inf that only one of several replicas has, must reach everybody.
        return torch.where(flags[0] > 0, total + torch.nan, total), flags[1:]

    def _fill_slots(self, powers: Tensor, present: list[int]) -> Tensor:
        """Combine each param group's powers into its slot, and copy each parameter's into its own."""
        slots = powers.new_zeros(sum(self._sizes[:2]))
        if not present:
            return slots
        start = 0
        groups = [self.plan.entries[i].group for i in present]
        while start < len(groups):  # entries come group by group: each is one run
            stop = start + groups[start:].count(groups[start])
            run = powers[start:stop]
            slots[groups[start]] = self._together(run)
            start = stop
        if self.per_parameter:
            slots[self._constant("slots", present, powers)] = powers
        return slots

    def _constant(self, kind: Literal["weights", "slots"], present: list[int], like: Tensor) -> Tensor:
        key = (kind, *present)
        if kind == "weights":
            return self._constants(key, lambda: [self.plan.weights[i] for i in present], like.dtype, like.device)
        first = self.plan.num_groups
        return self._constants(key, lambda: [first + self.plan.parameter_slots[i] for i in present], *_index(like))

    # Collectives: on their own device, where that is another than the gradients' ----------------------------------------

    def _sum(self, vector: Tensor, group: dist.ProcessGroup) -> Tensor:
        wire = vector.to(self.registry.device)
        dist.all_reduce(wire, group=group)
        return wire.to(vector.device)

    def _rows(self, vector: Tensor, group: dist.ProcessGroup) -> Tensor:
        """[ranks of the group, len(vector)]: of all of them."""
        wire = vector.to(self.registry.device)
        gathered = wire.new_empty(group.size() * wire.numel())
        all_gather_flat(gathered, wire, group)
        return gathered.to(vector.device).view(group.size(), -1)


def _index(like: Tensor) -> tuple[torch.dtype, torch.device]:
    """Of an index into ``like``."""
    return torch.int64, like.device


def checked_norm_type(norm_type: float) -> float:
    """``norm_type`` as a float.

    Raises:
        ValueError: It is below 1 or NaN.
    """
    value = float(norm_type)
    if 0 < value < 1:
        raise ValueError(
            f"norm_type={norm_type}: give a number >= 1 (2.0 is the usual norm) or float('inf'); below 1 it is no norm (a "
            "sum of two gradients could be longer than both together), and grows with the number n of elements so fast, as "
            f"n^{1 / value:.3g}, that a threshold means little"
        )
    if isnan(value) or value < 1:
        raise ValueError(f"norm_type={norm_type}: give a number >= 1 (2.0 is the usual norm) or float('inf')")
    return value


def checked_reduction(reduction: Reduction) -> Reduction:
    """``reduction``.

    Raises:
        ValueError: It is none of the two.
    """
    if reduction not in ("packed", "per_group"):
        raise ValueError(f"reduction={reduction!r}: give 'packed' or 'per_group'")
    return reduction
