"""Run all GPU tests and benchmarks in at most nine minutes, and print a summary.

python -m tests.gpu --all                        on one or several GPUs
python -m tests.gpu --all --device cpu           a rehearsal on the CPU with smaller sizes, at most two hours

It needs torch and pytest, no installation and no network. Other arguments go to pytest. The log of each phase and
the summary are written to ``--out``, by default to the folder in the environment variable OUT, or to a new folder.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 530.0  # of the nine minutes, 10 s are for the start and for the summary
REHEARSAL = 7200.0
LEAST = 10.0  # seconds that must be left for a stage to start
SHOWN = 230  # characters per line of the summary


@dataclass
class Phase:
    """A process that runs some test files or the benchmark.

    ``limit`` are the seconds after which it is stopped; ``environment`` are additional variables.
    """

    name: str
    arguments: Sequence[str]
    limit: float
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    log: Path = Path()
    took: float = 0.0
    result: str = "not started"

    def start(self, folder: Path) -> None:
        self.log = folder / f"{self.name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.arguments],
                cwd=ROOT,
                env={**os.environ, **self.environment, "PYTHONUNBUFFERED": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, deadline: float) -> None:
        """Wait for the process until its limit or the deadline, and then stop it with its children."""
        assert self.process is not None
        begin = time.monotonic()
        try:
            status = self.process.wait(max(min(self.limit, deadline - begin), 0.0))
            # pytest's status is 5 if no test was selected.
            self.result = "passed" if status == 0 else "no tests" if status == 5 else f"failed, status {status}"
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.result = "stopped by its time limit"

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.process else ""

    def counts(self) -> Counter[str]:
        return Counter(re.findall(r"(?m)::\S.* (PASSED|FAILED|ERROR|SKIPPED)\b", self.text))


def stages(device: str, more: Sequence[str], gpus: int) -> list[list[Phase]]:
    """Return the phases. Those of one stage run at the same time; the benchmark runs alone."""
    on_cpu = device == "cpu"
    benchmark = Phase("speed", ["tests/benchmarks/gpu.py", *(["--device", "cpu", "--quick"] if on_cpu else [])], 170.0)

    def phase(name: str, *files: str, **environment: str) -> Phase:
        chosen = [f"test_gpu_{file}.py" for file in files]
        options = ["-m", device, "-v", "--tb=short", "-rfE", "--durations=6", *more]
        # Triton's kernels run on a CPU in Triton's interpreter.
        interpreted = {"TRITON_INTERPRET": "1"} if on_cpu and "triton" in files else {}
        environment = {"OMP_NUM_THREADS": "4", **environment, **interpreted}
        return Phase(name, ["-m", "tests.gpu", *chosen, *options], 240.0, environment)

    found = [
        [
            phase("kernels", "triton", "rounding", "loss_scale"),
            phase("steps", "steps", "optimizers"),
            phase("graphs", "capture"),
            phase("ranks", "nccl", "fsdp", "ranks", "checkpoints", "offload", "fp8"),
            phase("configurations", "configurations"),
            phase("torch's kernels", "steps", "rounding", "configurations", MESHSTEP_KERNELS="torch"),
            phase("powers", "powers"),
            phase("soak", "soak"),
        ],
        [benchmark],
    ]
    if gpus > 1 or on_cpu:
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(max(gpus, 2))]
        command = [*several, "-m", "tests.gpu", "-v", "--tb=short", "-rfE", *more]
        found.append([Phase("several GPUs", command, 120.0, {"OMP_NUM_THREADS": "1"})])
    return found


def run(device: str, more: Sequence[str], folder: Path) -> int:
    """Run all phases, print and write the summary, and return 0 if every phase passed or had no tests, else 1."""
    start = time.monotonic()
    names = gpu_names()
    deadline = start + (REHEARSAL if device == "cpu" else SECONDS)
    planned = stages(device, more, len(names))
    for phases in planned:
        if any(phase.name == "speed" for phase in phases) and not has_triton(planned[0][0]):
            phases[0].arguments = [*phases[0].arguments, "--no-triton"]
        if deadline - time.monotonic() < LEAST:
            continue
        begin = time.monotonic()
        for phase in phases:
            if device == "cpu":
                phase.limit = REHEARSAL
            phase.start(folder)
        for phase in phases:
            phase.wait(min(deadline, begin + phase.limit))
            phase.took = time.monotonic() - begin
            print(f"{phase.name}: {phase.result} after {time.monotonic() - start:.0f} s", flush=True)
    every = [phase for phases in planned for phase in phases]
    text = summary(every, names, time.monotonic() - start)
    (folder / "summary.md").write_text(text)
    print(f"{text}\nlogs: {folder}", flush=True)
    return int(any(phase.result not in ("passed", "no tests") for phase in every))


def has_triton(phase: Phase) -> bool:
    """Return True if the phase with the tests of the Triton kernels passed, or had no tests. Otherwise the benchmark must
    not run these kernels, because a wrong kernel could end its process."""
    return not re.search(r"test_gpu_triton\S* (FAILED|ERROR)", phase.text) and phase.result in ("passed", "no tests")


def gpu_names() -> list[str]:
    """Return name, driver and memory of each GPU; empty without a GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def summary(phases: Sequence[Phase], gpus: Sequence[str], took: float) -> str:
    """Return the versions, a table of the phases, the benchmark's tables, failed tests, and the most frequent errors."""
    lines = [
        "# Summary",
        "",
        f"{'; '.join(gpus) or 'no GPU'}; {versions()}; {took:.0f} s",
        "",
        "| phase | result | passed | failed | skipped | s |",
        "|---|---|---|---|---|---|",
    ]
    for phase in phases:
        counts = phase.counts()
        numbers = counts["PASSED"], counts["FAILED"] + counts["ERROR"], counts["SKIPPED"]
        lines.append(f"| {phase.name} | {phase.result} | {' | '.join(map(str, numbers))} | {phase.took:.0f} |")
    speed = next(phase for phase in phases if phase.name == "speed").text.splitlines()
    lines += ["", *(line for line in speed if line.startswith("|") or "GB/s" in line or not line)]
    failed = [line for phase in phases for line in phase.text.splitlines() if re.match(r"(FAILED|ERROR) \S", line)]
    if failed:
        lines += ["", "## Failed tests", "", *(line[:SHOWN] for line in failed[:20])]
    errors = Counter(
        line.strip()[:SHOWN]
        for phase in phases
        for line in phase.text.splitlines()
        if re.match(r"E   +\S*(Error|assert)|\w*Error: ", line)
    )
    if errors:
        lines += ["", "## Errors", "", *(f"{count} x {line}" for line, count in errors.most_common(12))]
    return "\n".join(lines)


def versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in ("torch", "triton", "transformer_engine", "apex", "deepspeed"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def main(arguments: Sequence[str]) -> int:
    """Parse the arguments, run everything, and return the exit status."""
    parser = argparse.ArgumentParser("python -m tests.gpu --all", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--out", type=Path, help="folder of the logs")
    options, more = parser.parse_known_args(arguments)
    folder = options.out or Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="gpu-tests-"))
    folder.mkdir(parents=True, exist_ok=True)
    return run(options.device, more, folder)
