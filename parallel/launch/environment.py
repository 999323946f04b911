"""What a launcher left in the environment: this process's rank, and where the ranks meet.

    torchrun    RANK  WORLD_SIZE  LOCAL_RANK  MASTER_ADDR  MASTER_PORT
    openmpi     OMPI_COMM_WORLD_RANK  OMPI_COMM_WORLD_SIZE  OMPI_COMM_WORLD_LOCAL_RANK  OMPI_COMM_WORLD_LOCAL_SIZE
    mpich       PMI_RANK  PMI_SIZE  MPI_LOCALRANKID  MPI_LOCALNRANKS: MPICH and Intel MPI
    mvapich     MV2_COMM_WORLD_RANK  MV2_COMM_WORLD_SIZE  MV2_COMM_WORLD_LOCAL_RANK  MV2_COMM_WORLD_LOCAL_SIZE
    slurm       SLURM_PROCID  SLURM_NTASKS  SLURM_LOCALID  SLURM_STEP_ID

MPI's ranks find the address in MASTER_ADDR; or it is this machine, when the local size says that all of them are on it; or
the first host of SLURM_JOB_NODELIST, in a Slurm job. Slurm's find it in MASTER_ADDR, SLURM_STEP_NODELIST,
SLURM_JOB_NODELIST (rank 0 runs on their first host) or SLURM_LAUNCH_NODE_IPADDR. The port is MASTER_PORT, or comes from the
job's id, so that two jobs on a machine don't meet.

The order of the list is the order of preference: torchrun may run inside a Slurm job. What mpirun starts there inherits
Slurm's variables, which speak of mpirun itself and not of its ranks, so that they count only where no MPI's are there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args
from zlib import crc32

Launcher = Literal["torchrun", "openmpi", "mpich", "mvapich", "slurm", "none"]

# Rank, world size and local rank; one of them there is a sign of the launcher.
_NUMBERS: Mapping[Launcher, tuple[str, str, str]] = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "mvapich": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}
_LOCAL_SIZE: Mapping[Launcher, str] = {
    "openmpi": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "mpich": "MPI_LOCALNRANKS",
    "mvapich": "MV2_COMM_WORLD_LOCAL_SIZE",
}
# Signs of launchers whose variables don't say all.
_UNKNOWN = ("PMIX_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK")


@dataclass(frozen=True)
class LaunchEnvironment:
    """This process's place; ``address`` is "" for one process, IPv6 addresses are without brackets."""

    launcher: Launcher
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str = ""
    port: int = 0

    @property
    def url(self) -> str:
        """``tcp://host:port``, for `torch.distributed.init_process_group`."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"tcp://{host}:{self.port}"


def read_environment(environ: Mapping[str, str], launcher: Launcher | None = None) -> LaunchEnvironment:
    """The place that ``environ`` describes; of the first launcher whose variables are all there, if none is given.

    Raises:
        ValueError: No such launcher.
        RuntimeError: A launcher's variables are there in part, or don't make sense; the message names them.
    """
    if launcher is not None and launcher not in get_args(Launcher):
        raise ValueError(f"launcher {launcher!r} is unknown; write one of {', '.join(map(repr, get_args(Launcher)))}")
    if launcher == "none":
        return LaunchEnvironment("none")
    launchers = [launcher] if launcher else _signs(environ)
    missing = {name: _missing(environ, name) for name in launchers}
    for name in launchers:
        if not missing[name]:
            return _place(environ, name)
    if not launchers:
        unknown = [name for name in _UNKNOWN if environ.get(name)]
        if not unknown:
            return LaunchEnvironment("none")
        raise RuntimeError(
            f"{unknown[0]}={environ[unknown[0]]} says that this is one of several processes, of a launcher that is not "
            f"known here. Set {', '.join(_NUMBERS['torchrun'])}, MASTER_ADDR and MASTER_PORT for each, or pass "
            "launcher='none' to run as one process"
        )
    if "slurm" in launchers and not _has_step(environ):
        raise RuntimeError(
            f"this is a Slurm job (SLURM_NTASKS={environ.get('SLURM_NTASKS', '')}), but srun did not start this process: "
            "SLURM_STEP_ID is not set. Write 'srun python ...' in the batch script, which starts one process a task; or "
            "torchrun; or pass launcher='none' to run as one process"
        )
    problems = "; ".join(f"{name} needs {', '.join(variables)}" for name, variables in missing.items())
    raise RuntimeError(
        f"the environment has only a part of a launcher's variables: {problems}. Set them, start the program with "
        "torchrun, mpirun or srun, or pass launcher='none' to run as one process"
    )


def _signs(environ: Mapping[str, str]) -> list[Launcher]:
    """The launchers of which some variable is there, but for those whose variables were inherited."""
    found = [name for name, numbers in _NUMBERS.items() if any(map(environ.get, numbers))]
    if "slurm" in found and "mpich" in found and not environ.get("MPI_LOCALRANKID"):
        pairs = zip(_NUMBERS["mpich"][:2], _NUMBERS["slurm"][:2], strict=True)
        if all(environ.get(one) == environ.get(other) for one, other in pairs):
            found.remove("mpich")  # srun speaks PMI as well
    only_task = (
        not environ.get("SLURM_NTASKS") and environ.get("SLURM_TASKS_PER_NODE") == "1" and not _has_step(environ)
    )
    if "slurm" in found and only_task:
        found.remove("slurm")
    if "slurm" in found and any(name in _LOCAL_SIZE for name in found):
        found.remove("slurm")
    return found


def _has_step(environ: Mapping[str, str]) -> bool:
    return bool(environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID"))


def _missing(environ: Mapping[str, str], launcher: Launcher) -> list[str]:
    missing = [name for name in _NUMBERS[launcher] if not environ.get(name)]
    if launcher == "torchrun":
        missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    elif not missing and environ[_NUMBERS[launcher][1]] != "1":
        if not _address(environ, launcher):
            missing.append("MASTER_ADDR (the host of rank 0)")
        if launcher == "slurm" and not _has_step(environ):
            missing.append("SLURM_STEP_ID")
    return missing


def _place(environ: Mapping[str, str], launcher: Launcher) -> LaunchEnvironment:
    rank, world_size, local_rank = (_number(environ, name) for name in _NUMBERS[launcher])
    if not rank < world_size:
        names = _NUMBERS[launcher]
        raise RuntimeError(f"{names[0]}={rank} isn't below {names[1]}={world_size}; ranks go from 0 to world size - 1")
    return LaunchEnvironment(
        launcher, rank, world_size, local_rank, _address(environ, launcher), _port(environ, launcher)
    )


def _address(environ: Mapping[str, str], launcher: Launcher) -> str:
    given = environ.get("MASTER_ADDR", "")
    if given:
        return given.strip("[]")
    if launcher in _LOCAL_SIZE:
        if environ.get(_LOCAL_SIZE[launcher]) == environ[_NUMBERS[launcher][1]]:
            return "127.0.0.1"
        # Not the step's list: on the other nodes that is of the step in which mpirun started its daemons.
        return first_host(environ.get("SLURM_JOB_NODELIST", ""))
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    return first_host(nodes) or environ.get("SLURM_LAUNCH_NODE_IPADDR", "")


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: ``tux[03-05,07],gpu1`` begins with ``tux03``; "" of an empty one."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group()) if first else ""


def _port(environ: Mapping[str, str], launcher: Launcher) -> int:
    if environ.get("MASTER_PORT"):
        port = _number(environ, "MASTER_PORT")
        if not 0 < port < 2**16:
            raise RuntimeError(f"MASTER_PORT={port} is no port; write a number from 1 to 65535")
        return port
    names = (
        ("SLURM_JOB_ID", "SLURM_STEP_ID") if launcher == "slurm" else ("PMIX_NAMESPACE", "SLURM_JOB_ID", "PBS_JOBID")
    )
    job = ".".join(environ.get(name, "") for name in names)
    # Below the range (from 32768) from which the system hands out ports.
    return 20_000 + crc32(job.encode()) % 10_000


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ[name].strip().isdecimal():
        raise RuntimeError(f"{name}={environ[name]!r} isn't a number; write an integer >= 0")
    return int(environ[name])
