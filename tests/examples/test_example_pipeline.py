"""The pipeline example with several schedules and topologies."""

from __future__ import annotations

from pathlib import Path

import torch
from pipelines import ZBV_RUNS
from properties import repetitions
from run_example import assert_same_test_losses, printed_by_example, read_curve, run_example, train_example
from world import World

# 48 paragraphs for training, so the last step is in the second epoch.
FLAGS = ["--paragraphs", "176", "--batch-size", "16", "--steps", "4", "--width", "32", "--seed", "3"]
STEPS = 4
V = "zbv" if ZBV_RUNS else "gpipe"
RUNS: list[tuple[str, int, str, list[str]]] = [
    ("pipe=2,tensor=2", 4, "1f1b", []),
    ("data=2,pipe=2", 4, V, ["--zero", "2"]),
    ("pipe=2", 2, "interleaved1f1b", []),
    ("pipe=4", 4, "1f1b", ["--accumulate", "8"]),
]


def test_pipeline_example_with_several_schedules_matches_single_process_run(world: World, tmp_path: Path) -> None:
    printed = run_example("pipeline_lm", "--verify", "--curve", str(tmp_path / "one.csv"), *FLAGS)
    expected = read_curve(tmp_path / "one.csv")
    assert expected.shape == (STEPS, 3)
    assert expected[-1, 1] < expected[0, 1] - 0.5, "the model should learn"
    for topology, ranks, schedule, more in repetitions(RUNS, "pipeline_lm", default=2):
        curve = tmp_path / f"{topology}.csv"
        how = [*FLAGS, "--verify", "--schedule", schedule, "--curve", str(curve), *more]
        also_printed, *others = world.run(ranks, printed_by_example, "pipeline_lm", how, topology)
        assert others == [""] * (ranks - 1)
        torch.testing.assert_close(read_curve(curve), expected, rtol=2e-5, atol=0)
        assert_same_test_losses(also_printed, printed)
        assert "(relative): right" in also_printed


def test_pipeline_run_resumes_with_other_schedule_and_topology(world: World, tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole.csv", tmp_path / "resumed.csv"
    world.run(2, train_example, "pipeline_lm", [*FLAGS, "--curve", str(whole)], "pipe=2")
    saving = [*FLAGS, "--resume", str(tmp_path / "run"), "--save-every", "2", "--curve", str(resumed)]
    world.run(2, train_example, "pipeline_lm", [*saving, "--schedule", V], "pipe=2", 3)
    began = world.run(4, train_example, "pipeline_lm", saving, "pipe=2,tensor=2")
    assert began == [2] * 4
    torch.testing.assert_close(read_curve(resumed), read_curve(whole), rtol=2e-5, atol=0)
