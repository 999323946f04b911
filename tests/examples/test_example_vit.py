"""The mixed precision example: curves, and its sample data."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import pytest
import torch
from run_example import example, losses_of_tests, read_curve, run_example, train_example
from sklearn.datasets import load_digits
from world import World

pytest.importorskip("torchvision", reason="the example and its sample data are read by torchvision's dataset classes")

# Reading images takes most of the time, so batches are small. The last 7 steps are in the second epoch.
SMALL = ["--image-size", "16", "--width", "32", "--depth", "1"]
FLAGS = ["--sample", "--batch-size", "16", "--steps", "70", "--seed", "3", *SMALL]
STEPS = 70


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def test_sharded_vit_example_matches_single_process_run_and_bf16_is_close(
    world: World, data: Path, tmp_path: Path
) -> None:
    paths = {name: tmp_path / f"{name}.csv" for name in ("one", "split", "half")}
    flags = {name: [*FLAGS, "--data", str(data), "--curve", str(path)] for name, path in paths.items()}
    printed = run_example("amp_vit", *flags["one"], "--precision", "fp32")
    world.run(2, train_example, "amp_vit", [*flags["split"], "--precision", "fp32"], "tensor=2")
    world.run(1, train_example, "amp_vit", [*flags["half"], "--precision", "bf16"])
    one, split, half = (read_curve(paths[name]) for name in ("one", "split", "half"))

    assert one.shape == (STEPS // 5, 3)
    torch.testing.assert_close(split, one, rtol=1e-5, atol=0)
    torch.testing.assert_close(half[:, 1], one[:, 1], rtol=1e-2, atol=0)
    assert not torch.equal(half[:, 1], one[:, 1])
    before, after = losses_of_tests(printed)
    assert after < before - 1, "the model should learn"


def test_sample_data_can_be_made_twice_and_read_by_torchvision(tmp_path: Path) -> None:
    datasets = importlib.import_module("torchvision.datasets")
    sample = example("sample_data")
    for _ in range(2):  # the second iteration finds the files
        caltech101 = datasets.Caltech101(sample.make_caltech101(tmp_path))
        train, test = (sample.SampleCIFAR10(sample.make_cifar10(tmp_path), train=train) for train in (True, False))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["caltech101", "cifar-10-batches-py"]

    assert caltech101.categories == sorted(["china", "flower", *sample.DIGITS])
    assert Counter(caltech101.y) == dict.fromkeys(range(12), 100)
    image, label = caltech101[1199]
    with image:  # closes the image file
        assert (caltech101.categories[label], image.mode) == ("zero", "RGB")

    assert (len(train), len(test), train.classes) == (1440, 357, sample.DIGITS)
    assert train.targets + test.targets == load_digits().target.tolist()
    assert train[0][0].size == (32, 32)
    # The middle of a zero shows the darkened photograph; the strokes of the digit are light.
    zero = train.data[0]
    assert zero[14:18, 14:18].max() < 128 < zero[8:24, 8:24].max()


def test_failure_while_making_sample_data_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = example("sample_data")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(sample.Painter, "write", fail)
    with pytest.raises(OSError, match="disk full"):
        sample.make_caltech101(tmp_path)
    assert list(tmp_path.iterdir()) == []
