"""Start `torch.distributed` from whatever started this process: torchrun, Open MPI, Slurm, or nothing at all.

launch = init_distributed()
model.to(launch.device)
logger = get_dist_logger()          # speaks on rank 0
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from .environment import LaunchEnvironment, Launcher, read_environment
from .logger import get_dist_logger as get_dist_logger


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

    Variables are read as the module `environment` lists them. Without any of them this is a world of one process, which
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
