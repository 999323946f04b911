"""The model-parallel unit (mpu) of a registry, and flags that make the gradient norm of DeepSpeed exact."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, Param, cases, parameters_on
from hypothesis import given, settings
from meshstep.parallel import ModelParallelUnit, P, ProcessGroupRegistry, Topology, mark_model_parallel
from meshstep.parallel.interop.deepspeed import counts_piece, model_parallel_axes
from properties import number_of_cases
from torch import Tensor, nn
from world import World


def answers(axes: tuple[tuple[str, int], ...]) -> dict[str, Any]:
    with ProcessGroupRegistry(Topology(roles=None, **dict(axes))) as registry:
        mpu = ModelParallelUnit(registry)
        assert not hasattr(mpu, "initialize_sequence_parallel")
        found: dict[str, Any] = {"ranks": mpu.get_data_parallel_group_ranks()}
        for kind in ("model", "tensor_model", "pipeline_model", "data"):
            group = getattr(mpu, f"get_{kind}_parallel_group")()
            rank, size = (getattr(mpu, f"get_{kind}_parallel_{what}")() for what in ("rank", "world_size"))
            assert (dist.get_rank(group), dist.get_world_size(group)) == (rank, size)
            found[kind] = (rank, dist.get_process_group_ranks(group))
        return found


def test_model_parallel_unit_returns_groups_of_the_topology(world: World) -> None:
    found = world.run(4, answers, (("pipe", 2), ("tensor", 2)))[3]
    assert found == {
        "ranks": [3],  # without a data axis, the group is this rank alone
        "model": (3, [0, 1, 2, 3]),
        "tensor_model": (1, [2, 3]),
        "pipeline_model": (1, [1, 3]),
        "data": (0, [3]),
    }
    found = world.run(4, answers, (("data", 2), ("row", 1), ("col", 2)))[2]
    assert found == {
        "ranks": [0, 2],
        "model": (0, [2, 3]),
        "tensor_model": (0, [2, 3]),
        "pipeline_model": (0, [2]),
        "data": (1, [0, 2]),
    }


def stock_norm(params: list[tuple[str, nn.Parameter]], mpu: ModelParallelUnit, norm_type: float) -> float:
    """Compute the norm as DeepSpeed does: rank 0 counts all its gradients, other ranks only flagged parameters."""
    counted = [
        param.grad.double()
        for _, param in params
        if param.grad is not None and (mpu.get_model_parallel_rank() == 0 or getattr(param, "model_parallel", False))
    ]
    total = torch.zeros((), dtype=torch.float64)
    for grad in counted:
        total = torch.maximum(total, grad.abs().max()) if norm_type == inf else total + grad.abs().pow(norm_type).sum()
    op = dist.ReduceOp.MAX if norm_type == inf else dist.ReduceOp.SUM
    dist.all_reduce(total, op=op, group=mpu.get_model_parallel_group())
    return float(total) if norm_type == inf else float(total) ** (1 / norm_type)


GRIDS = [
    Case(
        (("row", 2), ("col", 2)),
        (
            Param((4, 6), P("row", "col")),
            Param((6,), P("col")),  # replicated over row
            Param((8,), P(("col", "row"))),
            Param((6,), P("col", owned={"row": 1})),
            Param((5,), P()),
        ),
    ),
    Case(
        (("pipe", 2), ("tensor", 2)),
        (Param((4, 6), P("tensor")), Param((5,), P()), Param((8, 3), P("tensor", tied={"pipe": (0, -1)}))),
    ),
    Case((("data", 2), ("tensor", 2)), (Param((4, 6), P(None, "tensor")), Param((5,), P()))),
]


def stock_norms(case: Case, marked: bool) -> list[float]:
    with ProcessGroupRegistry(case.topology) as registry:
        params = parameters_on(case, registry)
        if marked:
            mark_model_parallel([param for _, param in params], registry)
        else:  # one flag per parameter, equal on all ranks
            for index, (_, param) in enumerate(params):
                param.model_parallel = bool(case.params[index].spec.sharded_axes)  # type: ignore[attr-defined]
        return [stock_norm(params, ModelParallelUnit(registry), p) for p in (1.0, 2.0, inf)]


@pytest.mark.parametrize("case", GRIDS)
def test_norm_of_deepspeed_after_mark_model_parallel_matches_dense_norm(world: World, case: Case) -> None:
    expected = [case.dense_norm(p) for p in (1.0, 2.0, inf)]
    for found in world.run(4, stock_norms, case, True):
        assert found == pytest.approx(expected, rel=1e-6)


def test_equal_flags_on_all_ranks_make_norm_of_deepspeed_wrong(world: World) -> None:
    found = world.run(4, stock_norms, GRIDS[0], False)[0]
    assert abs(found[1] / GRIDS[0].dense_norm(2.0) - 1) > 0.01


@settings(max_examples=number_of_cases(200))
@given(case=cases())
def test_deepspeed_flag_is_true_on_one_rank_per_shard(case: Case) -> None:
    """The squared elements of the flagged shards of a model-parallel group add up to the squared dense norm. All shards
    of the group's first rank are flagged."""
    topology = case.topology
    axes = model_parallel_axes(topology)
    total = 0.0
    for rank in topology.peers(topology.world_size - 1, *axes) if axes else (0,):
        for index, param in enumerate(case.params):
            if case.holds(index, rank):
                counts = counts_piece(param.spec, topology.coordinate(rank), topology)
                assert counts or rank != topology.peers(rank, *axes)[0]
                total += float(case.piece(index, rank).square().sum()) if counts else 0.0
    assert total == pytest.approx(case.dense_norm(2.0) ** 2)


def refused(spec: P, declared: bool) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        param: Tensor = nn.Parameter(torch.zeros(4))
        if declared:
            from meshstep.parallel import annotate

            annotate(param, spec, "w")
        try:
            mark_model_parallel([param], registry)
        except ValueError as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize(
    ("spec", "declared", "message"),
    [
        (P("data"), True, "w (P('data')) is sharded over 'data'"),
        (P(partial="data"), True, "w (P(partial='data')) has a partial gradient over 'data' after backward"),
        (P(), False, "no spec"),
    ],
)
def test_mark_model_parallel_rejects_unsupported_specs(world: World, spec: P, declared: bool, message: str) -> None:
    assert message in world.run(2, refused, spec, declared)[0]
