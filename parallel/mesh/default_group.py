"""What a registry is to the default process group: as large as its topology, and one of several, with a name that all
ranks know."""

from __future__ import annotations

import itertools

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .topology import Topology

_fake_registries = itertools.count()


def default_group(topology: Topology) -> dist.ProcessGroup | None:
    """The world; None: one rank, without torch.distributed.

    Raises:
        RuntimeError: `torch.distributed` isn't initialised and the topology has more than one rank.
        ValueError: The topology's size isn't the world's.
    """
    if not dist.is_initialized():
        if topology.world_size == 1:
            return None
        raise RuntimeError(
            f"{topology!r} has {topology.world_size} ranks but torch.distributed isn't initialised; call "
            "meshstep.parallel.launch.init_distributed() first (and start the ranks, for example with torchrun "
            f"--nproc-per-node {topology.world_size})"
        )
    world_size = dist.get_world_size()
    if world_size != topology.world_size:
        raise ValueError(
            f"{topology!r} has {topology.world_size} ranks but the world has {world_size}; the sizes must multiply to "
            f"{world_size}{_suggestion(topology, world_size)}"
        )
    return dist.group.WORLD


def _suggestion(topology: Topology, world_size: int) -> str:
    fitting = []
    for axis, size in zip(topology.axes, topology.sizes, strict=True):
        rest = topology.world_size // size
        if world_size % rest == 0:
            fitting.append(f"{axis}={world_size // rest}")
    if fitting:
        return f": write {' or '.join(fitting)} instead, or start {topology.world_size} ranks"
    return f", or start {topology.world_size} ranks"


def agreed_name(topology: Topology, rank: int) -> str:
    """A name for this rank's next registry that is the same on all ranks.

    Raises:
        ValueError: Another rank's registry of the same number has another topology.
    """
    if is_fake():
        # One process plays one rank of a world that isn't there, on a store that may not even answer.
        return f"meshstep/fake/{next(_fake_registries)}"
    store = distributed_c10d._get_default_store()
    number = store.add(f"meshstep/registries/{rank}", 1)
    name = f"meshstep/registry/{number}"
    first = store.compare_set(name, "", repr(topology)).decode()
    if first != repr(topology):
        raise ValueError(
            f"rank {rank} builds registry number {number} with {topology!r}, another rank built its number {number} "
            f"with {first}; every rank must build the same registries in the same order"
        )
    return name


def is_fake() -> bool:
    """Whether the world is one process that plays one rank."""
    return "fake" in dist.get_backend_config()
