"""Initialize `torch.distributed` under any launcher: torchrun, Open MPI, MPICH, MVAPICH, Slurm, or none.

A script starts with these lines:

    launch = init_distributed()
    model.to(launch.device)
    logger = get_dist_logger()          # writes on rank 0
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

from .mesh.registry import order_launches

# Environment variables of launchers: the rank of this process, and the address of rank 0 ------------------------------

#     torchrun    RANK  WORLD_SIZE  LOCAL_RANK  MASTER_ADDR  MASTER_PORT
#     openmpi     OMPI_COMM_WORLD_RANK  OMPI_COMM_WORLD_SIZE  OMPI_COMM_WORLD_LOCAL_RANK  OMPI_COMM_WORLD_LOCAL_SIZE
#     mpich       PMI_RANK  PMI_SIZE  MPI_LOCALRANKID  MPI_LOCALNRANKS    (MPICH and Intel MPI)
#     mvapich     MV2_COMM_WORLD_RANK  MV2_COMM_WORLD_SIZE  MV2_COMM_WORLD_LOCAL_RANK  MV2_COMM_WORLD_LOCAL_SIZE
#     slurm       SLURM_PROCID  SLURM_NTASKS  SLURM_LOCALID  SLURM_STEP_ID
#
# Sources of the address of rank 0, in this order:
#
#     MPI         MASTER_ADDR; 127.0.0.1 if the local size equals the world size; the first host of SLURM_JOB_NODELIST
#     Slurm       MASTER_ADDR; the first host of SLURM_STEP_NODELIST or SLURM_JOB_NODELIST; SLURM_LAUNCH_NODE_IPADDR
#
# The port is MASTER_PORT. Without this variable, it is a hash of the job's id, so that two jobs on a machine rarely use
# the same port.
#
# Variables of several launchers may be set, for example if torchrun runs in a Slurm job. The first launcher in the
# table whose variables are complete is used. Processes that mpirun starts in a Slurm job inherit Slurm's variables of
# the rank and the world size, which describe mpirun itself. They are therefore ignored if mpirun started the process.

Launcher = Literal["torchrun", "openmpi", "mpich", "mvapich", "slurm", "none"]

# Variables of rank, world size and local rank. A launcher is detected if one of its three variables is set.
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
# Variables of launchers that are not supported, because they do not set all variables that are needed.
_UNKNOWN = ("PMIX_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK")


@dataclass(frozen=True)
class LaunchEnvironment:
    """The rank of this process and the address of rank 0, as read from a launcher's environment variables.

    An IPv6 ``address`` has no brackets. For one process ``address`` may be empty, and ``port`` may be 0.
    """

    launcher: Launcher
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str = ""
    port: int = 0

    @property
    def url(self) -> str:
        """Return ``tcp://host:port``, for `torch.distributed.init_process_group`."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"tcp://{host}:{self.port}"


def read_environment(environ: Mapping[str, str], launcher: Launcher | None = None) -> LaunchEnvironment:
    """Return the rank, the world size and the address of rank 0, as read from a launcher's environment variables.

    ``launcher`` selects a launcher; ``"none"`` ignores all variables. None: use the first of torchrun, openmpi, mpich,
    mvapich and slurm whose variables are complete. Without variables of a launcher, the result describes one process.

    Raises:
        RuntimeError: Variables of a launcher are missing or have incorrect values, or the launcher is not supported.
        ValueError: ``launcher`` is unknown.
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
            f"{unknown[0]}={environ[unknown[0]]} is set by a launcher that is not supported. Set "
            f"{', '.join(_NUMBERS['torchrun'])}, MASTER_ADDR and MASTER_PORT for each process, or call "
            "init_distributed(launcher='none') to run as one process"
        )
    in_job = [f"{name}={environ[name]}" for name in _NUMBERS["slurm"] if environ.get(name)]
    if "slurm" in launchers and in_job and not _has_step(environ):
        raise RuntimeError(
            f"this is a Slurm job ({', '.join(in_job)}), but srun did not start this process "
            "(SLURM_STEP_ID is not set). Write 'srun python ...' in the batch script, which starts one process per task; "
            "or use torchrun; or call init_distributed(launcher='none') to run as one process"
        )
    problems = "; ".join(f"{name} needs {', '.join(variables)}" for name, variables in missing.items())
    raise RuntimeError(
        f"the environment variables of a launcher are incomplete: {problems}. Set them, start the program with torchrun, "
        "mpirun or srun, or call init_distributed(launcher='none') to run as one process"
    )


def _signs(environ: Mapping[str, str]) -> list[Launcher]:
    """Return the launchers that may have started this process.

    These are all launchers of which a variable in `_NUMBERS` is set, with three exceptions:

    * mpich is left out if srun set the PMI variables.
    * slurm is left out if mpirun started the process.
    * slurm is left out if srun did not start the process, SLURM_TASKS_PER_NODE is 1 and SLURM_NTASKS is not set.
    """
    found = [name for name, numbers in _NUMBERS.items() if any(map(environ.get, numbers))]
    if "slurm" in found and "mpich" in found and not environ.get("MPI_LOCALRANKID"):
        mpich, slurm = ([environ.get(name) for name in _NUMBERS[launcher][:2]] for launcher in ("mpich", "slurm"))
        if mpich == slurm:
            found.remove("mpich")  # srun set the PMI variables
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
        raise RuntimeError(
            f"{names[0]}={rank} isn't below {names[1]}={world_size}; set a rank from 0 to {names[1]} - 1 for each process"
        )
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
        # SLURM_STEP_NODELIST is not used: under mpirun it may list the nodes of the Slurm step that runs mpirun's
        # daemons.
        return first_host(environ.get("SLURM_JOB_NODELIST", ""))
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    return first_host(nodes) or environ.get("SLURM_LAUNCH_NODE_IPADDR", "")


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: ``tux03`` for ``tux[03-05,07],gpu1``; "" for an empty list."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group()) if first else ""


def _port(environ: Mapping[str, str], launcher: Launcher) -> int:
    if environ.get("MASTER_PORT"):
        return _number(environ, "MASTER_PORT", 1, 2**16 - 1)
    names = (
        ("SLURM_JOB_ID", "SLURM_STEP_ID") if launcher == "slurm" else ("PMIX_NAMESPACE", "SLURM_JOB_ID", "PBS_JOBID")
    )
    job = ".".join(environ.get(name, "") for name in names)
    # The port is below 32768, because by default Linux assigns ports from 32768 on to other connections.
    return 20_000 + crc32(job.encode()) % 10_000


def _number(environ: Mapping[str, str], name: str, least: int = 0, most: int | None = None) -> int:
    text = environ[name].strip()
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        bounds = f">= {least}" if most is None else f"from {least} to {most}"
        raise RuntimeError(f"{name}={environ[name]!r}: give an integer {bounds}")
    return int(text)


# A standard logger that writes the rank -------------------------------------------------------------------------------


def get_dist_logger(
    name: str = "meshstep",
    ranks: Collection[int] | None = (0,),
    file: str | os.PathLike[str] | None = None,
    level: int = logging.INFO,
) -> logging.Logger:
    """Return the logger ``name``, configured to write to stderr on some ranks, with the rank in each line.

        logger = get_dist_logger()
        logger.info("step %d", step)        # [12:00:00 rank 0 INFO] step 1

    The logger reads the rank for each message, so this function may be called before `init_distributed`. Child loggers, for
    example ``meshstep.optim``, use the same handlers. Handlers of the root logger do not get the messages. A second call
    with the same name replaces the configuration.

    Args:
        name: Name of the logger. Default: ``"meshstep"``, the logger of this library.
        ranks: Ranks that write. Default: rank 0. None: all ranks.
        file: Path of a file to append to, in addition to stderr. The directory of the file is created. In the path,
            ``{rank}`` is replaced by the rank at the time of this call. If several ranks write, the path must contain
            ``{rank}``, because ranks must not share a file. None: stderr only.
        level: Lowest level of messages to write. Default: INFO.
    """
    logger = logging.getLogger(name)
    logger.setLevel(level)
    logger.propagate = False  # handlers of the root logger would write each line again, on every rank
    for handler in [handler for handler in logger.handlers if any(isinstance(f, _OnRanks) for f in handler.filters)]:
        logger.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if file is not None:
        path = Path(str(file).replace("{rank}", str(_rank())))
        path.parent.mkdir(parents=True, exist_ok=True)
        # A rank without messages creates no file.
        handlers.append(logging.FileHandler(path, delay=True, encoding="utf-8"))
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
    except RuntimeError:  # `init_distributed` raises this error, but a log message must not
        return 0


# Initialization of the default process group --------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """Result of `init_distributed`: rank, device and launcher of this process.

        launch = init_distributed()
        print(launch.rank, launch.world_size, launch.device)

    Attributes:
        rank: Rank of this process, 0..world_size-1.
        world_size: Number of processes.
        local_rank: Rank among the processes on this machine. If ``launcher`` is ``"other"``, the index of the CUDA
            device, or 0 without one.
        device: Device for the tensors of this process: with NCCL its CUDA device, else the CPU. `init_distributed`
            binds the CUDA device to the default group that it creates.
        backend: Backend of the default process group.
        launcher: ``"torchrun"``, ``"openmpi"``, ``"mpich"``, ``"mvapich"``, ``"slurm"``, or ``"none"`` for one process
            without a launcher. ``"other"``: the default group existed before the call of `init_distributed`, and its
            rank or its size differs from the environment variables.
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
    """Initialize the default process group from a launcher's environment variables, and return rank and device.

        launch = init_distributed()         # under torchrun, mpirun or srun, or in one process
        model.to(launch.device)

    With NCCL, the function also sets the current CUDA device to the device with the index of the local rank; if only
    one device is visible, every process uses this device. It sets the environment variable
    ``NCCL_LAUNCH_ORDER_IMPLICIT=1`` unless the variable is set. If no variables of a launcher are set, the default
    group has this process alone, and no port is opened. If the default process group exists already, the function
    returns its description and changes nothing. Every process of the job must call this function.

    Args:
        backend: Name of a backend, as in `torch.distributed.init_process_group`. None: NCCL if CUDA and NCCL are
            available, else gloo.
        timeout: Timeout of this call, of collectives on the default group, and of collectives on groups of registries that
            are created without ``timeout=``. If a rank stops, the other ranks raise an error after this time. The timeout
            must therefore exceed the longest time for which ranks wait while another rank works. None: torch's default,
            30 minutes, or 10 minutes with NCCL.
        launcher: Read only the variables of this launcher. ``"none"``: ignore all variables, and run as one process.
            None: use the first of torchrun, openmpi, mpich, mvapich and slurm whose variables are complete.

    Raises:
        RuntimeError: Variables are missing, have incorrect values, or are set by a launcher that is not supported (the
            message names them); the ranks do not connect within the timeout; or NCCL is used, and no CUDA device has
            the index of the local rank, or the communicator can't be created.
        ValueError: ``launcher`` is unknown.

    Collectives: the rendezvous of the default group, and with NCCL the creation of its communicator.
    """
    if dist.is_initialized():
        return _describe_existing()
    place = read_environment(os.environ, launcher)
    backend = backend or ("nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo")
    device = _device(backend, place.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        order_launches(None)
    _join(backend, place, timeout, device if device.type == "cuda" else None)
    return Launch(place.rank, place.world_size, place.local_rank, device, backend, place.launcher)


def _join(backend: str, place: LaunchEnvironment, timeout: timedelta | None, device: torch.device | None) -> None:
    # Without device_id, torch chooses the device by LOCAL_RANK or by the global rank. Under Slurm, this device may
    # belong to another process. With device_id, torch also creates the NCCL communicator in this call.
    if place.world_size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout, device_id=device)
        return
    # torchrun's agent may already serve the store; torch's method env:// then connects to it.
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
    except dist.DistBackendError as error:  # a subclass of DistError
        debug = ", or set NCCL_DEBUG=INFO and start the job again" if "nccl" in backend else ""
        raise RuntimeError(
            f"rank {place.rank} of {place.world_size} (started by {place.launcher}) connected to {place.url}, but the "
            f"{backend} communicator of all ranks couldn't be created; see the first error of the other ranks{debug}. "
            f"torch reports: {error}"
        ) from error
    except dist.DistError as error:
        advice = (
            "give torchrun an address of rank 0 that every node can reach, with --master-addr and --master-port or with "
            "--rdzv-endpoint"
            if "TORCHELASTIC_RUN_ID" in os.environ and place.launcher == "torchrun"
            else "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port that every rank can reach"
        )
        raise RuntimeError(
            f"rank {place.rank} of {place.world_size} (started by {place.launcher}) didn't connect to the other ranks at "
            f"{place.url}; start all {place.world_size} ranks, and {advice}. torch reports: {error}"
        ) from error


def _attempt() -> str:
    """Return a prefix for store keys after torchrun has restarted a job on one node; "" before the first restart.

    torchrun's agent keeps its store when it restarts ranks. Without a prefix, gloo would connect to the addresses of the
    previous processes. With several nodes the result is "", because each agent counts restarts separately.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    alone = os.environ.get("GROUP_WORLD_SIZE") == "1"
    return f"meshstep/restart/{restarts}" if alone and restarts != "0" else ""


def _device(backend: str, local_rank: int) -> torch.device:
    if "nccl" not in backend:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1:  # some launchers make only one device visible to each process
        return torch.device("cuda", 0)
    if local_rank >= count:
        write = f"start at most {count} processes per machine, or call" if count else "call"
        raise RuntimeError(
            f"local rank {local_rank} has no device, because {count} CUDA devices are visible to this process; {write} "
            "init_distributed(backend='gloo')"
        )
    return torch.device("cuda", local_rank)


def _describe_existing() -> Launch:
    # For a group that was created without a backend, `get_backend` returns "undefined", and `get_backend_config`
    # returns one backend per device type.
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
