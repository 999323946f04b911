"""Specs derived from placements of DTensor parameters and merged with declarations; incomplete layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import slice_of
from dtensors import randn, registry_of
from meshstep.optim import ParallelOptimizer, global_norm
from meshstep.parallel import P, annotate, blocks, spec_of
from torch import Tensor, nn
from world import World

GRID = (("data", 2), ("tensor", 2))


def layouts() -> list[str]:
    """Return the specs of DTensors in many layouts, after checking that each describes the local shard."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    found = []
    with registry_of(GRID) as registry:
        mesh = registry.device_mesh("data", "tensor")

        def note(name: str, param: Tensor, full: Tensor) -> None:
            spec = spec_of(param)
            expected = slice_of(full, spec, registry.topology, registry.global_rank)
            assert torch.equal(param.to_local(), expected), f"{name}: {spec}"  # type: ignore[attr-defined]
            found.append(f"{name}: {spec}")

        full = randn(8, 5)
        for placements in (
            (Shard(0), Replicate()),
            (Replicate(), Shard(1)),
            (Shard(1), Shard(0)),
            (Shard(0), Shard(0)),
            (Replicate(), Replicate()),
        ):
            note(str(placements), nn.Parameter(distribute_tensor(full, mesh, placements)), full)
        swapped = registry.device_mesh("tensor", "data")
        note("(tensor, data)", nn.Parameter(distribute_tensor(full, swapped, (Shard(0), Shard(0)))), full)

        torch.manual_seed(5)
        dense = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)).double()
        weights = {name: param.detach().clone() for name, param in dense.named_parameters()}
        parallelize_module(dense, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(dense, mesh=mesh["data"])
        for name, param in dense.named_parameters():
            note(name, param, weights[name])
    return found


def test_specs_of_dtensors_describe_their_local_shards(world: World) -> None:
    for found in world.run(4, layouts):
        assert found == [
            "(Shard(dim=0), Replicate()): P('data')",
            "(Replicate(), Shard(dim=1)): P(None, 'tensor')",
            "(Shard(dim=1), Shard(dim=0)): P('tensor', 'data')",
            "(Shard(dim=0), Shard(dim=0)): P(('data', 'tensor'))",
            "(Replicate(), Replicate()): P()",
            "(tensor, data): P(('tensor', 'data'))",
            "0.weight: P(('tensor', 'data'))",  # fully_shard shards the local shard of the tensor axis
            "0.bias: P(('tensor', 'data'))",
            "1.weight: P('data', 'tensor')",
            "1.bias: P('data')",
        ]


def strided(split_factor: int) -> str:
    """Return the spec, or the error, of a DTensor with a strided shard over "data" and a shard over "tensor"."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    with registry_of(GRID) as registry:
        placements = (_StridedShard(0, split_factor=split_factor), Shard(0))
        param = DTensor.from_local(torch.ones(2), registry.device_mesh("data", "tensor"), placements, run_check=False)
        try:
            return str(spec_of(nn.Parameter(param)))
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize(
    ("split_factor", "text"),
    [(2, "P(('tensor', 'data'))"), (3, "with split factor 3 doesn't fit"), (4, "with split factor 4 doesn't fit")],
)
def test_split_factor_of_strided_shard_must_be_product_of_sizes_of_later_mesh_dims(
    world: World, split_factor: int, text: str
) -> None:
    for found in world.run(4, strided, split_factor):
        assert text in found


def merged(said: P, dim: int) -> str:
    from torch.distributed.tensor import Shard, distribute_tensor

    with registry_of(GRID) as registry:
        param = nn.Parameter(distribute_tensor(randn(4, 6), registry.device_mesh("data"), (Shard(dim),)))
        annotate(param, said, "w")
        try:
            return str(spec_of(param))
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize(
    ("said", "dim", "expected"),
    [
        (P(), 0, "P('data')"),
        (P("tensor"), 0, "P(('tensor', 'data'))"),
        (P("tensor"), 1, "P('tensor', 'data')"),
        (P(partial="tensor"), 1, "P(None, 'data', partial='tensor')"),
        (P(("tensor", "data")), 0, "P(('tensor', 'data'))"),
        (P("data"), 0, "P('data')"),
        (
            P(("data", "tensor")),
            0,
            "make it P(('tensor', 'data')); declare only the axes outside its mesh: P('tensor')",
        ),
        (P("data"), 1, "declare only the axes outside its mesh: P()"),
        (P(owned={"data": 0}), 0, "declare only the axes outside its mesh: P()"),
        (P(None, "data", partial="tensor"), 0, "declare only the axes outside its mesh: P(partial='tensor')"),
        (P(partial=("data", "tensor")), 0, "declare only the axes outside its mesh: P(partial='tensor')"),
        (P(blocks("tensor", 2), "data"), 0, "declare only the axes outside its mesh: P(blocks('tensor', 2))"),
        (P(owned={"data": 0, "tensor": 0}), 0, "declare only the axes outside its mesh: P(owned={'tensor': 0})"),
        (P(None, "data", tied={"tensor": (0, 1)}), 0, "outside its mesh: P(tied={'tensor': (0, 1)})"),
    ],
)
def test_declared_spec_is_merged_with_dtensor_placements_or_rejected(
    world: World, said: P, dim: int, expected: str
) -> None:
    for found in world.run(4, merged, said, dim):
        assert found == expected or found.endswith(expected)


def refused(kind: str) -> str:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with registry_of(GRID) as registry:
        mesh = registry.device_mesh("data")
        if kind == "no axes":
            mesh = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("beside", "dp"))["dp"]
        elif kind == "ranks":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "data"))["data"]
        param = nn.Parameter(distribute_tensor(randn(4, 6), mesh, (Shard(0),) * mesh.ndim))
        if kind not in ("undeclared", "mixed"):
            annotate(param, P(), "w")
        plain = nn.Parameter(randn(2))
        make: Any = torch.optim.Muon if kind == "Muon" else torch.optim.AdamW
        try:
            ParallelOptimizer(make([param, *([plain] if kind == "mixed" else [])]), registry)
        except ValueError as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "no axes",
            "w is on a device mesh whose dim 'dp' has ranks (0, 3), and no axes of Topology(data=2, tensor=2)",
        ),
        ("ranks", "w is on a device mesh whose dim 'data' has ranks (0, 1), but the axis of this name in"),
        (
            "undeclared",
            "no spec for parameter 0 of group 0 (shape (sharded, 6)), and Topology(data=2, tensor=2) has model axes",
        ),
        ("mixed", "(shape (sharded, 6)), parameter 1 of group 0 (shape (2))"),
        ("Muon", "is sharded, which requires an optimizer whose update is elementwise"),
    ],
)
def test_dtensors_on_unmatched_mesh_or_without_spec_or_with_muon_are_rejected(
    world: World, kind: str, message: str
) -> None:
    assert message in world.run(4, refused, kind)[0]


def step_with_undeclared_plain_parameter(named: bool) -> str:
    from torch.distributed.tensor import Shard, distribute_tensor

    with registry_of((("tensor", 2),)) as registry:
        model: Any = nn.Module()
        model.weight = nn.Parameter(distribute_tensor(randn(4, 6), registry.device_mesh("tensor"), (Shard(0),)))
        model.bias = nn.Parameter(randn(2))
        params = model.named_parameters() if named else model.parameters()
        optimizer = ParallelOptimizer(torch.optim.SGD(params, lr=1.0), registry, check_replicas=True)
        optimizer.backward(model.weight.to_local().sum() + model.bias.sum())
        optimizer.step()
        return str(optimizer.model_plan.entries[1].spec)


@pytest.mark.parametrize("named", [False, True])
def test_undeclared_plain_parameter_beside_dtensors_counts_as_replicated_over_their_mesh(
    world: World, named: bool
) -> None:
    assert world.run(2, step_with_undeclared_plain_parameter, named) == ["P()"] * 2


def spec_on_unnamed_mesh() -> str:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with registry_of(GRID) as registry:
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
        param = nn.Parameter(distribute_tensor(randn(4, 6), mesh, (Replicate(), Shard(1))))
        annotate(param, P(), "w")
        optimizer = ParallelOptimizer(torch.optim.AdamW([param]), registry)
        return str(optimizer.plan.entries[0].spec)


def test_dims_of_unnamed_mesh_are_matched_to_axes_by_their_ranks(world: World) -> None:
    assert world.run(4, spec_on_unnamed_mesh) == ["P(None, 'tensor')"] * 4


def stepped_with_pending(op: str) -> tuple[list[float], float]:
    """Step a replicated weight with a partial gradient: 1 on the first tensor rank, 4 on the second.

    Return the weight and the norm.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    with registry_of(GRID) as registry:
        mesh = registry.device_mesh("tensor")
        param = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()]))
        annotate(param, P(partial="tensor"), "w")
        optimizer = ParallelOptimizer(torch.optim.SGD([param], lr=1.0), registry)
        optimizer.backward(None)
        local = torch.full((4,), 1.0 + 3 * registry.rank("tensor"))
        param.grad = DTensor.from_local(local, mesh, [Partial(op)], run_check=False)
        stats = optimizer.step()
        assert stats is not None
        assert local.tolist() == [1.0 + 3 * registry.rank("tensor")] * 4 or op == "sum", (
            "the caller's gradient was changed"
        )
        return param.to_local().tolist(), float(stats.total_norm)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("op", "gradient"), [("sum", 5.0), ("avg", 2.5)])
def test_partial_dtensor_gradient_is_reduced_with_its_own_operation(world: World, op: str, gradient: float) -> None:
    assert world.run(4, stepped_with_pending, op) == [([-gradient] * 4, gradient * 2)] * 4


def norm_with_axis_of_size_one() -> float:
    from torch.distributed.tensor import Shard, distribute_tensor

    with registry_of((("tensor", 2), ("depth", 1))) as registry:
        param = nn.Parameter(distribute_tensor(torch.zeros(4), registry.device_mesh("tensor"), [Shard(0)]))
        param.grad = distribute_tensor(torch.full((4,), 0.5), registry.device_mesh("tensor"), [Shard(0)])
        return float(global_norm([param], registry))


def test_dtensor_needs_no_declaration_for_axis_of_size_one(world: World) -> None:
    assert world.run(2, norm_with_axis_of_size_one) == [1.0, 1.0]
