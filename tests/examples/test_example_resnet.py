"""Gradient clipping from the command line: it learns, and in double precision there is one curve for every topology."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from run_example import read_curve, run_example

pytest.importorskip("torchvision", reason="the example's model and data set are torchvision's")

TOPOLOGIES = {
    "data=2": ["--data-parallel", "ddp"],
    "tensor=2": [],
    "data=2,tensor=2": [],
    "data=4": ["--data-parallel", "zero2"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def run(folder: Path, *flags: str, processes: int = 1) -> tuple[torch.Tensor, str]:
    """The curve and what was printed."""
    curve = folder / "curve.csv"
    flags = ("--sample", "--data", str(folder), "--curve", str(curve), *flags)
    printed = run_example("clip_resnet34", *flags, processes=processes)
    return read_curve(curve), printed


@pytest.fixture(scope="module")
def alone(folder: Path) -> torch.Tensor:
    """The curve of one process."""
    return exact_curve(folder)


def exact_curve(folder: Path, *flags: str, processes: int = 1) -> torch.Tensor:
    curve, _ = run(folder, "--float64", "--steps", "10", "--batch-size", "16", *flags, processes=processes)
    assert curve[:, 0].tolist() == [5, 10]
    return curve


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_topology_has_the_curve_of_one_process(folder: Path, alone: torch.Tensor, topology: str) -> None:
    processes = 4 if topology in ("data=2,tensor=2", "data=4") else 2
    found = exact_curve(folder, "--topology", topology, *TOPOLOGIES[topology], processes=processes)
    torch.testing.assert_close(found, alone, rtol=1e-10, atol=0)


def test_it_learns(folder: Path) -> None:
    _, printed = run(folder)
    (before, wrong), (after, right) = re.findall(r"test \w+: +loss ([\d.]+), accuracy ([\d.]+)%", printed)
    assert float(after) < float(before) / 2
    assert float(wrong) < 20 < 60 < float(right)
