"""Gradient accumulation from the command line: the same curve for every K and topology, and a model that learns."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from run_example import printed_by_example, read_curve, run_example
from world import World

# 104 paragraphs to train: 6 batches of 16 and one of 8 in an epoch, which is half a window where a window has 2 parts.
FLAGS = ["--paragraphs", "232", "--batch-size", "16", "--epochs", "3", "--width", "32", "--seed", "3"]
STEPS = 21


def test_accumulated_over_data_and_tensor_it_is_the_run_of_one_process(world: World, tmp_path: Path) -> None:
    one, split = tmp_path / "one.csv", tmp_path / "split.csv"
    printed = run_example("accumulate_lm", "--curve", str(one), *FLAGS)
    how = ["--curve", str(split), "--accumulate", "2", *FLAGS]
    also_printed, *others = world.run(4, printed_by_example, "accumulate_lm", how, "data=2,tensor=2")
    assert others == ["", "", ""]

    curve = read_curve(one)
    assert curve.shape == (STEPS, 3)
    torch.testing.assert_close(read_curve(split), curve, rtol=2e-5, atol=0)

    before, after = (float(loss) for loss in re.findall(r"test \w+: +loss ([\d.]+)", printed))
    assert after < before - 1, "it should learn"
    assert "test" in also_printed
    assert printed[printed.index("test") :] == also_printed[also_printed.index("test") :], "losses and what it writes"
