"""The batch scripts of CLUSTERS.md, run by bash with a substitute for srun that starts all tasks on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from meshstep.parallel import ProcessGroupRegistry, Topology
from meshstep.parallel.launch import read_environment
from snippets import blocks
from torch.distributed.run import config_from_args, parse_args

ROOT = Path(__file__).parent.parent.parent
BY_HAND, SLURM, BOTH = (text for text, _ in blocks("bash", (ROOT / "docs" / "howto" / "CLUSTERS.md").read_text()))
JOB, NODES = 4321, "node[07-08]"

SRUN = """#!/bin/bash
export SLURM_STEP_ID=0 SLURM_STEP_NODELIST="$SLURM_JOB_NODELIST" SLURM_NTASKS=$((SLURM_JOB_NUM_NODES * TASKS))
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
    SLURM_PROCID=$rank SLURM_LOCALID=$((rank % TASKS)) "$@" || exit 1
done
"""
SCONTROL = """#!/bin/bash
[[ "$1 $2" == "show hostnames" ]] && printf 'node07\\nnode08\\n'
"""
NOTED = """#!{python}
import json, os, sys
with open(os.environ["NOTES"], "a") as notes:
    print(json.dumps([sys.argv, dict(os.environ)]), file=notes)
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with substitutes for srun and scontrol, and a python and a torchrun that record their calls."""
    noted = NOTED.format(python=sys.executable)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": noted, "torchrun": noted}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def called(machine: Path, script: str, **variables: str) -> list[tuple[list[str], dict[str, str]]]:
    """Return arguments and environment of each python or torchrun that a script starts."""
    environment = {"PATH": f"{machine}:{os.environ['PATH']}", "NOTES": str(machine / "notes"), **variables}
    subprocess.run(["bash", "-e", "-u", "-c", script], env=environment, check=True, cwd=ROOT)
    return [tuple(json.loads(line)) for line in (machine / "notes").read_text().splitlines()]


def job(script: str) -> dict[str, str]:
    """Return the variables that sbatch sets according to the #SBATCH lines of the script."""
    asked = dict(line.removeprefix("#SBATCH --").split("=") for line in script.splitlines() if line[:7] == "#SBATCH")
    return {
        "SLURM_JOB_ID": str(JOB),
        "SLURM_JOB_NODELIST": NODES,
        "SLURM_JOB_NUM_NODES": asked["nodes"],
        "TASKS": asked["ntasks-per-node"],
    }


def agents(calls: list[tuple[list[str], dict[str, str]]]) -> list[tuple[int, int, str, str]]:
    """Return nodes, processes per node, rendezvous endpoint and script of each torchrun."""
    found = []
    for arguments, _ in calls:
        config, _, words = config_from_args(parse_args(arguments[1:]))
        script = next(word for word in words if word.endswith(".py"))
        assert (ROOT / script).is_file()
        assert config.rdzv_backend == "c10d"
        found.append((config.max_nodes, config.nproc_per_node, config.rdzv_endpoint, script))
    return found


def test_manual_torchrun_command_starts_two_processes_per_node(machine: Path) -> None:
    assert agents(called(machine, BY_HAND, HEAD="node07:29500")) == [(2, 2, "node07:29500", "examples/quickstart.py")]


def test_slurm_script_starts_one_task_per_process(machine: Path) -> None:
    calls = called(machine, SLURM, **job(SLURM))
    places = [read_environment(environment) for _, environment in calls]
    assert [(place.rank, place.world_size, place.local_rank) for place in places] == [
        (0, 4, 0),
        (1, 4, 1),
        (2, 4, 0),
        (3, 4, 1),
    ]
    assert {place.launcher for place in places} == {"slurm"}
    assert {place.address for place in places} == {"node07"}
    assert len({place.port for place in places}) == 1
    assert {(ROOT / arguments[1]).is_file() for arguments, _ in calls} == {True}


def test_slurm_script_without_srun_raises_a_clear_error(machine: Path) -> None:
    (_, environment), *_ = called(machine, SLURM.replace("srun ", ""), **job(SLURM), SLURM_NTASKS="4", SLURM_PROCID="0")
    with pytest.raises(RuntimeError, match=r"srun did not start this process.*Write 'srun python"):
        read_environment({**environment, "SLURM_LOCALID": "0"})


def test_torchrun_under_slurm_starts_one_agent_per_node(machine: Path) -> None:
    port = 20000 + JOB % 10000
    assert agents(called(machine, BOTH, **job(BOTH))) == [(2, 2, f"node07:{port}", "examples/quickstart.py")] * 2


def test_time_limit_snippet_reports_a_received_signal() -> None:
    ((code, _),) = blocks("python", (ROOT / "docs" / "howto" / "CLUSTERS.md").read_text())
    before = signal.getsignal(signal.SIGUSR1)
    try:
        found: dict[str, Any] = {}
        exec(code, found)
        registry = ProcessGroupRegistry(Topology())
        assert not found["must_stop"](registry)
        signal.raise_signal(signal.SIGUSR1)
        assert found["must_stop"](registry)
    finally:
        signal.signal(signal.SIGUSR1, before)
