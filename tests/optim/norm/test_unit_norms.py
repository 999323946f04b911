"""Norms of units, which are slices of full tensors such as rows, for p from 1 to inf."""

from __future__ import annotations

from math import inf

import pytest
import torch
from meshstep.optim import ParallelOptimizer
from meshstep.optim.norm.global_norm import GlobalNorm, Units
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, shard
from torch import Tensor, nn
from world import World

MAGNITUDES = (1e-30, 1.0, 1.0, 1e30)  # of the rows; the 100th powers of 1e-30 and 1e30 leave the range of float64


def full_tensor(seed: int) -> Tensor:
    values = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values * torch.tensor(MAGNITUDES, dtype=torch.float64).unsqueeze(1)


def norms_of_rows(spec: P, norm_type: float) -> tuple[list[float], list[float]]:
    """Return the norms of the rows of a gradient and of its weight, sharded by ``spec``."""
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        weight = nn.Parameter(shard(full_tensor(0), spec, registry).clone())
        annotate(weight, spec, "weight")
        optimizer = ParallelOptimizer(
            torch.optim.SGD([weight], lr=0.1), registry, norm_type=norm_type, per_parameter_norms=True
        )
        rows = optimizer.stepped_tensors()
        units = Units.of(optimizer.plan, [row.region for row in rows])
        norm = GlobalNorm(optimizer.plan, registry, norm_type, units=units, weights_at="units")
        found = norm([shard(full_tensor(1), spec, registry)], weights=[weight])
        return found.units.tolist(), found.weights.tolist()


@pytest.mark.parametrize("spec", [P(), P("tensor"), P(None, "tensor"), P(None, ("data", "tensor"))], ids=str)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, 12.0, 100.0, inf])
def test_row_norms_of_sharded_tensor_match_dense_tensor(world: World, spec: P, norm_type: float) -> None:
    for gradients, weights in world.run(4, norms_of_rows, spec, norm_type):
        for found, seed in ((gradients, 1), (weights, 0)):
            full = full_tensor(seed)
            largest = full.abs().amax(1, keepdim=True)
            expected = torch.linalg.vector_norm(full / largest, norm_type, 1) * largest.squeeze(1)
            assert found == pytest.approx(expected.tolist(), rel=1e-12)
