"""Checkpoints of only the trainable parameters, and their loading into models with the frozen ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from meshstep.amp import Bf16
from meshstep.optim import AsyncSaver, ParallelOptimizer, Sharded, load_checkpoint, save_checkpoint
from meshstep.optim.checkpoint.directory import newest_checkpoint
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, shard
from torch import Tensor, nn
from world import World

Layout = tuple[tuple[tuple[str, int], ...], str]
ONE: Layout = ((), "")
BOTH: Layout = ((("data", 2), ("tensor", 2)), "")
ZERO1: Layout = ((("data", 2), ("tensor", 2)), "ZeRO-1")
ZERO2: Layout = ((("data", 2), ("tensor", 2)), "ZeRO-2")
DATA: Layout = ((("data", 4),), "ZeRO-1")
TENSOR: Layout = ((("tensor", 2),), "")
SPECS = {"base": P("tensor"), "late": P(), "up": P("tensor"), "down": P(None, "tensor")}
STATES: dict[str, Any] = {"": (), "ZeRO-1": Sharded("data"), "ZeRO-2": Sharded("data", gradients=True)}
PRECISIONS: dict[str, Any] = {"float64": "fp32", "bf16": "bf16", "split": Bf16(split_masters=True)}
HALF = 3  # steps before and after the checkpoint


def full_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(4, 6, generator=generator, dtype=torch.float64) for name in SPECS}


def loss_of(params: Any, factor: float) -> Tensor:
    terms = [(param.double().square() * factor + param.double()).sum() for param in params.values()]
    return torch.stack(terms).sum()


class Run:
    """A model and its optimizer. The parameters in ``frozen``, by default "base", are frozen and undeclared.

    `freeze_late` later freezes "late", too.
    """

    def __init__(self, layout: Layout, mode: str, frozen: tuple[str, ...] = ("base",)) -> None:
        axes, states = layout
        self.registry = registry = ProcessGroupRegistry(Topology(roles=None, **dict(axes)))
        dtype = torch.float64 if mode == "float64" else torch.bfloat16
        present = {name: spec if dict(axes).get("tensor", 1) > 1 else P() for name, spec in SPECS.items()}
        self.specs = present
        self.model = nn.ParameterDict({n: shard(w, present[n], registry).to(dtype) for n, w in full_weights().items()})
        for name, param in self.model.items():
            param.requires_grad_(name not in frozen)
            if name not in frozen:
                annotate(param, present[name], name)
        adamw = torch.optim.AdamW(self.model.named_parameters(), lr=0.05, weight_decay=0.25, fused=True)
        self.optimizer = ParallelOptimizer(
            adamw, registry, max_norm=3.0, states=STATES[states], precision=PRECISIONS[mode]
        )

    def train(self, steps: int) -> None:
        data = self.registry.coordinate.get("data", 0)
        ranks = self.registry.topology.size(*self.registry.topology.data_axes)
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.optimizer.backward(loss_of(self.model, 1.0 + data + 0.5 * (4 - ranks)))  # the mean is 2.5 on any mesh
            self.optimizer.step()

    def freeze_late(self) -> None:
        self.model["late"].requires_grad_(False)

    def differences(self, wanted: dict[str, Tensor]) -> dict[str, float]:
        shards = {name: shard(wanted[name], self.specs[name], self.registry) for name in SPECS}
        return {name: float((param.detach() - shards[name]).abs().max()) for name, param in self.model.items()}


def dense(steps: int, late: int) -> dict[str, Tensor]:
    """Return the weights after ``steps`` of one torch optimizer, with "late" trained in the first ``late`` steps."""
    params = {name: nn.Parameter(weight, requires_grad=name != "base") for name, weight in full_weights().items()}
    adamw = torch.optim.AdamW(params.values(), lr=0.05, weight_decay=0.25)
    for step in range(steps):
        params["late"].requires_grad_(step < late)
        adamw.zero_grad()
        loss_of(params, 2.5).backward()
        torch.nn.utils.clip_grad_norm_([param for param in params.values() if param.grad is not None], 3.0)
        adamw.step()
    return {name: param.detach() for name, param in params.items()}


def save(path: Path, layout: Layout, mode: str, in_background: bool = False) -> None:
    run = Run(layout, mode)
    run.train(1)
    run.freeze_late()
    run.train(HALF - 1)
    if in_background:
        with AsyncSaver(path, run.registry) as saver:
            saver.save(run.model, run.optimizer, trainable_only=True)
            run.train(1)  # does not change the checkpoint
    else:
        save_checkpoint(path, run.model, run.optimizer, trainable_only=True)
    run.registry.close()


def resume(path: Path, layout: Layout, mode: str) -> dict[str, float]:
    """Load into a model that already has the frozen weights ("late" as after the first step), and train.

    Return the differences from the dense run.
    """
    run = Run(layout, mode, frozen=("base", "late"))
    late = dense(1, 1)["late"]
    with torch.no_grad():
        run.model["late"].copy_(shard(late, run.specs["late"], run.registry))
    load_checkpoint(path, run.model, run.optimizer, trainable_only=True)
    run.train(HALF)
    found = run.differences(dense(2 * HALF, 1))
    run.registry.close()
    return found


@pytest.mark.parametrize("mode", ["float64", "bf16", "split"])
@pytest.mark.parametrize("after", [ONE, BOTH, ZERO1, ZERO2, TENSOR], ids=str)
@pytest.mark.parametrize("before", [ONE, BOTH, ZERO2, DATA], ids=str)
def test_trainable_only_run_resumed_on_another_layout_matches_dense_run(
    world: World, tmp_path: Path, before: Layout, after: Layout, mode: str
) -> None:
    world.run(Topology(roles=None, **dict(before[0])).world_size, save, tmp_path, before, mode)
    bound = 1e-12 if mode == "float64" else 0.05
    for found in world.run(Topology(roles=None, **dict(after[0])).world_size, resume, tmp_path, after, mode):
        assert max(found.values()) < bound


def test_run_resumed_from_trainable_only_async_checkpoint_matches_dense_run(world: World, tmp_path: Path) -> None:
    world.run(4, save, tmp_path, BOTH, "float64", True)
    for found in world.run(4, resume, tmp_path, BOTH, "float64"):
        assert max(found.values()) < 1e-12


def test_trainable_only_checkpoint_contains_no_bytes_of_frozen_parameters(tmp_path: Path) -> None:
    run = Run(ONE, "float64")
    run.model["base"] = nn.Parameter(torch.zeros(10**6), requires_grad=False)
    save_checkpoint(tmp_path, run.model, run.optimizer, trainable_only=True)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert sum(file.stat().st_size for file in found.iterdir()) < 50_000


@pytest.mark.parametrize("mode", ["float64", "bf16", "split"])
def test_trainable_only_load_keeps_state_of_parameter_frozen_later(tmp_path: Path, mode: str) -> None:
    run = Run(ONE, mode)
    run.train(2)
    run.freeze_late()
    save_checkpoint(tmp_path, run.model, run.optimizer, trainable_only=True)
    row = next(row for row in run.optimizer.stepped_tensors() if row.name == "late")
    kept = {key: value.clone() for key, value in run.optimizer.state[row.tensor].items()}
    weights, master = run.model["late"].clone(), run.optimizer.transforms.values()[1].clone()
    run.train(1)
    moved = run.model["up"].clone()
    load_checkpoint(tmp_path, run.model, run.optimizer, trainable_only=True)
    assert not torch.equal(moved, run.model["up"])
    assert torch.equal(weights, run.model["late"])
    assert torch.equal(master, run.optimizer.transforms.values()[1])
    now = run.optimizer.state[row.tensor]
    assert kept.keys() == now.keys()
    assert all(torch.equal(kept[key], now[key]) for key in kept)


class Norms(nn.Module):
    """Batch norms, the first one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        self.frozen.requires_grad_(False)


def test_trainable_only_checkpoint_contains_buffers_of_trained_modules_only(tmp_path: Path) -> None:
    registry = ProcessGroupRegistry(Topology())
    models = [Norms(), Norms()]
    optimizers = [ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), registry) for model in models]
    for norm in (models[0].frozen, models[0].trained):
        norm(torch.ones(4, 3) * 5)
    save_checkpoint(tmp_path, models[0], optimizers[0], trainable_only=True)
    load_checkpoint(tmp_path, models[1], optimizers[1], trainable_only=True)
    assert torch.equal(models[1].trained.get_buffer("running_mean"), models[0].trained.get_buffer("running_mean"))
    assert models[1].frozen.get_buffer("running_mean").tolist() == [0.0] * 3


# Errors ---------------------------------------------------------------------------------------------------------------


def message_of(function: Callable[..., object], *args: Any, **options: Any) -> str:
    try:
        function(*args, **options)
    except ValueError as error:
        return str(error)
    return "no error"


def wrong_loads(path: Path) -> list[str]:
    run = Run(BOTH, "float64")
    save_checkpoint(path / "some", run.model, run.optimizer, trainable_only=True)
    annotate(run.model["base"], P("tensor"), "base")
    save_checkpoint(path / "all", run.model, run.optimizer)
    before = {name: param.detach().clone() for name, param in run.model.items()}
    found = [
        message_of(load_checkpoint, path / "some", run.model, run.optimizer),
        message_of(load_checkpoint, path / "all", run.model, run.optimizer, trainable_only=True),
    ]
    run.model["base"].requires_grad_(True)
    run.optimizer.refresh()
    found.append(message_of(load_checkpoint, path / "some", run.model, run.optimizer, trainable_only=True))
    run.model["base"].requires_grad_(False)
    run.model["up"].requires_grad_(False)
    run.optimizer.refresh()
    found.append(message_of(load_checkpoint, path / "some", run.model, run.optimizer, trainable_only=True))
    assert all(torch.equal(param.detach(), before[name]) for name, param in run.model.items())
    run.registry.close()
    return found


def test_load_with_wrong_trainable_only_or_frozen_parameters_raises_and_keeps_weights(
    world: World, tmp_path: Path
) -> None:
    for ordinary, of_full, missing, frozen in world.run(4, wrong_loads, tmp_path):
        assert "was saved with trainable_only=True, so it has no frozen parameters" in ordinary
        assert "has all parameters of the model: leave trainable_only=True out" in of_full
        assert "the trainable parameters in the model differ from the checkpoint's (only here: base)" in missing
        assert "only in the checkpoint: up" in frozen
        assert "freeze the parameters that were frozen then" in frozen
