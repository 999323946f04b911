"""Over which axes a parameter is cut into the pieces that ranks step; and that all of these ranks cut it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...parallel.mesh.topology import Topology
from ..gradients.axes import sync_axes
from ..norm.entries import ParameterEntry


class Cut(NamedTuple):
    """The axes that cut a parameter, none where it stays whole, and whether its gradients are to be summed over them."""

    axes: tuple[str, ...] = ()
    summed: bool = False


def cut_of(entry: ParameterEntry, axis: str, topology: Topology, averages_data: bool, gradients: bool) -> Cut:
    """How a parameter is cut over an axis, or over those of an alias on which all ranks hold and step the same of it.

    Where torch has averaged its gradient over some of them and not over others, the others cut. The gradients of a DTensor
    are its own until the step, so they can't be taken from backward.

    Args:
        averages_data: Whether the optimizer averages gradients over the data axes.
        gradients: They are taken from backward.
    """
    spec = entry.spec
    taken = {*spec.distinct_axes(topology), *dict(spec.owned), *dict(spec.tied)}
    free = tuple(axis for axis in topology.atoms(axis) if axis not in taken and topology.size(axis) > 1)
    if not entry.trained or not entry.numel or (gradients and entry.averaged):
        return Cut()
    to_sum = sync_axes(spec, topology, averages_data, entry.averaged)
    summed = tuple(axis for axis in free if axis in to_sum)
    return Cut(summed or free, bool(summed))


Cuts = Mapping[tuple[str, ...], list[str]]
"""The names of the parameters that a rank cuts over these axes."""


def check_same_cuts(cuts: Sequence[Cuts], topology: Topology) -> None:
    """Raise ValueError where two ranks along the same axes would cut different parameters over them.

    Args:
        cuts: Of each rank.
    """
    for axes in sorted({axes for of_rank in cuts for axes in of_rank}):
        for rank, of_rank in enumerate(cuts):
            first = topology.peers(rank, *axes)[0]
            names, others = of_rank.get(axes, []), cuts[first].get(axes, [])
            if names != others:
                differ = sorted({*names} ^ {*others})
                over = axes[0] if len(axes) == 1 else " x ".join(axes)
                raise ValueError(
                    f"ranks {first} and {rank} would shard different parameters over {over!r}, {', '.join(differ[:5])} on "
                    "only one of them: freeze the same parameters on all ranks before making the optimizer"
                )
