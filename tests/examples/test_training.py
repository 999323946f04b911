"""Common features of the training scripts: resuming (also with accumulation and ZeRO), precision modes, and plots."""

from __future__ import annotations

import importlib
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from math import inf, nan
from pathlib import Path

import pytest
import torch
from meshstep.parallel import Topology
from run_example import example, made_trainer, read_curve, train_example
from world import World

SVG = "{http://www.w3.org/2000/svg}"
# 128 paragraphs are the test set; the other 36 make an epoch of 3 steps, the last one with a smaller batch.
LM = ["accumulate_lm", "--paragraphs", "164", "--batch-size", "16", "--width", "16", "--steps", "5"]
VIT = ["amp_vit", "--sample", "--image-size", "16", "--precision", "fp32", "--width", "16", "--steps", "5"]
RESNET = ["clip_resnet34", "--sample", "--batch-size", "4", "--steps", "5"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def trainer_of(name: str) -> Callable[..., int]:
    """Return `train_example` of a script; for the ResNet example with a narrow model."""
    if name == "clip_resnet34":
        return importlib.import_module("narrow_resnet").train_narrow  # type: ignore[no-any-return]
    return partial(train_example, name)


@pytest.mark.parametrize(
    ("script", "topology", "also"),
    [
        (LM, "data=2,tensor=2", ["--accumulate", "2", "--zero", "2"]),
        (VIT, "data=2,tensor=2", ["--accumulate", "2", "--zero", "1"]),
        ([*RESNET, "--float64"], "data=2", ["--zero", "2"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_training_scripts_resume_on_another_topology(
    world: World, data: Path, tmp_path: Path, script: list[str], topology: str, also: list[str]
) -> None:
    name, *flags = script
    if name != "accumulate_lm":
        pytest.importorskip("torchvision", reason="needs torchvision to read the images")
        flags += ["--data", str(data)]
    train = trainer_of(name)
    whole, curve, folder = tmp_path / "whole.csv", tmp_path / "curve.csv", ["--resume", str(tmp_path / "checkpoints")]
    flags += ["--save-every", "4"]
    world.run(1, train, [*flags, "--curve", str(whole)])
    assert world.run(1, train, [*flags, *folder], "data=1", 4) == [0]
    ranks = Topology.parse(topology).world_size
    began = world.run(ranks, train, [*flags, *folder, *also, "--curve", str(curve)], topology)
    assert began == [4] * ranks
    found, expected = read_curve(curve), read_curve(whole)
    assert expected[-1, 0] == 5
    # Most scripts report the mean loss of five steps. The resumed run makes only the last step, so losses are not compared.
    torch.testing.assert_close(found[:, ::2], expected[:, ::2], rtol=2e-5, atol=0)


@pytest.mark.parametrize("name", ["train_digits", "train_moe", "accumulate_lm", "pipeline_lm"])
def test_finished_run_can_be_resumed_for_more_steps(world: World, tmp_path: Path, name: str) -> None:
    flags = ["--width", "16", "--resume", str(tmp_path / "checkpoints"), "--save-every", "2"]
    flags += ["--paragraphs", "164", "--batch-size", "16"] if name.endswith("lm") else []
    assert len(world.run(1, rates_of, name, [*flags, "--steps", "4"])[0]) == 4
    (found,) = world.run(1, rates_of, name, [*flags, "--steps", "16"])
    assert len(found) == 12
    assert min(found[1:]) > 0, "a step is after the end of the schedule"
    assert max(found) > found[0] < found[1], "the rate should leave the low value of the end of the short run"


def rates_of(name: str, flags: list[str]) -> list[float]:
    rates = list[float]()
    with made_trainer(name, flags) as trainer:

        def note(*_: object) -> None:
            rates.append(float(trainer.optimizer.param_groups[0]["lr"]))

        trainer.optimizer.register_step_pre_hook(note)
        (trainer.train if name.endswith("lm") else trainer.run)()
    return rates


@pytest.mark.parametrize("precision", example("command_line").PRECISIONS)
def test_lm_vit_and_resnet_scripts_run_in_every_precision(
    world: World, precision: str, data: Path, tmp_path: Path
) -> None:
    curve, mode = tmp_path / "curve.csv", ["--precision", precision]
    world.run(1, train_example, LM[0], [*LM[1:], *mode, "--curve", str(curve)])
    assert read_curve(curve)[:, 1].isfinite().all()
    if find_spec("torchvision") is not None:
        for name, *flags in (VIT, RESNET):
            world.run(1, trainer_of(name), [*flags, *mode, "--steps", "1", "--data", str(data)])


def test_plot_has_loss_and_norm_curves_with_gaps_at_non_finite_values(tmp_path: Path) -> None:
    path = tmp_path / "curve.svg"
    rows = [(1, 3.0, 10.0), (2, 2.0, nan), (3, 1.0, 30.0), (4, 1.5, 20.0)]
    example("training").write_plot(path, "a < b", rows)
    root = ET.fromstring(path.read_text(encoding="utf-8"))
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert words[0] == "a < b"
    assert {"loss", "gradient norm", "3", "1", "30", "10", "step 1", "4"} <= set(words)
    curves = [element.attrib["points"].split() for element in root.iter(f"{SVG}polyline")]
    assert [len(points) for points in curves] == [4, 1, 2]
    (left, top), *_, (right, _) = (tuple(map(float, point.split(","))) for point in curves[0])
    *_, (_, bottom), _ = (tuple(map(float, point.split(","))) for point in curves[0])
    script = example("plot")
    assert (right - left, bottom - top) == (script.WIDTH, script.HEIGHT)


def test_verify_prints_WRONG_for_large_or_non_finite_norm_differences() -> None:
    verdict = example("training").verdict
    for wrong in ([nan], [1e-7, nan], [nan, 1e-7], [inf], [1e-7, 2e-5]):
        said, right = verdict(wrong)
        assert not right
        assert said.endswith("WRONG")
    for differences in ([], [0.0], [9e-6, 1e-7]):
        said, right = verdict(differences)
        assert right
        assert said.endswith("right")
    assert verdict([])[0].startswith("the norm differs from the dense model's by at most 0.0e+00 ")


def test_plot_without_data_points_has_no_curves() -> None:
    drawn = example("plot").draw("nothing yet", {"loss": []}, {"loss": []})
    assert "polyline" not in drawn
    assert ET.fromstring(drawn).tag == f"{SVG}svg"
