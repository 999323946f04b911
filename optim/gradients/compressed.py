"""Gradients that travel in half their size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .buckets import Exact, Exchange, Finish, Memory


@dataclass(frozen=True)
class Bf16Wire(Exchange):
    """Float32 gradients travel, and are summed, as bfloat16: half the bytes, 8 significant bits.

        ParallelOptimizer(..., overlap=True, compression=Bf16Wire())
        ParallelOptimizer(..., states=Sharded("data", compression=Bf16Wire()))

    What rounding a rank's own gradients loses is kept and added to the next ones, so that small gradients arrive late
    instead of never. What the sum itself rounds on its way is nobody's own, and is lost. Gradients of other dtypes travel
    as they are: half-precision ones are as small, and who computes in float64 wants all of it.

    What is kept belongs to a bucket on a rank, in the units of the loss scale that it was rounded under. It is in no state
    dict, and gone when param groups are added. Gradients that are not finite leave none.

    Args:
        error_feedback: Keep what rounding loses; 4 bytes an element on every rank, for as long as the optimizer lives.
    Collectives: one a call, as in `Exact`. Host reads: none.

    Reference: Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019, arXiv:1901.09847.
    """

    error_feedback: bool = True

    def all_reduce(self, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        if flat.dtype != torch.float32:
            return Exact().all_reduce(flat, group, memory)
        wire = self._rounded(flat, memory)
        arrived = Exact().all_reduce(wire, group, memory)

        def finish() -> None:
            arrived()
            flat.copy_(wire)

        return finish

    def reduce_scatter(self, own: Tensor, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        if flat.dtype != torch.float32:
            return Exact().reduce_scatter(own, flat, group, memory)
        part = torch.empty_like(own, dtype=torch.bfloat16)
        held = [self._rounded(flat, memory)]  # the collective reads it until it has finished
        arrived = Exact().reduce_scatter(part, held[0], group, memory)

        def finish() -> None:
            arrived()
            held.clear()
            own.copy_(part)

        return finish

    @torch.no_grad()
    def _rounded(self, flat: Tensor, memory: Memory) -> Tensor:
        """In bfloat16, with what the last time lost; ``flat`` may be a gradient itself, and stays as it is."""
        if not self.error_feedback:
            return flat.bfloat16()
        lost = memory.get("lost")
        if lost is None:
            lost = memory["lost"] = torch.zeros_like(flat)
        wire = lost.add_(flat).bfloat16()
        # inf - inf, of a step that is skipped, must not come back in the next one.
        lost.sub_(wire).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return wire


def reference_bf16_wire(rounds: list[list[Tensor]], error_feedback: bool) -> list[Tensor]:
    """The sums, plain: ``rounds[t][r]`` is what rank r gives in round t; summed in float64."""
    lost = [torch.zeros_like(flat) for flat in rounds[0]]
    sums = []
    for flats in rounds:
        given = [flat + late if error_feedback else flat for flat, late in zip(flats, lost, strict=True)]
        lost = [flat - flat.bfloat16().float() for flat in given]
        sums.append(torch.stack([flat.bfloat16().double() for flat in given]).sum(0))
    return sums
