"""Arguments of other libraries and wrong objects, and the advice in their errors."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshstep.optim import Booster, Monitor, Muon, ParallelOptimizer, clip_grad_norm_
from meshstep.parallel import ColumnParallelLinear, ProcessGroupRegistry, Topology, annotate, prepare_dataloader, shard
from meshstep.parallel.layout.annotation import annotation_of
from meshstep.parallel.layout.spec import P
from torch import nn
from torch.utils.data import TensorDataset
from world import World

ALONE = Topology(data=1, tensor=1)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("max_grad_norm", "write max_norm="),
        ("clip_grad", "write max_norm="),
        ("gradient_accumulation_steps", "write accumulation_steps="),
        ("mixed_precision", "write precision="),
        ("comm_hook", "write compression="),
        ("exchange", "write compression="),
        ("overlap_grad_reduce", "write overlap=True"),
        ("bucket_cap_mb", "write bucket_bytes="),
        ("per_parameter", "write per_parameter_norms="),
        ("shard_states", "write states="),
        ("measure", "write the arguments of Measure as arguments of their own, norm_type="),
        ("max_nrom", "write max_norm="),
        (
            "colour",
            "the arguments are accumulation_steps, average_data, bucket_bytes, check_replicas, commit, compression, data",
        ),
    ],
)
def test_unknown_argument_name_raises_error_with_correct_or_available_names(name: str, advice: str) -> None:
    options: dict[str, Any] = {name: 1.0}
    with pytest.raises(TypeError, match=f"ParallelOptimizer has no argument {name}=: {advice}"):
        ParallelOptimizer(adam(nn.Linear(2, 2)), ProcessGroupRegistry(ALONE), **options)


@pytest.mark.parametrize("is_list", [False, True])
def test_optimizer_rejected_after_making_master_weights_is_unchanged(is_list: bool) -> None:
    weight, bias, other = (nn.Parameter(torch.ones(*shape).bfloat16()) for shape in ((2, 2), (2,), (2,)))
    muon, sgd = Muon([{"params": [weight, bias], "algorithm": "muon"}]), torch.optim.SGD([other])
    muon.state[weight]["momentum"] = momentum = torch.zeros(2, 2).bfloat16()
    for _ in range(2):  # in the second call too, the optimizer does not count as wrapped before
        with pytest.raises(ValueError, match="is not a matrix, which Muon needs"):
            ParallelOptimizer([muon, sgd] if is_list else muon, ProcessGroupRegistry(ALONE), precision="bf16")
    assert all(map(is_, muon.param_groups[0]["params"], [weight, bias]))
    assert muon.state.keys() == {weight}
    assert muon.state[weight]["momentum"] is momentum
    assert sgd.param_groups[0]["params"][0] is other
    assert "optimizer" not in sgd.param_groups[0]


@pytest.mark.parametrize(
    "use",
    [
        lambda layout: ParallelOptimizer(adam(nn.Linear(2, 2)), layout),
        lambda layout: Booster(registry=layout).boost(nn.Linear(2, 2), adam(nn.Linear(2, 2))),
        lambda layout: clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0, layout),
        lambda layout: ColumnParallelLinear(2, 2, layout),
        lambda layout: Monitor(layout),
        lambda layout: prepare_dataloader(TensorDataset(torch.ones(2)), layout, 1),
        lambda layout: shard(torch.ones(2), P(), layout),
    ],
    ids=["optimizer", "booster", "clipping", "layer", "monitor", "loader", "shard"],
)
def test_topology_instead_of_registry_is_rejected_with_advice(use: Callable[[Any], object]) -> None:
    advice = r"a topology has no process groups; give ProcessGroupRegistry\(Topology\(data=1, tensor=1\)\) instead"
    with pytest.raises(AttributeError, match=advice):
        use(ALONE)


@pytest.mark.parametrize("registry", [None, 2, "data", nn.Linear(2, 2)], ids=["None", "number", "string", "module"])
def test_other_object_instead_of_registry_is_rejected_with_advice(registry: Any) -> None:
    with pytest.raises(
        TypeError, match=f"the registry is a {type(registry).__name__}: give a ProcessGroupRegistry, such"
    ):
        ParallelOptimizer(adam(nn.Linear(2, 2)), registry)


def test_registry_is_accepted_by_keyword_and_missing_registry_raises_type_error() -> None:
    with ProcessGroupRegistry(ALONE) as registry:
        model = nn.Linear(2, 2)
        annotate(model.weight, P(), "weight")
        annotate(model.bias, P(), "bias")
        assert ParallelOptimizer(adam(model), registry=registry).registry is registry
        with pytest.raises(TypeError, match="registry"):
            ParallelOptimizer(adam(model))  # type: ignore[call-overload]


def refused_with_parameters_on_one_rank() -> str:
    model = nn.Linear(2, 2)
    given: Any = model.parameters() if dist.get_rank() else adam(model)
    with ProcessGroupRegistry(Topology(data=2)) as registry, pytest.raises(TypeError) as error:
        ParallelOptimizer(given, registry)
    return str(error.value)


def test_parameters_instead_of_optimizer_are_rejected_on_all_ranks(world: World) -> None:
    for text in world.run(2, refused_with_parameters_on_one_rank):
        assert (
            "the optimizer is a generator, not a torch optimizer: create a torch optimizer from the parameters" in text
        )


def test_boosted_parameters_get_their_full_names() -> None:
    first = nn.Linear(2, 2)
    model = nn.Sequential(first, nn.Linear(2, 2))
    annotate(first.weight, P())  # declared by the layer, without a name
    Booster().boost(model, adam(model))
    names = [annotation.name for param in model.parameters() if (annotation := annotation_of(param)) is not None]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]
