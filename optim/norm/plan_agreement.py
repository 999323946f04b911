"""Comparison of the ranks' reduction plans: ranks that hold the same parameters must declare them equally.

Each rank sends digests of its declarations and of its parameters' full shapes. On request it also sends the names and
full shapes themselves. If digests of declarations differ, ranks exchange the declarations, and every rank raises an
error that shows the first two declarations that differ. If digests of full shapes differ, ranks exchange the full
shapes. A full shape that differs between ranks was computed from shards of unequal sizes, and becomes unknown (None).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, zip_longest
from typing import NamedTuple, TypeVar

from ...parallel.layout.spec import P, owns
from ...parallel.mesh.agreement import gather_objects, on_all_ranks_with
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from .plan import NormBucket, ParameterEntry, ReductionPlan

T = TypeVar("T")


class Holders(NamedTuple):
    """The coordinates of the ranks that hold a parameter or its shards. These ranks must declare the parameter equally.

    ``where`` has (axis, coordinates) pairs: along ``axis``, only ranks at ``coordinates`` hold the parameter. Only
    ranks with equal coordinates on both axes of a pair in ``diagonal`` hold it. ``tied``: the parameter is tied over
    pipeline stages.
    """

    where: tuple[tuple[str, tuple[int, ...]], ...]
    tied: bool
    diagonal: tuple[tuple[str, str], ...] = ()

    def include(self, coordinate: Mapping[str, int]) -> bool:
        return all(coordinate[axis] in indices for axis, indices in self.where) and owns(self.diagonal, coordinate)

    def __str__(self) -> str:
        where = [*((axis, at[0]) for axis, at in self.where), *self.diagonal]
        return ",".join(f"{axis}={at}" for axis, at in where)

    @classmethod
    def of(cls, spec: P, plan: ReductionPlan) -> Holders:
        """Return the coordinates of the ranks that hold a parameter with the layout ``spec``.

        These are all ranks of this pipeline stage, or of the tied stages. If the spec names owner ranks, they are only
        the owner ranks.
        """
        coordinate = plan.coordinate
        own = (axis for axis in plan.topology.pipe_axes if axis not in spec.named_axes)
        where: dict[str, tuple[int, ...]] = {axis: (coordinate[axis],) for axis in own}
        where |= {axis: (index,) for axis, index in spec.owned if not isinstance(index, str)}
        where |= {axis: spec.tied_coordinates(axis, plan.topology) for axis, _ in spec.tied}
        diagonal = tuple((axis, other) for axis, other in spec.owned if isinstance(other, str))
        return cls(tuple(sorted(where.items())), bool(spec.tied), diagonal)


class Declaration(NamedTuple):
    """A rank's declaration of a parameter. A tied parameter may have different names on different stages.

    ``layout`` is the parameter's spec, its shape without the sizes of sharded dims, which may be uneven, and its dtype,
    as text.
    """

    name: str
    layout: str
    group: int
    trained: bool

    @classmethod
    def of(cls, entry: ParameterEntry, spec: str) -> Declaration:
        sizes = ("sharded" if entry.spec.dim_axes(d) else str(size) for d, size in enumerate(entry.shape))
        layout = f"{spec}, shape ({', '.join(sizes)}), {str(entry.dtype)[6:]}"
        return cls(entry.name, layout, entry.group, entry.trained)

    @property
    def text(self) -> str:
        return f"{self.layout}, param group {self.group}{'' if self.trained else ', frozen'}"


class ParameterIdentity(NamedTuple):
    """The key, name and full shape of a parameter.

    All shards and replicas of one logical parameter have equal keys on all ranks.
    """

    key: tuple[Holders, str | int]
    name: str
    full_shape: tuple[int, ...] | None


def identities_of(plan: ReductionPlan) -> list[ParameterIdentity]:
    """Return the identity of each parameter of a plan.

    If several parameters of this rank have one name, such as ``weight`` in each layer, the second name is ``weight (2)``.
    """
    found = []
    seen: Counter[Holders] = Counter()
    declared: Counter[str] = Counter()
    holders_of = _holders(plan)
    for entry in plan.entries:
        holders = holders_of[entry.spec]
        declared[entry.name] += 1
        times = declared[entry.name]
        name = entry.name if times == 1 else f"{entry.name} ({times})"
        # A tied parameter may have different names on its stages. So its key contains, instead of the name, its position
        # among the parameters that are tied over the same stages.
        found.append(ParameterIdentity((holders, seen[holders] if holders.tied else name), name, entry.full_shape))
        seen[holders] += 1
    return found


@dataclass(frozen=True)
class Summary:
    """The data about one rank's plan that `agree` compares or combines over ranks.

    The parameters of a rank are divided into sets held by the same ranks; ``digests`` (of declarations) and ``shapes``
    (digests of full shapes) have one item per set. ``weighted`` is the sum over the parameters of the number of local
    elements divided by the replication factor. ``named`` is None if names were not requested.
    """

    digests: dict[Holders, str]
    shapes: dict[Holders, str]
    buckets: tuple[NormBucket, ...]
    num_groups: int
    weighted: Fraction
    named: list[ParameterIdentity] | None

    @classmethod
    def of(cls, plan: ReductionPlan, names: bool) -> Summary:
        """Return the summary of ``plan``. With ``names`` it contains parameter names and full shapes, and is large."""
        digests = {
            holders: _hexdigest([one.text if holders.tied else tuple(one) for one in found])
            for holders, found in _declarations(plan).items()
        }
        shapes = {holders: _hexdigest(found) for holders, found in _full_shapes(plan).items()}
        named = identities_of(plan) if names else None
        return cls(digests, shapes, plan.buckets, plan.num_groups, _weighted(plan), named)


def agreed(make: Callable[[], ReductionPlan], registry: ProcessGroupRegistry, names: bool = False) -> ReductionPlan:
    """Return this rank's plan ``make()``, completed by `agree` after a comparison of all ranks' plans.

    ``make`` must not issue a collective; its error on any rank is raised on every rank. With ``names``, parameter names
    are also exchanged, so that the returned plan has unique names.
    Collectives: an object all-gather, and the collectives of `agree`; none with one rank.
    """

    def make_with_summary() -> tuple[ReductionPlan, Summary]:
        plan = make()
        return plan, Summary.of(plan, names)

    return agree(*on_all_ranks_with(make_with_summary, registry), registry)


def agree(plan: ReductionPlan, summaries: Sequence[Summary], registry: ProcessGroupRegistry) -> ReductionPlan:
    """Return ``plan`` with the norm buckets, the element count and the parameter names of all ranks.

    In the returned plan, ``full_shape`` is None for a parameter whose shards have unequal sizes, unless it was
    declared.

    Ranks of one pipeline stage must declare the same parameters in the same order; otherwise ValueError is raised on
    every rank. The name, the spec, the sizes of unsharded dims, the dtype, the param group, and whether the parameter
    is frozen must be equal. For an owned parameter this applies to its owner ranks only. For a tied parameter it
    applies to all ranks of its stages, but its name may differ.

    Collectives: one object all-gather, only if declarations or full shapes differ between ranks.
    """
    disagreement = _first_disagreement([summary.digests for summary in summaries], plan.topology)
    if disagreement is not None:
        holders, first, second = disagreement
        by_rank = gather_objects(_declarations(plan).get(holders, []), registry)
        raise ValueError(_difference(first, by_rank[first], second, by_rank[second], holders.tied))
    if _first_disagreement([summary.shapes for summary in summaries], plan.topology) is not None:
        plan = _drop_uneven_shapes(plan, gather_objects(_full_shapes(plan), registry))
    shared = replace(
        plan,
        buckets=tuple(sorted({bucket for summary in summaries for bucket in summary.buckets})),
        num_groups=max(summary.num_groups for summary in summaries),
        counted=int(sum((summary.weighted for summary in summaries), Fraction())),
    )
    named = [summary.named for summary in summaries if summary.named is not None]
    return _with_names(shared, named) if named else shared


def with_names(plan: ReductionPlan, registry: ProcessGroupRegistry) -> ReductionPlan:
    """Return ``plan`` with a unique name per logical parameter of the model.

    If different parameters on several pipeline stages or owner ranks have the same name, their names get a suffix, such
    as ``@pipe=1``.

    ``plan`` comes from `agree`, without names.
    Collectives: an object all-gather; none with one rank.
    Host synchronization: yes, except with one rank.
    """
    return _with_names(plan, gather_objects(identities_of(plan), registry))


def _with_names(plan: ReductionPlan, by_rank: Sequence[Sequence[ParameterIdentity]]) -> ReductionPlan:
    labels: dict[tuple[Holders, str | int], str] = {}
    shapes: dict[tuple[Holders, str | int], tuple[int, ...] | None] = {}
    for key, name, shape in chain.from_iterable(by_rank):
        labels.setdefault(key, name)
        shapes[key] = shape if shapes.setdefault(key, shape) == shape else None
    used = Counter(labels.values())
    unique = [name if used[name] == 1 else f"{name}@{holders}" for (holders, _), name in labels.items()]
    slots = {key: slot for slot, key in enumerate(labels)}
    return replace(
        plan,
        parameter_names=tuple(unique),
        parameter_slots=tuple(slots[identity.key] for identity in by_rank[plan.rank]),
        parameter_shapes=tuple(shapes[key] for key in labels),
    )


def _holders(plan: ReductionPlan) -> dict[P, Holders]:
    return plan.by_spec(lambda spec: Holders.of(spec, plan))


def _weighted(plan: ReductionPlan) -> Fraction:
    numels: Counter[P] = Counter()
    for entry in plan.entries:
        numels[entry.spec] += entry.numel
    return sum((Fraction(numel, spec.num_replicas(plan.topology)) for spec, numel in numels.items()), Fraction())


def _by_holders(plan: ReductionPlan, value_of: Callable[[ParameterEntry], T]) -> dict[Holders, list[T]]:
    """Return ``value_of(entry)`` of all parameters, in lists by the ranks that hold the parameter."""
    found: dict[Holders, list[T]] = {}
    holders_of = _holders(plan)
    for entry in plan.entries:
        found.setdefault(holders_of[entry.spec], []).append(value_of(entry))
    return found


def _full_shapes(plan: ReductionPlan) -> dict[Holders, list[tuple[int, ...] | None]]:
    return _by_holders(plan, lambda entry: entry.full_shape)


def _declarations(plan: ReductionPlan) -> dict[Holders, list[Declaration]]:
    text_of = plan.by_spec(str)
    return _by_holders(plan, lambda entry: Declaration.of(entry, text_of[entry.spec]))


def _drop_uneven_shapes(
    plan: ReductionPlan, by_rank: Sequence[Mapping[Holders, list[tuple[int, ...] | None]]]
) -> ReductionPlan:
    """Return the plan with ``full_shape`` None where it differs between ranks, because shards have unequal sizes."""
    seen: Counter[Holders] = Counter()
    entries = []
    holders_of = _holders(plan)
    for entry in plan.entries:
        holders = holders_of[entry.spec]
        position, seen[holders] = seen[holders], seen[holders] + 1
        even = len({shapes[holders][position] for shapes in by_rank if holders in shapes}) == 1
        entries.append(entry if even else replace(entry, full_shape=None))
    return replace(plan, entries=tuple(entries))


def _hexdigest(declared: Sequence[object]) -> str:
    return hashlib.sha256(repr(declared).encode()).hexdigest()[:16]


def _first_disagreement(
    digests: Sequence[Mapping[Holders, str]], topology: Topology
) -> tuple[Holders, int, int] | None:
    """Return (holders, rank, other rank) of the first two ranks whose digests for the same holders differ, else None."""
    coordinates = [topology.coordinate(rank) for rank in range(topology.world_size)]
    for holders in sorted({key for declared in digests for key in declared}):
        ranks = [rank for rank, coordinate in enumerate(coordinates) if holders.include(coordinate)]
        for rank in ranks:
            if digests[rank].get(holders) != digests[ranks[0]].get(holders):
                return holders, ranks[0], rank
    return None


def _first_regrouped(mine: Sequence[Declaration], theirs: Sequence[Declaration]) -> tuple[str, int, int] | None:
    """Return the name of the first parameter with different param groups on two ranks, and its two param groups.

    Return None if no param group differs, or if the declarations differ in anything but param groups and order.
    """
    if sorted(of._replace(group=0) for of in mine) != sorted(of._replace(group=0) for of in theirs):
        return None
    group_of = {of.name: of.group for of in theirs}
    return next(((of.name, of.group, group_of[of.name]) for of in mine if of.group != group_of[of.name]), None)


def _advice(one: Declaration | None, other: Declaration | None, tied: bool) -> str:
    """Return how to correct two declarations that differ. None: the rank has no such parameter."""
    if one is not None and other is not None and (tied or one.name == other.name):
        differs = {
            "spec, shape and dtype": one.layout != other.layout,
            "param group": one.group != other.group,
            "requires_grad": one.trained != other.trained,
        }
        same = " and the same ".join(name for name, is_different in differs.items() if is_different)
        return f"give {one.name} the same {same} on both ranks"
    stages = "" if one and other else ". If the ranks are pipeline stages, give their mesh axis the role 'pipe'"
    return (
        "declare the same parameters in the same order on both, or declare the ranks that hold them with owned= or tied="
        + stages
    )


def _difference(first: int, mine: list[Declaration], second: int, theirs: list[Declaration], tied: bool) -> str:
    if not tied and (regrouped := _first_regrouped(mine, theirs)):
        name, own_group, other_group = regrouped
        return (
            f"ranks {first} and {second} hold the same parameters in different param groups, first {name}: in group "
            f"{own_group} on rank {first}, in group {other_group} on rank {second}; put each parameter into the same param "
            "group on all ranks"
        )
    for one, other in zip_longest(mine, theirs):
        if one is None or other is None or one.text != other.text or (not tied and one.name != other.name):
            shown = [
                f"{declaration.name}: {declaration.text}" if declaration else "no such parameter"
                for declaration in (one, other)
            ]
            is_missing = one is None or other is None
            differ = "different parameters" if is_missing else "the same parameters but declare them differently"
            return (
                f"ranks {first} and {second} hold {differ}, first in {(one or other).name}: rank {first} has "
                f"[{shown[0]}], rank {second} has [{shown[1]}]; {_advice(one, other, tied)}"
            )
    raise AssertionError("digests differ but declarations do not")
