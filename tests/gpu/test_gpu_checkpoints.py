"""A checkpoint keeps the state of the GPU's random numbers, and a run that is resumed goes on with the same bits."""

from __future__ import annotations

from pathlib import Path

import torch
from graph_runs import SETTINGS, Run
from meshstep.optim import load_checkpoint, save_checkpoint
from precision_modes import differences, snapshot


def test_random_numbers_go_on_where_they_were(device: torch.device, tmp_path: Path) -> None:
    run = Run(SETTINGS["fp16_naive"], device)
    run.steps(range(3, 6))
    torch.rand(5, device=device)
    save_checkpoint(tmp_path, run.model, run.optimizer)
    expected = torch.rand(100, device=device)
    again = Run(SETTINGS["fp16_naive"], device)  # seeds them
    load_checkpoint(tmp_path, again.model, again.optimizer)
    assert torch.equal(torch.rand(100, device=device), expected)


def test_a_resumed_run_goes_on_with_the_same_bits(device: torch.device, tmp_path: Path) -> None:
    for name in ("fp32", "bf16", "fp16_naive"):
        run, again = (Run(SETTINGS[name], device) for _ in range(2))
        run.steps(range(3, 6))
        save_checkpoint(tmp_path / name, run.model, run.optimizer)
        load_checkpoint(tmp_path / name, again.model, again.optimizer)
        for each in (run, again):
            each.steps(range(6, 12))
        assert differences(snapshot(run.model, run.optimizer), snapshot(again.model, again.optimizer)) == []
