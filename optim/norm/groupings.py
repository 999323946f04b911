"""Groups of parameters other than param groups: groups by name (`Named`), and slices of weights along a dim (`Units`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from math import inf

import torch
from torch import Tensor

from ...parallel.layout.shard import Region
from ...parallel.mesh.text import some
from ..kernels.device_constants import Constants
from .plan import ReductionPlan
from .powers import p_norm

# Groups by name -------------------------------------------------------------------------------------------------------

# A named group is the set of logical parameters whose name matches a glob, in any param group and on any rank.
#
# named[k]^p = sum of parameters[i]^p over the parameters whose name matches pattern k, and no pattern before it


def matches(pattern: str, name: str) -> bool:
    """Return True if ``pattern`` matches the name of a logical parameter, with or without its ``@stage`` suffix."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.partition("@")[0], pattern)


@dataclass(frozen=True)
class Named:
    """The named groups of a plan's logical parameters. The last group holds the parameters that no pattern matches.

    Args:
        groups: For each logical parameter the index of its group: the first pattern that matches its name.
        count: Number of groups, including the last one.
    """

    groups: tuple[int, ...]
    count: int

    @classmethod
    def of(cls, names: Sequence[str], patterns: Sequence[str]) -> Named:
        """Return the groups of the parameters called ``names``, equal on every rank.

        Raises:
            ValueError: A pattern is the first match of no parameter.
        """
        groups = tuple(
            next((index for index, pattern in enumerate(patterns) if matches(pattern, name)), len(patterns))
            for name in names
        )
        for index, pattern in enumerate(patterns):
            if index not in groups:
                taken = [name for name in names if matches(pattern, name)]
                raise ValueError(
                    f"the pattern {pattern!r} matches only {some(taken)}, which earlier patterns match first; write the "
                    "narrower pattern first"
                    if taken
                    else f"the pattern {pattern!r} matches no parameter; there are {some(sorted(names))}. Use the names "
                    "given to declare, or the names of model.named_parameters() if the optimizer was made from them"
                )
        return cls(groups, len(patterns) + 1)

    def norms(self, parameters: Tensor, norm_type: float, constants: Constants) -> Tensor:
        """Return the p-norm of each group, [count], from the norms of all logical parameters. An empty group has norm 0.

        Host synchronization: none.
        """
        index = constants(("named", self.groups), lambda: self.groups, torch.int64, parameters.device)
        own = index.unsqueeze(1) == torch.arange(self.count, device=parameters.device)
        return p_norm(torch.where(own, parameters.unsqueeze(1), torch.zeros_like(parameters[:1])), norm_type)


# Slices along a dim ---------------------------------------------------------------------------------------------------

# A unit is a slice of the full tensor, such as a row of a linear layer's weight. A rank may hold parts of many units, and
# several ranks may hold parts of one unit. Each rank adds the powers of its parts to the slots of the units; the packed
# collective sums the slots over all ranks.

UnitDim = int | Mapping[str, int]
"""The dim along which units are counted: one dim for all parameters, or a dim per glob over their names (default 0)."""


@dataclass(frozen=True)
class Units:
    """The units of a plan's logical parameters, and this rank's parts of them.

    Args:
        dims: For each logical parameter the dim along which its units are counted. None: the parameter is one unit,
            because it has fewer than two dims.
        starts: For each logical parameter the slot of its first unit; at the end the number of slots.
        slots: For each entry of the plan the index of its logical parameter.
        regions: For each entry the part of the full tensor that this rank holds.
    """

    dims: tuple[int | None, ...]
    starts: tuple[int, ...]
    slots: tuple[int, ...]
    regions: tuple[Region, ...]

    @classmethod
    def of(cls, plan: ReductionPlan, regions: Sequence[Region | None], unit_dim: UnitDim = 0) -> Units:
        """Return the units of a plan that was agreed with ``names=True``.

        Args:
            plan: The agreed plan.
            regions: For each entry the part of the full tensor that this rank holds; None if shards have unequal sizes.
            unit_dim: See `UnitDim`. Default: 0, the rows of each weight.
        Raises:
            ValueError: A parameter has shards of unequal sizes, or does not have the dim.
        """
        dims = tuple(
            _dim_of(name, shape, unit_dim)
            for name, shape in zip(plan.parameter_names, plan.parameter_shapes, strict=True)
        )
        counts = [
            1 if dim is None else shape[dim]
            for dim, shape in zip(dims, plan.parameter_shapes, strict=True)
            if shape is not None  # only for mypy: `_dim_of` raises for None
        ]
        known = tuple(region for region in regions if region is not None)
        return cls(dims, tuple(accumulate(counts, initial=0)), plan.parameter_slots, known)

    @property
    def count(self) -> int:
        """Return the number of units of all parameters."""
        return self.starts[-1]

    def powers(self, tensors: Sequence[Tensor | None], norm_type: float, weights: Sequence[float]) -> Tensor:
        """Return the power of each unit on this rank, [count] float64.

        The power is the sum of |x|^p over this rank's part of the unit, times the entry's weight. For p = inf it is the
        largest |x|, without a weight. Host synchronization: none.

        Args:
            tensors: One tensor per entry; None counts as zero.
            norm_type: p >= 1, or inf.
            weights: One weight per entry.
        """
        device = next((tensor.device for tensor in tensors if tensor is not None), torch.device("cpu"))
        totals = torch.zeros(self.count, dtype=torch.float64, device=device)
        for index, tensor in enumerate(tensors):
            for first, dim, part in self._parts(index, tensor):
                found = _powers_along(part.double(), dim, norm_type)
                slots = totals[first : first + found.numel()]
                if norm_type == inf:
                    torch.maximum(slots, found, out=slots)
                else:
                    slots.add_(found, alpha=weights[index])
        return totals

    def multiply_(self, index: int, gradient: Tensor, factors: Tensor) -> None:
        """Multiply this rank's part of every unit of entry ``index`` by the unit's factor, in place."""
        for first, dim, part in self._parts(index, gradient):
            if dim is None:
                part.mul_(factors[first].to(part))
                continue
            shape = [-1 if d == dim else 1 for d in range(part.dim())]
            part.mul_(factors[first : first + part.shape[dim]].to(part).view(shape))

    def _parts(self, index: int, tensor: Tensor | None) -> list[tuple[int, int | None, Tensor]]:
        """Return (slot of the first unit, dim of the units in the part, part) for each part of entry ``index``."""
        if tensor is None or not tensor.numel():
            return []
        slot, region = self.slots[index], self.regions[index]
        dim, start = self.dims[slot], self.starts[slot]
        parts = region.parts(tensor)
        return [(start if dim is None else start + at[dim], dim, part) for at, part in parts.items()]


def _dim_of(name: str, shape: tuple[int, ...] | None, unit_dim: UnitDim) -> int | None:
    if shape is None:
        raise ValueError(
            f"{name} has shards of unequal sizes, which units do not support: make each sharded dim divisible by the size "
            "of its mesh axes"
        )
    if len(shape) < 2:
        return None
    patterns = {"*": unit_dim} if isinstance(unit_dim, int) else unit_dim
    dim = next((dim for pattern, dim in patterns.items() if matches(pattern, name)), 0)
    if not -len(shape) <= dim < len(shape):
        raise ValueError(
            f"unit_dim={dim} is not a dim of {name}, whose shape is {shape}; give one of {len(shape)} dims"
        )
    return dim % len(shape)


def _powers_along(part: Tensor, dim: int | None, norm_type: float) -> Tensor:
    """Return the sums of |x|^p of the slices along ``dim``, 1-dim; for p = inf the largest |x|."""
    rows = part.reshape(1, -1) if dim is None else part.movedim(dim, 0).flatten(1)
    powers = rows.abs()
    return powers.amax(1) if norm_type == inf else powers.pow(norm_type).sum(1)
