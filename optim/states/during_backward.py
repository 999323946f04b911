"""Whether gradients can be reduced while backward runs, among collectives that the model itself issues there.

They are started when they have come, and wait for each other; where a rank lacks some, at the end of backward. So ranks
that meet in the model must come to the same reductions on the way, or they may wait for each other in a circle: one in
the model for another, which waits in a reduction for a third, which comes there only when it has met others in the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...parallel.mesh.topology import Topology
from ..norm.entries import ParameterEntry


def model_meets_over_data(entries: Sequence[ParameterEntry], axes: Sequence[str], topology: Topology) -> bool:
    """Whether the model may issue collectives over ``axes``, over which gradients are reduced, or over a data axis, whose
    ranks see other samples, and so may lack other gradients."""
    named = {name for entry in entries for name in entry.spec.named_axes}
    axes = (*axes, *(other for other in topology.data_axes if topology.size(other) > 1))
    return any(not topology.only_splits_the_batch(axis) or axis in named for axis in axes)


def stages_differ(sizes: Sequence[Sequence[int]], topology: Topology) -> bool:
    """Whether ranks of one pipeline stage cut their parameters into other buckets.

    Args:
        sizes: Of each rank, the numbers of elements of its parameters.
    """
    within = [axis for axis in topology.axes if axis not in topology.pipe_axes]
    return any(of_rank != sizes[topology.peers(rank, *within)[0]] for rank, of_rank in enumerate(sizes))
