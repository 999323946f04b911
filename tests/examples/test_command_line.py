"""The command line that all scripts share: flags, defaults, and errors of wrong arguments."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked_python
import pytest
import torch
from meshstep.amp import ApexFp16
from meshstep.parallel import Topology
from run_example import EXAMPLES, example, start_example, torchrun_example

TRAINING = ["train_digits", "train_moe", "accumulate_lm", "pipeline_lm", "amp_vit", "clip_resnet34"]
SCRIPTS = [*TRAINING, "accumulate_norms", "compare_norms"]
SHARED = ["--steps", "--topology", "--precision", "--accumulate", "--zero", "--resume", "--plot", "--help"]
NEED_TORCHVISION = ("amp_vit", "clip_resnet34")


def script(name: str) -> Any:
    if name in NEED_TORCHVISION and find_spec("torchvision") is None:
        pytest.skip("this example needs torchvision to read its images")
    return example(name)


def read(name: str, arguments: Sequence[str], processes: int = 1) -> argparse.Namespace:
    options: argparse.Namespace = script(name).read_options(processes, arguments)
    return options


def run_main(name: str, *arguments: str) -> None:
    """Run the code below ``if __name__ == "__main__"`` up to the first step."""
    module = script(name)
    prepare = getattr(module, "prepare", None) or getattr(module, "Trainer", None) or module.Experiment
    example("command_line").main(lambda world_size: module.read_options(world_size, arguments), prepare, lambda _: None)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_of_example_scripts_prints_usage_without_training(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_main(name, "--help")
    assert ended.value.code == 0
    assert not torch.distributed.is_initialized()
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("usage: ")
    assert "default: data=<number of processes>" in printed
    if name in TRAINING:
        assert [flag for flag in SHARED if f" {flag}" not in printed] == []


def test_quickstart_help_prints_usage_without_training() -> None:
    done = start_example("quickstart", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: quickstart.py [-h]")
    assert "pip install 'meshstep[examples]'" in " ".join(done.stdout.split())
    assert "loss" not in done.stdout


@pytest.mark.parametrize(
    ("name", "package"), [("clip_resnet34", "torchvision"), ("amp_vit", "torchvision"), ("train_digits", "sklearn")]
)
def test_missing_package_error_names_the_extra_to_install(name: str, package: str) -> None:
    program = f"""
import sys, runpy
for name in [*sys.modules]:
    if name.startswith({f"{package}."!r}):  # a forked process may have imported it
        del sys.modules[name]
sys.modules[{package!r}] = None
sys.argv = sys.argv[1:]
sys.path[0] = {str(EXAMPLES)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    done = forked_python.run("-c", program, str(EXAMPLES / f"{name}.py"), "--help")
    assert done.returncode == 1
    assert done.stderr == (
        f"{name}.py: error: {package} is not installed, which this example needs: pip install -e '.[examples]'\n"
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_default_topology_has_all_processes_on_the_data_axis(name: str) -> None:
    assert read(name, [], processes=4).topology.data_axes == ("data",)
    assert read(name, [], processes=4).topology.size("data") == 4
    given = read(name, ["--topology", "data=2,tensor=2"]).topology
    assert (given.size("data"), given.size("tensor"), given.world_size) == (2, 2, 4)  # a script may add axes of size 1


@pytest.mark.parametrize("name", TRAINING)
def test_all_training_scripts_read_the_shared_flags(name: str) -> None:
    given = "--steps 7 --precision O1 --accumulate 2 --zero 1 --resume folder --plot curve.svg --batch-size 8"
    options = read(name, given.split())
    found = options.steps, options.accumulate, options.zero, options.resume, options.plot
    assert found == (7, 2, 1, Path("folder"), Path("curve.svg"))
    shared, training = example("command_line"), example("training")
    precision = shared.precision_asked(options)
    assert isinstance(precision, ApexFp16)
    assert (precision.opt_level, shared.data_parallel_asked(options)) == ("O1", "zero1")
    assert training.steps_asked(options, per_epoch=3) == 7


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("train_digits", "--topology tensor", r"'tensor' is neither axis=size nor alias=axis\+axis"),
        ("train_digits", "--topology tensor=2", "has 2 ranks but the world has 1"),
        # The batch size 64 is not a multiple of 3 either.
        ("train_digits", "--topology data=3", "has 3 ranks but the world has 1"),
        ("pipeline_lm", "--topology data=3", "has 3 ranks but the world has 1"),
        ("pipeline_lm", "--width 30", "--width 30 must be a multiple of --heads 4"),
        ("accumulate_lm", "--width 30", "--width 30 must be a multiple of --heads 4"),
        (
            "accumulate_lm",
            "--micro-batches 5",
            "--micro-batches 5 must be a positive multiple of 1, the number of data ranks, and must divide",
        ),
        ("accumulate_lm", "--micro-batches 4 --accumulate 2", "does not support --accumulate"),
        ("accumulate_lm", "--micro-batches 4 --topology cp=1", "does not support the axis cp"),
        ("train_moe", "--width 30", "--width 30 must be a multiple of --heads 4"),
        ("amp_vit", "--sample --image-size 30", "--image-size 30 must be a positive multiple of 8"),
        ("amp_vit", "--sample --image-size 0", "--image-size 0 must be a positive multiple of 8"),
        (
            "train_digits",
            "--topology expert=1",
            "no layers support .*expert=1.*: give only data axes, or data axes with tensor, with row and col",
        ),
        ("train_digits", "--topology tensor=1 --zero 1", "--zero shards over the data axes, and .* has none"),
        ("train_digits", "--verify --precision bf16", "only fp32 reaches"),
        ("train_digits", "--accumulate 3", "--batch-size 64 must be a multiple of 3, the product --accumulate x data"),
        ("train_digits", "--steps 0", "'0' must be a whole number >= 1"),
        ("train_digits", "--plot curve.png", "'curve.png' must end in .svg"),
        (
            "accumulate_lm",
            "--topology row=1",
            "--topology has row, over which this model can't be sharded: use only data, cp and tensor",
        ),
        ("accumulate_lm", "--steps 3 --epochs 2", "not allowed with argument"),
        ("train_moe", "--experts tnsor", "unknown axis 'tnsor'"),
        (
            "train_moe",
            "--topology row=1,col=1",
            "--topology has row, col, over which this script can't shard layers: use only data axes",
        ),
        ("train_moe", "--top-k 9", "--top-k 9 is not in 1..8, the number of experts"),
        ("train_moe", "--verify --precision bf16", "compute in float64: leave out --precision bf16"),
        ("amp_vit", "--data nowhere", "there is no nowhere/caltech101: give --sample, --download, or another --data"),
        ("clip_resnet34", "--topology row=1", "ResNet-34 can't be sharded over 'row'"),
        ("clip_resnet34", "--zero 1 --data-parallel ddp", "leave out one of the two"),
        ("accumulate_norms", "--topology tensor=1", "give data axes only"),
        ("accumulate_norms", "--precision fp32", "unrecognized arguments: --precision"),
        ("compare_norms", "--topology pipe=1", "no layers support Topology"),
    ],
)
def test_wrong_argument_prints_one_error_line(
    name: str, arguments: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [f"examples/{name}.py"])
    with pytest.raises(SystemExit) as ended:
        run_main(name, *arguments.split())
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{name}.py: error: ")
    assert re.search(told, line), line


def test_topology_error_under_torchrun_is_printed_once_and_last() -> None:
    done = torchrun_example("compare_norms", "--topology", "tensor=3", processes=2)
    assert done.returncode != 0
    assert done.stdout == ""
    told = "compare_norms.py: error: Topology(tensor=3) has 3 ranks but the world has 2; the product of the sizes must be 2"
    *_, line, rule = done.stderr.splitlines()
    assert set(rule) == {"="}, "the report of torchrun, which ends with a rule, should be printed last"
    assert told in line
    assert done.stderr.count(told) == 1
    assert str(EXAMPLES) not in done.stderr.replace(f"{EXAMPLES}/compare_norms.py FAILED", ""), (
        "a traceback of a rank was printed"
    )


def test_argument_error_on_a_single_rank_other_than_0_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = example("command_line")
    monkeypatch.setattr(shared, "PATIENCE", 0.0)
    with pytest.raises(ValueError, match="here only"), shared._told_by_one_rank(3):
        raise ValueError("here only")


def test_error_raised_during_training_is_not_caught() -> None:
    def fail(_: object) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        example("command_line").main(
            lambda world_size: argparse.Namespace(topology=Topology(data=world_size)), lambda *_: None, fail
        )


def test_attention_heads_not_divisible_by_tensor_ranks_raise() -> None:
    check_divides = example("models.layers").check_divides
    check_divides(4, "tensor", SimpleNamespace(size=lambda axis: 2))
    with pytest.raises(ValueError, match="4 attention heads don't divide over tensor=8"):
        check_divides(4, "tensor", SimpleNamespace(size=lambda axis: 8))


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.name)
def test_examples_import_only_public_modules(path: Path) -> None:
    packages = {
        words[1]
        for line in path.read_text().splitlines()
        if (words := line.split())[:1] in (["from"], ["import"]) and words[1].startswith("meshstep")
    }
    offered = {f"meshstep.{name}" for name in ("parallel", "amp", "optim", "testing", "testing.strategies")}
    assert packages <= offered | {"meshstep"}
