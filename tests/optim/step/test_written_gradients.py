"""Gradients that are written to between the last backward and `step`, by torch's clipping, are named by a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from arguments import arguments
from meshstep.amp import GradScaler, precision_of
from meshstep.optim import Fingerprints, Measure, ParallelOptimizer, Reduce
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from world import World
from zero_models import ZERO1

Change = Callable[[Iterable[Tensor]], object]


def clip(params: Iterable[Tensor]) -> None:
    nn.utils.clip_grad_norm_(params, 0.5)


def clip_nothing(params: Iterable[Tensor]) -> None:
    nn.utils.clip_grad_norm_(params, 1e6)


def clip_some(params: Iterable[Tensor]) -> None:
    nn.utils.clip_grad_norm_(list(params)[:1], 0.5)


def clip_value(params: Iterable[Tensor]) -> None:
    nn.utils.clip_grad_value_(params, 0.1)


def nothing(params: Iterable[Tensor]) -> None:
    pass


def small(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    declare(model, {"*": P()})
    return model


def said_in_steps(change: Change, options: dict[str, Any], micro_batches: int = 1, mode: Any = "fp32") -> list[str]:
    """The warnings of three steps, with ``change`` between backward and step."""
    with ProcessGroupRegistry(Topology(data=2)) as registry, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = small()
        precision_of(mode).prepare(model, registry)
        wrapped: nn.Module = model
        if options.get("data_parallel") == "ddp":
            wrapped = DistributedDataParallel(model, process_group=registry.group("data"))
            options = {**options, "data_parallel": wrapped}
        inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
        optimizer = ParallelOptimizer(inner, registry, precision=mode, **arguments(**options))
        for step in range(3):
            optimizer.zero_grad()
            for micro_batch in range(micro_batches):
                x = torch.linspace(-1, 2 + registry.global_rank + micro_batch + step, 8).view(2, 4)
                optimizer.backward(wrapped(x.to(next(model.parameters()).dtype)).float().square().mean())
                change(model.parameters())
                optimizer.step()
        return [str(item.message) for item in caught if "were written to" in str(item.message)]


ON_RANK_0 = "all gradients of rank 0 were written to between backward and step, as by torch.nn.utils.clip_grad_norm_ or"


@pytest.mark.parametrize("change", [clip, clip_nothing, clip_value])
def test_clipping_by_torch_on_replicas_is_named_once(world: World, change: Change) -> None:
    for said in world.run(2, said_in_steps, change, {"max_norm": 3.0}):
        assert len(said) == 1
        assert said[0].startswith(ON_RANK_0)
        assert "of this rank alone, not reduced over ranks yet. To clip, take that call out and give" in said[0]
        assert "warnings.filterwarnings('ignore', message='.*were written to between backward and step')" in said[0]


@pytest.mark.parametrize(
    ("options", "micro_batches"),
    [({"accumulation_steps": 2}, 2), (ZERO1, 1), ({"on_nonfinite": "raise"}, 1)],
    ids=["window", "zero1", "raise"],
)
def test_clipping_by_torch_is_named_in_every_mode(world: World, options: dict[str, Any], micro_batches: int) -> None:
    for said in world.run(2, said_in_steps, clip, options, micro_batches):
        assert len(said) == 1


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (nothing, {}),
        (nothing, ZERO1),
        (clip_some, {}),
        (clip, {"data_parallel": "ddp"}),
        (clip, {"data_parallel": Reduce(overlap=True)}),
    ],
    ids=["no change", "no change, zero1", "some", "ddp", "overlap"],
)
def test_complete_or_unchanged_gradients_are_not_named(world: World, change: Change, options: dict[str, Any]) -> None:
    assert world.run(2, said_in_steps, change, options) == [[], []]


def clipped_on_one_rank() -> str:
    """A warning that is an error is one on every rank."""
    with ProcessGroupRegistry(Topology(data=2)) as registry, warnings.catch_warnings():
        warnings.simplefilter("error")
        model = small()
        optimizer = ParallelOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1), registry)
        before = model.weight.detach().clone()
        optimizer.backward(model(torch.ones(2, 4)).sum())
        if registry.global_rank == 1:
            clip(model.parameters())
        with pytest.raises(UserWarning, match="all gradients of rank 1 were written to") as error:
            optimizer.step()
        assert torch.equal(before, model.weight)
        return str(error.value)


def test_clipping_on_one_rank_is_named_on_all(world: World) -> None:
    assert len({*world.run(2, clipped_on_one_rank)}) == 1


def test_clipping_of_one_process_is_not_named() -> None:
    model = small()
    optimizer = ParallelOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1), ProcessGroupRegistry(Topology()))
    optimizer.backward(model(torch.ones(2, 4)).sum())
    clip(model.parameters())
    optimizer.step()


def test_clipping_of_scaled_gradients_is_named() -> None:
    model, registry = small(), ProcessGroupRegistry(Topology())
    precision_of("fp16_naive").prepare(model, registry)
    inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = ParallelOptimizer(inner, registry, precision="fp16_naive")
    optimizer.backward(model(torch.ones(2, 4).half()).float().sum())
    if model.weight.grad is None:
        pytest.skip("the mode takes gradients in backward")
    clip(model.parameters())
    with pytest.warns(UserWarning, match="were written to .*: they were multiplied by the loss scale"):
        optimizer.step()


def unscaled_by_a_scaler() -> None:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model, scaler = small(), GradScaler(registry)
        optimizer = ParallelOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1), registry)
        with optimizer.window():
            scaler.scale(optimizer.scale_loss(model(torch.ones(2, 4)).sum())).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


def test_unscaling_by_a_scaler_is_not_named(world: World) -> None:
    world.run(2, unscaled_by_a_scaler)


def silenced() -> None:
    with ProcessGroupRegistry(Topology(data=2)) as registry, warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*were written to between backward and step")
        model = small()
        optimizer = ParallelOptimizer(
            torch.optim.SGD(model.named_parameters(), lr=0.1), registry, measure=Measure(check_replicas=Fingerprints())
        )
        optimizer.backward(model(torch.ones(2, 4)).sum())
        clip(model.parameters())
        optimizer.step()


def test_warning_of_written_gradients_can_be_silenced(world: World) -> None:
    world.run(2, silenced)
