"""Run a script of examples/ from the command line, as a user does."""

from __future__ import annotations

import csv
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def example(name: str) -> Any:
    """A script of examples/ as a module."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def run_example(name: str, *flags: str, processes: int = 1) -> str:
    """What it prints to stdout; under torchrun where there are several processes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(torchrun if processes > 1 else []), str(EXAMPLES / f"{name}.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read_curve(path: Path, columns: tuple[str, ...] = ("step", "loss", "norm")) -> torch.Tensor:
    """[report, column] float64, from what ``--curve`` wrote."""
    with path.open() as file:
        header, *rows = csv.reader(file)
    assert header == list(columns)
    return torch.tensor([[float(value) for value in row] for row in rows], dtype=torch.float64)
