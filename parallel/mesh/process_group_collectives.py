"""Collectives over one process group: flat all-gather and reduce-scatter, and an all-gather of small objects.

For small objects, `all_gather_objects` issues one all-gather, or on the CPU one gather and one broadcast.
`torch.distributed.all_gather_object` always issues two all-gathers.
"""

from __future__ import annotations

import pickle
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

# Flat collectives -----------------------------------------------------------------------------------------------------

# Newer versions of torch have other names for these collectives.

ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def all_gather_flat(whole: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """Gather the 1-dim tensor ``own`` of every rank of ``group`` into the 1-dim ``whole``, in the order of the group.

    ``own`` has the same length on all ranks. Over NCCL only the CUDA stream waits, not the host.
    """
    getattr(dist, ALL_GATHER)(whole, own, group=group)


def reduce_scatter_flat(own: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    """Sum the 1-dim ``whole`` over all ranks of ``group`` and write this rank's shard of the sum into ``own``."""
    getattr(dist, REDUCE_SCATTER)(own, whole, group=group)


# All-gather of objects ------------------------------------------------------------------------------------------------

T = TypeVar("T")

# Limits of the first message of `all_gather_objects`, in bytes.
LARGEST = 2**13  # maximum size of the message of a rank
TOGETHER = 2**22  # maximum of the sum over all ranks
LEAST = 2**6  # minimum size of the message of a rank, even if the sum over all ranks then exceeds its maximum
_LENGTH = 8  # bytes of the length field, before the pickled object


class NotPicklableError(TypeError):
    """`pickle` does not accept an object. `all_gather_objects` raises this error before it issues a collective."""


def all_gather_objects(value: T, group: dist.ProcessGroup, device: torch.device) -> list[T]:
    """Gather ``value`` from every rank of ``group`` and return the values in the order of the group.

    First, each rank sends a message of a fixed size: the length of the pickled object, and as much of the object as
    fits. If the object of any rank does not fit, each rank sends the rest of its object in a second message. All second
    messages are padded to the length of the longest rest. ``device`` is ignored if the group has a CPU backend.

    Raises:
        NotPicklableError: `pickle` does not accept ``value``. There was no collective.
    Collectives: one all-gather per message, or on the CPU one gather to the first rank and one broadcast. There is a
    second message if the pickled object of any rank exceeds about 8 KiB; with more than 512 ranks this limit is
    smaller.
    Host synchronization: yes.
    """
    if "cpu:" in dist.get_backend_config(group):
        device = torch.device("cpu")
    ranks = group.size()
    room = max(LEAST, min(LARGEST, TOGETHER // ranks))
    try:
        content = pickle.dumps(value)
    except Exception as problem:  # any type: methods of the object define its pickling
        reason = f"{type(problem).__name__}: {problem}"
        raise NotPicklableError(
            f"an object can't be sent to other ranks, because pickle fails ({reason}); give plain values, such as numbers "
            "and strings"
        ) from problem
    message = len(content).to_bytes(_LENGTH, "little") + content
    first = _gather_bytes(message[:room], room, group, device)
    more = max(int.from_bytes(head[:_LENGTH], "little") for head in first) + _LENGTH - room
    rest = _gather_bytes(message[room:], more, group, device) if more > 0 else [b""] * ranks
    # `pickle.loads` ignores the padding at the end of a message.
    return [pickle.loads((head + tail)[_LENGTH:]) for head, tail in zip(first, rest, strict=True)]


def _gather_bytes(message: bytes, room: int, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """Pad ``message`` with zero bytes to ``room`` bytes, gather it from every rank, and return the padded messages."""
    own = torch.frombuffer(bytearray(message.ljust(room, b"\0")), dtype=torch.uint8).to(device)
    found = bytearray(room * group.size())
    here = torch.frombuffer(found, dtype=torch.uint8)
    everything = here.to(device)
    (_gather_and_broadcast if device.type == "cpu" else _all_gather)(everything, own, group)
    here.copy_(everything)
    return [bytes(found[start : start + room]) for start in range(0, len(found), room)]


# These functions call the functions of `distributed_c10d` directly, as torch's `all_gather_object` does. Tools that
# replace the functions of `torch.distributed` to count collectives therefore do not count the collectives of objects.


def _all_gather(everything: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    getattr(distributed_c10d, ALL_GATHER)(everything, own, group=group)


def _gather_and_broadcast(everything: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """Gather ``own`` of all ranks into ``everything``, by a gather to the first rank and a broadcast.

    Over gloo this is faster than an all-gather, which takes n - 1 sequential exchanges between n ranks.
    """
    of_each = list(everything.view(group.size(), -1)) if group.rank() == 0 else None
    distributed_c10d.gather(own, of_each, group=group, group_dst=0)
    distributed_c10d.broadcast(everything, group=group, group_src=0)
