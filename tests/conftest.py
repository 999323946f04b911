from __future__ import annotations

import os
from collections.abc import Iterator

# Before torch is imported anywhere: one intra-op thread a rank, or the ranks fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings
from world import World

torch.set_num_threads(1)
settings.register_profile(
    "meshstep", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("meshstep")


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """A pool of ranks over gloo; see `world.World`."""
    pool = World()
    yield pool
    pool.close()
