"""`replay` repeats the last update from its inputs, and names the tensors that differ."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from flips import LAYOUTS, Run, What, bits_of, flip
from meshstep.amp import Bf16
from meshstep.optim import HalfStates, Offloaded, ParallelOptimizer, Replayable, ReplicaMismatchError, Sharded, replay
from meshstep.optim.states import replayable
from meshstep.optim.states.replayable import State, UpdateRecorder, _copied
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn
from world import World

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "rates that are tensors": lambda params: torch.optim.Adam(params, lr=torch.tensor(1e-2)),
}


def alone(make: Make, **options: Any) -> ParallelOptimizer[Any]:
    model = nn.ParameterDict({"w": torch.randn(6, generator=torch.Generator().manual_seed(0)), "b": torch.ones(2)})
    declare(model, {"*": P()})
    options = {"states": Replayable(), "max_norm": 0.5, **options}
    return ParallelOptimizer(make(model.named_parameters()), ProcessGroupRegistry(Topology()), **options)


def step_of(optimizer: ParallelOptimizer[Any], scale: float = 1.0) -> None:
    optimizer.zero_grad()
    params = [piece.param for piece in optimizer.stepped_tensors()]
    optimizer.backward(sum((param.float().square().sum() for param in params), torch.zeros(())) * scale)
    optimizer.step()


def everything(optimizer: ParallelOptimizer[Any]) -> list[Tensor]:
    pieces = [piece.tensor for piece in optimizer.stepped_tensors()]
    states = [v for piece in pieces for v in optimizer.state[piece].values() if isinstance(v, Tensor)]
    gradients = [piece.grad for piece in pieces if piece.grad is not None]
    return [tensor.detach().clone() for tensor in [*pieces, *states, *gradients]]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("steps", [1, 3])
def test_replay_reproduces_last_update_and_changes_nothing(make: Make, steps: int) -> None:
    optimizer = alone(make)
    for _ in range(steps):
        step_of(optimizer)
    before = bits_of(everything(optimizer))
    for group in optimizer.param_groups:
        group["lr"] = 123.0  # as set by a schedule for the next step
    assert replay(optimizer) == replay(optimizer) == []
    assert bits_of(everything(optimizer)) == before
    assert {group["lr"] for group in optimizer.param_groups} == {123.0}


@pytest.mark.parametrize("what", ["parameter", "exp_avg", "exp_avg_sq", "step"])
def test_replay_names_tensor_with_flipped_bit(what: str) -> None:
    optimizer = alone(OPTIMIZERS["fused AdamW"])
    for _ in range(3):
        step_of(optimizer)
    piece = next(piece.tensor for piece in optimizer.stepped_tensors() if piece.name == "w")
    flip(piece if what == "parameter" else optimizer.state[piece][what], 0)
    assert replay(optimizer) == [f"w: {what}"]


def test_replay_after_skipped_step_checks_update_before_it() -> None:
    optimizer = alone(OPTIMIZERS["fused AdamW"])
    step_of(optimizer)
    step_of(optimizer, float("inf"))
    piece = next(piece.tensor for piece in optimizer.stepped_tensors() if piece.name == "b")
    assert replay(optimizer) == []
    flip(piece, 31)
    assert replay(optimizer) == ["b: parameter"]


def test_replayable_step_frees_old_input_copies_before_making_new_ones() -> None:
    optimizer = alone(OPTIMIZERS["fused AdamW"])
    (recorder,) = (found for found in optimizer.transforms.transforms if isinstance(found, UpdateRecorder))
    alive = list[int]()

    def counted(state: State) -> State:
        alive.append(sum(copy() is not None for copy in copies))
        return _copied(state)

    step_of(optimizer)
    assert recorder._inputs is not None
    copies = [weakref.ref(kept.value) for kept in recorder._inputs.params.values()]
    with mock.patch.object(replayable, "_copied", counted):
        step_of(optimizer)
    assert alive
    assert set(alive) == {0}


@pytest.mark.parametrize(
    "options",
    [
        {"states": (Offloaded(0.5), Replayable())},
        {"states": (Replayable(), Offloaded(1.0)), "precision": Bf16()},
        {"states": Replayable(), "precision": Bf16()},
    ],
    ids=["offloaded", "offloaded masters", "masters"],
)
def test_replay_supports_offload_and_master_weights(options: dict[str, Any]) -> None:
    model = nn.ParameterDict({"w": torch.randn(64), "b": torch.ones(2)})
    if "precision" in options:
        options["precision"].prepare(model)
    declare(model, {"*": P()})
    adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-2, fused=True)
    optimizer = ParallelOptimizer(adamw, ProcessGroupRegistry(Topology()), **options)
    for _ in range(3):
        step_of(optimizer)
    assert replay(optimizer) == []
    first = optimizer.stepped_tensors()[0]
    flip(first.tensor, 5)
    assert replay(optimizer) == [f"{first.name}: parameter"]


def after_an_error(name: str, what: What) -> list[str]:
    """Return the result of `replay` on this rank after the error for a bit flipped on rank 1."""
    with ProcessGroupRegistry(LAYOUTS[name].topology) as registry:
        states = (Sharded("data"), Replayable()) if "ZeRO" in name else Replayable()
        run = Run(name, registry, states=states)
        for step in range(40):
            run.backward()
            if step == 8 and registry.global_rank == 1:
                flip(run.tensor(what, "bias"), 0)
            try:
                run.optimizer.step()
            except ReplicaMismatchError:
                return replay(run.optimizer)
        return ["no error"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["data", "ZeRO-1, copied over tensor"])
def test_replay_identifies_the_rank_with_the_flipped_bit(world: World, name: str) -> None:
    found = world.run(LAYOUTS[name].topology.world_size, after_an_error, name, "exp_avg")
    assert found[1] == ["bias: exp_avg"]
    assert not any(of_rank for rank, of_rank in enumerate(found) if rank != 1)


def test_replay_without_replayable_state_raises() -> None:
    optimizer = alone(OPTIMIZERS["SGD"], states=())
    step_of(optimizer)
    with pytest.raises(
        RuntimeError,
        match=r"inputs of the last update: create the optimizer with states=Replayable\(\)",
    ):
        replay(optimizer)


def test_replay_before_first_update_raises() -> None:
    optimizer = alone(OPTIMIZERS["SGD"])
    with pytest.raises(RuntimeError, match="no update has been made"):
        replay(optimizer)
    step_of(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match="no update has been made"):
        replay(optimizer)


@pytest.mark.parametrize(
    ("options", "which"),
    [
        ({"states": (HalfStates(), Replayable())}, "HalfStates"),
        ({"states": (Replayable(), HalfStates())}, "HalfStates"),
        ({"precision": Bf16(stochastic_rounding=True)}, r"precision=Bf16\(stochastic_rounding=True"),
    ],
)
def test_replayable_rejects_stochastic_rounding(options: dict[str, Any], which: str) -> None:
    with pytest.raises(
        ValueError, match=f"Replayable can't repeat an update with {which}.*: leave Replayable or .* out"
    ):
        alone(OPTIMIZERS["fused AdamW"], **options)


def test_pickled_replayable_is_equal_and_copied_optimizer_can_replay() -> None:
    optimizer = alone(OPTIMIZERS["fused AdamW"])
    step_of(optimizer)
    assert pickle.loads(pickle.dumps(Replayable())) == Replayable()
    other = copy.deepcopy(optimizer)
    step_of(other)
    assert replay(other) == []
