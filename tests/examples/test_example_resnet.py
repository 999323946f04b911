"""The gradient clipping example: curves on several topologies, and its test loss."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from meshstep.parallel import Topology
from run_example import read_curve, run_example
from world import World

pytest.importorskip("torchvision", reason="the example's model and data set are torchvision's")

from narrow_resnet import printed_by_narrow, train_narrow

TOPOLOGIES = {
    "data=2": ["--data-parallel", "ddp"],
    "tensor=2": [],
    "data=2,tensor=2": [],
    "data=4": ["--zero", "2"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def alone(world: World, folder: Path) -> torch.Tensor:
    """The curve of one process."""
    return exact_curve(world, folder, "data=1")


def exact_curve(world: World, folder: Path, topology: str, *more: str) -> torch.Tensor:
    path = folder / "curve.csv"
    flags = ["--sample", "--data", str(folder), "--float64", "--steps", "10", "--batch-size", "8", *more]
    ranks = Topology.parse(topology).world_size
    world.run(ranks, train_narrow, [*flags, "--curve", str(path)], topology)
    curve = read_curve(path)
    assert curve[:, 0].tolist() == [5, 10]
    return curve


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_resnet_example_on_several_topologies_matches_single_process_run(
    world: World, folder: Path, alone: torch.Tensor, topology: str
) -> None:
    found = exact_curve(world, folder, topology, *TOPOLOGIES[topology])
    torch.testing.assert_close(found, alone, rtol=1e-10, atol=0)


def results_of(printed: str) -> list[tuple[float, float]]:
    """Return loss and accuracy in percent, before and after training."""
    found = re.findall(r"test \w+: +loss ([\d.]+), accuracy ([\d.]+)%", printed)
    return [(float(loss), float(accuracy)) for loss, accuracy in found]


def test_resnet_example_halves_its_test_loss(world: World, folder: Path) -> None:
    (printed,) = world.run(1, printed_by_narrow, ["--sample", "--data", str(folder)], "data=1")
    (before, wrong), (after, right) = results_of(printed)
    assert after < before / 2
    assert wrong < 20 < 60 < right


def test_resnet_example_runs_from_the_command_line(folder: Path) -> None:
    printed = run_example("clip_resnet34", "--sample", "--data", str(folder), "--batch-size", "8", "--steps", "2")
    assert re.search(r": 2 steps in [\d.]+ s, 0 of them skipped\n", printed)
    (before, _), (after, _) = results_of(printed)
    assert after != before
