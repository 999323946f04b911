"""What one plan's measurements sum into which slots; made by all ranks together, anew when parameters are added."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...parallel.mesh.agreement import gather_objects, on_all_ranks
from ..norm.agreement import with_names
from ..norm.constants import Constants
from ..norm.plan import ReductionPlan
from ..norm.powers import accumulation_dtype
from ..parallel_optimizer import ParallelOptimizer
from .labels import TOTAL, By, chosen, labelled
from .local_gradients import LocalGradients, is_local
from .noise_scale import NoiseScale
from .slots import Slots, world_sum
from .spectral import PowerIteration, SpectralNorms

KINDS = ("param_norm", "grad_norm", "update_norm", "grad_zeros", "grad_underflow")


class Planned:
    """Of an optimizer as it is now.

    Args:
        by, spectral, noise: As `Telemetry` has them.
    Raises:
        ValueError: On every rank: globs that fit to nothing; pieces of unequal sizes among the matrices; no gradient that
            is a data rank's own.
    Collectives: object all-gathers, and one all-reduce. Host reads: yes.

    Attributes:
        plan: Of what is stepped, with the names of all logical parameters.
        measured: What has the gradients of what is stepped, in the order of its entries; ``values()`` gives the latter.
        numels: Of each the elements that have a gradient: all, or none where it is frozen.
        labels: What figures are given of, the whole model last.
        local: What measures each data rank's own gradient; None where nobody asks.
        left_out: The names of the parameters that the noise scale does not see.
    """

    def __init__(
        self, optimizer: ParallelOptimizer[Any], by: By, spectral: SpectralNorms | None, noise: NoiseScale | None
    ) -> None:
        registry, chain, device = optimizer.registry, optimizer._states, optimizer._device
        self.registry, self.device, self.constants = registry, device, Constants()
        model = optimizer._plan if optimizer._plan.parameter_names else with_names(optimizer._plan, registry)
        self.plan = chain.derive(model)
        self.values, self.measured = chain.values, chain.measured()
        names, slots = self.plan.parameter_names, self.plan.parameter_slots
        self._to_parameters = Slots(slots, len(names), device)
        dtype = accumulation_dtype(device)
        self._weights = torch.tensor(self.plan.weights, dtype=dtype).to(device)

        own = [is_local(entry, registry.topology) for entry in model.entries]
        told = {slot: (e.group, o) for slot, e, o in zip(model.parameter_slots, model.entries, own, strict=True)}
        everywhere = {slot: said for of_rank in gather_objects(told, registry) for slot, said in of_rank.items()}
        groups = [everywhere[slot][0] for slot in range(len(names))]
        labels, where = on_all_ranks(lambda: labelled(names, groups, by), registry)
        self.labels = (*labels, TOTAL)
        self._to_labels = Slots(where, len(labels), device)

        # Frozen parameters have no gradients of which zeros could be counted.
        pairs = zip(self.measured, self.plan.entries, strict=True)
        self.numels = [tensor.numel() if entry.trained else 0 for tensor, entry in pairs]
        elements = self.to_parameters(torch.tensor(self.numels, dtype=dtype).to(device))
        self._elements = self.to_labels(self.summed(elements))

        fits = chosen(names, spectral.globs if spectral else ())
        # Of unknown shape are those with pieces of unequal sizes, which are an error there.
        matrix = [shape is None or len(shape) > 1 for shape in self.plan.parameter_shapes]
        self.matrices = [index for index, slot in enumerate(slots) if fits[slot] and matrix[slot]]
        self.spectral = None if spectral is None else self._power_iteration(optimizer, spectral)
        self.local: LocalGradients | None = None
        self.left_out, self._own = tuple[str, ...](), torch.zeros(0)
        if noise is not None:
            self._see_local(optimizer, model, [everywhere[slot][1] for slot in range(len(names))])

    def _power_iteration(self, optimizer: ParallelOptimizer[Any], spectral: SpectralNorms) -> PowerIteration:
        pieces, names, slots = optimizer.pieces(), self.plan.parameter_names, self.plan.parameter_slots
        named = [(names[slots[index]], pieces[index].piece, pieces[index].region) for index in self.matrices]
        return PowerIteration(named, self.registry, spectral.iterations, self.device)

    def _see_local(self, optimizer: ParallelOptimizer[Any], model: ReductionPlan, own: list[bool]) -> None:
        if not any(own):
            raise ValueError(
                "NoiseScale: the data axes split every parameter, so that no data rank has gradients of its own samples "
                "alone: leave noise= out"
            )
        params = [param for _, param, _ in optimizer._states.given]
        self.local = LocalGradients(params, model, self.registry, self.device, self.constants)
        self.left_out = tuple(name for name, is_own in zip(self.plan.parameter_names, own, strict=True) if not is_own)
        self._own = torch.tensor(own, dtype=accumulation_dtype(self.device)).to(self.device)

    def to_parameters(self, values: Tensor) -> Tensor:
        """[..., entries] -> [..., logical parameters]: what this rank adds, each piece divided by its number of holders."""
        return self._to_parameters(values * self._weights)

    def to_labels(self, values: Tensor) -> Tensor:
        """[..., logical parameters] -> [..., labels]: sums, the whole model's last."""
        return torch.cat([self._to_labels(values), values.sum(-1, keepdim=True)], -1)

    def of_local(self, squares: Tensor) -> Tensor:
        """0-dim: of the squared norms of logical parameters the sum of those that `local` measures too."""
        return torch.where(self._own > 0, squares, 0.0).sum()

    def fractions(self, counts: Tensor) -> Tensor:
        """[..., labels] counts of elements as fractions of all trained ones; NaN where there are none."""
        return counts / self._elements

    def summed(self, packed: Tensor) -> Tensor:
        """Over the world. Collectives: one all-reduce, none on one rank."""
        return world_sum(packed, self.registry)
