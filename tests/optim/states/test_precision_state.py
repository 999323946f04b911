"""State dicts of the precision modes: resuming in new processes, and invalid states."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from meshstep.amp import Bf16, Fp8
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import ProcessGroupRegistry, Topology
from precision_modes import MODES, differences, make, snapshot, train_step
from scenarios import SCENARIOS, batch
from torch import Tensor, nn
from world import World

SCENARIO = SCENARIOS["tensor"]
ALL = {**MODES, "bf16 split": Bf16(split_masters=True), "fp8 on bf16": Fp8("bf16"), "fp8 on fp32": Fp8("fp32")}

# Continuing in a new process ------------------------------------------------------------------------------------------


class End(NamedTuple):
    """The state at the end of a run, and the norm of each of its steps."""

    tensors: dict[str, Tensor]
    scale: dict[str, float | int] | None
    skipped: int
    norms: list[bytes]


def train(model: nn.Module, optimizer: ParallelOptimizer, steps: range) -> End:
    """Train with overflows in steps 1 and 5, so that a hysteresis state is saved and used."""
    norms = []
    for step in steps:
        optimizer.zero_grad()
        optimizer.backward(model(batch(step)))
        if step in (1, 5) and dist.get_rank() == 1:
            grad = model.get_parameter("down.weight").grad
            assert grad is not None
            grad[0, 0] = torch.inf
        stats = optimizer.step()
        assert stats is not None
        norms.append(stats.total_norm.numpy().tobytes())
    scale = None if optimizer.loss_scale is None else optimizer.loss_scale.state_dict()
    return End(snapshot(model, optimizer), scale, optimizer.skipped_steps, norms)


def file_of(directory: Path, mode: str) -> Path:
    return directory / f"{mode}-{dist.get_rank()}.pt"


def start(directory: Path) -> tuple[int, dict[str, End]]:
    """Train 3 steps, save, and train 6 more. Return the process id, and the `End` of each mode."""
    ends = {}
    with ProcessGroupRegistry(SCENARIO.topology) as registry:
        for name, mode in ALL.items():
            model, optimizer = make(SCENARIO, registry, mode, max_norm=0.4)
            scale = optimizer.loss_scale
            if scale is not None and "growth_interval" in scale.state_dict():
                scale.load_state_dict({**scale.state_dict(), "growth_interval": 2})
            train(model, optimizer, range(3))
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, file_of(directory, name))
            ends[name] = train(model, optimizer, range(3, 9))
    return os.getpid(), ends


def go_on(directory: Path) -> tuple[int, dict[str, End]]:
    """Load the state of `start` into models with other weights, and train the same 6 steps. Return the same as `start`."""
    ends = {}
    with ProcessGroupRegistry(SCENARIO.topology) as registry:
        for name, mode in ALL.items():
            model, optimizer = make(SCENARIO, registry, mode, max_norm=0.4)
            saved = torch.load(file_of(directory, name), weights_only=True)
            model.load_state_dict({key: torch.full_like(value, 7.0) for key, value in saved["model"].items()})
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            ends[name] = train(model, optimizer, range(3, 9))
    return os.getpid(), ends


@pytest.fixture
def other_world() -> Iterator[World]:
    """A world whose ranks are new processes, other than those of ``world``."""
    pool = World()
    yield pool
    pool.close()


@pytest.mark.long
def test_run_resumed_in_new_processes_is_bitwise_identical_in_every_precision(
    world: World, other_world: World, tmp_path: Path
) -> None:
    first, second = world.run(2, start, tmp_path), other_world.run(2, go_on, tmp_path)
    assert len({pid for pid, _ in (*first, *second)}) == 4
    for (_, expected), (_, found) in zip(first, second, strict=True):
        for mode in ALL:
            assert differences(found[mode].tensors, expected[mode].tensors) == [], mode
            assert found[mode][1:] == expected[mode][1:]
            assert found[mode].skipped == 2
    scales = {name: end.scale["scale"] for name, end in first[0][1].items() if end.scale is not None}
    # Steps 1 and 5 overflow. Steps 3 and 7 grow the scale, step 3 because of the saved count. Each growth resets the
    # hysteresis.
    assert scales == {
        "fp16": 2.0**16,
        "fp16_naive": 2.0**18,
        "O0": 1.0,
        "O1": 2.0**16,
        "O2": 2.0**16,
        "O3": 128.0,
    }


# Invalid states -------------------------------------------------------------------------------------------------------


def everything(model: nn.Module, optimizer: ParallelOptimizer) -> tuple[dict[str, Tensor], Any]:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    scale = None if optimizer.loss_scale is None else optimizer.loss_scale.state_dict()
    weights = {key: value for key, value in optimizer.state_dict()["meshstep"]["weights"].items() if key != "masters"}
    return snapshot(model, optimizer), copy.deepcopy((groups, scale, weights, optimizer.skipped_steps))


def attempt(model: nn.Module, optimizer: ParallelOptimizer, state: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the error, and the names of tensors changed in spite of it."""
    before = everything(model, optimizer)
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        after = everything(model, optimizer)
        changed = differences(before[0], after[0]) + (["the rest"] if before[1] != after[1] else [])
        return str(error), changed
    return "", []


def saved_by(registry: ProcessGroupRegistry, mode: str) -> dict[str, Any]:
    model, optimizer = make(SCENARIO, registry, ALL[mode])
    train_step(model, optimizer, batch(5))
    optimizer.param_groups[0]["lr"] = 0.5
    return copy.deepcopy(optimizer.state_dict())


def cross() -> dict[tuple[str, str], tuple[str, list[str]]]:
    """Load every mode's state into every other mode's optimizer, except between "bf16" and "bf16 split".

    Return the result of `attempt` for each pair of modes.
    """
    with ProcessGroupRegistry(SCENARIO.topology) as registry:
        states = {mode: saved_by(registry, mode) for mode in ALL}
        results = {}
        for target in ALL:
            model, optimizer = make(SCENARIO, registry, ALL[target])
            for step in range(2):
                train_step(model, optimizer, batch(step))
            for source in ALL:
                if source != target and {source, target} != {"bf16", "bf16 split"}:  # these two load into each other
                    results[source, target] = attempt(model, optimizer, states[source])
            assert attempt(model, optimizer, states[target]) == ("", [])
        return results


def test_state_dict_of_another_precision_is_rejected_except_bf16_with_split_masters(world: World) -> None:
    """Exception: bf16 modes with float32 and with split master weights accept each other's states."""
    for results in world.run(2, cross):
        for (source, target), (error, changed) in results.items():
            assert error, f"{source} loads into {target}"
            assert changed == [], f"{source} into {target}"


# How the state of rank 1 is corrupted, and the expected error.
SPOILED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another mode": (lambda state: state["meshstep"].update(precision="bf16"), "was saved with precision='bf16'"),
    "empty": (lambda state: state.clear(), "a torch optimizer's"),
    "a plain one": (lambda state: state.pop("meshstep"), "a torch optimizer's"),
    "no weights": (lambda state: state["meshstep"].pop("weights"), "incomplete"),
    "no groups": (lambda state: state.pop("param_groups"), "incomplete"),
    "no loss scale": (lambda state: state["meshstep"].pop("loss_scale"), "incomplete"),
    "a bad loss scale": (lambda state: state["meshstep"]["loss_scale"].update(scale=-1.0), "scale=-1.0"),
    "no masters": (lambda state: state["meshstep"]["weights"].clear(), "no master weights"),
    "too few masters": (
        lambda state: state["meshstep"]["weights"]["masters"].popitem(),
        "master weights, at positions",
    ),
    "another shape": (
        lambda state: state["meshstep"]["weights"]["masters"].update({0: torch.zeros(3)}),
        r"saved master weight 0 has shape (3,)",
    ),
}


def spoil(model_was_loaded: bool) -> dict[str, tuple[str, list[str]]]:
    with ProcessGroupRegistry(SCENARIO.topology) as registry:
        results = {}
        for what, (change, _) in SPOILED.items():
            state = saved_by(registry, "fp16_naive")
            model, optimizer = make(SCENARIO, registry, ALL["fp16_naive"])
            train_step(model, optimizer, batch(0))
            if model_was_loaded:
                model.load_state_dict({key: value * 3 for key, value in model.state_dict().items()})
            if registry.global_rank == 1:
                change(state)
            results[what] = attempt(model, optimizer, state)
            if not model_was_loaded:
                train_step(model, optimizer, batch(1))
        return results


def load_on_rank_1(wrong: Any) -> tuple[str, list[str]]:
    with ProcessGroupRegistry(SCENARIO.topology) as registry:
        state = saved_by(registry, "fp32")
        model, optimizer = make(SCENARIO, registry, ALL["fp32"])
        return attempt(model, optimizer, wrong if registry.global_rank == 1 else state)


@pytest.mark.parametrize("wrong", [None, [1]])
def test_state_that_is_no_dict_on_one_rank_is_rejected_on_all_ranks(world: World, wrong: Any) -> None:
    for error, changed in world.run(2, load_on_rank_1, wrong):
        assert error.removeprefix("rank 1: ") == f"the state is {wrong}; expected a dict"
        assert changed == []


@pytest.mark.long
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("model_was_loaded", [False, True])
def test_corrupt_state_on_one_rank_is_rejected_on_all_ranks(world: World, model_was_loaded: bool) -> None:
    for rank, results in enumerate(world.run(2, spoil, model_was_loaded)):
        for what, (_, says) in SPOILED.items():
            error, changed = results[what]
            assert says in error, what
            assert error.startswith("rank 1: ") == (rank == 0)
            assert changed == [], what


# States of wrong shapes, with which torch's fused kernels access other memory --------------------------------------------

ELEMENTWISE: list[tuple[Callable[[Any], torch.optim.Optimizer], str]] = [
    (lambda params: torch.optim.AdamW(params, fused=True), "exp_avg"),
    (lambda params: torch.optim.Adam(params, amsgrad=True, fused=True), "max_exp_avg_sq"),
    (lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, fused=True), "momentum_buffer"),
    (lambda params: torch.optim.Adagrad(params, fused=True), "sum"),
    (torch.optim.RMSprop, "square_avg"),
]


def stepped(
    make_optimizer: Callable[[Any], torch.optim.Optimizer], registry: ProcessGroupRegistry
) -> ParallelOptimizer:
    """Return an optimizer of a weight of shape (2, 5) and a bias, after one step."""
    model = nn.Linear(5, 2)
    optimizer = ParallelOptimizer(make_optimizer(model.parameters()), registry)
    optimizer.backward(model(torch.ones(1, 5)).sum())
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(("make_optimizer", "name"), ELEMENTWISE)
@pytest.mark.parametrize("wrong", [(3,), (5, 2), (10, 1)])
def test_state_of_another_shape_is_rejected_by_load_state_dict(
    make_optimizer: Callable[[Any], torch.optim.Optimizer], name: str, wrong: tuple[int, ...]
) -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        optimizer = stepped(make_optimizer, registry)
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(copy.deepcopy(state))
        state["state"][0][name] = torch.full(wrong, 7.0)
        with pytest.raises(
            ValueError, match=rf"state\[0\]\['{name}'\] has shape .*, but its parameter has shape \(2, 5\)"
        ):
            optimizer.load_state_dict(state)
        weight = optimizer.param_groups[0]["params"][0]
        assert optimizer.optimizer.state[weight][name].shape == (2, 5)


@pytest.mark.parametrize(("make_optimizer", "name"), [ELEMENTWISE[0], ELEMENTWISE[3]])
def test_missing_state_of_torch_optimizer_is_rejected_by_load_state_dict(
    make_optimizer: Callable[[Any], torch.optim.Optimizer], name: str
) -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        optimizer = stepped(make_optimizer, registry)
        for other in ({}, {name: None}):
            state = copy.deepcopy(optimizer.state_dict())
            del state["state"][1][name]
            state["state"][1].update(other)
            with pytest.raises(ValueError, match=rf"state\[1\]\['{name}'\] is None; expected a tensor"):
                optimizer.load_state_dict(state)
