"""Whether gradients can be reduced while backward runs, among collectives that the model itself issues there.

They are started when they have come, and wait for each other; where a rank lacks some, at the end of backward. So ranks
that meet in the model must come to the same reductions on the way, or they may wait for each other in a circle: one in
the model for another, which waits in a reduction for a third, which comes there only when it has met others in the model.
Then all of them wait for the end of backward; where only pieces are uneven, those of their kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ..norm.entries import ParameterEntry
from ..norm.plan import ReductionPlan
from .axes import layout_kind, sync_axes


def model_meets_over_data(entries: Sequence[ParameterEntry], topology: Topology, *axes: str) -> bool:
    """Whether the model may issue collectives over ``axes``, over which gradients are reduced, or over a data axis, whose
    ranks see other samples, and so may lack other gradients."""
    named = {name for entry in entries for name in entry.spec.named_axes}
    axes = (*axes, *(axis for axis in topology.data_axes if topology.size(axis) > 1))
    return any(not topology.only_splits_the_batch(axis) or axis in named for axis in axes)


Sizes = tuple[tuple[str, int], ...]
"""The kind of layout and the number of elements of each parameter of a rank, in order."""


def kind_of(entry: ParameterEntry, topology: Topology) -> str:
    """In words, one for each kind of layout."""
    return str(layout_kind(entry.spec, topology))


def sizes_of(entries: Iterable[ParameterEntry], topology: Topology) -> Sizes:
    """Of the parameters of these entries."""
    return tuple((kind_of(entry, topology), entry.numel) for entry in entries)


def uneven_kinds(sizes: Sequence[Sizes], topology: Topology) -> frozenset[str]:
    """The kinds of layout whose parameters ranks of one pipeline stage cut into other buckets; all, where what is left does
    not come in one order.

    Args:
        sizes: By rank.
    """
    within = [axis for axis in topology.axes if axis not in topology.pipe_axes]
    first = [sizes[topology.peers(rank, *within)[0]] for rank in range(len(sizes))]
    others = {(one, other) for one, other in zip(sizes, first, strict=True) if one != other}

    def differ(kinds: set[str]) -> bool:
        return any(
            [item for item in one if item[0] in kinds] != [item for item in other if item[0] in kinds]
            for one, other in others
        )

    kinds = {kind for pair in others for of_rank in pair for kind, _ in of_rank}
    uneven = {kind for kind in kinds if differ({kind})}
    return frozenset(kinds if differ(kinds - uneven) else uneven)


@dataclass(frozen=True)
class Early:
    """Which gradients the optimizer itself averages while backward runs: those of its own over data axes alone; not a
    DTensor's, which has its in the step only, nor those of owned parameters, which other ranks lack.

    Attributes:
        plan: Of the parameters.
        none: All wait for the end of backward.
        uneven: The kinds of layout that do.
    """

    plan: ReductionPlan
    none: bool = False
    uneven: frozenset[str] = frozenset()

    @classmethod
    def of(cls, plan: ReductionPlan, registry: ProcessGroupRegistry) -> Early:
        """Made by all ranks together. Collectives: an object all-gather."""
        early, topology = cls(plan), plan.topology
        sizes = sizes_of((entry for entry in plan.entries if early(entry)), topology)
        reports = gather_objects((sizes, model_meets_over_data(plan.entries, topology)), registry)
        uneven = uneven_kinds([sizes for sizes, _ in reports], topology)
        return cls(plan, any(meets for _, meets in reports), uneven)

    def __call__(self, entry: ParameterEntry) -> bool:
        topology, spec = self.plan.topology, entry.spec
        axes = sync_axes(spec, topology, True, entry.averaged)
        mine = entry.trained and not entry.averaged and not spec.owned
        waits = self.none or kind_of(entry, topology) in self.uneven
        return mine and not waits and bool(axes) and {*axes} <= {*topology.data_axes} - {*spec.named_axes}
