"""Global norms with replicas, tied parameters, and tiny or non-finite elements; contents of reduction plans."""

from __future__ import annotations

import warnings
from math import inf

import pytest
import torch
from meshstep.optim import ParameterEntry, ReductionPlan
from meshstep.optim.norm import powers
from meshstep.optim.norm.global_norm import GlobalNorm
from meshstep.optim.norm.measure import Reduction
from meshstep.optim.norm.plan import NormBucket, logical_shape
from meshstep.optim.norm.plan_agreement import agreed
from meshstep.optim.norm.powers import p_norm
from meshstep.parallel import P, ProcessGroupRegistry, Topology
from meshstep.parallel.layout.annotation import Annotation
from torch import Tensor
from world import World


@pytest.mark.parametrize("p", [1.0, 2.0, 12.0])
def test_p_norm_of_infinity_zeros_and_nan_is_infinity_zero_and_nan(p: float) -> None:
    assert p_norm(torch.tensor([1.0, inf]), p) == inf
    assert p_norm(torch.tensor([0.0, 0.0]), p) == 0
    assert p_norm(torch.tensor([1.0, torch.nan]), p).isnan()


@pytest.mark.parametrize("size", [1e-24, 1.2e-22, 3e-21])
def test_squares_that_underflow_in_float32_are_summed_in_float64(size: float) -> None:
    tiny = torch.full((powers.SMALL + 1,), size)
    assert float(tiny[:1].square()) != pytest.approx(size**2, rel=1e-5, abs=0.0)
    found = powers.powers_by_torch([tiny], 2.0)
    assert float(found) == pytest.approx(len(tiny) * float(tiny[0].double()) ** 2, rel=1e-6, abs=0.0)


def plan_of(entries: list[ParameterEntry], topology: Topology, registry: ProcessGroupRegistry) -> ReductionPlan:
    return agreed(lambda: ReductionPlan.of(entries, topology, registry.global_rank), registry, names=True)


def weight_norms(p: float) -> tuple[list[float], list[float]]:
    """Return the norm of each weight and of each gradient. One parameter is replicated, the other is sharded."""
    topology = Topology(data=2, tensor=2)
    with ProcessGroupRegistry(topology) as registry:
        entries = [ParameterEntry("copy", P(), (3,)), ParameterEntry("shard", P("tensor"), (2,))]
        norm = GlobalNorm(plan_of(entries, topology, registry), registry, p, weights_at="parameters")
        tensors = [torch.full((3,), 2.0), torch.full((2,), 3.0)]
        found = norm([2 * tensor for tensor in tensors], weights=tensors)
        return found.weights.tolist(), found.parameters.tolist()


@pytest.mark.parametrize("p", [1.0, 2.0, 12.0, 20.0, inf])
def test_norms_of_weights_count_replicated_weights_once(world: World, p: float) -> None:
    sizes = (3, 4)
    wanted = [value * (1.0 if p == inf else size ** (1 / p)) for size, value in zip(sizes, (2.0, 3.0), strict=True)]
    for weights, gradients in world.run(4, weight_norms, p):
        assert weights == pytest.approx(wanted, rel=1e-12)
        assert gradients == pytest.approx([2 * value for value in wanted], rel=1e-12)


def norm_with_bad_replica(p: float, reduction: Reduction, bad: float) -> float:
    """Return the norm if one replica of a parameter has a non-finite element on the last rank only."""
    topology = Topology(data=2, tensor=2)
    with ProcessGroupRegistry(topology) as registry:
        gradient = torch.ones(3)
        if registry.global_rank == 3:
            gradient[1] = bad
        plan = plan_of([ParameterEntry("copy", P(), (3,))], topology, registry)
        return float(GlobalNorm(plan, registry, p, reduction)([gradient]).total)


@pytest.mark.parametrize("reduction", ["packed", "per_group"])
@pytest.mark.parametrize("p", [2.0, 12.0, inf])
def test_nonfinite_element_of_one_replica_makes_norm_nonfinite_on_all_ranks(
    world: World, p: float, reduction: Reduction
) -> None:
    for bad in (torch.nan, inf):
        found = world.run(4, norm_with_bad_replica, p, reduction, bad)
        assert not any(map(torch.tensor(found).isfinite().tolist().__getitem__, range(4)))


def tied_norm(p: float, reduction: Reduction) -> float:
    """Return the norm of a tied parameter, whose replica on the second stage does not count, and one parameter per
    stage."""
    topology = Topology(pipe=2)
    with ProcessGroupRegistry(topology) as registry:
        entries = [ParameterEntry("tied", P(tied={"pipe": (0, 1)}), (3,)), ParameterEntry("own", P(), (2,))]
        plan = plan_of(entries, topology, registry)
        return float(GlobalNorm(plan, registry, p, reduction)([torch.ones(3), torch.ones(2)]).total)


@pytest.mark.parametrize("reduction", ["packed", "per_group"])
@pytest.mark.parametrize("p", [1.0, 2.0, 12.0])
def test_tied_parameter_counts_once_in_global_norm(world: World, p: float, reduction: Reduction) -> None:
    assert world.run(2, tied_norm, p, reduction) == pytest.approx([7 ** (1 / p)] * 2, rel=1e-12)


def norms_by_name() -> dict[str, float]:
    """Return the norm of each parameter. The second rank lists its parameters in reverse order of their names."""
    topology = Topology(pipe=2)
    with ProcessGroupRegistry(topology) as registry:
        names = [["a", "b"], ["d", "c"]][registry.global_rank]
        sizes = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
        entries = [ParameterEntry(name, P(), (1,)) for name in names]
        plan = plan_of(entries, topology, registry)
        gradients: list[Tensor | None] = [torch.full((1,), sizes[name]) for name in names]
        found = GlobalNorm(plan, registry, per_parameter=True)(gradients)
        return dict(zip(plan.parameter_names, found.parameters.tolist(), strict=True))


def test_per_parameter_norms_have_correct_names_on_every_rank(world: World) -> None:
    assert world.run(2, norms_by_name) == [{"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}] * 2


def test_per_parameter_norms_follow_order_of_plan_parameter_names() -> None:
    topology = Topology()
    entries = tuple(ParameterEntry(name, P(), (1,)) for name in ("a", "b"))
    plan = ReductionPlan.of(entries, topology, 0)
    swapped = ReductionPlan(topology, 0, entries, plan.buckets, 1, 2, ("b", "a"), (1, 0), ((1,), (1,)))
    gradients = [torch.full((1,), 3.0), torch.full((1,), 5.0)]
    found = GlobalNorm(swapped, ProcessGroupRegistry(topology), per_parameter=True)(gradients)
    assert found.parameters.tolist() == [5.0, 3.0]


# Reduction plans and norm buckets -------------------------------------------------------------------------------------


def test_norm_bucket_of_owner_only_parameter_counts_on_owner_ranks_only() -> None:
    topology = Topology(row=2, col=2)
    bucket = NormBucket.of(P("col", owned={"row": 1}), topology)
    assert [bucket.counts(topology.coordinate(rank)) for rank in range(4)] == [False, False, True, True]


def test_only_per_group_norm_needs_process_groups_over_data_axes() -> None:
    topology = Topology(roles={"expert": "data"}, data=2, expert=2, tensor=2)
    entries = [ParameterEntry("expert", P("expert", "tensor"), (1, 2)), ParameterEntry("norm", P(), (4,))]
    plan = ReductionPlan.of(entries, topology, 0)
    assert plan.groups("packed") == [("tensor",)]
    assert plan.groups("per_group") == [("expert", "tensor"), ("tensor",)]


def without_role(trained: bool, rank: int) -> list[str]:
    topology = Topology(data=2, expert=2)
    entries = [ParameterEntry("experts", P("expert"), (2,)), ParameterEntry("router", P(), (2,), trained=trained)]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ReductionPlan.of(entries, topology, rank).warn_of_experts()
    return [str(warning.message).split(",")[0] for warning in found]


@pytest.mark.parametrize("trained", [True, False])
def test_expert_axis_without_role_warns_on_rank_0_if_replicas_are_trained(trained: bool) -> None:
    for rank in range(4):
        found = without_role(trained, rank)
        wanted = ["axis 'expert' shards experts and replicates router"] if trained and rank == 0 else []
        assert found == wanted


def test_logical_shape_of_dtensor_is_scaled_only_by_axes_outside_its_mesh() -> None:
    topology = Topology(data=2, tensor=2)
    param = torch.zeros(2, 3)
    layout = Annotation(P(("data", "tensor")), mesh_axes=("data",))
    assert logical_shape(param, layout, topology) == (4, 3)


def names_of_stages() -> tuple[tuple[str, ...], tuple[object, ...]]:
    """Return names and shapes of a plan in which each stage has a "layer" of a different shape, and the tied "embed"."""
    topology = Topology(pipe=2)
    with ProcessGroupRegistry(topology) as registry:
        tied = ParameterEntry("embed", P(tied={"pipe": (0, 1)}), (5,), full_shape=(5,))
        own = ParameterEntry("layer", P(), (2 + registry.global_rank,), full_shape=(2 + registry.global_rank,))
        plan = plan_of([tied, own], topology, registry)
        return plan.parameter_names, plan.parameter_shapes


def test_same_named_parameters_of_two_stages_get_stage_suffix(world: World) -> None:
    names, shapes = world.run(2, names_of_stages)[0]
    assert names == ("embed", "layer@pipe=0", "layer@pipe=1")
    assert shapes == ((5,), (2,), (3,))


def shapes_of_uneven_shards() -> tuple[object, ...]:
    """Return the full shapes in the plan. The ranks have 3 and 2 elements of "uneven", and 2 each of "even"."""
    topology = Topology(tensor=2)
    with ProcessGroupRegistry(topology) as registry:
        length = 3 - registry.global_rank
        uneven = ParameterEntry("uneven", P("tensor"), (length,), full_shape=(2 * length,))
        even = ParameterEntry("even", P("tensor"), (2,), full_shape=(4,))
        return plan_of([uneven, even], topology, registry).parameter_shapes


def test_full_shape_of_uneven_shards_is_unknown(world: World) -> None:
    assert world.run(2, shapes_of_uneven_shards) == [(None, (4,))] * 2
