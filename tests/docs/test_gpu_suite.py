"""The GPU tests and the GPU benchmark can be started from a plain checkout, and report a missing GPU."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import forked_python
import pytest
import torch

ROOT = Path(__file__).parents[2]
UNDER_TORCHRUN = "test_gpu_torchrun.py"
everything: Any = importlib.import_module("gpu.everything")
COPIED = ("parallel", "amp", "optim", "tests/gpu", "tests/harness", "tests/benchmarks", "src/meshstep")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain checkout, in which hypothesis and xdist cannot be imported. It has the bytecode of the sources."""
    root = tmp_path_factory.mktemp("checkout")
    for name in (*COPIED, "pyproject.toml"):
        source, target = ROOT / name, root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
    (root / "missing").mkdir()
    for name in ("hypothesis", "xdist"):
        (root / "missing" / f"{name}.py").write_text("raise ImportError('it is missing')")
    return root


@pytest.fixture(scope="module")
def logs(checkout: Path) -> Path:
    """The folder of logs of the command for all GPU tests and the benchmark, run on the CPU with two tests selected."""
    options = ("--device", "cpu", "--out", "logs", "-k", "grad_scaler or mean_gradient")
    done = started(checkout, "-m", "tests.gpu", "--all", *options, fork_children=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (checkout / "logs" / "summary.md").read_text() in done.stdout
    return checkout / "logs"


def started(
    checkout: Path, *arguments: str, processes: int = 0, fork_children: bool = False, writes_bytecode: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a command in the checkout, under torchrun if ``processes`` > 0."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "missing"), "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "" if writes_bytecode else "1", "CUDA_VISIBLE_DEVICES": ""}
    for variable in ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER"):
        environment.pop(variable, None)
    forked = forked_python.Forked(
        *arguments, cwd=checkout, env=environment, processes=processes, fork_children=fork_children
    )
    return forked.completed()


def test_gpu_tests_run_from_a_checkout_and_skip_without_a_gpu(checkout: Path) -> None:
    chosen = "test_gpu_steps and (cuda or (host_synchronization and cpu and fp16))"
    before = sorted(checkout.rglob("*"))
    done = started(checkout, "-m", "tests.gpu", "-q", "-k", chosen, writes_bytecode=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "needs a GPU: " in done.stdout
    assert " passed, " in done.stdout  # the tests that also run on a CPU
    assert f"meshstep of {checkout / 'optim'}" in done.stdout
    assert sorted(checkout.rglob("*")) == before


def test_selected_gpu_tests_pass_on_the_cpu_under_torchrun(checkout: Path) -> None:
    chosen = "mean_gradient or (fp32 and (replicas_are or (replays and replicated)))"
    done = started(checkout, "-m", "tests.gpu", "-q", "-k", chosen, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("7 passed") == 2


def test_gpu_benchmark_without_a_gpu_exits_with_a_clear_error(checkout: Path) -> None:
    done = started(checkout, "tests/benchmarks/gpu.py")
    assert done.returncode == 2
    assert "this needs a GPU, and torch finds none" in done.stderr


def test_gpu_benchmark_prints_a_markdown_table(logs: Path) -> None:
    lines = (logs / "speed.log").read_text().splitlines()
    assert f"torch {torch.__version__}" in lines[0]
    rows = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in rows} == {8}
    assert sum(line.startswith("| meshstep |") for line in rows) == 4
    for name in ("stochastic rounding", "squares in float64", "meshstep's Muon", "all states offloaded", "overlap"):
        (row, *_) = (line for line in rows if name in line)
        assert float(row.split("|")[2]) > 0, row


def test_one_command_starts_every_phase_of_gpu_tests_and_the_benchmark(logs: Path) -> None:
    lines = (logs / "summary.md").read_text().splitlines()
    assert f"torch {torch.__version__.split('+')[0]}" in lines[2]
    results = {line.split(" | ")[0].strip("| "): line.split(" | ")[1] for line in lines[6:16]}
    ran = ("kernels", "speed", "several GPUs")
    empty = ("steps", "graphs", "ranks", "configurations", "torch's kernels", "powers", "soak")
    assert results == dict.fromkeys(ran, "passed") | dict.fromkeys(empty, "no tests")
    assert any(line.startswith("| meshstep's Muon | ") for line in lines)


# Completeness of the one command, and its time limit -------------------------------------------------------------------


@pytest.mark.default_cases(3)
@pytest.mark.parametrize(("device", "gpus"), [("cuda", 1), ("cuda", 4), ("cpu", 0)])
def test_every_gpu_test_file_is_in_a_phase_of_the_one_command(device: str, gpus: int) -> None:
    files = {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    phases = [phase for stage in everything.stages(device, (), gpus) for phase in stage]
    named = {argument for phase in phases for argument in phase.arguments if argument.endswith(".py")}
    assert named - {"tests/benchmarks/gpu.py"} == files - {UNDER_TORCHRUN}
    assert [phase.name for phase in phases if "torch.distributed.run" in phase.arguments] == (
        [] if (device, gpus) == ("cuda", 1) else ["several GPUs"]
    )


def test_every_gpu_test_has_the_marker_cuda_or_cpu_or_needs_torchrun(checkout: Path) -> None:
    """A phase selects tests by one of the markers, so it would silently leave out other tests."""
    unmarked = "not cuda and not cpu"
    done = started(checkout, "-m", "tests.gpu", "--collect-only", "-q", "-m", unmarked, writes_bytecode=False)
    found = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert found == {f"tests/gpu/{UNDER_TORCHRUN}"}, done.stdout + done.stderr


def test_limits_of_gpu_phases_add_up_to_at_most_nine_minutes() -> None:
    limits = [max(phase.limit for phase in stage) for stage in everything.stages("cuda", (), 8)]
    assert sum(limits) <= everything.SECONDS <= 9 * 60 - 10


HANGS = "import os, time; os.fork(); print(os.getpid(), flush=True); time.sleep(600)"


def is_running(pid: int) -> bool:
    """Return True if the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("is_deadline", [True, False], ids=["deadline", "limit of a phase"])
def test_one_command_stops_hanging_phase_and_its_children_at_its_time_limit(
    is_deadline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = 1.5
    hangs = everything.Phase("hangs", ["-S", "-E", "-c", HANGS], 240.0 if is_deadline else seconds)
    speed = everything.Phase("speed", ["-S", "-E", "-c", "print('| a row |')"], 170.0)
    monkeypatch.setattr(everything, "stages", lambda *_: [[hangs], [speed]])
    monkeypatch.setattr(everything, "SECONDS", seconds if is_deadline else 60.0)
    monkeypatch.setattr(everything, "LEAST", 0.1)
    begin = time.monotonic()
    assert everything.run("cuda", (), tmp_path) == 1
    assert seconds <= time.monotonic() - begin < 30
    printed = (tmp_path / "summary.md").read_text()
    assert "| hangs | stopped by its time limit | 0 | 0 | 0 |" in printed
    assert f"| speed | {'not started' if is_deadline else 'passed'} | 0 | 0 | 0 |" in printed
    assert ("| a row |" in printed) != is_deadline
    assert printed in capsys.readouterr().out
    children = [*map(int, hangs.text.split())]
    assert len(children) == 2
    assert not any(map(is_running, children))
