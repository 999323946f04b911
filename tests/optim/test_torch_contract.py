"""Optimizers and schedules behave like torch's in Python: global hooks, copies, pickle, lifetimes."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from meshstep.amp import Bf16, NaiveFp16
from meshstep.optim import (
    CosineAnnealingLR,
    HalfStates,
    HoldOnSkip,
    LinearWarmupLR,
    Offloaded,
    ParallelOptimizer,
    Sharded,
)
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from meshstep.parallel.layout.annotation import annotate, annotation_of
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from world import World

MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "not fused": {"fused": False},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": NaiveFp16(init_scale=4.0)},
    "rounded": {"precision": Bf16(stochastic_rounding=True)},
    "split": {"precision": Bf16(split_masters=True)},
    "half states": {"states": HalfStates()},
    "offloaded": {"states": Offloaded(0.5)},
    "ZeRO-1": {"states": Sharded("data")},
    "ZeRO-2, bf16": {"states": Sharded("data", gradients=True), "precision": "bf16"},
}


@pytest.fixture
def registry() -> Iterator[ProcessGroupRegistry]:
    with ProcessGroupRegistry(Topology()) as registry:
        yield registry


def built(registry: ProcessGroupRegistry, *, fused: bool = True, **options: Any) -> tuple[nn.Module, ParallelOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    declare(model, {"*": P()})
    precision = options.get("precision", "fp32")
    if precision == "bf16":
        Bf16().prepare(model, registry)
    elif precision != "fp32":
        precision.prepare(model, registry)
    inner = torch.optim.AdamW(model.named_parameters(), lr=1e-2, fused=fused)
    return model, ParallelOptimizer(inner, registry, max_norm=0.5, **options)


def train(model: nn.Module, optimizer: ParallelOptimizer, first: int, last: int) -> list[list[float]]:
    for step in range(first, last):
        optimizer.zero_grad()
        rank = optimizer.registry.global_rank
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.backward(model(x.to(next(model.parameters()).dtype)).float().square().mean())
        optimizer.step()
    return [param.detach().flatten().tolist() for param in model.parameters()]


# Hooks ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_global_step_hooks_run_once_per_step(registry: ProcessGroupRegistry, mode: str) -> None:
    model, optimizer = built(registry, **{key: value for key, value in MODES[mode].items() if "ZeRO" not in mode})
    seen: list[tuple[str, object]] = []
    own = optimizer.optimizer.register_step_post_hook(lambda *_: seen.append(("wrapped", None)))
    handles = [
        register_optimizer_step_pre_hook(lambda opt, *_: seen.append(("before", opt))),
        register_optimizer_step_post_hook(lambda opt, *_: seen.append(("after", opt))),
    ]
    try:
        train(model, optimizer, 0, 2)
        other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        other.step()
    finally:
        for handle in (*handles, own):
            handle.remove()
    calls = [("before", optimizer), ("wrapped", None), ("after", optimizer)]
    assert [item for item in seen if item[0] != "wrapped"] == [
        *(item for item in calls * 2 if item[0] != "wrapped"),
        ("before", other),
        ("after", other),
    ]
    assert ("wrapped", None) in seen


def test_global_hooks_are_restored_after_failed_step(registry: ProcessGroupRegistry) -> None:
    model, optimizer = built(registry)
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    hooks = register_optimizer_step_pre_hook.__globals__["_global_optimizer_pre_hooks"]
    before = dict(hooks)
    optimizer.optimizer.register_step_post_hook(lambda *_: 1 / 0)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        train(model, optimizer, 0, 1)
    assert dict(hooks) == before
    handle.remove()


# Copies -----------------------------------------------------------------------------------------------------------------


def deep(pair: Any) -> Any:
    return copy.deepcopy(pair)


def pickled(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


def copied(axes: dict[str, int], mode: str, how: Callable[[Any], Any]) -> None:
    with ProcessGroupRegistry(Topology(roles=None, **axes)) as registry:
        model, optimizer = built(registry, **MODES[mode])
        train(model, optimizer, 0, 3)
        optimizer.zero_grad()
        other_model, other = how((model, optimizer))
        assert type(other) is ParallelOptimizer
        assert other.registry is registry
        assert {name for name in vars(other) if name[0] != "_"} == {name for name in vars(optimizer) if name[0] != "_"}
        assert other.skipped_steps == optimizer.skipped_steps
        old = [param.detach().clone() for param in model.parameters()]
        continued = train(other_model, other, 3, 6)
        assert all(map(torch.equal, old, model.parameters()))
        assert train(model, optimizer, 3, 6) == continued


@pytest.mark.parametrize("how", [deep, pickled])
@pytest.mark.parametrize("mode", MODES)
def test_copied_model_and_optimizer_continue_bitwise_and_independently(
    world: World, mode: str, how: Callable[[Any], Any]
) -> None:
    if "ZeRO" not in mode:
        world.run(1, copied, {}, mode, how)
    world.run(2, copied, {"data": 2}, mode, how)


def test_shallow_copy_of_optimizer_shares_groups_and_states_but_no_hooks(registry: ProcessGroupRegistry) -> None:
    model, optimizer = built(registry)
    train(model, optimizer, 0, 1)
    optimizer.register_step_post_hook(lambda *_: 1 / 0)  # type: ignore[arg-type]
    other = copy.copy(optimizer)
    assert other.param_groups is optimizer.param_groups
    assert other.state is optimizer.state
    train(model, other, 1, 2)
    (state, *_) = optimizer.state.values()
    assert state["step"] == 2


def test_pickle_has_annotation_or_none_per_parameter(registry: ProcessGroupRegistry) -> None:
    """Pickles of earlier versions have this form."""
    declared, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    annotate(declared, P(), "declared")
    optimizer = ParallelOptimizer(torch.optim.SGD([other, declared], lr=0.1), registry)
    _, (_, recipe) = optimizer.__reduce__()
    assert recipe.annotations == [annotation_of(other), annotation_of(declared)]
    assert annotation_of(declared) is not None


def test_elementwise_attribute_is_copied_with_optimizer(registry: ProcessGroupRegistry) -> None:
    _, optimizer = built(registry)
    optimizer.optimizer.elementwise = True  # type: ignore[attr-defined]
    assert copy.deepcopy(optimizer).optimizer.elementwise  # type: ignore[attr-defined]


SCHEDULES: dict[str, Callable[[ParallelOptimizer], LRScheduler]] = {
    "ours": lambda optimizer: CosineAnnealingLR(optimizer, total_steps=10, warmup_steps=2),
    "made on the plain optimizer": lambda optimizer: followed(optimizer),
    "torch's, held": lambda optimizer: HoldOnSkip(StepLR(optimizer, step_size=2, gamma=0.5)),
    "torch's": lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5),
}


def followed(optimizer: ParallelOptimizer) -> LRScheduler:
    schedule = CosineAnnealingLR(optimizer.optimizer, total_steps=10)
    schedule.watch(optimizer)
    return schedule


@pytest.mark.parametrize("how", [deep, pickled])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_copied_schedule_continues_with_copied_optimizer(
    registry: ProcessGroupRegistry, kind: str, how: Callable[[Any], Any]
) -> None:
    def rates(model: nn.Module, optimizer: ParallelOptimizer, schedule: LRScheduler) -> list[float]:
        found = []
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).sum()
            optimizer.backward(loss * float("nan") if step % 2 else loss)
            optimizer.step()
            schedule.step()
            found += [group["lr"] for group in optimizer.param_groups]
        return found

    model, optimizer = built(registry)
    schedule = SCHEDULES[kind](optimizer)
    rates(model, optimizer, schedule)
    other = how((model, optimizer, schedule))
    before = optimizer.param_groups[0]["lr"]
    found = rates(*other)
    assert optimizer.param_groups[0]["lr"] == before
    assert found == rates(model, optimizer, schedule)
    shallow = copy.copy(schedule)
    assert shallow.optimizer is schedule.optimizer
    assert shallow.get_last_lr() == schedule.get_last_lr()


# Lifetimes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCHEDULES)
def test_deleted_optimizer_and_schedule_are_freed_immediately(registry: ProcessGroupRegistry, kind: str) -> None:
    model, optimizer = built(registry)
    schedule = SCHEDULES[kind](optimizer)
    train(model, optimizer, 0, 1)
    schedule.step()
    gone: list[Any] = [weakref.ref(schedule), weakref.ref(optimizer)]
    gc.disable()
    try:
        del schedule
        assert gone[0]() is None
        del optimizer
        assert gone[1]() is None
    finally:
        gc.enable()


def test_replaced_schedules_do_not_accumulate_hooks(registry: ProcessGroupRegistry) -> None:
    model, optimizer = built(registry)
    for _ in range(100):
        schedule: LRScheduler = LinearWarmupLR(optimizer, total_steps=10)
        held: LRScheduler = HoldOnSkip(StepLR(optimizer, step_size=2))
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    assert len(hooks) <= 6
    train(model, optimizer, 0, 1)
    schedule.step()
    held.step()
    assert isinstance(optimizer.param_groups[0]["lr"], float)


# Schedules --------------------------------------------------------------------------------------------------------------


def param(size: int = 2) -> Tensor:
    value = nn.Parameter(torch.ones(size))
    value.grad = torch.ones(size)
    return value


def test_added_param_group_follows_schedule_from_its_own_rate(registry: ProcessGroupRegistry) -> None:
    optimizer = ParallelOptimizer(torch.optim.SGD([param()], lr=0.4), registry)
    schedule = CosineAnnealingLR(optimizer, total_steps=10, hold_on_skip=False)
    for _ in range(4):
        optimizer.step()
        schedule.step()
    optimizer.add_param_group({"params": [param(3)], "lr": 0.1})
    for taken in range(5, 8):
        optimizer.step()
        schedule.step()
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert first == schedule.rate(0.4, taken)
        assert second == schedule.rate(0.1, taken)
    assert schedule.get_last_lr() == [first, second]
    fresh = CosineAnnealingLR(optimizer, total_steps=10, hold_on_skip=False)
    fresh.load_state_dict(schedule.state_dict())
    assert fresh.get_last_lr() == [first, second]


def test_added_param_group_with_rate_below_eta_min_raises(registry: ProcessGroupRegistry) -> None:
    optimizer = ParallelOptimizer(torch.optim.SGD([param()], lr=0.4), registry)
    schedule = CosineAnnealingLR(optimizer, total_steps=10, eta_min=0.2, hold_on_skip=False)
    optimizer.add_param_group({"params": [param(3)], "lr": 0.1})
    optimizer.step()
    with pytest.raises(ValueError, match=r"eta_min=0.2 is above the initial learning rate 0.1 of param group 1"):
        schedule.step()


def test_schedule_accepts_numpy_integers_and_rejects_floats() -> None:
    numpy = pytest.importorskip("numpy")
    optimizer = torch.optim.SGD([param()], lr=0.4)
    schedule = CosineAnnealingLR(optimizer, numpy.int64(10), numpy.int32(2))
    assert (schedule.total_steps, schedule.warmup_steps) == (10, 2)
    assert type(schedule.total_steps) is int
    for wrong in (10.0, "10", True, numpy.float64(10)):
        with pytest.raises(ValueError, match="give a whole number of steps"):
            CosineAnnealingLR(optimizer, wrong)  # type: ignore[arg-type]


def test_last_epoch_argument_continues_schedule(registry: ProcessGroupRegistry) -> None:
    optimizer = torch.optim.SGD([param()], lr=0.4)
    schedule = CosineAnnealingLR(optimizer, total_steps=10)
    for _ in range(4):
        optimizer.step()
        schedule.step()
    resumed = torch.optim.SGD([{"params": [param()], "lr": 0.4, "initial_lr": 0.4}])
    other = CosineAnnealingLR(resumed, total_steps=10, last_epoch=schedule.last_epoch - 1)
    assert other.get_last_lr() == schedule.get_last_lr()
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    with pytest.raises(KeyError, match="initial_lr"):
        CosineAnnealingLR(torch.optim.SGD([param()], lr=0.4), total_steps=10, last_epoch=3)
    with pytest.raises(ValueError, match=r"last_epoch=-2: give a whole number of steps >= -1"):
        CosineAnnealingLR(resumed, total_steps=10, last_epoch=-2)
