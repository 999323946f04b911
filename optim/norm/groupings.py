"""Groups of parameters other than param groups: by name (`Named`), and slices along a dim (`Units`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from math import inf

import torch
from torch import Tensor

from ...parallel.layout.regions import Region
from ...parallel.mesh.text import some
from ..kernels.device_constants import Constants
from .plan import ReductionPlan
from .powers import p_norm

# Groups by name -------------------------------------------------------------------------------------------------------

# Named groups: logical parameters by glob over their names, whoever holds them and whatever param groups they are in.
#
# named[k]^p = sum of parameters[i]^p over the parameters whose name matches pattern k, and no pattern before it


def matches(pattern: str, name: str) -> bool:
    """Whether a logical parameter is meant, with or without the stage that makes its name unique."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.partition("@")[0], pattern)


@dataclass(frozen=True)
class Named:
    """The groups that patterns make of all logical parameters of a plan; the last one is what no pattern matches.

    Args:
        groups: For each logical parameter the index of its group: that of the first pattern that matches.
        count: Number of groups, that of the others among them.
    """

    groups: tuple[int, ...]
    count: int

    @classmethod
    def of(cls, names: Sequence[str], patterns: Sequence[str]) -> Named:
        """The groups of the parameters of these ``names``, the same on every rank.

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
                    f"the pattern {pattern!r} matches {some(taken)}, which earlier patterns have taken: the first match "
                    "wins, so write the narrower pattern first"
                    if taken
                    else f"the pattern {pattern!r} matches no parameter; there are {some(sorted(names))}. Names come from "
                    "declare, or from model.named_parameters(), if the optimizer is made of these"
                )
        return cls(groups, len(patterns) + 1)

    def norms(self, parameters: Tensor, norm_type: float, constants: Constants) -> Tensor:
        """[count]: of each group, from [logical parameters]; 0 of one without parameters. Host reads: none."""
        index = constants(("named", self.groups), lambda: self.groups, torch.int64, parameters.device)
        own = index.unsqueeze(1) == torch.arange(self.count, device=parameters.device)
        return p_norm(torch.where(own, parameters.unsqueeze(1), torch.zeros_like(parameters[:1])), norm_type)


# Slices along a dim ---------------------------------------------------------------------------------------------------

# A unit is a slice of the full tensor, such as a row of a linear layer's weight. A rank may hold parts of many units, and
# several ranks parts of one. Each rank adds the powers of its parts to the units' slots, and the packed collective adds
# those of all ranks.

UnitDim = int | Mapping[str, int]
"""The dim along which units lie, of all parameters or by glob over their names (0 for those that no pattern matches)."""


@dataclass(frozen=True)
class Units:
    """The units of all logical parameters of a plan, and this rank's parts of them.

    Args:
        dims: For each logical parameter the dim of its units; None: it is one unit (it has fewer than two dims).
        starts: For each logical parameter the slot of its first unit, and at the end the number of slots.
        slots: For each entry of the plan the index of its logical parameter.
        regions: For each entry which part of the logical tensor this rank has.
    """

    dims: tuple[int | None, ...]
    starts: tuple[int, ...]
    slots: tuple[int, ...]
    regions: tuple[Region, ...]

    @classmethod
    def of(cls, plan: ReductionPlan, regions: Sequence[Region | None], unit_dim: UnitDim = 0) -> Units:
        """The units of a plan that was agreed with ``names=True``.

        Args:
            regions: For each entry; None where pieces are of unequal sizes.
        Raises:
            ValueError: A parameter has pieces of unequal sizes, or lacks the dim.
        """
        dims = tuple(
            _dim_of(name, shape, unit_dim)
            for name, shape in zip(plan.parameter_names, plan.parameter_shapes, strict=True)
        )
        counts = [
            1 if dim is None else shape[dim]
            for dim, shape in zip(dims, plan.parameter_shapes, strict=True)
            if shape is not None  # `_dim_of` has raised
        ]
        known = tuple(region for region in regions if region is not None)
        return cls(dims, tuple(accumulate(counts, initial=0)), plan.parameter_slots, known)

    @property
    def count(self) -> int:
        """Number of units of all parameters."""
        return self.starts[-1]

    def powers(self, tensors: Sequence[Tensor | None], norm_type: float, weights: Sequence[float]) -> Tensor:
        """[count] float64: the sum of |x|^p of this rank's parts of each unit, times the entry's weight (p = inf: the
        largest |x|, unweighted). Host reads: none."""
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
        """Multiply this rank's part of every unit of entry ``index`` by its unit's factor, in place."""
        for first, dim, part in self._parts(index, gradient):
            if dim is None:
                part.mul_(factors[first].to(part))
                continue
            shape = [-1 if d == dim else 1 for d in range(part.dim())]
            part.mul_(factors[first : first + part.shape[dim]].to(part).view(shape))

    def _parts(self, index: int, tensor: Tensor | None) -> list[tuple[int, int | None, Tensor]]:
        """(slot of the first unit, dim of the units in the part, part) of what this rank has of entry ``index``."""
        if tensor is None or not tensor.numel():
            return []
        slot, region = self.slots[index], self.regions[index]
        dim, start = self.dims[slot], self.starts[slot]
        parts = region.parts(tensor)
        return [(start if dim is None else start + at[dim], dim, part) for at, part in parts.items()]


def _dim_of(name: str, shape: tuple[int, ...] | None, unit_dim: UnitDim) -> int | None:
    if shape is None:
        raise ValueError(
            f"{name} has pieces of unequal sizes, so that its units are not known: make dims divide over axes"
        )
    if len(shape) < 2:
        return None
    patterns = {"*": unit_dim} if isinstance(unit_dim, int) else unit_dim
    dim = next((dim for pattern, dim in patterns.items() if matches(pattern, name)), 0)
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"unit_dim={dim} is no dim of {name}, whose shape is {shape}; give one of its {len(shape)}")
    return dim % len(shape)


def _powers_along(part: Tensor, dim: int | None, norm_type: float) -> Tensor:
    """1-dim: the sums of |x|^p of the slices along ``dim``."""
    rows = part.reshape(1, -1) if dim is None else part.movedim(dim, 0).flatten(1)
    powers = rows.abs()
    return powers.amax(1) if norm_type == inf else powers.pow(norm_type).sum(1)
