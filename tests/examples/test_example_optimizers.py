"""`--optimizer` of the digits and the language model example."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from run_example import printed_by_example, read_curve, train_example
from world import World

STEPS = 5
COLUMNS = ("loss", "accuracy", "norm", "clip_coef")
DIGITS = ["--steps", str(STEPS), "--depth", "1", "--seed", "3"]


# The first bases of SOAP depend on rounding if the first gradient has fewer independent columns than rows.
@pytest.mark.parametrize(("name", "tolerance"), [("muon", 2e-5), ("lamb", 2e-5), ("adafactor", 2e-5), ("soap", 3e-3)])
def test_digits_example_with_muon_lamb_adafactor_or_soap_matches_single_process_run(
    world: World, name: str, tolerance: float, tmp_path: Path
) -> None:
    flags = [*DIGITS, "--optimizer", name]
    one = tmp_path / "one.csv"
    world.run(1, printed_by_example, "train_digits", [*flags, "--curve", str(one)], "data=1")
    expected = read_curve(one, COLUMNS)
    assert expected.shape == (STEPS, 4)
    for topology, more in (("data=2,tensor=2", ["--zero", "2"]), ("row=2,col=2", []), ("tensor=4", [])):
        path = tmp_path / f"{topology}.csv"
        world.run(4, printed_by_example, "train_digits", [*flags, "--curve", str(path), *more], topology)
        torch.testing.assert_close(read_curve(path, COLUMNS)[:, 0], expected[:, 0], rtol=tolerance, atol=0)


def test_lm_example_with_muon_has_lower_loss_than_adamw_and_plots_both(world: World, tmp_path: Path) -> None:
    flags = ["--paragraphs", "500", "--epochs", "3", "--width", "32", "--seed", "3"]
    curves = {name: tmp_path / f"{name}.csv" for name in ("adamw", "muon")}
    plot = tmp_path / "both.svg"
    for name, path in curves.items():
        more = ["--plot", str(plot), "--beside", str(curves["adamw"])] if name == "muon" else []
        how = ["--optimizer", name, "--curve", str(path), *flags, *more]
        world.run(1, train_example, "accumulate_lm", how)
    adamw, muon = (read_curve(path)[:, 1] for path in curves.values())
    assert len(adamw) == len(muon) > 20
    assert muon[-5:].mean() < adamw[-5:].mean() - 0.05
    drawn = plot.read_text()
    assert drawn.count('class="curve"') == drawn.count('class="beside"') == 2
