"""Checkpoints of models on a GPU: random state, resumed runs and asynchronous saves."""

from __future__ import annotations

from pathlib import Path

import torch
from graph_runs import SETTINGS, Run
from meshstep.optim import AsyncSaver, load_checkpoint, save_checkpoint
from meshstep.parallel import ProcessGroupRegistry, Topology
from precision_modes import differences, snapshot


def test_checkpoint_restores_the_random_state_of_the_device(device: torch.device, tmp_path: Path) -> None:
    run = Run(SETTINGS["fp16_naive"], device)
    run.steps(range(3, 6))
    torch.rand(5, device=device)
    save_checkpoint(tmp_path, run.model, run.optimizer)
    expected = torch.rand(100, device=device)
    again = Run(SETTINGS["fp16_naive"], device)  # reseeds the generators
    load_checkpoint(tmp_path, again.model, again.optimizer)
    assert torch.equal(torch.rand(100, device=device), expected)


def test_resumed_run_continues_bitwise_identically(device: torch.device, tmp_path: Path) -> None:
    for name in ("fp32", "bf16", "fp16_naive"):
        run, again = (Run(SETTINGS[name], device) for _ in range(2))
        run.steps(range(3, 6))
        save_checkpoint(tmp_path / name, run.model, run.optimizer)
        load_checkpoint(tmp_path / name, again.model, again.optimizer)
        for each in (run, again):
            each.steps(range(6, 12))
        assert differences(snapshot(run.model, run.optimizer), snapshot(again.model, again.optimizer)) == []


def test_async_checkpoint_contains_state_at_save_call_not_of_later_steps(device: torch.device, tmp_path: Path) -> None:
    """Later steps write the weights while the copies to the host may still run."""
    registry = ProcessGroupRegistry(Topology())
    run, again = (Run(SETTINGS["bf16"], device, registry) for _ in range(2))
    run.steps(range(3, 6))
    expected = snapshot(run.model, run.optimizer)
    with AsyncSaver(tmp_path, registry) as saver:
        saver.save(run.model, run.optimizer)
        run.steps(range(6, 9))
    load_checkpoint(tmp_path, again.model, again.optimizer)
    assert differences(expected, snapshot(again.model, again.optimizer)) == []
    assert differences(expected, snapshot(run.model, run.optimizer)) != []
