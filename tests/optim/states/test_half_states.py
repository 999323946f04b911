"""`HalfStates`, which keeps float32 optimizer states in bfloat16 between steps."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from meshstep.amp import Bf16, Mode, NaiveFp16, Precision
from meshstep.amp.master_weights import SCALAR_STATE
from meshstep.amp.stochastic_rounding import Drawn
from meshstep.optim import (
    HalfStates,
    Offloaded,
    ParallelOptimizer,
    Sharded,
    StatePlacement,
    load_checkpoint,
    save_checkpoint,
)
from meshstep.optim.states import half_states
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from optimizers import Counting
from planted import LAYOUTS, Part, Planted, parts, run_skipped_step, run_step
from torch import Tensor, nn
from world import World
from zero_models import small_buckets

States = tuple[StatePlacement, ...]
ZERO2 = Sharded("data", gradients=True)


def make(
    registry: ProcessGroupRegistry,
    layout: str,
    states: States,
    precision: Mode | Precision = "fp32",
    fused: bool = True,
) -> tuple[Planted, ParallelOptimizer]:
    model = Planted(LAYOUTS[layout], registry.global_rank)
    if isinstance(precision, Precision):
        precision.prepare(model, registry)
    groups: Any = model.groups()
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.5, 0.75), fused=fused)
    return model, ParallelOptimizer(adamw, registry, max_norm=5.0, precision=precision, states=states)


def state_of(optimizer: ParallelOptimizer) -> list[tuple[str, Tensor]]:
    """Return (key, tensor) pairs of all state tensors, except scalar states such as step counts."""
    found = [pair for state in optimizer.state.values() for pair in state.items()]
    return [(key, value) for key, value in found if key not in SCALAR_STATE and isinstance(value, Tensor)]


def everything(model: nn.Module, optimizer: ParallelOptimizer) -> list[Tensor]:
    stepped = [piece.tensor for piece in optimizer.stepped_tensors()]
    states = [optimizer.state.get(tensor, {}) for tensor in stepped]
    state = [entry[key] for entry in states for key in sorted(entry) if isinstance(entry[key], Tensor)]
    return [value.detach().clone() for value in (*model.parameters(), *stepped, *state)]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(first, second, strict=True))


# Compared with float32 states -----------------------------------------------------------------------------------------


def trained(layout: str, states: States, precision: Mode | Precision, steps: int) -> tuple[list[Part], int]:
    """Return this rank's shards after some steps, and the bytes of its optimizer state."""
    with ProcessGroupRegistry(LAYOUTS[layout].topology) as registry, small_buckets(64):
        model, optimizer = make(registry, layout, states, precision)
        for step in range(steps):
            run_step(model, optimizer, step)
            optimizer.step()
        nbytes = sum(value.nbytes for _, value in state_of(optimizer))
        return parts(LAYOUTS[layout], optimizer), nbytes


CONFIGS: dict[str, tuple[str, States, Mode | Precision]] = {
    "one rank": ("one rank", (), "fp32"),
    "grid": ("grid", (), "fp32"),
    "pipe, tied": ("pipe, tied", (), "fp32"),
    "ZeRO-1": ("data", (Sharded("data"),), "fp32"),
    "ZeRO-2, bf16": ("data x tensor", (ZERO2,), Bf16()),
    "ZeRO-2, offload, fp16": ("data x tensor", (ZERO2, Offloaded(0.5)), NaiveFp16(init_scale=64.0)),
    "offload, bf16": ("tensor", (Offloaded(1.0),), Bf16()),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_half_states_are_close_to_float32_states_at_half_the_size(world: World, name: str) -> None:
    layout, states, precision = CONFIGS[name]
    ranks = LAYOUTS[layout].topology.world_size
    exact = world.run(ranks, trained, layout, states, precision, 4)
    half = world.run(ranks, trained, layout, (HalfStates(), *states), precision, 4)
    copies: dict[Any, Part] = {}
    for (wanted, whole_bytes), (found, half_bytes) in zip(exact, half, strict=True):
        assert half_bytes * 2 == whole_bytes > 0
        for one, other in zip(wanted, found, strict=True):
            assert one.region == other.region
            for key, value in other.state.items():
                if key in SCALAR_STATE:
                    assert torch.equal(value, one.state[key])
                    continue
                assert (value.dtype, one.state[key].dtype) == (torch.bfloat16, torch.float32)
                # A rounding error is at most 2^-7 of the value. Each step multiplies the earlier errors by at most
                # beta2 = 3/4, so their sum is less than 4 * 2^-7.
                error = (value.double() - one.state[key].double()).abs().max() / one.state[key].abs().max()
                assert error < 4 * 2**-7, (other.key, key)
            assert float((one.value - other.value).abs().max()) < 4 * 1e-2 * 0.1, (
                "the difference must be below a tenth of the largest possible change"
            )
            first = copies.setdefault((other.key, other.region), other)
            assert torch.equal(first.value, other.value)
            assert all(torch.equal(first.state[key], value) for key, value in other.state.items())


def wave(states: States, steps: int) -> tuple[float, list[Tensor]]:
    """Return the loss of a small network that learned a sine wave, and its second moments."""
    with ProcessGroupRegistry(Topology()) as registry:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
        adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-2, fused=True)
        optimizer = ParallelOptimizer(adamw, registry, max_norm=1.0, states=states)
        x = torch.linspace(-2, 2, 64).view(-1, 1)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), torch.sin(3 * x))
            optimizer.backward(loss)
            optimizer.step()
        return float(loss.detach()), [value.float() for key, value in state_of(optimizer) if key == "exp_avg_sq"]


def to_nearest(everything: Iterable[Drawn], numel_at_once: int, kernel: object) -> None:
    for drawn in everything:
        for target, source in drawn.pairs:
            target.copy_(source)


@pytest.mark.long
def test_stochastic_rounding_lets_second_moments_decay() -> None:
    exact_loss, exact = wave((), 600)
    loss, stochastic = wave((HalfStates(),), 600)
    with mock.patch.object(half_states, "round_all_", to_nearest):
        _, nearest = wave((HalfStates(),), 600)
    right = sum(float(value.sum()) for value in exact)
    assert sum(float(value.sum()) for value in stochastic) == pytest.approx(right, rel=0.1)
    assert sum(float(value.sum()) for value in nearest) > 1.3 * right
    assert loss < 2 * exact_loss


# Skipped steps and buckets --------------------------------------------------------------------------------------------


def skipped(layout: str, states: States, precision: Mode | Precision, first: bool) -> bool:
    with ProcessGroupRegistry(LAYOUTS[layout].topology) as registry:
        model, optimizer = make(registry, layout, (HalfStates(), *states), precision)
        for step in range(0 if first else 2):
            run_step(model, optimizer, step)
            optimizer.step()
        before = everything(model, optimizer)
        run_skipped_step(model, optimizer, 2)
        after = everything(model, optimizer)
        made = after[len(before) :]  # states created by a skipped first step are zeros
        return same(before, after[: len(before)]) and not any(bool(value.any()) for value in made)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", ["one rank", "grid", "ZeRO-1", "offload, bf16"])
def test_skipped_step_with_half_states_changes_no_values(world: World, name: str, first: bool) -> None:
    layout, states, precision = CONFIGS[name]
    assert all(world.run(LAYOUTS[layout].topology.world_size, skipped, layout, states, precision, first))


def test_loss_with_half_states_is_independent_of_bucket_size() -> None:
    one, _ = wave((HalfStates(),), 20)
    with mock.patch.object(half_states, "BUCKET_NUMEL", 40):
        assert wave((HalfStates(),), 20)[0] == one
    assert wave((HalfStates(seed=1),), 20)[0] != one


def test_count_in_param_group_advances_once_per_step_with_several_buckets() -> None:
    with ProcessGroupRegistry(Topology()) as registry, mock.patch.object(half_states, "BUCKET_NUMEL", 3):
        model = nn.Linear(4, 2)
        optimizer = ParallelOptimizer(Counting(model.named_parameters()), registry, states=HalfStates())
        for _ in range(4):
            optimizer.backward(model(torch.ones(4)).sum())
            optimizer.step()
            optimizer.zero_grad()
        (group,) = optimizer.param_groups
        assert (group["count"], group["weight_sum"]) == (4, 30.0)


# Saving -----------------------------------------------------------------------------------------------------------------


def continued(layout: str, states: States, precision: Mode | Precision, path: str | None) -> tuple[bool, bool]:
    """Train 4 steps, the last 2 also with a new optimizer that loads the saved state. Return whether all tensors
    are bitwise identical, and whether loaded states are in bfloat16."""
    with ProcessGroupRegistry(LAYOUTS[layout].topology) as registry:
        model, optimizer = make(registry, layout, (HalfStates(), *states), precision)
        again, resumed = make(registry, layout, (HalfStates(), *states), precision)
        for step in range(4):
            if step == 2 and path is not None:
                save_checkpoint(path, model, optimizer)
                load_checkpoint(path, again, resumed)
            elif step == 2:
                with torch.no_grad():
                    for old, new in zip(model.parameters(), again.parameters(), strict=True):
                        new.copy_(old)
                resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if step == 2:
                at_once = all(value.dtype == torch.bfloat16 for _, value in state_of(resumed))
            for network, opt in [(model, optimizer), (again, resumed)][: 1 if step < 2 else 2]:
                run_step(network, opt, step)
                opt.step()
        return same(everything(model, optimizer), everything(again, resumed)), at_once


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_half_states_resume_bitwise_identically(world: World, tmp_path: Path, name: str, checkpoint: bool) -> None:
    layout, states, precision = CONFIGS[name]
    ranks = LAYOUTS[layout].topology.world_size
    path = str(tmp_path) if checkpoint else None
    assert world.run(ranks, continued, layout, states, precision, path) == [(True, True)] * ranks


def across(path: str, first: States, then: States) -> tuple[float, set[torch.dtype]]:
    """Save with some state placements and load with others. Return the largest relative difference, and the dtypes."""
    with ProcessGroupRegistry(LAYOUTS["data"].topology) as registry:
        model, optimizer = make(registry, "data", first)
        again, resumed = make(registry, "data", then)
        for step in range(2):
            run_step(model, optimizer, step)
            optimizer.step()
        save_checkpoint(path, model, optimizer)
        load_checkpoint(path, again, resumed)
        pairs = [(piece.name, optimizer.state[piece.tensor]) for piece in optimizer.stepped_tensors()]
        saved = {(name, key): value for name, state in pairs for key, value in state.items()}
        off, dtypes = [], set()
        for piece in resumed.stepped_tensors():
            for key, value in resumed.state[piece.tensor].items():
                whole = saved[piece.name, key].flatten()
                part = whole[piece.offset :][: value.numel()].float()
                off.append(float((value.flatten().float() - part).abs().max() / part.abs().max()))
                dtypes |= set() if key in SCALAR_STATE else {value.dtype}
        run_step(again, resumed, 2)
        resumed.step()
        return max(off), dtypes


def test_checkpoints_of_float32_and_half_states_load_into_each_other(world: World, tmp_path: Path) -> None:
    there, back, cut = str(tmp_path / "there"), str(tmp_path / "back"), str(tmp_path / "cut")
    for off, dtypes in world.run(2, across, there, (), (HalfStates(),)):
        assert 0 < off < 2**-7
        assert dtypes == {torch.bfloat16}
    assert world.run(2, across, back, (HalfStates(),), ()) == [(0.0, {torch.float32})] * 2
    assert world.run(2, across, cut, (HalfStates(),), (Sharded("data"), HalfStates())) == [(0.0, {torch.bfloat16})] * 2


# Arguments ------------------------------------------------------------------------------------------------------------


def test_half_states_reject_float16_and_stochastic_rounding_mode() -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        with pytest.raises(ValueError, match=r"give torch\.bfloat16"):
            make(registry, "one rank", (HalfStates(torch.float16),))
        with pytest.raises(ValueError, match="in bfloat16 already"):
            make(registry, "one rank", (HalfStates(),), Bf16(stochastic_rounding=True))


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "RMSprop", "ASGD", "NAdam", "Adamax", "Adafactor"])
def test_steps_of_torch_optimizers_with_half_states_are_close_to_float32_states(kind: str) -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        results = []
        for states in ((), (HalfStates(),)):
            model = Planted(LAYOUTS["one rank"], 0)
            inner: Any = getattr(torch.optim, kind)(model.parameters(), lr=1e-2)
            optimizer = ParallelOptimizer(inner, registry, states=states)
            for step in range(3):
                run_step(model, optimizer, step)
                optimizer.step()
            results.append([param.detach().clone() for param in model.parameters()])
        for key, value in state_of(optimizer):
            assert value.dtype == torch.bfloat16, key
        for exact, half in zip(*results, strict=True):
            torch.testing.assert_close(half, exact, rtol=0, atol=1e-2)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.bfloat16), ("fp32", torch.float64), (Bf16(split_masters=True), torch.float64)],
)
def test_half_states_leave_bfloat16_and_float64_states_unchanged(
    precision: Mode | Precision, dtype: torch.dtype
) -> None:
    results = []
    with ProcessGroupRegistry(Topology()) as registry:
        for states in ((), (HalfStates(),)):
            other, half = (nn.Parameter(torch.linspace(-1, 1, 8, dtype=kind)) for kind in (dtype, torch.bfloat16))
            adamw = torch.optim.AdamW([other, half], lr=1e-2)
            optimizer = ParallelOptimizer(adamw, registry, precision=precision, states=states)
            for _ in range(3):
                optimizer.zero_grad()
                optimizer.backward((other.double().square().sum() + half.double().square().sum()) / 3)
                optimizer.step()
            results.append([other.detach(), *(adamw.state[other][key] for key in ("exp_avg", "exp_avg_sq"))])
    assert same(*results)
    assert {value.dtype for value in results[1]} == {dtype}


def test_existing_states_and_added_groups_are_converted_to_half_states() -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        model = Planted(LAYOUTS["one rank"], 0)
        adamw = torch.optim.AdamW([model.get_parameter("up")], lr=1e-2)
        model(0).backward()
        adamw.step()
        optimizer = ParallelOptimizer(adamw, registry, states=HalfStates())
        assert {value.dtype for _, value in state_of(optimizer)} == {torch.bfloat16}
        optimizer.add_param_group({"params": [model.get_parameter("down")]})
        run_step(model, optimizer, 1)
        optimizer.step()
        assert [value.dtype for _, value in state_of(optimizer)] == [torch.bfloat16] * 4


def states_of_shards() -> list[list[int]]:
    """Return the bits of the first moment of a sharded and of a replicated parameter. Before the rounding to bfloat16,
    all values are 0.1003, which is 0.41 of the distance between two bfloat16 numbers above the lower one."""
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        params = {name: torch.nn.Parameter(torch.zeros(64)) for name in ("shard", "copy")}
        annotate(params["shard"], P("tensor"), "shard")
        annotate(params["copy"], P(), "copy")
        adam = torch.optim.AdamW(params.items(), lr=0.1, fused=True)
        optimizer = ParallelOptimizer(adam, registry, states=HalfStates())
        optimizer.backward(torch.stack([(param * 1.003).sum() for param in params.values()]).sum())
        optimizer.step()
        return [adam.state[param]["exp_avg"].view(torch.int16).tolist() for param in params.values()]


def test_half_states_round_differently_on_shards_and_equally_on_replicas(world: World) -> None:
    (shard, replica), (other_shard, other_replica) = world.run(2, states_of_shards)
    assert len({*shard}) > 1, "all values are representable, so nothing was rounded"
    assert shard != other_shard
    assert replica == other_replica
