"""Start `torch.distributed` from whatever started this process: torchrun, Open MPI, Slurm, or nothing at all.

launch = init_distributed()
model.to(launch.device)
logger = get_dist_logger()          # speaks on rank 0
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args
from zlib import crc32

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

# What a launcher left in the environment: this process's rank, and where the ranks meet -------------------------------

#     torchrun    RANK  WORLD_SIZE  LOCAL_RANK  MASTER_ADDR  MASTER_PORT
#     openmpi     OMPI_COMM_WORLD_RANK  OMPI_COMM_WORLD_SIZE  OMPI_COMM_WORLD_LOCAL_RANK  OMPI_COMM_WORLD_LOCAL_SIZE
#     mpich       PMI_RANK  PMI_SIZE  MPI_LOCALRANKID  MPI_LOCALNRANKS: MPICH and Intel MPI
#     mvapich     MV2_COMM_WORLD_RANK  MV2_COMM_WORLD_SIZE  MV2_COMM_WORLD_LOCAL_RANK  MV2_COMM_WORLD_LOCAL_SIZE
#     slurm       SLURM_PROCID  SLURM_NTASKS  SLURM_LOCALID  SLURM_STEP_ID
#
# MPI's ranks find the address in MASTER_ADDR; or it is this machine, when the local size says that all of them are on it;
# or the first host of SLURM_JOB_NODELIST, in a Slurm job. Slurm's find it in MASTER_ADDR, SLURM_STEP_NODELIST,
# SLURM_JOB_NODELIST (rank 0 runs on their first host) or SLURM_LAUNCH_NODE_IPADDR. The port is MASTER_PORT, or comes from
# the job's id, so that two jobs on a machine don't meet.
#
# The order of the list is the order of preference: torchrun may run inside a Slurm job. What mpirun starts there inherits
# Slurm's variables, which speak of mpirun itself and not of its ranks, so that they count only where no MPI's are there.

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


# A standard logger that knows its rank --------------------------------------------------------------------------------


def get_dist_logger(
    name: str = "meshstep",
    ranks: Collection[int] | None = (0,),
    file: str | os.PathLike[str] | None = None,
    level: int = logging.INFO,
) -> logging.Logger:
    """The logger ``name``, which writes to stderr on the given ranks only, with the rank before each line.

    The rank is looked up at each message, so the logger may be made before `init_distributed`. Loggers below it
    (``meshstep.optim``) speak through it. Asking again with other arguments replaces the former ones.

    Args:
        ranks: Who speaks; None for everybody.
        file: Append to this file too. ``{rank}`` in it becomes the rank, as several ranks can't share a file well.
        level: Messages below it are dropped.
    """
    logger = logging.getLogger(name)
    logger.setLevel(level)
    logger.propagate = False  # the root's handlers would write each line again, on every rank
    for handler in [handler for handler in logger.handlers if any(isinstance(f, _OnRanks) for f in handler.filters)]:
        logger.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if file is not None:
        path = Path(str(file).replace("{rank}", str(_rank())))
        path.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(path, delay=True, encoding="utf-8"))  # silent ranks leave no file
    for handler in handlers:
        handler.addFilter(_OnRanks(ranks))
        handler.setFormatter(logging.Formatter("[%(asctime)s rank %(rank)d %(levelname)s] %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
    return logger


class _OnRanks(logging.Filter):
    def __init__(self, ranks: Collection[int] | None) -> None:
        super().__init__()
        self._ranks = None if ranks is None else frozenset(ranks)

    def filter(self, record: logging.LogRecord) -> bool:
        rank = _rank()
        vars(record)["rank"] = rank  # for the formatter
        return self._ranks is None or rank in self._ranks


def _rank() -> int:
    if dist.is_initialized():
        return dist.get_rank()
    try:
        return read_environment(os.environ).rank
    except RuntimeError:  # half an environment is for init_distributed to complain about, not for a log line
        return 0


# Start ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """What `init_distributed` found and did.

    Attributes:
        rank: This process among all, 0..world_size-1.
        world_size: Number of processes.
        local_rank: This process among those on its machine.
        device: Where its tensors belong: its CUDA device under NCCL, else the CPU. NCCL's groups are bound to it.
        backend: Of the default process group.
        launcher: ``torchrun``, ``openmpi``, ``mpich``, ``mvapich``, ``slurm``, ``none``, or ``other`` when somebody else
            had initialised.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    launcher: str


def init_distributed(
    backend: str | None = None, timeout: timedelta | None = None, *, launcher: Launcher | None = None
) -> Launch:
    """Initialise the default process group, and choose this process's device.

    Variables are read as `read_environment` lists them. Without any of them this is a world of one process, which
    opens no port. If the default process group is there already, it is described and nothing is changed. When torchrun has
    restarted the ranks of a node (``--max-restarts``), they meet anew; load the newest checkpoint then, as at any start.

    Args:
        backend: As in `torch.distributed.init_process_group`; by default NCCL where there is CUDA, else gloo.
        timeout: How long a rank waits for the others: to meet here, in every collective of the default group, and in those
            of all registries that are given no other. Where a rank is stopped or gone, its peers fail after this time. By
            default torch's: 30 minutes, 10 with NCCL. It should be longer than the longest work that a rank does alone.
        launcher: Read this launcher's variables only; ``"none"`` is one process whatever the environment says.

    Raises:
        RuntimeError: Variables are missing or make no sense (the message names them), the ranks don't meet in time, or
            there are fewer CUDA devices than processes on this machine.
        ValueError: No such launcher.

    Collectives: the default group's own rendezvous.
    """
    if dist.is_initialized():
        return _described()
    place = read_environment(os.environ, launcher)
    backend = backend or ("nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo")
    device = _device(backend, place.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Collectives of several groups then begin on the GPU in the order in which they were started, which is one order on
        # all ranks; on streams of their own they might begin in different ones, and wait for each other in a circle.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    _join(backend, place, timeout, device if device.type == "cuda" else None)
    return Launch(place.rank, place.world_size, place.local_rank, device, backend, place.launcher)


def _join(backend: str, place: LaunchEnvironment, timeout: timedelta | None, device: torch.device | None) -> None:
    # Without device_id torch takes LOCAL_RANK, or the rank modulo the number of devices: under Slurm another process's.
    # It also makes the communicator here, where all ranks are. (Groups of a registry are no splits of it: `local_group`.)
    if place.world_size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout, device_id=device)
        return
    # Under torchrun the agent may hold the store already; only torch's own env:// knows how to join that one.
    agent = place.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    url = "env://" if agent else place.url
    ranks: dict[str, Any] = {
        "rank": place.rank,
        "world_size": place.world_size,
        "timeout": timeout,
        "device_id": device,
    }
    try:
        attempt = _attempt() if agent else ""
        if attempt:
            given = {} if timeout is None else {"timeout": timeout}
            store, *_ = next(rendezvous(url, place.rank, place.world_size, **given))
            dist.init_process_group(backend, store=PrefixStore(attempt, store), **ranks)
        else:
            dist.init_process_group(backend, init_method=url, **ranks)
    except dist.DistError as error:
        raise RuntimeError(
            f"rank {place.rank} of {place.world_size} (started by {place.launcher}) didn't meet the others at "
            f"{place.url}; start all {place.world_size} ranks, and set MASTER_ADDR and MASTER_PORT to a host of rank 0 "
            f"and a free port that every rank reaches. torch says: {error}"
        ) from error


def _attempt() -> str:
    """What the keys of this start begin with, "" at the first one. torchrun's agent keeps its store when it restarts the
    ranks, and gloo would connect to the addresses that those before left there.

    Each node's agent has its own count, which is the same for all ranks on one node only.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    alone = os.environ.get("GROUP_WORLD_SIZE") == "1"
    return f"meshstep/restart/{restarts}" if alone and restarts != "0" else ""


def _device(backend: str, local_rank: int) -> torch.device:
    if "nccl" not in backend:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1:  # as launchers do that show each process its own device only
        return torch.device("cuda", 0)
    if local_rank >= count:
        raise RuntimeError(
            f"local rank {local_rank} has no device of its own: this machine has {count} CUDA devices; start at most "
            f"{count} processes on it, or use backend='gloo'"
        )
    return torch.device("cuda", local_rank)


def _described() -> Launch:
    # Each device type's backend: `get_backend` says "undefined" of a group that was made without naming one.
    config = dist.get_backend_config()
    backend = config if dist.get_backend() == "undefined" else dist.get_backend()
    world = dist.group.WORLD
    bound = None if world is None else world.bound_device_id
    on_cpu = "nccl" not in config
    device = torch.device("cpu") if on_cpu else bound or torch.device("cuda", torch.cuda.current_device())
    try:
        place = read_environment(os.environ)
    except RuntimeError:
        place = LaunchEnvironment("none")
    known = (place.rank, place.world_size) == (dist.get_rank(), dist.get_world_size())
    return Launch(
        dist.get_rank(),
        dist.get_world_size(),
        place.local_rank if known else device.index or 0,
        device,
        backend,
        place.launcher if known else "other",
    )
