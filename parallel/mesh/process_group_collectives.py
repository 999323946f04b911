"""Objects of all ranks, in one round where they are small: `torch.distributed.all_gather_object` takes two always."""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

# Flat collectives -----------------------------------------------------------------------------------------------------

# Collectives from one flat tensor into another, under the names that torch has for them since 2.13 or had before.

ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def all_gather_flat(whole: Tensor, own: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> Any:
    """Fill ``whole`` with all ranks' ``own``, one after the other. Both 1-dim. Returns the work, with ``async_op``."""
    return getattr(dist, ALL_GATHER)(whole, own, group=group, async_op=async_op)


def reduce_scatter_flat(own: Tensor, whole: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> Any:
    """Fill ``own`` with this rank's part of the sum of all ranks' ``whole``. Both 1-dim. Returns the work, with
    ``async_op``."""
    return getattr(dist, REDUCE_SCATTER)(own, whole, group=group, async_op=async_op)


# Objects --------------------------------------------------------------------------------------------------------------

T = TypeVar("T")

LARGEST = 2**13  # bytes that a rank sends in the first message, at most
TOGETHER = 2**22  # that all send in it, at most
LEAST = 2**6  # that a rank sends in it, in a world of any size
_LENGTH = 8  # bytes, before an object


def all_gather_objects(value: T, group: dist.ProcessGroup, device: torch.device) -> list[T]:
    """``value`` of every rank of ``group``, in its order. It pickles and waits for the host.

    All send a first message of one size, with the length of what they have. So all know from it whether some have more; the
    rest comes in a second one, as long as the longest.

    Args:
        device: What the messages travel from where the group has no backend for a CPU: a CUDA device for NCCL.
    Collectives: one all-gather (on the CPU a gather on the first rank and a broadcast); another one if an object of any
    rank has more than 8 KiB, less in a world of more than 512 ranks. Host reads: yes.
    """
    if "cpu:" in dist.get_backend_config(group):
        device = torch.device("cpu")
    ranks = group.size()
    room = max(LEAST, min(LARGEST, TOGETHER // ranks))
    said = pickle.dumps(value)
    message = len(said).to_bytes(_LENGTH, "little") + said
    first = _all_gathered(message[:room], room, group, device)
    lengths = [int.from_bytes(one[:_LENGTH], "little") for one in first]
    more = max(lengths) + _LENGTH - room
    rest = _all_gathered(message[room:], more, group, device) if more > 0 else [b""] * ranks
    whole = [(one + other)[_LENGTH : _LENGTH + length] for one, other, length in zip(first, rest, lengths, strict=True)]
    return [pickle.loads(one) for one in whole]


def _all_gathered(message: bytes, room: int, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """Of each rank, filled up to ``room`` bytes."""
    own = torch.frombuffer(bytearray(message.ljust(room, b"\0")), dtype=torch.uint8).to(device)
    found = bytearray(room * group.size())
    here = torch.frombuffer(found, dtype=torch.uint8)
    everything = here.to(device)
    (_over_the_first_rank if device.type == "cpu" else _as_torch_gathers)(everything, own, group)
    here.copy_(everything)
    return [bytes(found[start : start + room]) for start in range(0, len(found), room)]


# Below torch's own are called, as its `all_gather_object` does: who counts the collectives of a step counts no objects.


def _as_torch_gathers(everything: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    getattr(distributed_c10d, ALL_GATHER)(everything, own, group=group)


def _over_the_first_rank(everything: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """The same. Gloo's all-gather passes messages round a ring, where n ranks wait for each other n - 1 times: 8 ranks on a
    core 6 ms. To the first rank, and from there to all over a tree, is 2.3 ms."""
    of_each = list(everything.view(group.size(), -1)) if group.rank() == 0 else None
    distributed_c10d.gather(own, of_each, group=group, group_dst=0)
    distributed_c10d.broadcast(everything, group=group, group_src=0)
