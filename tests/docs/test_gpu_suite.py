"""The GPU tests and the GPU benchmark can be started from a plain checkout, and report a missing GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import forked_python
import pytest
import torch

ROOT = Path(__file__).parents[2]
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
