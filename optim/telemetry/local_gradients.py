"""The squared norm of each data rank's own gradient, before the ranks' are averaged.

Sums over other axes, of a term that every rank of ``tensor`` has, or of tied copies, are made first, on copies: what is
asked for is the gradient that this data rank alone would step with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...parallel.interop.local import has_dtensors
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ..gradients.axes import sync_axes, sync_ranks
from ..gradients.bucket import reduce_all
from ..gradients.in_place import gradient_dtype
from ..gradients.sync import gradient_buckets
from ..norm.constants import Constants
from ..norm.entries import ParameterEntry
from ..norm.plan import ReductionPlan
from ..parallel_optimizer import ParallelOptimizer
from ..states.sharded import Sharded
from .local_sums import squares


def check_are_local(optimizer: ParallelOptimizer[Any]) -> None:
    """Raise ValueError where gradients are not this data rank's own when backward is over. Collectives: none."""
    setup, topology = optimizer._setup, optimizer.registry.topology
    if topology.size(*topology.data_axes) == 1:
        raise ValueError(
            f"NoiseScale needs two data ranks, whose gradients differ; the mesh is {topology!r}: leave noise= out"
        )
    reasons = []
    if optimizer._switch is not None or not setup.reduce.average_data:
        reasons.append("data_parallel= averages them while backward runs: leave it out, and the step averages them")
    if setup.reduce.overlap:
        reasons.append("Reduce(overlap=True) averages them while backward runs: leave overlap out")
    if any(isinstance(placement, Sharded) and placement.gradients for placement in setup.placements):
        reasons.append("Sharded(gradients=True) averages them while backward runs: shard the states alone")
    if has_dtensors([param for _, param, _ in optimizer._states.given]):
        reasons.append("those of DTensors may be pending sums: declare plain parameters")
    if reasons:
        raise ValueError(
            "NoiseScale needs each data rank's gradients before they are averaged, but "
            f"{'; and '.join(reasons)}. Or leave noise= out"
        )


def is_local(entry: ParameterEntry, topology: Topology) -> bool:
    """Whether each data rank has a gradient of its own of all of it: not where a data axis splits it, as experts, or owns
    it, whose gradients come from the samples of several ranks."""
    large = {axis for axis in topology.data_axes if topology.size(axis) > 1}
    return entry.trained and large <= {*sync_axes(entry.spec, topology, True, entry.averaged)}


class LocalGradients:
    """Measures those of one plan.

    Args:
        params: The model's parameters, where backward leaves gradients, in the order of the entries.
        plan: Of these.
        device: Of what is measured.
        constants: Of this plan.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        plan: ReductionPlan,
        registry: ProcessGroupRegistry,
        device: torch.device,
        constants: Constants,
    ) -> None:
        topology = plan.topology
        self.params, self.plan, self.registry, self.device = list(params), plan, registry, device
        self._constants = constants
        self._own = [index for index, entry in enumerate(plan.entries) if is_local(entry, topology)]
        self._pending = [
            index
            for index in self._own
            if len(sync_ranks(plan.entries[index].spec, topology, plan.rank, average_data=False)) > 1
        ]
        self.data_ranks, self.data_rank = topology.size(*topology.data_axes), registry.rank(*topology.data_axes)
        weights = [self.data_ranks * plan.weights[index] for index in self._own]
        self._weights = torch.tensor(weights, dtype=torch.float64).to(device)

    def powers(self) -> Tensor:
        """[data ranks] float64: what this rank adds to the squared norm of its data rank, at its place; as backward left
        the gradients, the loss scale in them, and summed over the window.

        Collectives: where there are pending sums, one all-reduce for each set of peers and kind of layout. Host reads:
        none.
        """
        summed = self._summed()
        gradients = [summed[index] if index in summed else self.params[index].grad for index in self._own]
        found = torch.zeros(self.data_ranks, dtype=torch.float64, device=self.device)
        found[self.data_rank] = (squares(gradients, self.device, self._constants) * self._weights).sum()
        return found

    def _summed(self) -> dict[int, Tensor | None]:
        """The gradients with pending sums, by entry: copies in which these are made."""
        copies = {}
        for index in self._pending:
            param = self.params[index]
            copies[index] = copy = torch.empty_like(param, dtype=gradient_dtype(param)).requires_grad_()
            copy.grad = None if param.grad is None else param.grad.detach().to(copy.dtype, copy=True)
        entries = tuple(self.plan.entries[index] for index in self._pending)
        plan = replace(self.plan, entries=entries)
        reduce_all(gradient_buckets([*copies.values()], plan, self.registry, average_data=False))
        return {index: copy.grad for index, copy in copies.items()}
