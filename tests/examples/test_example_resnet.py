"""Gradient clipping from the command line: it learns, and in double precision there is one curve for every topology."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from meshstep.parallel import Topology
from run_example import example, read_curve, run_example, train_example
from world import World

pytest.importorskip("torchvision", reason="the example's model and data set are torchvision's")

TOPOLOGIES = {
    "data=2": ["--data-parallel", "ddp"],
    "tensor=2": [],
    "data=2,tensor=2": [],
    "data=4": ["--zero", "2"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def of_few_blocks(**options: Any) -> torch.nn.Module:
    """ResNet-34 with fewer blocks: two plain ones, and three whose shortcut is a convolution. Most of its
    time goes with 21 million parameters, and blocks of a kind differ in nothing that a topology could change."""
    from torchvision.models.resnet import BasicBlock, ResNet

    model: torch.nn.Module = ResNet(BasicBlock, [2, 1, 1, 1], **options)
    return model


def train_few_blocks(flags: Sequence[str], topology: str) -> None:
    with mock.patch.object(example("models.resnet"), "resnet34", of_few_blocks):
        train_example("clip_resnet34", flags, topology)


@pytest.fixture(scope="module")
def alone(world: World, folder: Path) -> torch.Tensor:
    """The curve of one process."""
    return exact_curve(world, folder, "data=1")


def exact_curve(world: World, folder: Path, topology: str, *more: str) -> torch.Tensor:
    path = folder / "curve.csv"
    flags = ["--sample", "--data", str(folder), "--float64", "--steps", "10", "--batch-size", "8", *more]
    ranks = Topology.parse(topology).world_size
    world.run(ranks, train_few_blocks, [*flags, "--curve", str(path)], topology)
    curve = read_curve(path)
    assert curve[:, 0].tolist() == [5, 10]
    return curve


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_topology_has_the_curve_of_one_process(
    world: World, folder: Path, alone: torch.Tensor, topology: str
) -> None:
    found = exact_curve(world, folder, topology, *TOPOLOGIES[topology])
    torch.testing.assert_close(found, alone, rtol=1e-10, atol=0)


def test_it_learns(folder: Path) -> None:
    printed = run_example("clip_resnet34", "--sample", "--data", str(folder))
    (before, wrong), (after, right) = re.findall(r"test \w+: +loss ([\d.]+), accuracy ([\d.]+)%", printed)
    assert float(after) < float(before) / 2
    assert float(wrong) < 20 < 60 < float(right)
