"""The global norm on random meshes and layouts, compared with the dense float64 norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

import pytest
import torch
import torch.distributed as dist
from cases import NORM_TYPES, Case, Param, cases, parameters_on
from hypothesis import strategies as st
from meshstep.optim import global_norm
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, spec_of
from properties import random_cases
from torch import Tensor, nn
from world import World

Named = list[tuple[str, nn.Parameter]]
Measure = Callable[[Named, ProcessGroupRegistry, float], Tensor]


def packed(params: Named, registry: ProcessGroupRegistry, p: float) -> Tensor:
    return global_norm(params, registry, p).total_norm


def per_group(params: Named, registry: ProcessGroupRegistry, p: float) -> Tensor:
    return global_norm(params, registry, p, reduction="per_group").total_norm


def measured(case: Case, measure: Measure, norm_types: tuple[float, ...] = NORM_TYPES) -> list[bytes]:
    """Return the norms of this rank as bytes, so that ranks can be compared bitwise."""
    with ProcessGroupRegistry(case.topology) as registry:
        params = parameters_on(case, registry)
        return [measure(params, registry, p).double().view(1).numpy().tobytes() for p in norm_types]


def assert_exact(
    world: World, drawn: Sequence[Case], measure: Measure, norm_types: tuple[float, ...] = NORM_TYPES
) -> None:
    results = world.run_each(measured, [(case.topology.world_size, (case, measure, norm_types)) for case in drawn])
    for case, by_rank in zip(drawn, results, strict=True):
        assert all(bits == by_rank[0] for bits in by_rank), "ranks disagree"
        for p, bits in zip(norm_types, by_rank[0], strict=True):
            value = torch.frombuffer(bytearray(bits), dtype=torch.float64).item()
            assert value == pytest.approx(case.dense_norm(p), rel=1e-6, abs=1e-30), f"p={p}"


@pytest.mark.long
@random_cases(cases(), 1000)
def test_global_norm_with_packed_reduction_matches_dense_norm(world: World, drawn: list[Case]) -> None:
    assert_exact(world, drawn, packed)


@pytest.mark.long
@random_cases(cases(), 200)
def test_global_norm_with_per_group_reduction_matches_dense_norm(world: World, drawn: list[Case]) -> None:
    assert_exact(world, drawn, per_group)


@st.composite
def relabelled_cases(draw: st.DrawFn) -> tuple[Case, Case]:
    """Draw a case, and the same case with its mesh axes in another order."""
    case = draw(cases())
    return case, Case(tuple(draw(st.permutations(case.axes))), case.params, case.seed, case.scale)


@random_cases(relabelled_cases(), 50)
def test_global_norm_does_not_depend_on_order_of_mesh_axes(world: World, drawn: list[tuple[Case, Case]]) -> None:
    for case, relabelled in drawn:
        assert relabelled.dense_norm(2.0) == pytest.approx(case.dense_norm(2.0), rel=1e-12)
    assert_exact(world, [relabelled for _, relabelled in drawn], packed, (2.0,))


def with_a_value_on_one_replica(value: float, measure: Measure) -> float:
    """Return the norm of a replicated parameter with ``value`` in the gradient of the second replica."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        param = nn.Parameter(torch.zeros(3))
        annotate(param, P())
        param.grad = torch.full((3,), value if registry.rank("data") else 1.0)
        return float(measure([("weight", param)], registry, 2.0))


@pytest.mark.parametrize("measure", [packed, per_group])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_gradient_on_one_replica_gives_nonfinite_norm_on_all_ranks(
    world: World, value: float, measure: Measure
) -> None:
    assert not any(map(isfinite, world.run(2, with_a_value_on_one_replica, value, measure)))


# Negative controls: common wrong norms must fail the same assertion. --------------------------------------------------


def naive(params: Named, registry: ProcessGroupRegistry, p: float) -> Tensor:
    """Return the local norm, as torch.nn.utils.get_total_norm does for plain tensors."""
    return torch.nn.utils.get_total_norm([q.grad for _, q in params if q.grad is not None], p)


def one_boolean(params: Named, registry: ProcessGroupRegistry, p: float) -> Tensor:
    """Use one flag per parameter, "sharded": count unsharded parameters on the first rank of the model axes only, and
    sum over all model axes."""
    axes = [axis for axis in registry.topology.axes if axis not in registry.topology.data_axes]
    first = registry.rank(*axes) == 0
    total = torch.zeros((), dtype=torch.float64)
    for _, q in params:
        if q.grad is not None and (first or spec_of(q).sharded_axes):
            total += q.grad.double().abs().pow(p).sum()
    if registry.size(*axes) > 1:
        dist.all_reduce(total, group=registry.group(*axes))
    return total ** (1 / p)


def every_replica(params: Named, registry: ProcessGroupRegistry, p: float) -> Tensor:
    """Sum the powers of all gradients on all ranks, which counts replicas several times."""
    total = torch.zeros((), dtype=torch.float64)
    for _, q in params:
        if q.grad is not None:
            total += q.grad.double().abs().pow(p).sum()
    dist.all_reduce(total)
    return total ** (1 / p)


TENSOR_LAYER = Case(
    (("data", 2), ("tensor", 2)),
    (Param((8, 6), P("tensor")), Param((8,), P("tensor")), Param((6, 8), P(None, "tensor")), Param((6,), P())),
)
GRID_LAYER = Case((("row", 2), ("col", 2)), (Param((8, 6), P("row", "col")), Param((6,), P("col"))))


@pytest.mark.parametrize("case", [TENSOR_LAYER, GRID_LAYER])
@pytest.mark.parametrize("wrong", [naive, every_replica])
def test_norms_that_ignore_layouts_differ_from_dense_norm(world: World, case: Case, wrong: Measure) -> None:
    assert_exact(world, [case], packed, (1.0, 2.0, 3.0))
    with pytest.raises(AssertionError):
        assert_exact(world, [case], wrong, (2.0,))


def test_norm_by_sharded_flag_equals_dense_norm_on_1d_but_not_2d_mesh(world: World) -> None:
    one_dimension = Case((("tensor", 4),), TENSOR_LAYER.params)
    assert_exact(world, [one_dimension], one_boolean, (2.0,))
    with pytest.raises(AssertionError):
        assert_exact(world, [GRID_LAYER], one_boolean, (2.0,))
