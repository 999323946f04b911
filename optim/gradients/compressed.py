"""Gradient compression: reduce float32 gradients in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .buckets import Exact, Exchange, Finish, Memory


@dataclass(frozen=True)
class Bf16Wire(Exchange):
    """Reduces float32 gradients in bfloat16: half the bytes, 8 significant bits.

        ParallelOptimizer(..., overlap=True, compression=Bf16Wire())
        ParallelOptimizer(..., states=Sharded("data", compression=Bf16Wire()))

    Error feedback keeps the rounding error of a rank's gradients, and adds it to its next gradients. So small gradients are
    delayed instead of lost. Rounding errors of the sum itself are lost. Gradients of other dtypes are reduced in their own
    dtype: half-precision gradients are already as small, and float64 gradients need their full precision.

    The rounding errors are stored per bucket and rank, in the units of the loss scale of their step. They are not part of a
    state dict, and are dropped when param groups are added. Non-finite gradients leave no rounding error.

    Args:
        error_feedback: True (default): keep rounding errors. This takes 4 bytes per element on every rank, for the lifetime
            of the optimizer.
    Collectives: one per call, as in `Exact`.
    Host synchronization: none.

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
        held = [self._rounded(flat, memory)]  # the collective reads this buffer until it has finished
        arrived = Exact().reduce_scatter(part, held[0], group, memory)

        def finish() -> None:
            arrived()
            held.clear()
            own.copy_(part)

        return finish

    @torch.no_grad()
    def _rounded(self, flat: Tensor, memory: Memory) -> Tensor:
        """Return ``flat`` plus the last rounding error, in bfloat16. ``flat`` may be a gradient, and stays unchanged."""
        if not self.error_feedback:
            return flat.bfloat16()
        lost = memory.get("lost")
        if lost is None:
            lost = memory["lost"] = torch.zeros_like(flat)
        wire = lost.add_(flat).bfloat16()
        # inf - inf = NaN, from a skipped step, must not enter the next gradients.
        lost.sub_(wire).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return wire


def reference_bf16_wire(rounds: list[list[Tensor]], error_feedback: bool) -> list[Tensor]:
    """Return the sums of a plain reference. ``rounds[t][r]``: the input of rank r in round t. Sums in float64."""
    lost = [torch.zeros_like(flat) for flat in rounds[0]]
    sums = []
    for flats in rounds:
        given = [flat + late if error_feedback else flat for flat, late in zip(flats, lost, strict=True)]
        lost = [flat - flat.bfloat16().float() for flat in given]
        sums.append(torch.stack([flat.bfloat16().double() for flat in given]).sum(0))
    return sums
