"""Collectives over one process group: flat all-gather and reduce-scatter, and an all-gather of small objects.

For small objects, `all_gather_objects` issues one all-gather (on the CPU a gather and a broadcast instead);
`torch.distributed.all_gather_object` always issues two.
"""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

# Flat collectives -----------------------------------------------------------------------------------------------------

# torch 2.13 renamed these collectives.

ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def all_gather_flat(whole: Tensor, own: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> Any:
    """Gather ``own`` of all ranks of ``group`` into ``whole``, in the order of the group.

    Args:
        whole: 1-dim output, of ``group.size()`` times as many elements as ``own``.
        own: 1-dim tensor of this rank, of the same length on all ranks.
        group: The process group.
        async_op: True: return before the collective has finished. False: as torch's synchronous collectives.
    Returns:
        torch's work object if ``async_op``, else None.
    Collectives: one all-gather.
    """
    return getattr(dist, ALL_GATHER)(whole, own, group=group, async_op=async_op)


def reduce_scatter_flat(own: Tensor, whole: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> Any:
    """Sum ``whole`` over all ranks of ``group`` and write this rank's shard of the sum into ``own``.

    Args:
        own: 1-dim output.
        whole: 1-dim tensor of ``group.size()`` times as many elements as ``own``.
        group: The process group.
        async_op: True: return before the collective has finished. False: as torch's synchronous collectives.
    Returns:
        torch's work object if ``async_op``, else None.
    Collectives: one reduce-scatter.
    """
    return getattr(dist, REDUCE_SCATTER)(own, whole, group=group, async_op=async_op)


# Objects --------------------------------------------------------------------------------------------------------------

T = TypeVar("T")

# Size of the first message, in bytes.
LARGEST = 2**13  # maximum per rank
TOGETHER = 2**22  # maximum of the sum over all ranks
LEAST = 2**6  # minimum per rank; it is used even if the sum over all ranks then exceeds the maximum
_LENGTH = 8  # bytes of the length field before an object


def all_gather_objects(value: T, group: dist.ProcessGroup, device: torch.device) -> list[T]:
    """Gather ``value`` from every rank of ``group`` and return the values in the order of the group.

    First, all ranks send messages of the same fixed size, which start with the length of the pickled object. If any rank's
    object does not fit, all ranks send a second message, whose size is that of the longest remainder.

    Args:
        value: Any object that `pickle` accepts.
        group: The process group.
        device: Device of the messages if the group has no CPU backend: a CUDA device for NCCL.
    Returns:
        One value per rank.
    Collectives: per message one all-gather, or on the CPU a gather to the first rank and a broadcast. There is a second
    message if the pickled object of any rank exceeds about 8 KiB; with more than 512 ranks this limit is smaller.
    Host synchronization: yes.
    """
    if "cpu:" in dist.get_backend_config(group):
        device = torch.device("cpu")
    ranks = group.size()
    room = max(LEAST, min(LARGEST, TOGETHER // ranks))
    content = pickle.dumps(value)
    message = len(content).to_bytes(_LENGTH, "little") + content
    first = _gather_bytes(message[:room], room, group, device)
    lengths = [int.from_bytes(head[:_LENGTH], "little") for head in first]
    more = max(lengths) + _LENGTH - room
    rest = _gather_bytes(message[room:], more, group, device) if more > 0 else [b""] * ranks
    contents = [
        (head + tail)[_LENGTH : _LENGTH + length] for head, tail, length in zip(first, rest, lengths, strict=True)
    ]
    return [pickle.loads(content) for content in contents]


def _gather_bytes(message: bytes, room: int, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """Pad ``message`` with zeros to ``room`` bytes, gather it from every rank, and return the padded messages."""
    own = torch.frombuffer(bytearray(message.ljust(room, b"\0")), dtype=torch.uint8).to(device)
    found = bytearray(room * group.size())
    here = torch.frombuffer(found, dtype=torch.uint8)
    everything = here.to(device)
    (_gather_and_broadcast if device.type == "cpu" else _all_gather)(everything, own, group)
    here.copy_(everything)
    return [bytes(found[start : start + room]) for start in range(0, len(found), room)]


# These functions call torch's c10d functions, as `all_gather_object` does. Tools that replace the functions of
# `torch.distributed` to count the collectives of a step therefore do not count objects.


def _all_gather(everything: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    getattr(distributed_c10d, ALL_GATHER)(everything, own, group=group)


def _gather_and_broadcast(everything: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """Gather ``own`` of all ranks into ``everything``, by a gather to the first rank and a broadcast.

    Over gloo this is faster than an all-gather, which is a ring of n - 1 sequential exchanges between n ranks. With 8 ranks
    on one core the ring takes 6 ms; the gather and the broadcast, which are trees, take 2.3 ms.
    """
    of_each = list(everything.view(group.size(), -1)) if group.rank() == 0 else None
    distributed_c10d.gather(own, of_each, group=group, group_dst=0)
    distributed_c10d.broadcast(everything, group=group, group_src=0)
