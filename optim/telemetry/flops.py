"""How much of what the devices could compute a model needs: model flops utilization.

    utilization = counts a second * flops a count / (devices * peak)

Chowdhery et al. 2022, "PaLM", arXiv:2204.02311, appendix B: what the model needs counts, not what was computed, so nothing
that is computed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

from ...parallel.mesh.registry import ProcessGroupRegistry
from ..parallel_optimizer import ParallelOptimizer


@dataclass(frozen=True)
class Flops:
    """What a `Monitor` computes the utilization of.

    Args:
        per_count: Floating-point operations of forward and backward for one of what the monitor counts, of the whole model.
        peak: Of one rank's device, a second, in the dtype that is computed in.
    Raises:
        ValueError: One is not finite and positive.
    """

    per_count: float
    peak: float

    def __post_init__(self) -> None:
        for name, value in (("per_count", self.per_count), ("peak", self.peak)):
            if not (isfinite(value) and value > 0):
                raise ValueError(f"Flops({name}={value}): give a finite number > 0")

    @classmethod
    def of_parameters(cls, optimizer: ParallelOptimizer[Any], peak: float, active: float = 1.0) -> Flops:
        """6 N a token: two for each parameter in forward, four in backward. Attention between tokens is not in it.

        Args:
            optimizer: N is what its plan counts: every logical element once, over all ranks.
            active: The fraction of them that a token meets, below 1 for experts.
        Kaplan et al. 2020, arXiv:2001.08361, section 2.1.
        """
        counted = optimizer.plan.counted
        assert counted is not None, "an optimizer's plan is agreed"
        return cls(6.0 * counted * active, peak)

    def utilization(self, per_second: float, registry: ProcessGroupRegistry) -> float:
        """From counts a second of all ranks together."""
        return per_second * self.per_count / (self.peak * registry.topology.world_size)
