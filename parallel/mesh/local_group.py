"""Make a process group without waiting for its other members.

`torch.distributed.new_group` is a meeting: gloo connects all members before it returns, NCCL splits the parent when a
device is bound to it, and `use_local_synchronization=True` only shrinks the meeting to the members. Meetings need one
order that everybody keeps, and ranks that first need different groups have none:

* ranks that ask in different orders wait for each other in a circle (torch's documentation warns of it);
* the name of the group, under which its members meet in the store, is a hash with a counter of the groups that *this
  rank* made before (seen in torch 2.13 and 2.15). Ranks that are in different groups have different counters, so they
  wait under different names even when all of them ask in the same order.

Nor would an agreed order be safe, as a ticket per request in the store would give: to keep it, a rank must first make
groups that others asked for, and one of their members may be waiting for this rank in a collective elsewhere.

So no meeting is held. The caller gives the name, gloo connects lazily (each pair of ranks at its first message), and NCCL
is told to make its communicator at the first collective: torch 2.15's would else make it with the group. What is left
of the creation is local: it takes under a millisecond, and ranks may create groups in any order.

Members meet in their first collective on the group, which is a meeting anyway; a member that never comes is an error
after the group's timeout there. Those first collectives do need an order: over NCCL a rank is in one bootstrap at a
time, which also takes memory of the GPU. `ProcessGroupRegistry.meet` holds them early, in one order on all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# What would make the creation a meeting again: gloo's eager full mesh, and the barrier that torch can be told to add.
_LAZY_ENVIRONMENT = {"TORCH_GLOO_LAZY_INIT": "1", "TORCH_DIST_INIT_BARRIER": "0"}


def new_local_group(
    ranks: Sequence[int],
    name: str,
    *,
    timeout: timedelta | None = None,
    backend: str | None = None,
    device: torch.device | None = None,
) -> dist.ProcessGroup:
    """A process group of these global ranks, made by this rank alone.

    Args:
        ranks: Global ranks, ascending, this one among them.
        name: The same on every member, and never used before on this default store.
        timeout: For the group's collectives; the default group's otherwise.
        backend: As in `torch.distributed.new_group`; the default group's otherwise.
        device: Where its tensors will be; it is bound to a CUDA device. torch would take LOCAL_RANK, or the rank modulo the
            number of devices, which Slurm's cyclic placement makes another process's device.

    Collectives: none, and no wait for other ranks. Not thread safe against other threads that make groups.
    """
    timeout = timeout if timeout is not None else _default_timeout()
    bound = device if device is not None and device.type == "cuda" else None
    with _environment(bound), _named(name), _unbound(dist.group.WORLD):
        group = dist.new_group(
            list(ranks),
            timeout=timeout,
            backend=backend,
            pg_options=_nccl_options(backend, timeout),
            use_local_synchronization=True,
            group_desc=f"meshstep: {len(ranks)} ranks, {ranks[0]} to {ranks[-1]}",  # for NCCL's timeout messages
        )
    if not isinstance(group, dist.ProcessGroup) or group.group_name != name:
        raise RuntimeError(
            f"this torch, {torch.__version__}, doesn't let a process group be named ({group!r} instead of {name!r}); take "
            "torch 2.11 or newer"
        )
    if bound is not None and group.bound_device_id is None:  # as torch before 2.15 leaves it
        group.bound_device_id = bound
    return group


def end_local_group(group: dist.ProcessGroup, *, abort: bool = False) -> None:
    """Destroy the group; with ``abort`` NCCL's works are given up, for which it would wait. Other backends don't wait."""
    end = distributed_c10d._abort_process_group if abort and "nccl" in dist.get_backend_config(group) else None
    (end or dist.destroy_process_group)(group)


def cuda_device(world: dist.ProcessGroup | None) -> torch.device:
    """The CUDA device of this process: the one that the default group is bound to, else the current one."""
    bound = None if world is None else world.bound_device_id
    return bound if bound is not None and bound.type == "cuda" else torch.device("cuda", torch.cuda.current_device())


def _nccl_options(backend: str | None, timeout: timedelta | None) -> object | None:
    """What keeps NCCL from making the communicator, which is a meeting, with the group, as torch 2.15 does; None: nothing
    is needed."""
    if "nccl" not in str(backend or dist.get_backend_config()) or not dist.is_nccl_available():
        return None
    options = dist.ProcessGroupNCCL.Options()
    if not hasattr(options, "lazy_init"):
        return None  # an older torch, which always waits for the first collective
    options.lazy_init = True
    if timeout is not None:
        options._timeout = timeout
    return options


def _default_timeout() -> timedelta | None:
    """The default group's as it is now; torch would take the backend's own, minutes. None: it has none (a fake group)."""
    world = dist.group.WORLD
    backends = [] if world is None else [world._get_backend(device) for device in world._device_types]
    options = (getattr(backend, "options", None) for backend in backends)
    return max((found for each in options if (found := getattr(each, "_timeout", None)) is not None), default=None)


@contextmanager
def _environment(device: torch.device | None) -> Iterator[None]:
    # LOCAL_RANK is where NCCL's group looks for its device. As device_id of new_group it would be connected to at once.
    wanted = _LAZY_ENVIRONMENT if device is None else {**_LAZY_ENVIRONMENT, "LOCAL_RANK": str(device.index)}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _named(name: str) -> Iterator[None]:
    # torch has no public way to name a group; this is the one function that decides it. To replace it also leaves
    # torch's own counter alone: were it to advance on some ranks only, the next ordinary new_group would not meet.
    before = distributed_c10d._process_group_name
    setattr(distributed_c10d, "_process_group_name", lambda ranks, use_hashed_name: name)  # noqa: B010 (mypy)
    try:
        yield
    finally:
        setattr(distributed_c10d, "_process_group_name", before)  # noqa: B010


@contextmanager
def _unbound(world: dist.ProcessGroup | None) -> Iterator[None]:
    # With a device bound to the default group, NCCL would split it: a collective over the whole world.
    device = world.bound_device_id if world is not None else None
    if world is None or device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device
