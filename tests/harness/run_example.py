"""Run a script of examples/, from the command line as a user would, or on the ranks of a `World`."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import forked_python
import torch
from meshstep.parallel import ProcessGroupRegistry, Topology

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def example(name: str) -> Any:
    """Import a script of examples/ as a module."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def run_example(name: str, *flags: str) -> str:
    done = start_example(name, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start_example(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return forked_python.run(str(EXAMPLES / f"{name}.py"), *flags)


def torchrun_example(name: str, *flags: str, processes: int) -> subprocess.CompletedProcess[str]:
    """Run the script with the command torchrun, and return the completed process. Launcher and ranks are forked."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return forked_python.run(*torchrun, str(EXAMPLES / f"{name}.py"), *flags, fork_children=True)


@contextlib.contextmanager
def made_trainer(name: str, flags: Sequence[str], topology: str = "data=1") -> Iterator[Any]:
    """Yield the script's trainer on this rank of a `World`."""
    script = example(name)
    options = script.read_options(Topology.parse(topology).world_size, ["--topology", topology, *flags])
    with ProcessGroupRegistry(options.topology) as registry:
        yield script.Trainer(options, registry)


def train_example(name: str, flags: Sequence[str], topology: str = "data=1", stop_after: int | None = None) -> int:
    """Train with a script on this rank of a `World`, and return the step at which training began.

    The script's tests of the model before and after training are left out. The run is interrupted after ``stop_after``
    steps.
    """
    with made_trainer(name, flags, topology) as trainer:
        began: int = trainer.run.done
        if stop_after is not None:
            trainer.run.steps = stop_after
        trainer.train()
        trainer.run.write()
    return began


def printed_by_example(name: str, flags: Sequence[str], topology: str) -> str:
    """Return the stdout of a script on this rank of a `World`."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), made_trainer(name, flags, topology) as trainer:
        example(name).run(trainer)
    return printed.getvalue()


def losses_of_tests(printed: str) -> torch.Tensor:
    return torch.tensor([float(loss) for loss in re.findall(r"test \w+: +loss ([\d.]+)", printed)], dtype=torch.float64)


def assert_same_test_losses(printed: str, expected: str) -> None:
    """Assert equal test losses, except for rounding in the fourth and last decimal."""
    assert len(losses_of_tests(expected)) == 2
    torch.testing.assert_close(losses_of_tests(printed), losses_of_tests(expected), rtol=2e-5, atol=1e-4)


def read_curve(path: Path, columns: tuple[str, ...] = ("step", "loss", "norm")) -> torch.Tensor:
    """Read a file written by ``--curve``: [report, column] in float64."""
    with path.open() as file:
        header, *rows = csv.reader(file)
    assert header == list(columns)
    return torch.tensor([[float(value) for value in row] for row in rows], dtype=torch.float64)
