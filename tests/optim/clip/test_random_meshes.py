"""Clipping without a registry on random models of DTensors matches the norm of the dense gradients.

The models have several meshes, submeshes, flattened mesh dims, strided and uneven shards, pipeline stages, experts
declared over a mesh dim that their own mesh lacks, plain tensors, sharded parameters whose gradient is a replicated
DTensor, and missing gradients.
``tests/benchmarks/random_cases.py clip`` runs 1,000 such models.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose

import pytest
import torch
from properties import random_cases
from random_meshes import MESH_CASES, MeshCase, clip_random_model, dense_gradients
from world import World

ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}


@pytest.mark.long
@random_cases(MESH_CASES, 100)
def test_clip_grad_norm_matches_dense_norm_and_gradients_on_random_meshes(world: World, drawn: list[MeshCase]) -> None:
    for case, problems in zip(drawn, problems_of_meshes(world, drawn), strict=True):
        assert not problems, f"{problems} in {case}"


def problems_of_meshes(world: World, drawn: Sequence[MeshCase]) -> list[list[str]]:
    """Clip the gradients of each case on its ranks. Return, per case, a text for each norm or gradient that is wrong."""
    wanted = [dense_norm(case) for case in drawn]
    calls = [(case.world, (case, case.factor * norm or 1.0)) for case, norm in zip(drawn, wanted, strict=True)]
    found = []
    for case, norm, reports in zip(drawn, wanted, world.run_each(clip_random_model, calls), strict=True):
        problems = []
        for rank, (norms, errors) in enumerate(reports):
            # The norm is summed in float64 from values that are exact in the dtype of the gradients.
            problems += [
                f"rank {rank}: norm {one}, expected {norm}" for one in norms if not isclose(one, norm, rel_tol=1e-11)
            ]
            problems += [f"rank {rank}: gradients {error:.1e} off" for error in errors if error > ROUNDING[case.dtype]]
        found.append(problems)
    return found


def dense_norm(case: MeshCase) -> float:
    flat = torch.cat([gradient.flatten() for gradient in dense_gradients(case)])
    return float(torch.linalg.vector_norm(flat, case.norm_type))
