"""What the micro-batches of a window weigh, all data ranks together, on its way through the collective that measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...amp.capture import is_captured
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..norm.constants import Constants
from ..norm.powers import accumulation_dtype


class Weight:
    """What one rank's micro-batches of a window weigh together.

    Attributes:
        value: A number; where any micro-batch's weight is a tensor a 0-dim tensor, the same one for life: CUDA graphs of
            micro-batches add to it in every replay.
        sum: That tensor, from when there was one on; replays add to it while ``value`` is 0.
    """

    def __init__(self) -> None:
        self.value: float | Tensor = 0.0
        self.sum: Tensor | None = None

    def clear(self) -> None:
        """Nothing has come."""
        self.value = 0.0
        if self.sum is not None:
            self.sum.zero_()

    @torch.no_grad()
    def add(self, weight: float | Tensor) -> None:
        """Of one more micro-batch; 0-dim."""
        if isinstance(weight, Tensor) and not isinstance(self.value, Tensor):
            if self.sum is None or self.sum.device != weight.device:
                self.sum = torch.zeros((), dtype=accumulation_dtype(weight.device), device=weight.device)
            self.value = self.sum.add_(self.value) if self.value else self.sum
        if isinstance(self.value, Tensor):
            self.value.add_(weight)
        else:
            self.value += weight

    def check_captured(self, weight: float | Tensor) -> None:
        """Raise RuntimeError for a weight that the replays of a CUDA graph would not add, where one is made."""
        if is_captured() and (self.sum is None or not isinstance(weight, Tensor)):
            raise RuntimeError(
                f"weight={weight!r} in a micro-batch that is captured in a CUDA graph, of which every replay would add the "
                "same: give a 0-dim tensor on the GPU, which you write to, in the windows before that are not captured too"
            )


@dataclass(frozen=True)
class Place:
    """Where a rank is, as far as weights ask."""

    stages: int
    stage: int
    sharers: int
    data_ranks: int
    constants: Constants = field(default_factory=Constants)

    @classmethod
    def of(cls, registry: ProcessGroupRegistry) -> Place:
        topology = registry.topology
        stage = registry.rank(*topology.pipe_axes) if topology.pipe_axes else 0
        stages, sharers = topology.size(*topology.pipe_axes), topology.size(*topology.model_axes)
        return cls(stages, stage, sharers, topology.size(*topology.data_axes))


_PLACES: WeakKeyDictionary[ProcessGroupRegistry, Place] = WeakKeyDictionary()


def place_of(registry: ProcessGroupRegistry) -> Place:
    """Of this rank."""
    place = _PLACES.get(registry)
    if place is None:
        place = _PLACES[registry] = Place.of(registry)
    return place


def weight_slots(
    weight: float | Tensor,
    registry: ProcessGroupRegistry,
    device: torch.device,
    vote: float | None = None,
    facts: int | None = None,
) -> Tensor:
    """[pipeline stages] float64, on ``device``: this rank's part of W, in its stage's slot; `clip.decide.inverse_weight`
    reads the sum over ranks.

    All ranks of a stage that share a data coordinate know the same weight, so each adds its part of it. Stages that know
    none (only the last one computes a loss) add 0. After those come a slot for the ``facts`` of a `StepAgreement`, and one
    for a ``vote``. Not to be written to: those of a number are made once.
    """
    place = place_of(registry)
    more = [float(number) for number in (facts, vote) if number is not None]
    if not isinstance(weight, Tensor) and not is_captured():  # a graph would copy from the host in every replay
        own = [0.0] * place.stages
        own[place.stage] = weight / place.sharers
        values = [*own, *more]
        return place.constants(tuple(values), values.copy, torch.float64, device)
    slots = torch.zeros(place.stages + len(more), dtype=torch.float64, device=device)
    # Not `slots[...] = number`, which in torch 2.11 is a copy from the host.
    slots[place.stage].fill_(weight / place.sharers)
    for at, number in enumerate(more, place.stages):
        if number:
            slots[at].fill_(number)
    return slots


def reference_inverse_weight(weights: Sequence[Sequence[float]]) -> float:
    """D / W in plain numbers: ``weights[d][k]`` is that of micro-batch k on data coordinate d."""
    total = sum(sum(of_rank) for of_rank in weights)
    return len(weights) / total if total else 1.0
