"""Checkpoints in which the shards of one tensor made different numbers of steps, or none.

Development versions before 0.3 wrote such checkpoints: they did not step a shard without a gradient. Now all shards of a
tensor are stepped or none. These tests disable this rule to write such checkpoints.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from arguments import arguments
from meshstep.optim import ParallelOptimizer, load_checkpoint, save_checkpoint
from meshstep.optim.step.missing_shards import MissingShards
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, shard
from torch import Tensor, nn
from world import World

ONE = Topology()
EXPERTS = Topology(roles={"expert": "model"}, expert=2)
DATA_EXPERTS = Topology(roles={"expert": "model"}, data=2, expert=2)
FIRST, LAST = 6, 9  # steps before the checkpoint, steps in total


class Experts(nn.Module):
    """Two experts, one on each rank of ``expert``, and a shared parameter."""

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        spec = P("expert") if "expert" in registry.topology.axes else P()
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(shard(torch.randn(4, 3, generator=generator), spec, registry))
        self.shared = nn.Parameter(torch.randn(3, generator=generator))
        annotate(self.weight, spec, "weight")
        annotate(self.shared, P(), "shared")

    def loss(self, step: int, busy: bool) -> Tensor:
        own = (self.weight * self.shared.detach()).square().sum() * (step + 1)
        return self.shared.square().sum() + (own if busy else 0.0)


class IntegerSteps(torch.optim.Optimizer):
    """An optimizer that counts its steps in an int."""

    elementwise = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                state["mean"] = state.get("mean", torch.zeros_like(param)).lerp(param.grad, 0.1)
                param.data -= group["lr"] * state["mean"] / (1 - 0.9 ** state["step"])


KINDS: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.05),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=0.05, fused=True),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.05),
    "int": lambda params: IntegerSteps(params, 0.05),
}


def build(topology: Topology, kind: str, **options: Any) -> tuple[Experts, ParallelOptimizer]:
    registry = ProcessGroupRegistry(topology)
    model = Experts(registry)
    return model, ParallelOptimizer(KINDS[kind](model.parameters()), registry, **arguments(max_norm=0.7, **options))


def train(
    model: Experts, optimizer: ParallelOptimizer, steps: Sequence[int], busy_until: int, skipped: int | None = None
) -> None:
    """Train. The second expert gets tokens before step ``busy_until``, from step `FIRST` on, and in step ``skipped``,
    whose loss is infinite."""
    second = optimizer.registry.coordinate.get("expert") == 1
    with mock.patch.object(MissingShards, "field", return_value={}):
        for step in steps:
            optimizer.zero_grad()
            busy = not second or step < busy_until or step >= FIRST or step == skipped
            optimizer.backward(model.loss(step, busy) * (float("inf") if step == skipped else 1.0))
            optimizer.step()


def run(path: Path, topology: Topology, kind: str, busy_until: int, save: bool) -> list[Any]:
    """If ``save``, train all steps and save a checkpoint after `FIRST` steps; else train from it.

    Return the parameters and the optimizer state of ``weight``.
    """
    model, optimizer = build(topology, kind)
    if save:
        train(model, optimizer, range(FIRST), busy_until)
        save_checkpoint(path, model, optimizer)
    else:
        load_checkpoint(path, model, optimizer)
    train(model, optimizer, range(FIRST, LAST), busy_until)
    optimizer.registry.close()
    return [model.weight.tolist(), model.shared.tolist(), state_of(optimizer, 0)]


def state_of(optimizer: ParallelOptimizer, position: int) -> dict[str, Any]:
    found = optimizer.state_dict()["state"].get(position, {})
    return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in found.items()}


@pytest.mark.parametrize("busy_until", [2, 0], ids=["second expert 4 steps behind", "second expert without state"])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_resume_with_their_own_step_counts_bitwise_identically(
    world: World, tmp_path: Path, kind: str, busy_until: int
) -> None:
    expected = world.run(2, run, tmp_path, EXPERTS, kind, busy_until, True)
    assert [weights_and_state[2]["step"] for weights_and_state in expected] == [LAST, LAST - FIRST + busy_until]
    assert world.run(2, run, tmp_path, EXPERTS, kind, busy_until, False) == expected


# Loading on another layout --------------------------------------------------------------------------------------------


def save(path: Path, kind: str, busy_until: int, skipped: int | None = None) -> dict[str, Any]:
    model, optimizer = build(EXPERTS, kind)
    train(model, optimizer, range(FIRST), busy_until, skipped)
    save_checkpoint(path, model, optimizer)
    optimizer.registry.close()
    return state_of(optimizer, 0)


def load(path: Path, topology: Topology, kind: str, message: str | None, **options: Any) -> list[dict[str, Any]]:
    """Return the optimizer state of each shard of the weight."""
    model, optimizer = build(topology, kind, **options)
    if message is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # pytest's own filter has no effect in the ranks' processes
            load_checkpoint(path, model, optimizer)
    else:
        with pytest.warns(UserWarning, match=message):
            load_checkpoint(path, model, optimizer)
    of_weight = [index for index, piece in enumerate(optimizer.stepped_tensors()) if piece.name == "weight"]
    optimizer.registry.close()
    return [state_of(optimizer, index) for index in of_weight]


@pytest.mark.parametrize("kind", ["AdamW", "NAdam", "int"])
def test_merging_experts_uses_lowest_step_count_and_warns(world: World, tmp_path: Path, kind: str) -> None:
    busy, idle = world.run(2, save, tmp_path, kind, 2)
    assert (busy["step"], idle["step"]) == (6, 2)
    (found,) = load(tmp_path, ONE, kind, r"optimizer steps: weight \(2 to 6 steps\)\. Each continues with the fewest")
    assert found.keys() == busy.keys()
    for key, value in found.items():
        rows = isinstance(value, list)
        assert value == (busy[key] + idle[key] if rows else idle[key]), key


def test_merging_expert_without_state_fills_zeros_and_warns(world: World, tmp_path: Path) -> None:
    busy, idle = world.run(2, save, tmp_path, "AdamW", 0)
    assert idle == {}
    (found,) = load(tmp_path, ONE, "AdamW", r"weight \(no state yet\)")
    zeros = [[0.0] * 3] * 2
    assert found == {"step": 6.0, "exp_avg": busy["exp_avg"] + zeros, "exp_avg_sq": busy["exp_avg_sq"] + zeros}


def test_merging_experts_treats_state_of_skipped_step_as_no_state(world: World, tmp_path: Path) -> None:
    """If that state counted, its 0 steps would be the lowest count, and all bias corrections would restart."""
    busy, idle = world.run(2, save, tmp_path, "AdamW, fused", 0, FIRST - 1)
    assert (busy["step"], idle["step"]) == (5, 0)
    (found,) = load(tmp_path, ONE, "AdamW, fused", r"weight \(no state yet\)")
    assert found["step"] == 5
    assert found["exp_avg"] == busy["exp_avg"] + [[0.0] * 3] * 2


def test_merging_states_of_only_skipped_steps_does_not_warn(world: World, tmp_path: Path) -> None:
    world.run(2, save_unstepped, tmp_path)
    (found,) = load(tmp_path, ONE, "AdamW, fused", None)
    assert found["step"] == 0


def save_unstepped(path: Path) -> None:
    """Save a checkpoint in which one expert has a state of zeros and the other has no state."""
    model, optimizer = build(EXPERTS, "AdamW, fused")
    second = optimizer.registry.coordinate["expert"] == 1
    with mock.patch.object(MissingShards, "field", return_value={}):
        optimizer.backward(model.loss(0, busy=not second) * float("inf"))
        optimizer.step()
    assert bool(state_of(optimizer, 0)) != second
    save_checkpoint(path, model, optimizer)
    optimizer.registry.close()


@pytest.mark.parametrize("busy_until", [2, 0])
def test_zero1_shards_of_expert_get_its_step_count_without_warning(
    world: World, tmp_path: Path, busy_until: int
) -> None:
    busy, idle = world.run(2, save, tmp_path, "AdamW", busy_until)
    for rank, pieces in enumerate(world.run(4, load_sharded, tmp_path)):
        for state in pieces:
            expected = (busy, idle)[rank % 2]
            assert state.get("step") == expected.get("step")
            assert set(state) == set(expected)


def load_sharded(path: Path) -> list[dict[str, Any]]:
    return load(path, DATA_EXPERTS, "AdamW", None, shard_states="data")


def test_merging_experts_with_equal_step_counts_does_not_warn(world: World, tmp_path: Path) -> None:
    busy, other = world.run(2, save, tmp_path, "AdamW", FIRST)
    assert busy["step"] == other["step"] == 6
    assert load(tmp_path, ONE, "AdamW", None)[0]["step"] == 6
