"""Writes to gradients before `step`, by torch's clipping or by ``loss.backward()`` in a window."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from arguments import arguments
from meshstep.amp import GradScaler, precision_of
from meshstep.optim import Fingerprints, ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from world import World
from zero_models import ZERO1, ZERO2

Change = Callable[[Iterable[Tensor]], object]


def clip(params: Iterable[Tensor]) -> None:
    nn.utils.clip_grad_norm_(params, 0.5)


def clip_above_norm(params: Iterable[Tensor]) -> None:
    nn.utils.clip_grad_norm_(params, 1e6)


def clip_first_parameter(params: Iterable[Tensor]) -> None:
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
    """Return the warnings of three steps, with ``change`` applied between backward and step."""
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


@pytest.mark.parametrize("change", [clip, clip_above_norm, clip_value])
def test_torch_clipping_of_replicas_warns_once(world: World, change: Change) -> None:
    for said in world.run(2, said_in_steps, change, {"max_norm": 3.0}):
        assert len(said) == 1
        assert said[0].startswith(ON_RANK_0)
        assert "local to that rank, not reduced over ranks yet: to clip, remove that call and give" in said[0]
        assert "warnings.filterwarnings('ignore', message='.*were written to between backward and step')" in said[0]


@pytest.mark.parametrize(
    ("options", "micro_batches"),
    [({"accumulation_steps": 2}, 2), (ZERO1, 1), ({"on_nonfinite": "raise"}, 1)],
    ids=["window", "zero1", "raise"],
)
def test_torch_clipping_warns_once_with_accumulation_zero1_or_on_nonfinite_raise(
    world: World, options: dict[str, Any], micro_batches: int
) -> None:
    for said in world.run(2, said_in_steps, clip, options, micro_batches):
        assert len(said) == 1


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (nothing, {}),
        (nothing, ZERO1),
        (clip_first_parameter, {}),
        (clip, {"data_parallel": "ddp"}),
        (clip, {"overlap": True}),
    ],
    ids=["no change", "no change, zero1", "some", "ddp", "overlap"],
)
def test_reduced_partly_clipped_or_unchanged_gradients_do_not_warn(
    world: World, change: Change, options: dict[str, Any]
) -> None:
    assert world.run(2, said_in_steps, change, options) == [[], []]


def clipped_on_one_rank() -> str:
    """Return the error if a filter turns the warning into an error; it must be raised on every rank."""
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


def test_torch_clipping_on_one_rank_is_reported_on_all_ranks(world: World) -> None:
    assert len({*world.run(2, clipped_on_one_rank)}) == 1


def test_torch_clipping_in_single_process_does_not_warn() -> None:
    model = small()
    optimizer = ParallelOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1), ProcessGroupRegistry(Topology()))
    optimizer.backward(model(torch.ones(2, 4)).sum())
    clip(model.parameters())
    optimizer.step()


def test_torch_clipping_of_scaled_gradients_warns() -> None:
    model, registry = small(), ProcessGroupRegistry(Topology())
    precision_of("fp16_naive").prepare(model, registry)
    inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = ParallelOptimizer(inner, registry, precision="fp16_naive")
    optimizer.backward(model(torch.ones(2, 4).half()).float().sum())
    if model.weight.grad is None:
        pytest.skip("this mode moves gradients out of .grad during backward")
    clip(model.parameters())
    with pytest.warns(UserWarning, match="were written to .*These gradients were still multiplied by the loss scale"):
        optimizer.step()


def unscaled_by_a_scaler() -> None:
    with ProcessGroupRegistry(Topology(data=2)) as registry, warnings.catch_warnings():
        warnings.simplefilter("error")  # pytest's own filter has no effect in the ranks' processes
        model, scaler = small(), GradScaler(registry)
        optimizer = ParallelOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1), registry)
        with optimizer.window():
            scaler.scale(optimizer.scale_loss(model(torch.ones(2, 4)).sum())).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


def test_unscaling_by_grad_scaler_does_not_warn(world: World) -> None:
    world.run(2, unscaled_by_a_scaler)


def silenced() -> None:
    with ProcessGroupRegistry(Topology(data=2)) as registry, warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*were written to between backward and step")
        model = small()
        optimizer = ParallelOptimizer(
            torch.optim.SGD(model.named_parameters(), lr=0.1), registry, check_replicas=Fingerprints()
        )
        optimizer.backward(model(torch.ones(2, 4)).sum())
        clip(model.parameters())
        optimizer.step()


def test_written_gradients_warning_can_be_filtered(world: World) -> None:
    world.run(2, silenced)


# loss.backward() instead of optimizer.backward(loss) in a window of accumulation_steps= -------------------------------

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "zero1": ZERO1,
    "zero2": ZERO2,
    "overlap": {"overlap": True},
    "ddp": {"data_parallel": "ddp"},
    "fsdp": {"data_parallel": "fsdp"},
}


def mask(params: Iterable[Tensor]) -> None:
    for param in params:
        if param.grad is not None:
            param.grad[:1] = 0


def managed(mode: str, precision: Any, plain_at: tuple[int, int] | None) -> tuple[list[str], int, list[float]]:
    """Run five windows of three micro-batches, with ``loss.backward()`` in the (window, micro-batch) ``plain_at``. Return
    errors, the number of steps, and weights."""
    options = MODES[mode]
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = small()
        precision_of(precision).prepare(model, registry)
        wrapped: nn.Module = model
        if mode == "ddp":
            wrapped = DistributedDataParallel(model, process_group=registry.group("data"))
            options = {"data_parallel": wrapped}
        if mode == "fsdp":
            fully_shard(model, mesh=registry.device_mesh("data"))
            options = {"data_parallel": model}
        inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
        optimizer = ParallelOptimizer(
            inner, registry, precision=precision, accumulation_steps=3, **arguments(**options)
        )
        texts, steps, dtype = [], 0, next(model.parameters()).dtype
        for window in range(5):
            for part in range(3):
                x = torch.linspace(-1, 2 + part + window, 8).view(2, 4).to(dtype)
                loss = wrapped(x).float().square().mean()
                try:
                    if (window, part) == plain_at:
                        loss.backward()
                    else:
                        optimizer.backward(loss)
                except RuntimeError as error:
                    texts.append(str(error))
                    optimizer.zero_grad()
                    break
                steps += optimizer.step() is not None
                optimizer.zero_grad()
        return texts, steps, [value for param in model.parameters() for value in _local(param).flatten().tolist()]


def _local(param: Tensor) -> Tensor:
    return param.detach().float() if not isinstance(param, DTensor) else param.to_local().detach().float()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("mode", ["plain", "zero1"])
@pytest.mark.parametrize("part", [1, 2])
def test_plain_backward_within_accumulation_window_raises_in_next_micro_batch(
    world: World, mode: str, precision: str, part: int
) -> None:
    for texts, steps, _ in world.run(2, managed, mode, precision, (1, part)):
        (text,) = texts
        assert text.startswith(f"loss.backward() was called after micro-batch {part} of 3, and added gradients")
        assert "write optimizer.backward(loss) for every micro-batch" in text
        assert steps == (4 if part == 1 else 3)


@pytest.mark.parametrize("mode", MODES)
def test_accumulation_window_with_optimizer_backward_does_not_raise(world: World, mode: str) -> None:
    for precision in ("fp32", "bf16") if mode not in ("fsdp", "ddp") else ("fp32",):
        for texts, steps, _ in world.run(2, managed, mode, precision, None):
            assert (texts, steps) == ([], 5)


@pytest.mark.parametrize("change", [mask, clip, clip_value])
def test_gradients_changed_within_accumulation_window_do_not_count_as_backward(change: Change) -> None:
    model = small()
    inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = ParallelOptimizer(inner, ProcessGroupRegistry(Topology()), accumulation_steps=2)
    for _ in range(4):
        optimizer.backward(model(torch.ones(2, 4)).sum())
        change(model.parameters())
        optimizer.step()
        optimizer.zero_grad()


def test_plain_backward_within_accumulation_window_raises_after_freezing_last_parameter() -> None:
    model = small()
    inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = ParallelOptimizer(inner, ProcessGroupRegistry(Topology()), accumulation_steps=3)
    optimizer.backward(model(torch.ones(2, 4)).sum())
    [*model.parameters()][-1].requires_grad_(False)
    optimizer.backward(model(torch.ones(2, 4)).sum())
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"loss.backward\(\) was called after micro-batch 2"):
        optimizer.backward(model(torch.ones(2, 4)).sum())


def test_plain_backward_between_accumulation_windows_is_allowed() -> None:
    """The hook that detects ``loss.backward()`` exists only within a window."""
    model = small()
    inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = ParallelOptimizer(inner, ProcessGroupRegistry(Topology()), accumulation_steps=2)
    for _ in range(3):
        for _ in range(2):
            optimizer.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
