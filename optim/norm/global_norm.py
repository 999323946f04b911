"""Global norms of sharded gradients, by default computed by one packed all-reduce.

    total_norm = (sum of |g|^p over all elements g of all gradients)^(1/p)

The *power* of a tensor is the sum of |x|^p over its elements. Each rank computes the powers of its shards, and divides
the power of a shard by the number of ranks that hold the same shard. The packed vector has one power per param group.
On request it also has one power per parameter or unit (such as a row of a weight), and powers of the weights. Other
parts of the step append fields to it, such as the window's total weight. One all-reduce sums the vector over all ranks.
Its length is equal on all ranks, whichever shards a rank holds. A NaN or inf in any gradient makes the sum NaN or inf,
so the vector needs no element for an overflow flag.

For p = inf, a MAX all-reduce would lose a NaN on some backends. For p >= `HIGH`, powers often leave float64's range. In
both cases one all-gather collects norms instead of powers, and every rank combines them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.layout.shard import Region
from ...parallel.mesh.process_group_collectives import all_gather_flat
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.text import some
from ..kernels.device_constants import Constants
from .measure import Level, Norms, Reduction, checked_norm_type, checked_reduction
from .plan import ReductionPlan
from .powers import HIGH, mixed_powers, p_norm


class GlobalNorm:
    """Computes the global norms of gradients, as a reduction plan describes.

        norm = GlobalNorm(optimizer.plan, optimizer.registry)
        norms = norm([row.grad_tensor.grad for row in optimizer.stepped_tensors()])

    Args:
        plan: The reduction plan. Use a plan that `norm.plan_agreement.agree` returned, because the collectives depend on
            it: on the number of param groups, with ``reduction="per_group"`` on the buckets, and with
            ``per_parameter=True`` on the parameter names.
        registry: The process groups.
        norm_type: p >= 1, or inf. Default: 2.
        reduction: ``"packed"`` (default): one all-reduce over all ranks. ``"per_group"``: one all-reduce per
            `NormBucket` of the plan whose axes have several ranks, over exactly these axes, and one all-reduce of a flag
            for non-finite gradients over all ranks. For p >= `HIGH` = 12, inf included, norms are all-gathered instead of
            all-reduced.
        per_parameter: True: also compute the norm of each logical parameter; ``weights_at="parameters"`` implies it.
            Default: False.
        units: Slices of parameters, such as rows of weights, whose norms are also computed; requires
            ``reduction="packed"``. None (default): no units.
        weights_at: Also compute norms of the weights, at this level: "total", "groups" (param groups), "parameters" or,
            with ``units``, "units"; requires ``reduction="packed"``. None (default): no norms of weights.
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
            raise ValueError(
                f"reduction={reduction!r} does not support norms of units (such as rows) or of weights; use "
                "reduction='packed'"
            )
        self.per_parameter = per_parameter or weights_at == "parameters"
        parameters = len(plan.parameter_names) if self.per_parameter else 0
        sizes = {"total": 1, "groups": plan.num_groups, "parameters": parameters, "units": units.count if units else 0}
        weights = 0 if weights_at is None else sizes[weights_at]
        self._sizes = [plan.num_groups, parameters, sizes["units"], weights]
        self._length = sum(self._sizes)  # of the packed vector without appended fields
        self._by_norms = self.norm_type >= HIGH  # the collective carries norms instead of powers
        self._has_replicas = any(weight != 1 for weight in plan.replica_weights)
        self._constants = Constants()
        self._all_replica_weights: Tensor | None = None
        self._collective_device = registry.device
        alone = registry.topology.world_size == 1
        self._world = None if alone else registry.group(*registry.topology.axes)

    @property
    def layout(self) -> tuple[int, ...]:
        """Return whether the packed vector has norms instead of powers, and the sizes of its parts; equal on all ranks."""
        return self._by_norms, *self._sizes

    def __call__(
        self,
        gradients: Sequence[Tensor | None],
        extra: Tensor | None = None,
        weights: Sequence[Tensor] = (),
    ) -> Norms:
        """Return the global norms of ``gradients``.

        ``gradients`` has one gradient per entry of the plan; None counts as zero. ``extra`` is a 1-dim tensor that the
        collective over all ranks also sums, to ``Norms.extra``. ``weights`` has one weight per entry; needed with
        ``weights_at``.

        Collectives: with ``reduction="packed"``, one over all ranks; with "per_group", one per bucket that is summed over
            several ranks, and one over all ranks. None in a world of one rank.
        Host synchronization: none if all tensors are on the registry's device.
        """
        here = [gradient for gradient in gradients if gradient is not None]
        all_here = len(here) == len(gradients)
        present = list(range(len(here))) if all_here else [i for i, g in enumerate(gradients) if g is not None]
        device = self._collective_device if extra is None else extra.device
        powers = mixed_powers(here, self.norm_type, device, self._constants)
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
        groups, parameters, units, weight_norms = torch.split_with_sizes(vector, self._sizes)
        return Norms(total, groups, parameters, extra, units, weight_norms, vector[:0], self.norm_type)

    def _unit_and_weight_powers(
        self, gradients: Sequence[Tensor | None], weights: Sequence[Tensor], like: Tensor
    ) -> list[Tensor]:
        """Return this rank's powers of units' gradients and of weights, if requested, divided by replication factors."""
        found = []
        if self.units is not None:
            found.append(self.units.powers(gradients, self.norm_type, self.plan.replica_weights).to(like))
        if self.weights_at == "units" and self.units is not None:
            found.append(self.units.powers(weights, self.norm_type, self.plan.replica_weights).to(like))
        elif self.weights_at is not None:
            everything = list(range(len(weights)))
            detached = [weight.detach() for weight in weights]
            powers = mixed_powers(detached, self.norm_type, like.device, self._constants).to(like)
            powers = self._divide_by_replicas(powers, everything)
            if self.weights_at == "parameters":
                found.append(self._parameter_powers(powers, everything))
            else:
                groups = self._group_powers(powers, everything)
                found.append(self._combine(groups).view(1) if self.weights_at == "total" else groups)
        return found

    def _combine(self, values: Tensor) -> Tensor:
        """Return the sum of powers, 0-dim. For p >= `HIGH`, ``values`` are norms: return their p-norm."""
        if values.numel() == 1:
            return values[0]
        return p_norm(values, self.norm_type) if self._by_norms else values.sum()

    def _divide_by_replicas(self, powers: Tensor, present: list[int]) -> Tensor:
        """Return ``powers``, one per plan entry in ``present``, divided by the replication factors of the shards.

        For `HIGH` <= p < inf, ``powers`` are norms and are divided by the p-th root of the factors. For p = inf they
        are returned unchanged.
        """
        if self.norm_type == inf or not self._has_replicas:
            return powers
        weights = self._all_replica_weights if len(present) == len(self.plan.replica_weights) else None
        if weights is None or weights.device != powers.device:
            weights = self._constants(
                ("replica_weights", *present),
                lambda: [self.plan.replica_weights[i] for i in present],
                powers.dtype,
                powers.device,
            )
            if len(present) == len(self.plan.replica_weights):
                self._all_replica_weights = weights
        return powers * (weights.pow(1 / self.norm_type) if self._by_norms else weights)

    def _packed(self, powers: Tensor, present: list[int], extra: Tensor, more: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the powers of the full model (norms for p >= `HIGH`), and the sum of ``extra``, from one collective.

        ``powers`` are not divided by replication factors yet. ``present`` has the index of the plan entry of each
        power. ``more`` are this rank's powers of units and weights.
        """
        parts = [*self._local_parts(self._divide_by_replicas(powers, present), present), *more]
        if self._world is None:
            return parts[0] if len(parts) == 1 else torch.cat(parts), extra
        vector, group = torch.cat([*parts, extra]), self._world
        if self._by_norms:
            rows = self._all_gather(vector, group)
            norms = p_norm(rows[:, : self._length], self.norm_type) if self._length else rows[0, :0]
            return norms, rows[:, self._length :].sum(0)
        vector = self._all_reduce(vector, group)
        return vector[: self._length], vector[self._length :]

    def _per_group(self, powers: Tensor, present: list[int], extra: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same as `_packed`, from one collective per norm bucket and one over all ranks."""
        plan = self.plan
        total = powers.new_zeros(self._length)
        flags = torch.cat([powers.isfinite().logical_not().any().to(powers).view(1), extra])
        for index, bucket in enumerate(plan.buckets):
            counted = bucket.counts(plan.coordinate)
            mine = [k for k, i in enumerate(present) if counted and plan.bucket_indices[i] == index]
            chosen = self._constants(("mine", index, *present), mine.copy, torch.int64, powers.device)
            vector = torch.cat(self._local_parts(powers[chosen], [present[k] for k in mine]))
            axes = bucket.axes(plan.topology)
            if axes and self.registry.size(*axes) > 1 and self._by_norms:
                vector = p_norm(self._all_gather(vector, self.registry.group(*axes)), self.norm_type)
            elif axes and self.registry.size(*axes) > 1:
                vector = self._all_reduce(vector, self.registry.group(*axes))
            total = p_norm(torch.stack([total, vector]), self.norm_type) if self._by_norms else total + vector
        if plan.topology.world_size > 1:
            flags = self._all_reduce(flags, self.registry.group(*plan.topology.axes))
        # The sum of a bucket does not contain the powers of all replicas. A NaN in any replica must still make the norm
        # NaN on all ranks.
        return torch.where(flags[0] > 0, total + torch.nan, total), flags[1:]

    def _local_parts(self, powers: Tensor, present: list[int]) -> list[Tensor]:
        """Return this rank's powers per param group and, if requested, per logical parameter."""
        groups = self._group_powers(powers, present)
        return [groups, self._parameter_powers(powers, present)] if self.per_parameter else [groups]

    def _group_powers(self, powers: Tensor, present: list[int]) -> Tensor:
        """Return one power (a norm for p >= `HIGH`) per param group, [param groups]; 0 for a group without gradients."""
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
        """Return one power per logical parameter, [parameters]; 0 for a parameter without a gradient on this rank."""
        slots, count = [self.plan.parameter_slots[i] for i in present], len(self.plan.parameter_names)
        if slots == list(range(count)):
            return powers
        found = powers.new_zeros(count)
        found[self._constants(("parameter_slots", *present), lambda: slots, torch.int64, powers.device)] = powers
        return found

    # Collectives, on the process group's device, which may differ from the gradients' device -----------------------------

    def _all_reduce(self, vector: Tensor, group: dist.ProcessGroup) -> Tensor:
        wire = vector.to(self._collective_device)
        dist.all_reduce(wire, group=group)
        return wire.to(vector.device)

    def _all_gather(self, vector: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Gather ``vector`` from all ranks of the group: [ranks, len(vector)]."""
        wire = vector.to(self._collective_device)
        gathered = wire.new_empty(group.size() * wire.numel())
        all_gather_flat(gathered, wire, group)
        return gathered.to(vector.device).view(group.size(), -1)


# Groups by name -------------------------------------------------------------------------------------------------------

# A named group is the set of logical parameters whose name matches a glob and no glob before it, in any param group and
# on any rank. Its norm is computed from the norms of its parameters:
#
#     named_norm[k]^p = sum of parameter_norm[i]^p over the parameters i of group k


def matches(pattern: str, name: str) -> bool:
    """Return True if the glob ``pattern`` matches ``name``, with or without a suffix such as ``@pipe=1``."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.partition("@")[0], pattern)


def check_glob(glob: object, where: str, write: str) -> None:
    """Raise TypeError unless ``glob`` is a string. The error begins with ``where`` and ends with the advice ``write``."""
    if not isinstance(glob, str):
        raise TypeError(f"{where} has the {type(glob).__name__} {glob!r:.80}, expected one glob (a string); {write}")


@dataclass(frozen=True)
class Named:
    """A division of the logical parameters into named groups: one per pattern, and one of all remaining parameters.

    ``groups`` has for each logical parameter the index of the first pattern that matches its name, or ``count - 1``,
    the group of the remaining parameters.
    """

    groups: tuple[int, ...]
    count: int

    @classmethod
    def of(cls, names: Sequence[str], patterns: Sequence[str]) -> Named:
        """Return the division of the logical parameters with these names by ``patterns``, which are globs.

        Both arguments must be equal on every rank.
        """
        groups = tuple(
            next((index for index, pattern in enumerate(patterns) if matches(pattern, name)), len(patterns))
            for name in names
        )
        for index, pattern in enumerate(patterns):
            if index not in groups:
                taken = [name for name in names if matches(pattern, name)]
                raise ValueError(
                    f"every parameter that the pattern {pattern!r} matches ({some(taken)}) is already matched by an "
                    f"earlier pattern; move {pattern!r} before the earlier patterns if it is narrower, else remove it"
                    if taken
                    else f"the pattern {pattern!r} matches no parameter; the names are {some(sorted(names))}. Give a "
                    "pattern for one of these names, which declare(...) or model.named_parameters() gave to the parameters"
                )
        return cls(groups, len(patterns) + 1)

    def norms(self, parameters: Tensor, norm_type: float, constants: Constants) -> Tensor:
        """Return the p-norm of each group, [count]. A group without parameters has norm 0."""
        index = constants(("named", self.groups), lambda: self.groups, torch.int64, parameters.device)
        own = index.unsqueeze(1) == torch.arange(self.count, device=parameters.device)
        return p_norm(torch.where(own, parameters.unsqueeze(1), torch.zeros_like(parameters[:1])), norm_type)


# Slices along a dim ---------------------------------------------------------------------------------------------------

# A unit is a slice of the full tensor, such as a row of a linear layer's weight. A rank may hold parts of many units, and
# several ranks may hold parts of one unit. The packed vector has one element per unit. Each rank adds the powers of its
# parts to the elements of their units. The packed collective combines the vectors of all ranks: by a sum, or for
# p >= `HIGH` by the p-norm (for p = inf the maximum).

UnitDim = int | Mapping[str, int]
"""The dim along which a parameter is divided into units, such as 0 for rows; or a dict from name globs to dims.

The first glob that matches a parameter's name gives its dim; without a match it is 0.
"""


class ParameterUnits(NamedTuple):
    """The units of a logical parameter: slices along ``dim``, or the full tensor if ``dim`` is None.

    ``first`` is the index of the parameter's first unit among all units.
    """

    dim: int | None
    first: int


def units_of(plan: ReductionPlan, unit_dim: UnitDim) -> tuple[list[ParameterUnits], int]:
    """Return the units of each logical parameter of a plan that has parameter names, and the number of all units.

    A parameter with fewer than two dims is one unit. Raise ValueError if the full shape of a parameter is unknown, or if
    a parameter with two or more dims lacks the given dim.
    """
    found, first = list[ParameterUnits](), 0
    for name, shape in zip(plan.parameter_names, plan.parameter_shapes, strict=True):
        dim, count = _dim_and_count(name, shape, unit_dim)
        found.append(ParameterUnits(dim, first))
        first += count
    return found, first


@dataclass(frozen=True)
class Units:
    """The units (slices along a dim, such as rows) of a plan's logical parameters, and this rank's parts of them.

    ``count`` is the number of units. ``shards`` has for each entry of the plan the units of its logical parameter, and the
    part of the full tensor that this rank holds.
    """

    count: int
    shards: tuple[tuple[ParameterUnits, Region], ...]

    @classmethod
    def of(cls, plan: ReductionPlan, regions: Sequence[Region | None], unit_dim: UnitDim = 0) -> Units:
        """Return the units of a plan whose entries hold ``regions``. Raise ValueError as `units_of`."""
        found, count = units_of(plan, unit_dim)
        pairs = zip(plan.parameter_slots, regions, strict=True)
        shards = tuple((found[slot], region) for slot, region in pairs if region is not None)
        return cls(count, shards)

    def powers(self, tensors: Sequence[Tensor | None], norm_type: float, weights: Sequence[float]) -> Tensor:
        """Return this rank's power of each unit of the model, [count] float64; 0 for units that it does not hold.

        The power is the sum of |x|^p over this rank's part of the unit, times the entry's factor in ``weights``. For
        `HIGH` <= p < inf, whose powers often leave the range of float64, the values are p-th roots of these powers. For
        p = inf the value is the largest |x|, without a factor. ``weights`` has 1 / replication factor per entry of the
        plan.
        """
        device = next((tensor.device for tensor in tensors if tensor is not None), torch.device("cpu"))
        totals = torch.zeros(self.count, dtype=torch.float64, device=device)
        for index, tensor in enumerate(tensors):
            for first, dim, part in self._parts(index, tensor):
                found = _powers_along(part.detach().double(), dim, norm_type)
                target = totals[first : first + found.numel()]
                if norm_type == inf:
                    torch.maximum(target, found, out=target)
                elif norm_type >= HIGH:
                    target.copy_(p_norm(torch.stack([target, found * weights[index] ** (1 / norm_type)]), norm_type))
                else:
                    target.add_(found, alpha=weights[index])
        return totals

    def multiply_(self, index: int, gradient: Tensor, factors: Tensor) -> None:
        """Multiply this rank's part of each unit of one parameter by the unit's factor, in place."""
        for first, dim, part in self._parts(index, gradient):
            if dim is None:
                part.mul_(factors[first].to(part))
                continue
            shape = [-1 if d == dim else 1 for d in range(part.dim())]
            part.mul_(factors[first : first + part.shape[dim]].to(part).view(shape))

    def _parts(self, index: int, tensor: Tensor | None) -> list[tuple[int, int | None, Tensor]]:
        """Split the shard of entry ``index`` into blocks that are rectangles of the full tensor.

        Return per block: the index of its first unit among all units, the dim along which it is divided into units
        (None: the block belongs to one unit), and the block.
        """
        if tensor is None or not tensor.numel():
            return []
        (dim, first), region = self.shards[index]
        parts = region.parts(tensor)
        return [(first if dim is None else first + at[dim], dim, part) for at, part in parts.items()]


def _dim_and_count(name: str, shape: tuple[int, ...] | None, unit_dim: UnitDim) -> tuple[int | None, int]:
    """Return the dim along which a parameter is divided into units (None: it is one unit), and their number."""
    if shape is None:
        raise ValueError(
            f"{name} has shards of unequal sizes, so its full shape is unknown, and the norms of its units (such as rows) "
            "can't be computed: give annotate(..., full_shape=...), or make each sharded dim divisible by the product "
            "of the sizes of its axes"
        )
    if len(shape) < 2:
        return None, 1
    patterns = {"*": unit_dim} if isinstance(unit_dim, int) else unit_dim
    dim = next((dim for pattern, dim in patterns.items() if matches(pattern, name)), 0)
    if not -len(shape) <= dim < len(shape):
        raise ValueError(
            f"unit_dim={dim} is not a dim of {name}, whose shape is {shape}; give a dim from {-len(shape)} to "
            f"{len(shape) - 1}"
        )
    return dim % len(shape), shape[dim]


def _powers_along(part: Tensor, dim: int | None, norm_type: float) -> Tensor:
    """Return one sum of |x|^p per slice along ``dim``, 1-dim; for p >= `HIGH` the p-norm. ``dim`` None: one slice."""
    rows = part.reshape(1, -1) if dim is None else part.movedim(dim, 0).flatten(1)
    magnitudes = rows.abs()
    return p_norm(magnitudes, norm_type, 1) if norm_type >= HIGH else magnitudes.pow(norm_type).sum(1)
