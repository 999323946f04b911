"""The spectral norm that telemetry reports, for matrices with special values."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from meshstep.optim.telemetry.telemetry import PowerIteration
from meshstep.parallel import P, ProcessGroupRegistry, Topology
from meshstep.parallel.layout.shard import Region


@pytest.mark.parametrize(("value", "expected"), [(nan, nan), (inf, nan), (0.0, 0.0)])
def test_spectral_norm_of_matrix_is_nan_for_non_finite_element_and_0_for_zeros(value: float, expected: float) -> None:
    matrix = torch.zeros(4, 3)
    matrix[1, 2] = value
    topology = Topology()
    with ProcessGroupRegistry(topology) as registry:
        region = Region.of_shard((4, 3), (4, 3), P(), topology, topology.coordinate(0))
        power_iteration = PowerIteration([("w", matrix, region)], registry, 3, torch.device("cpu"))
        found = power_iteration([matrix])
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64), equal_nan=True)
