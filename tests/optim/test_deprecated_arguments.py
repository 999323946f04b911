"""Deprecated arguments: warnings, effects, and conflicts with the new arguments."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from meshstep.optim import (
    Bf16Compression,
    Booster,
    Fingerprints,
    Measure,
    ParallelOptimizer,
    ParamTransform,
    PlacementContext,
    Position,
    Reduce,
    Sharded,
    StatePlacement,
)
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import nn
from world import World


def answer() -> bool:
    return True


# The old arguments, their text in messages, the new arguments, and the advice in the warning.
SPELLINGS: dict[str, tuple[dict[str, Any], str, dict[str, Any], str]] = {
    "norm_type": (
        {"measure": Measure(norm_type=3.0)},
        "measure=Measure(norm_type=3.0)",
        {"norm_type": 3.0},
        "write norm_type=3.0 instead",
    ),
    "reduction": (
        {"measure": Measure(reduction="per_group")},
        "measure=Measure(reduction='per_group')",
        {"reduction": "per_group"},
        "write reduction='per_group' instead",
    ),
    "per_parameter": (
        {"measure": Measure(per_parameter=True, check_replicas=False)},
        "measure=Measure(per_parameter=True, check_replicas=False)",
        {"per_parameter_norms": True, "check_replicas": False},
        "write per_parameter_norms=True, check_replicas=False instead",
    ),
    "check_replicas": (
        {"measure": Measure(check_replicas=Fingerprints(every=7))},
        "measure=Measure(check_replicas=Fingerprints(every=7))",
        {"check_replicas": Fingerprints(every=7)},
        "write check_replicas=Fingerprints(every=7) instead",
    ),
    "commit": (
        {"measure": Measure(commit=answer)},
        "measure=Measure(commit=answer)",
        {"commit": answer},
        "write commit=answer instead",
    ),
    "defaults of Measure": ({"measure": Measure()}, "measure=Measure()", {}, "leave measure out"),
    "overlap": (
        {"data_parallel": Reduce(overlap=True, exchange=Bf16Compression())},
        "data_parallel=Reduce(overlap=True, exchange=Bf16Compression(error_feedback=True))",
        {"overlap": True, "compression": Bf16Compression()},
        "write overlap=True, compression=Bf16Compression(error_feedback=True) instead",
    ),
    "average_data": (
        {"data_parallel": Reduce(average_data=False, bucket_bytes=64)},
        "data_parallel=Reduce(average_data=False, bucket_bytes=64)",
        {"average_data": False, "bucket_bytes": 64},
        "write average_data=False, bucket_bytes=64 instead",
    ),
    "defaults of Reduce": ({"data_parallel": Reduce()}, "data_parallel=Reduce()", {}, "leave data_parallel out"),
}


def optimizer_of(**options: Any) -> ParallelOptimizer[Any]:
    model = nn.Linear(3, 2)
    declare(model, {"*": P()})
    adamw = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    return ParallelOptimizer(adamw, ProcessGroupRegistry(Topology(data=1)), **options)


@pytest.mark.parametrize("name", SPELLINGS)
def test_deprecated_argument_warns_and_sets_new_argument(name: str) -> None:
    old, old_text, new, advice = SPELLINGS[name]
    text = re.escape(f"ParallelOptimizer({old_text}) is deprecated: {advice}")
    with pytest.warns(DeprecationWarning, match=f"^{text}$") as caught:
        optimizer = optimizer_of(**old)
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]
    assert optimizer._setup.options == optimizer_of(**new)._setup.options


def test_deprecated_measure_and_reduce_warn_once_each() -> None:
    options = {"measure": Measure(norm_type=3.0), "data_parallel": Reduce(overlap=True), "reduction": "per_group"}
    with pytest.warns(DeprecationWarning, match="is deprecated: write") as caught:
        optimizer = optimizer_of(**options)
    assert len(caught) == 2
    setup = optimizer._setup
    assert (setup.norm_type, setup.overlap, setup.reduction) == (3.0, True, "per_group")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"measure": Measure(norm_type=3.0), "norm_type": 1.0},
            "norm_type is given twice, as norm_type=1.0 and in measure=Measure(norm_type=3.0): leave norm_type out",
        ),
        (
            {"measure": Measure(per_parameter=True), "per_parameter_norms": True},
            "per_parameter_norms is given twice, as per_parameter_norms=True and in measure=Measure(per_parameter=True)",
        ),
        (
            {"data_parallel": Reduce(exchange=Bf16Compression()), "compression": Bf16Compression(error_feedback=False)},
            "compression is given twice, as compression=Bf16Compression(error_feedback=False) and in data_parallel=Reduce",
        ),
        ({"measure": Measure(), "max_nrom": 1.0}, "ParallelOptimizer has no argument max_nrom=: write max_norm="),
        ({"measure": True}, "ParallelOptimizer has no argument measure=: write the arguments of Measure as arguments"),
    ],
    ids=["norm_type", "per_parameter", "compression", "unknown name", "no Measure"],
)
def test_conflicting_or_invalid_deprecated_arguments_raise(options: dict[str, Any], said: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(TypeError, match=re.escape(said)):
            optimizer_of(**options)


def error_of_one_rank() -> str:
    """Give the deprecated argument on both ranks, and its replacement on rank 0 only. Return the error."""
    model = nn.Linear(3, 2)
    declare(model, {"*": P()})
    with ProcessGroupRegistry(Topology(data=2)) as registry, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        options: Any = {"data_parallel": Reduce(overlap=True)}
        if registry.global_rank == 0:
            options["overlap"] = True
        sgd = torch.optim.SGD(model.named_parameters(), lr=0.1)
        with pytest.raises(TypeError) as caught:
            ParallelOptimizer(sgd, registry, **options)
        return str(caught.value)


def test_deprecated_and_new_argument_on_one_rank_raise_on_all_ranks(world: World) -> None:
    for text in world.run(2, error_of_one_rank):
        assert "overlap is given twice, as overlap=True and in data_parallel=Reduce(overlap=True)" in text


def weights_after(options: dict[str, Any]) -> list[float]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
        declare(model, {"*": P()})
        adamw = torch.optim.AdamW(model.named_parameters(), lr=0.1, fused=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            optimizer = ParallelOptimizer(adamw, registry, max_norm=0.1, **options)
        for step in range(3):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(2 * step + registry.global_rank)
            optimizer.backward(model(torch.randn(3, 5, generator=generator)).square().mean())
            optimizer.step()
        return torch.cat([param.detach().flatten() for param in model.parameters()]).tolist()


@pytest.mark.parametrize("name", ["norm_type", "overlap"])
def test_deprecated_and_new_arguments_train_bitwise_identically(world: World, name: str) -> None:
    old, _, new, _ = SPELLINGS[name]
    assert world.run(2, weights_after, old) == world.run(2, weights_after, new)


def test_booster_warns_about_deprecated_measure() -> None:
    options: Any = {"measure": Measure(check_replicas=False)}
    text = re.escape("Booster(measure=Measure(check_replicas=False)) is deprecated: write check_replicas=False instead")
    with pytest.warns(DeprecationWarning, match=text) as caught:
        booster = Booster(**options)
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]
    model = nn.Linear(2, 2)
    _, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert optimizer._setup.check_replicas is False
    with pytest.raises(TypeError, match="commit is given twice"):
        Booster(measure=Measure(commit=answer), commit=bool)  # type: ignore[call-overload]


def test_deprecated_exchange_argument_of_sharded_warns() -> None:
    with pytest.warns(
        DeprecationWarning, match=r"write compression=Bf16Compression\(error_feedback=True\) instead"
    ) as caught:
        sharded = Sharded("data", exchange=Bf16Compression())  # type: ignore[call-arg]
    assert sharded == Sharded("data", compression=Bf16Compression())
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]
    with pytest.raises(TypeError, match="compression is given twice"):
        Sharded(compression=Bf16Compression(), exchange=Bf16Compression())  # type: ignore[call-arg]


class Counted(ParamTransform):
    """A transform with the deprecated form of `step`, which gets only the update."""

    updates = 0

    def step(self, update: Callable[[], object]) -> None:  # type: ignore[override]
        self.updates += 1
        update()


class Counting(StatePlacement):
    position = Position.STATE

    def check(self, context: PlacementContext) -> None:
        pass

    def transform(self, context: PlacementContext) -> ParamTransform:
        self.made = Counted()
        return self.made


def test_transform_step_with_deprecated_signature_warns_and_is_called() -> None:
    model, counting = nn.Linear(2, 1, bias=False), Counting()
    nn.init.ones_(model.weight)
    declare(model, {"*": P()})
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.warns(DeprecationWarning, match=r"write step\(self, request, update\) and call update\(request\)"):
        optimizer = ParallelOptimizer(sgd, ProcessGroupRegistry(Topology()), states=counting)
    optimizer.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert counting.made.updates == 1
    assert model.weight.tolist() == [[0.5, 0.5]]
