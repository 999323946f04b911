"""Whether gradients can be reduced while backward runs, among collectives that the model itself issues there.

They are started when they have come, and wait for each other; where a rank lacks some, at the end of backward. So ranks
that meet in the model must come to the same reductions on the way, or they may wait for each other in a circle: one in
the model for another, which waits in a reduction for a third, which comes there only when it has met others in the model.
Then all of them wait for the end of backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ..norm.entries import ParameterEntry
from ..norm.plan import ReductionPlan
from .axes import sync_axes


def model_meets_over_data(entries: Sequence[ParameterEntry], topology: Topology, *axes: str) -> bool:
    """Whether the model may issue collectives over ``axes``, over which gradients are reduced, or over a data axis, whose
    ranks see other samples, and so may lack other gradients."""
    named = {name for entry in entries for name in entry.spec.named_axes}
    axes = (*axes, *(axis for axis in topology.data_axes if topology.size(axis) > 1))
    return any(not topology.only_splits_the_batch(axis) or axis in named for axis in axes)


def stages_differ(sizes: Sequence[Sequence[int]], topology: Topology) -> bool:
    """Whether ranks of one pipeline stage cut their parameters into other buckets.

    Args:
        sizes: Of each rank, the numbers of elements of its parameters.
    """
    within = [axis for axis in topology.axes if axis not in topology.pipe_axes]
    return any(of_rank != sizes[topology.peers(rank, *within)[0]] for rank, of_rank in enumerate(sizes))


@dataclass(frozen=True)
class Early:
    """Which gradients the optimizer itself averages while backward runs: those of its own over data axes alone; not a
    DTensor's, which has its in the step only, nor those of owned parameters, which other ranks lack.

    Attributes:
        plan: Of the parameters.
        none: All wait for the end of backward.
    """

    plan: ReductionPlan
    none: bool = False

    @classmethod
    def of(cls, plan: ReductionPlan, registry: ProcessGroupRegistry) -> Early:
        """Made by all ranks together. Collectives: an object all-gather."""
        early = cls(plan)
        sizes = [entry.numel for entry in plan.entries if early(entry)]
        meets = model_meets_over_data(plan.entries, plan.topology)
        reports = gather_objects((sizes, meets), registry)
        late = any(meets for _, meets in reports) or stages_differ([sizes for sizes, _ in reports], plan.topology)
        return cls(plan, none=late)

    def __call__(self, entry: ParameterEntry) -> bool:
        topology, spec = self.plan.topology, entry.spec
        axes = sync_axes(spec, topology, True, entry.averaged)
        mine = entry.trained and not entry.averaged and not spec.owned
        return mine and not self.none and bool(axes) and {*axes} <= {*topology.data_axes} - {*spec.named_axes}
