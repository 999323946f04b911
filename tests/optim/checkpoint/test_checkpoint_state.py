"""Checkpoint contents besides parameters and moments: buffers, unusual optimizer state, hyper-parameters, random states.

Also models in `DistributedDataParallel` or `fully_shard`, and frozen parameters.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from meshstep.amp import Bf16
from meshstep.optim import ParallelOptimizer, load_checkpoint, save_checkpoint
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, declare, shard
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from world import World

Axes = tuple[tuple[str, int], ...]
ONE: Axes = ()
DATA: Axes = (("data", 2),)
TENSOR: Axes = (("tensor", 2),)
STAGES: Axes = (("pipe", 2),)


def registry_of(axes: Axes) -> ProcessGroupRegistry:
    return ProcessGroupRegistry(Topology(roles=None, **dict(axes)))


def sgd_of(model: nn.Module, registry: ProcessGroupRegistry) -> ParallelOptimizer:
    return ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), registry)


# Buffers --------------------------------------------------------------------------------------------------------------


class Buffers(nn.Module):
    """A module with buffers: ``stats`` has the values ``own``, ``table`` is equal on all ranks, and ``scratch``, which also
    has the values ``own``, is not persistent."""

    def __init__(self, own: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        annotate(self.weight, P(), "weight")
        self.register_buffer("stats", torch.full((3,), own))
        self.register_buffer("table", torch.arange(4))
        self.register_buffer("scratch", torch.full((2,), own), persistent=False)


def save_buffers(path: Path, axes: Axes) -> None:
    registry = registry_of(axes)
    model = Buffers(10.0 + registry.global_rank)
    save_checkpoint(path, model, sgd_of(model, registry))
    registry.close()


def load_buffers(path: Path, axes: Axes) -> dict[str, list[float]]:
    registry = registry_of(axes)
    model = Buffers(-1.0)
    load_checkpoint(path, model, sgd_of(model, registry))
    registry.close()
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}


def test_buffers_differing_over_data_axis_are_restored_per_rank_on_same_mesh(world: World, tmp_path: Path) -> None:
    world.run(2, save_buffers, tmp_path, DATA)
    for rank, found in enumerate(world.run(2, load_buffers, tmp_path, DATA)):
        assert found == {"stats": [10.0 + rank] * 3, "table": [0, 1, 2, 3], "scratch": [-1.0, -1.0]}
    # On another mesh, all ranks get the buffer of data rank 0.
    for axes, size in ((ONE, 1), ((("data", 4),), 4), ((("data", 1), ("tensor", 2)), 2)):
        for found in world.run(size, load_buffers, tmp_path, axes):
            assert found["stats"] == [10.0] * 3


def error_of(function: Callable[..., object], *args: object) -> str:
    with pytest.raises(ValueError, match=r".+") as error:
        function(*args)
    return str(error.value)


def test_buffer_that_differs_over_model_axis_must_be_declared_to_reshard(world: World, tmp_path: Path) -> None:
    world.run(2, save_buffers, tmp_path, TENSOR)
    found = world.run(2, load_buffers, tmp_path, TENSOR)
    assert [rank["stats"][0] for rank in found] == [10.0, 11.0]
    message = error_of(load_buffers, tmp_path, ONE)
    assert "the buffer stats differed between ranks" in message
    assert "annotate(buffer, P(...))" in message


def declared(path: Path, axes: Axes, save: bool) -> list[int]:
    registry = registry_of(axes)
    model = Buffers(0.0)
    spec = P("tensor") if axes == TENSOR else P()
    model.register_buffer(
        "lookup", shard(torch.arange(8) if save else torch.zeros(8, dtype=torch.int64), spec, registry)
    )
    annotate(model.get_buffer("lookup"), spec)
    (save_checkpoint if save else load_checkpoint)(path, model, sgd_of(model, registry))
    registry.close()
    found: list[int] = model.get_buffer("lookup").tolist()
    return found


def test_declared_buffer_is_resharded(world: World, tmp_path: Path) -> None:
    world.run(2, declared, tmp_path, TENSOR, True)
    assert declared(tmp_path, ONE, False) == list(range(8))
    assert world.run(2, declared, tmp_path, TENSOR, False) == [[0, 1, 2, 3], [4, 5, 6, 7]]


# Unusual optimizer state ----------------------------------------------------------------------------------------------


class Odd(torch.optim.SGD):
    """An optimizer with state that is an int, a tensor of one value per row, and a list."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["calls"] = state.get("calls", 0) + 1
                state["rows"] = param.detach().sum(1)
                state["history"] = [*state.get("history", []), float(param.detach().sum())]


def odd(axes: Axes, seed: int) -> tuple[nn.Module, ParallelOptimizer]:
    registry = registry_of(axes)
    spec = P("tensor") if axes == TENSOR else P()
    model = nn.Module()
    full = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    model.register_parameter("weight", nn.Parameter(shard(full, spec, registry)))
    annotate(model.get_parameter("weight"), spec, "weight")
    return model, ParallelOptimizer(Odd(model.parameters(), lr=0.1, momentum=0.5), registry)


def save_odd(path: Path, axes: Axes) -> Any:
    model, optimizer = odd(axes, 1)
    for _ in range(2):
        model.get_parameter("weight").grad = torch.ones_like(model.get_parameter("weight"))
        optimizer.step()
    save_checkpoint(path, model, optimizer)
    optimizer.registry.close()
    return optimizer.state_dict()["state"]


def load_odd(path: Path, axes: Axes) -> Any:
    model, optimizer = odd(axes, 2)
    load_checkpoint(path, model, optimizer)
    optimizer.registry.close()
    return optimizer.state_dict()["state"]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def test_int_list_and_per_row_states_are_restored_on_same_layout_and_rejected_on_fewer_ranks(
    world: World, tmp_path: Path
) -> None:
    one = world.run(1, save_odd, tmp_path / "one", ONE)[0]
    assert set(one[0]) == {"momentum_buffer", "calls", "rows", "history"}
    assert same(load_odd(tmp_path / "one", ONE), one)
    two = world.run(2, save_odd, tmp_path / "two", TENSOR)
    assert all(
        same(found, saved) for found, saved in zip(world.run(2, load_odd, tmp_path / "two", TENSOR), two, strict=True)
    )
    message = error_of(load_odd, tmp_path / "two", ONE)
    assert "'history' of weight differs between shards" in message or "'rows' of weight only for shards" in message


def adafactor(path: Path, resume: bool) -> list[float]:
    torch.manual_seed(3)
    model = nn.Linear(4, 3)
    optimizer = ParallelOptimizer(torch.optim.Adafactor(model.parameters(), lr=0.1), registry_of(ONE))
    if resume:
        load_checkpoint(path, model, optimizer)
    for step in range(2 if resume else 0, 4):
        if step == 2 and not resume:
            save_checkpoint(path, model, optimizer)
        optimizer.zero_grad()
        optimizer.backward(model(torch.full((2, 4), float(step + 1))).square().sum())
        optimizer.step()
    return [number for param in model.parameters() for number in param.detach().flatten().tolist()]


def test_factored_adafactor_moments_are_restored(tmp_path: Path) -> None:
    assert adafactor(tmp_path, False) == adafactor(tmp_path, True)


# Hyper-parameters -----------------------------------------------------------------------------------------------------


def test_hyper_parameters_are_restored_from_checkpoint(tmp_path: Path) -> None:
    def build(rates: tuple[float, float], clip: float) -> tuple[nn.Module, ParallelOptimizer]:
        model = nn.Linear(2, 2)
        groups = [
            {"params": [("weight", model.weight)], "lr": rates[0], "max_norm": clip},
            {"params": [("bias", model.bias)], "lr": torch.tensor(rates[1])},
        ]
        return model, ParallelOptimizer(torch.optim.AdamW(groups, fused=True, betas=(clip, 0.9)), registry_of(ONE))

    model, optimizer = build((0.1, 0.2), 0.5)
    save_checkpoint(tmp_path, model, optimizer)
    model, optimizer = build((0.3, 0.4), 0.25)
    load_checkpoint(tmp_path, model, optimizer)
    first, second = optimizer.param_groups
    assert (first["lr"], first["max_norm"], first["betas"]) == (0.1, 0.5, (0.5, 0.9))
    assert torch.equal(second["lr"], torch.tensor(0.2))
    assert first["params"][0] is model.get_parameter("weight")
    assert first["param_names"] == ["weight"]


GROUPS_OF_STAGES = ((("a",),), (("b",), ("c",)))  # names of the parameters, per param group of each stage


def in_groups(path: Path, axes: Axes, save: bool) -> dict[str, tuple[float, list[float], list[float]]]:
    """Save after a step, or load. Return the learning rate, the weight and the momentum of each parameter of this rank."""
    registry = registry_of(axes)
    groups = GROUPS_OF_STAGES[registry.rank("pipe")] if axes else (("a", "b"), ("c",))
    model = nn.ParameterDict({name: torch.full((2,), float(ord(name) if save else 0)) for name in sum(groups, ())})
    declare(model, {"*": P()})
    rates = (0.5, 0.25) if save else (0.0, 0.0)
    params: Any = [
        {"params": [(name, model[name]) for name in names], "lr": rate}
        for names, rate in zip(groups, rates, strict=False)
    ]
    optimizer = ParallelOptimizer(torch.optim.SGD(params, momentum=0.5), registry)
    if save:
        optimizer.backward(sum((param * index).sum() for index, param in enumerate(model.values(), start=1)))
        optimizer.step()
        save_checkpoint(path, model, optimizer)
    else:
        load_checkpoint(path, model, optimizer)
    registry.close()
    return {
        name: (group["lr"], param.tolist(), optimizer.optimizer.state[param]["momentum_buffer"].tolist())
        for group in optimizer.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
    }


def test_param_group_that_only_one_pipeline_stage_has_is_restored(world: World, tmp_path: Path) -> None:
    first, second = world.run(2, in_groups, tmp_path, STAGES, True)
    assert second["c"] == (0.25, [98.5, 98.5], [2.0, 2.0])
    assert world.run(2, in_groups, tmp_path, STAGES, False) == [first, second]
    assert in_groups(tmp_path, ONE, False) == {**first, **second}


# Random number generators ---------------------------------------------------------------------------------------------


def draw() -> list[float]:
    found = [random.random(), float(torch.rand(()))]
    try:
        import numpy as np
    except ImportError:
        return found
    return [*found, float(np.random.rand())]


def draws(path: Path, axes: Axes, save: bool) -> list[float]:
    registry = registry_of(axes)
    model = nn.Linear(1, 1)
    declare(model, {"*": P()})
    torch.manual_seed(registry.global_rank if save else 99)
    random.seed(registry.global_rank if save else 99)
    draw()
    if save:
        save_checkpoint(path, model, sgd_of(model, registry))
    else:
        load_checkpoint(path, model, sgd_of(model, registry))
    registry.close()
    return draw()


def test_random_states_are_restored_on_same_mesh_only(world: World, tmp_path: Path) -> None:
    saved = world.run(2, draws, tmp_path, DATA, True)
    assert saved[0] != saved[1]
    assert world.run(2, draws, tmp_path, DATA, False) == saved
    # On another mesh the random states are left unchanged.
    loaded = world.run(2, draws, tmp_path, TENSOR, False)
    assert loaded[0][:2] == loaded[1][:2] != saved[0][:2]


# Models wrapped or sharded by torch -----------------------------------------------------------------------------------


def wrapped(path: Path, how: str, save: bool) -> list[list[float]]:
    """Run two steps of a model in `DistributedDataParallel`, `fully_shard` or neither, and save before the second step. If
    ``save`` is False, load instead, and run the second step only.

    Return the full parameters.
    """
    registry = registry_of(ONE if how == "one process" else DATA)
    torch.manual_seed(5 if save else 6)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    declare(model, {"*": P()})
    run: nn.Module = model
    if how == "ddp":
        run = DistributedDataParallel(model, process_group=registry.group("data"))
    elif how == "fsdp":  # 5 rows over 2 ranks: uneven shards
        fully_shard(model, mesh=registry.device_mesh("data"))
    adam = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    optimizer = ParallelOptimizer(adam, registry, data_parallel=None if how == "one process" else run)
    for step in range(0 if save else 1, 2):
        if step == 1 and save:
            save_checkpoint(path, run, optimizer)
        if step == 1 and not save:
            load_checkpoint(path, run, optimizer)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        optimizer.backward(run(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    whole = [param.full_tensor() if isinstance(param, DTensor) else param for param in model.parameters()]
    registry.close()
    return [param.detach().flatten().tolist() for param in whole]


@pytest.mark.parametrize(
    ("saved", "loaded"), [("fsdp", "one process"), ("one process", "fsdp"), ("ddp", "fsdp"), ("fsdp", "ddp")]
)
def test_checkpoint_moves_between_ddp_fsdp2_and_single_process(
    world: World, tmp_path: Path, saved: str, loaded: str
) -> None:
    expected = world.run(1 if saved == "one process" else 2, wrapped, tmp_path, saved, True)[0]
    for found in world.run(1 if loaded == "one process" else 2, wrapped, tmp_path, loaded, False):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-6, abs=1e-7)


# Frozen parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split_masters", [False, True])
def test_checkpoint_with_master_weights_loads_into_model_with_frozen_parameter(
    tmp_path: Path, split_masters: bool
) -> None:
    def make(value: float, frozen: bool) -> tuple[nn.ParameterDict, ParallelOptimizer]:
        weights = {name: nn.Parameter(torch.full((3,), value, dtype=torch.bfloat16)) for name in ("base", "head")}
        model = nn.ParameterDict(weights)
        declare(model, {"*": P()})
        model["base"].requires_grad_(not frozen)
        adamw = torch.optim.AdamW(model.parameters(), lr=0.3, fused=True)
        precision = Bf16(split_masters=split_masters)
        return model, ParallelOptimizer(adamw, ProcessGroupRegistry(Topology()), precision=precision)

    def step(model: nn.ParameterDict, optimizer: ParallelOptimizer) -> None:
        optimizer.zero_grad()
        optimizer.backward(torch.stack([param.float().square().sum() for param in model.values()]).sum())
        optimizer.step()

    saved, optimizer = make(1.37, frozen=False)
    step(saved, optimizer)
    save_checkpoint(tmp_path, saved, optimizer)
    loaded, its_optimizer = make(5.0, frozen=True)
    load_checkpoint(tmp_path, loaded, its_optimizer)
    base = saved["base"].detach().clone()
    for run in ((saved, optimizer), (loaded, its_optimizer)):
        step(*run)
    assert torch.equal(loaded["base"], base)
    assert torch.equal(loaded["head"], saved["head"])
