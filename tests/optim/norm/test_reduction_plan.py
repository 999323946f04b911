"""The reduction plan: counted elements, its printed form, and consistency with the full model."""

from __future__ import annotations

from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
from arguments import arguments
from cases import Case, cases
from hypothesis import given, settings
from meshstep.optim import ParallelOptimizer, ParameterEntry, ReductionPlan
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare, spec_of
from properties import number_of_cases
from scenarios import SCENARIOS, build
from torch import nn
from torch.distributed.fsdp import fully_shard
from world import World

GRID = Topology(data=2, row=2, col=2)
LAYER = (
    ParameterEntry("weight", P("row", "col"), (4, 3)),
    ParameterEntry("bias", P("col"), (3,)),
    ParameterEntry("norm", P(), (6,)),
    ParameterEntry("shard", P(("col", "row")), (2,)),
)


def test_printed_plan_lists_buckets_and_counted_elements() -> None:
    text = str(ReductionPlan.of(LAYER, GRID, 5))
    assert text.splitlines() == [
        "ReductionPlan of rank 5 (data=1, row=0, col=1) over Topology(data=2, row=2, col=2)",
        "  bucket      group ranks  weight  parameters  local numel  counted numel",
        "  replicated  5               1/8           1            6              6",
        "  col         4,5             1/4           1            3              6",
        "  row x col   4,5,6,7         1/2           2           14             56",
        "counts 68 elements, as declared; plan.check_numel(n) compares with a dense model of n",
    ]


def test_wrong_spec_is_found_by_check_numel_but_not_by_plan() -> None:
    """A replicated bias of 3 elements is declared as sharded; the plan alone cannot detect this."""
    wrong = ReductionPlan.of((*LAYER[:1], ParameterEntry("bias", P("col"), (3,))), GRID, 0)
    right = ReductionPlan.of((*LAYER[:1], ParameterEntry("bias", P(), (3,))), GRID, 0)
    for plan, counted in ((wrong, 54), (right, 51)):
        assert f"counts {counted} elements, as declared; plan.check_numel(n)" in str(plan)
        assert "equal" not in str(plan).lower()
    right.check_numel(51)
    with pytest.raises(ValueError, match="counts 54 elements but the full model has 51"):
        wrong.check_numel(51)


def test_check_numel_compares_counted_elements_with_dense_model() -> None:
    plan = ReductionPlan.of(LAYER, GRID, 5)
    plan.check_numel(68)
    with pytest.raises(ValueError, match=r"counts 68 elements but the full model has 72.*(?s:.*)bias: local \(3,\)"):
        plan.check_numel(72)


@pytest.mark.parametrize(
    "question", ["holds", "num_replicas", "distinct_axes", "tied_coordinates", "validate", "replica_axes"]
)
def test_plan_evaluates_specs_of_10000_parameters_fewer_than_100_times(question: str) -> None:
    topology = Topology(data=131072, tensor=8, aliases={"all": ("data", "tensor")})
    specs = (P(), P("tensor"), P(None, "tensor"), P(partial="tensor"), P(tied={"tensor": (0, 1)}))
    entries = [ParameterEntry(f"layer{i}", specs[i % len(specs)], (64, 64)) for i in range(10_000)]
    with mock.patch.object(P, question, autospec=True, side_effect=getattr(P, question)) as asked:
        plan = ReductionPlan.of(entries, topology, 777_777 // 8 * 8)
        assert len(plan.replica_weights) == len(plan.bucket_indices) == len(str(plan) and plan.counted_numels) == 10_000
    assert 0 < asked.call_count < 20 * len(specs)


@settings(max_examples=number_of_cases(200))
@given(case=cases())
def test_element_counts_divided_by_replication_factor_sum_to_full_model(case: Case) -> None:
    """The sum over ranks of local elements / replication factor equals the elements of the full parameters of all
    stages."""
    topology = case.topology
    weighted = 0.0
    for rank in range(topology.world_size):
        held = [index for index in range(len(case.params)) if case.holds(index, rank)]
        entries = [ParameterEntry(f"p{i}", case.params[i].spec, tuple(case.piece(i, rank).shape)) for i in held]
        plan = ReductionPlan.of(entries, topology, rank)
        weighted += sum(e.numel * w for e, w in zip(plan.entries, plan.replica_weights, strict=True))
    full = 0
    for param in case.params:
        stages = prod(topology.size(axis) for axis in topology.pipe_axes if axis not in param.spec.named_axes)
        full += prod(param.shape) * stages
    assert weighted == pytest.approx(full)


def agreed_plan(name: str) -> tuple[str, tuple[str, ...], int | None]:
    import torch

    scenario = SCENARIOS[name]
    with ProcessGroupRegistry(scenario.topology) as registry:
        model = build(scenario, registry, torch.float32)
        params: Any = list(model.parameters()) if model is not None else [{"params": []}]
        optimizer = ParallelOptimizer(torch.optim.SGD(params), registry, **arguments(per_parameter_norms=True))
        plan = optimizer.plan
        return str(plan).splitlines()[-1], plan.parameter_names, plan.counted


@pytest.mark.parametrize(
    ("name", "numel", "names"),
    [
        ("grid, bias on row 0", 12 * 8 + 8 * 16 + 16 + 2 * 16 + 16 * 12 + 12, 7),
        ("data x pipe, tied", 12 * 8 + 2 * 8 * 8, 3),
        ("a stage without parameters", 12 * 8 + 2 * 8 + 16 * 8 + 16 + 8 * 16 + 8 + 12 * 8 + 12, 9),
    ],
)
def test_plans_of_all_ranks_have_equal_counts_and_parameter_names(
    world: World, name: str, numel: int, names: int
) -> None:
    size = SCENARIOS[name].topology.world_size
    reports = world.run(size, agreed_plan, name)
    assert len(set(reports)) == 1
    assert reports[0][0] == f"agreed by all {size} ranks, which count {numel} elements together"
    assert reports[0][2] == numel
    assert len(set(reports[0][1])) == names
    if "tied" in name:
        assert set(reports[0][1]) == {"layer@pipe=0", "layer@pipe=1", "tied"}


def plan_of_uneven_shards(dtensors: bool) -> list[str]:
    with ProcessGroupRegistry(Topology(data=4) if dtensors else Topology(tensor=2)) as registry:
        if dtensors:
            model: nn.Module = nn.Sequential(
                nn.Linear(8, 3), nn.Linear(3, 5)
            )  # rank 3 has no element of these parameters
            fully_shard(model, mesh=registry.device_mesh("data"))
        else:
            model = nn.ParameterDict({"a": nn.Parameter(torch.ones(3 - registry.global_rank))})
            declare(model, {"a": P("tensor")})
        optimizer = ParallelOptimizer(torch.optim.SGD(model.named_parameters()), registry)
        return str(optimizer.plan).splitlines()[-2:]


def test_printed_plan_counts_uneven_dtensors_by_their_full_shapes(world: World) -> None:
    for counted, agreed in world.run(4, plan_of_uneven_shards, True):
        assert counted.startswith("counts 47 elements, as declared; ")
        assert agreed == "agreed by all 4 ranks, which count 47 elements together"


def test_printed_plan_of_uneven_shards_says_that_count_assumes_equal_sizes(world: World) -> None:
    for rank, (counted, agreed) in enumerate(world.run(2, plan_of_uneven_shards, False)):
        assert counted.startswith(f"counts {(6, 4)[rank]} elements, as if all shards had this rank's size; ")
        assert agreed == "agreed by all 2 ranks, which count 5 elements together"


def regrouped(swap: bool) -> str:
    """Put "b" into the group of "a" on rank 1, or swap the groups there. Return the error."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        a, b, c = ((name, nn.Parameter(torch.ones(2))) for name in "abc")
        groups = [[a, c], [b]] if registry.global_rank == 0 else [[b], [a, c]] if swap else [[a, b, c], []]
        optimizer = torch.optim.SGD([{"params": group} for group in groups if group], lr=0.1)
        with pytest.raises(ValueError, match="ranks") as caught:
            ParallelOptimizer(optimizer, registry)
        return str(caught.value)


@pytest.mark.parametrize(
    ("swap", "first"),
    [(True, "a: in group 0 on rank 0, in group 1 on rank 1"), (False, "b: in group 1 on rank 0, in group 0 on rank 1")],
)
def test_parameters_in_different_param_groups_on_two_ranks_raise(world: World, swap: bool, first: str) -> None:
    for text in world.run(2, regrouped, swap):
        assert f"ranks 0 and 1 hold the same parameters in different param groups, first {first}; put each" in text


def differently_named() -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        names = "ab" if registry.global_rank == 0 else "ac"
        model = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in names})
        declare(model, {"*": P()})
        with pytest.raises(ValueError, match="declare them differently") as caught:
            ParallelOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1), registry)
        return str(caught.value)


def test_parameters_with_different_names_on_two_ranks_raise(world: World) -> None:
    for text in world.run(2, differently_named):
        assert "differently, first in b: rank 0 has [b: " in text
        assert "rank 1 has [c: " in text


def specs_after_construction() -> list[P]:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        model = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in "ab"})
        declare(model, {"a": P("tensor"), "b": P()})
        ParallelOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1), registry)
        return [spec_of(param) for param in model.values()]


def test_optimizer_does_not_change_declared_specs(world: World) -> None:
    assert world.run(2, specs_after_construction) == [[P("tensor"), P()]] * 2


def test_counted_elements_of_tied_and_owned_parameters_are_those_of_one_replica() -> None:
    entries = (
        ParameterEntry("tied", P("tensor", tied={"pipe": (0, -1)}), (4, 3)),
        ParameterEntry("owned", P(owned={"tensor": 0}), (5,)),
        ParameterEntry("own", P("tensor"), (2,)),
    )
    assert ReductionPlan.of(entries, Topology(pipe=3, data=2, tensor=2), 0).counted_numels == (24, 5, 4)
