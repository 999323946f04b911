"""Make every rank's plan the same plan, or say on every rank where they differ. Once, when a plan is bound.

Ranks exchange a digest of what they declare, a few hundred bytes each, and where they are asked for the names and logical
shapes of their parameters; only when digests disagree do they exchange the whole views, to name the first that differs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from ...parallel.layout.spec import P, owns
from ...parallel.mesh.agreement import gather_objects, on_all_ranks_with
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from .plan import Bucket, ParameterEntry, ReductionPlan


class Holders(NamedTuple):
    """The coordinates that hold a parameter, as far as they are not all: they must say the same about it."""

    where: tuple[tuple[str, tuple[int, ...]], ...]
    tied: bool
    diagonal: tuple[tuple[str, str], ...] = ()  # pairs of axes along which they have the same coordinate

    def include(self, coordinate: Mapping[str, int]) -> bool:
        """Whether the rank at ``coordinate`` is one of them."""
        return all(coordinate[axis] in indices for axis, indices in self.where) and owns(self.diagonal, coordinate)

    def __str__(self) -> str:
        where = [*((axis, at[0]) for axis, at in self.where), *self.diagonal]
        return ",".join(f"{axis}={at}" for axis, at in where)

    @classmethod
    def of(cls, spec: P, plan: ReductionPlan) -> Holders:
        """Who holds a parameter of this spec: this pipeline stage, or its owners, or the stages it is tied over."""
        coordinate = plan.coordinate
        own = (axis for axis in plan.topology.pipe_axes if axis not in spec.named_axes)
        where: dict[str, tuple[int, ...]] = {axis: (coordinate[axis],) for axis in own}
        where |= {axis: (index,) for axis, index in spec.owned if not isinstance(index, str)}
        where |= {axis: spec.tied_coordinates(axis, plan.topology) for axis, _ in spec.tied}
        diagonal = tuple((axis, other) for axis, other in spec.owned if isinstance(other, str))
        return cls(tuple(sorted(where.items())), bool(spec.tied), diagonal)


class View(NamedTuple):
    """What one rank says about a parameter. Tied parameters may have other names elsewhere, all else must be equal."""

    name: str
    said: str

    @classmethod
    def of(cls, entry: ParameterEntry, spec: str) -> View:
        """The view of ``entry``, whose spec prints so; sizes of sharded dims are left out, as pieces may be uneven."""
        sizes = ("sharded" if entry.spec.dim_axes(d) else str(size) for d, size in enumerate(entry.shape))
        frozen = "" if entry.trained else ", frozen"
        shape = f"shape ({', '.join(sizes)})"
        return cls(entry.name, f"{spec}, {shape}, {str(entry.dtype)[6:]}, param group {entry.group}{frozen}")


class Called(NamedTuple):
    """Of each parameter of a rank: what tells logical parameters apart, what it is called there, and its logical shape."""

    keys: list[tuple[Holders, str | int]]
    names: list[str]
    shapes: list[tuple[int, ...] | None]

    @classmethod
    def of(cls, plan: ReductionPlan) -> Called:
        """Of several parameters that were declared by one name, as where each layer declares its own ``weight``, the second
        is called ``weight (2)``."""
        keys: list[tuple[Holders, str | int]] = []
        names: list[str] = []
        seen: Counter[Holders] = Counter()
        declared: Counter[str] = Counter()
        for entry, holders in zip(plan.entries, _holders(plan), strict=True):
            declared[entry.name] += 1
            times = declared[entry.name]
            names.append(entry.name if times == 1 else f"{entry.name} ({times})")
            # Tied copies have different names: they are the same parameter by their position among the tied ones.
            keys.append((holders, seen[holders] if holders.tied else names[-1]))
            seen[holders] += 1
        return cls(keys, names, [entry.full_shape for entry in plan.entries])


@dataclass(frozen=True)
class Summary:
    """What ranks tell each other of their plans, for `agree`."""

    digests: dict[Holders, str]
    shapes: dict[Holders, str]  # digests, of the logical shapes
    buckets: tuple[Bucket, ...]
    num_groups: int
    weighted: Fraction  # elements, each divided by its number of holders
    named: Called | None

    @classmethod
    def of(cls, plan: ReductionPlan, names: bool) -> Summary:
        """Without ``names`` a few hundred bytes, however many parameters there are."""
        digests = {holders: _digest(holders, found) for holders, found in _views(plan).items()}
        shapes = {holders: _hexdigest(found) for holders, found in _full_shapes(plan).items()}
        return cls(digests, shapes, plan.buckets, plan.num_groups, _weighted(plan), Called.of(plan) if names else None)


def agreed(make: Callable[[], ReductionPlan], registry: ProcessGroupRegistry, names: bool = False) -> ReductionPlan:
    """The plan that ``make`` makes, without a collective; agreed, as by `agree`, in the gather that an error of ``make``
    takes anyway.

    Raises: As `on_all_ranks` and `agree`.
    Collectives: an object all-gather, and those of `agree`. Host reads: yes.
    """

    def made() -> tuple[ReductionPlan, Summary]:
        plan = make()
        return plan, Summary.of(plan, names)

    return agree(*on_all_ranks_with(made, registry), registry)


def agree(plan: ReductionPlan, summaries: Sequence[Summary], registry: ProcessGroupRegistry) -> ReductionPlan:
    """``plan`` with the bucket list, the element count and, where summaries have them, the parameter names that all ranks
    share.

    Ranks at the same coordinates of the pipeline axes must declare the same parameters in the same order (names, specs,
    unsharded dims, param groups), but for owned ones, on which their owners must agree, and tied ones, on which the
    stages that are tied must agree (names may differ there).

    Args:
        summaries: By global rank, of each rank's plan.
    Raises:
        ValueError: On every rank, when two disagree; names the first parameter that differs and both views of it.
    Collectives: object all-gathers, where ranks differ. Host reads: yes.
    """
    disagreement = _first_disagreement([summary.digests for summary in summaries], plan.topology)
    if disagreement is not None:
        holders, first, second = disagreement
        everybody = gather_objects(_views(plan).get(holders, []), registry)
        raise ValueError(_difference(first, everybody[first], second, everybody[second], holders.tied))
    if _first_disagreement([summary.shapes for summary in summaries], plan.topology) is not None:
        plan = _without_uneven(plan, gather_objects(_full_shapes(plan), registry))
    shared = replace(
        plan,
        buckets=tuple(sorted({bucket for summary in summaries for bucket in summary.buckets})),
        num_groups=max(summary.num_groups for summary in summaries),
        counted=int(sum((summary.weighted for summary in summaries), Fraction())),
    )
    named = [summary.named for summary in summaries if summary.named is not None]
    return _with_names(shared, named) if named else shared


def with_names(plan: ReductionPlan, registry: ProcessGroupRegistry) -> ReductionPlan:
    """An agreed plan with one name for each logical parameter of the model, made unique by the stage where it must be.

    Collectives: an object all-gather. Host reads: yes.
    """
    return _with_names(plan, gather_objects(Called.of(plan), registry))


def _with_names(plan: ReductionPlan, by_rank: Sequence[Called]) -> ReductionPlan:
    labels: dict[tuple[Holders, str | int], str] = {}
    shapes: dict[tuple[Holders, str | int], tuple[int, ...] | None] = {}
    for of_rank in by_rank:
        for key, name, shape in zip(*of_rank, strict=True):
            labels.setdefault(key, name)
            shapes[key] = shape if shapes.setdefault(key, shape) == shape else None
    used = Counter(labels.values())
    unique = [name if used[name] == 1 else f"{name}@{holders}" for (holders, _), name in labels.items()]
    slots = {key: slot for slot, key in enumerate(labels)}
    return replace(
        plan,
        parameter_names=tuple(unique),
        parameter_slots=tuple(slots[key] for key in by_rank[plan.rank].keys),
        parameter_shapes=tuple(shapes[key] for key in labels),
    )


def _holders(plan: ReductionPlan) -> tuple[Holders, ...]:
    """Of each entry."""
    return plan.for_each(lambda spec: Holders.of(spec, plan))


def _weighted(plan: ReductionPlan) -> Fraction:
    """The elements of this rank, each divided by its number of holders."""
    numels: Counter[int] = Counter()
    for entry, holders in zip(plan.entries, plan.num_replicas, strict=True):
        numels[holders] += entry.numel
    return sum((Fraction(numel, holders) for holders, numel in numels.items()), Fraction())


def _full_shapes(plan: ReductionPlan) -> dict[Holders, list[tuple[int, ...] | None]]:
    shapes: dict[Holders, list[tuple[int, ...] | None]] = {}
    for entry, holders in zip(plan.entries, _holders(plan), strict=True):
        shapes.setdefault(holders, []).append(entry.full_shape)
    return shapes


def _without_uneven(
    plan: ReductionPlan, everybody: Sequence[Mapping[Holders, list[tuple[int, ...] | None]]]
) -> ReductionPlan:
    """The plan without the logical shapes of parameters of which ranks have pieces of unequal sizes."""
    seen: Counter[Holders] = Counter()
    entries = []
    for entry, holders in zip(plan.entries, _holders(plan), strict=True):
        position, seen[holders] = seen[holders], seen[holders] + 1
        even = len({shapes[holders][position] for shapes in everybody if holders in shapes}) == 1
        entries.append(entry if even else replace(entry, full_shape=None))
    return replace(plan, entries=tuple(entries))


def _views(plan: ReductionPlan) -> dict[Holders, list[View]]:
    views: dict[Holders, list[View]] = {}
    said = plan.for_each(str)
    for entry, holders, spec in zip(plan.entries, _holders(plan), said, strict=True):
        views.setdefault(holders, []).append(View.of(entry, spec))
    return views


def _digest(holders: Holders, views: Sequence[View]) -> str:
    return _hexdigest([view.said if holders.tied else tuple(view) for view in views])


def _hexdigest(said: Sequence[object]) -> str:
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


def _first_disagreement(
    digests: Sequence[Mapping[Holders, str]], topology: Topology
) -> tuple[Holders, int, int] | None:
    """Two ranks that hold the same parameters and say different things about them; the same two on every rank."""
    coordinates = [topology.coordinate(rank) for rank in range(topology.world_size)]
    for holders in sorted({key for declared in digests for key in declared}):
        ranks = [rank for rank, coordinate in enumerate(coordinates) if holders.include(coordinate)]
        for rank in ranks:
            if digests[rank].get(holders) != digests[ranks[0]].get(holders):
                return holders, ranks[0], rank
    return None


def _difference(first: int, mine: list[View], second: int, theirs: list[View], tied: bool) -> str:
    for index in range(max(len(mine), len(theirs))):
        one = mine[index] if index < len(mine) else None
        other = theirs[index] if index < len(theirs) else None
        if one is None or other is None or one.said != other.said or (not tied and one.name != other.name):
            shown = [f"{view.name}: {view.said}" if view else "no such parameter" for view in (one, other)]
            return (
                f"ranks {first} and {second} hold the same parameters but declare them differently, first in "
                f"{(one or other or View('?', '')).name}: rank {first} says [{shown[0]}], rank {second} says [{shown[1]}]; "
                "declare the same parameters in the same order on both, or say with owned= or tied= who holds them"
            )
    raise AssertionError("digests differ but views do not")
