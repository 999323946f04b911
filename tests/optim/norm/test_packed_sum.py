"""`PackedSum`: several named tensors, summed over ranks in one collective."""

from __future__ import annotations

import pytest
import torch
from meshstep.optim import GlobalNorm, ReductionPlan
from meshstep.optim.norm.packed_sum import PackedSum
from meshstep.optim.norm.plan import entries_of
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from torch import Tensor, nn
from world import World


def packed() -> PackedSum:
    return PackedSum.of({"one": torch.tensor([1.0, 2.0])}).with_fields(
        {"two": torch.tensor([3.0]), "three": torch.zeros(0)}
    )


def test_packed_sum_splits_into_named_fields() -> None:
    fields = packed().split(torch.tensor([5.0, 6.0, 7.0]))
    assert {name: values.tolist() for name, values in fields.items()} == {"one": [5.0, 6.0], "two": [7.0], "three": []}


def test_packed_sum_with_single_field_needs_no_copy() -> None:
    sums = torch.tensor([1.0, 2.0])
    assert PackedSum.of({"one": sums}).split(sums)["one"] is sums


def test_packed_sum_with_no_added_fields_is_same_object() -> None:
    pack = packed()
    assert pack.with_fields({}) is pack


def test_packed_sum_with_a_field_twice_raises() -> None:
    with pytest.raises(ValueError, match="the field two is packed twice: give each field a unique name"):
        packed().with_fields({"two": torch.zeros(1)})


def measured() -> tuple[float, dict[str, list[float]]]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        param = nn.Parameter(torch.zeros(2))
        annotate(param, P(), "param")
        plan = ReductionPlan.of(entries_of([[param]], registry.topology), registry.topology, registry.global_rank)
        rank = float(registry.global_rank)
        pack = PackedSum.of({"first": torch.full((2,), 1.0 + rank)}).with_fields(
            {"second": torch.full((1,), 10 * rank)}
        )
        norms = GlobalNorm(plan, registry)([torch.tensor([3.0, 4.0])], pack.values)
        fields: dict[str, Tensor] = pack.split(norms.extra)
        return float(norms.total), {name: values.tolist() for name, values in fields.items()}


def test_packed_fields_are_summed_over_ranks_with_the_norm(world: World) -> None:
    assert world.run(2, measured) == [(5.0, {"first": [3.0, 3.0], "second": [10.0]})] * 2
