"""Copies of what is stepped, made equal again where they were computed on each rank and came out differently.

Along an axis that sums gradients all ranks get the same bits. Where every rank computes the gradient of its copy itself
(a layer norm on tensor ranks), they are equal as long as the kernels are deterministic, which on a GPU those with atomic
additions are not: the last bits differ, Adam makes whole updates of them, and the copies part slowly.
``torch.use_deterministic_algorithms(True)`` forbids such kernels, at their cost; to make the copies equal from time to time
costs next to nothing. Not averaged, but set to one rank's: weights, masters and moments go on as one step left them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...amp.master_weights import SCALAR_STATE
from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.call_tracker import in_call
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ..gradients.buckets import BUCKET_BYTES, layout_kind
from ..norm.param_table import SteppedTensor
from ..norm.plan import Bucket
from ..parallel_optimizer import ParallelOptimizer
from ..states.chain import TransformChain


class _TravelKind(NamedTuple):
    """What travels together."""

    ranks: tuple[int, ...]
    layout: Bucket


@torch.no_grad()
def align_copies(optimizer: ParallelOptimizer[Any]) -> None:
    """Give all copies of what is stepped, masters among it, and of its state the bits of the first rank that holds one, and
    bring them into the model. Every rank must call it, between two steps: every some hundred of them.

    Numbers that all elements of a parameter share (step counts) are left alone, and what has no copies.

    Raises:
        ValueError: On every rank: two copies have states of different kinds; nothing is changed.
    Collectives: an object all-gather, and for each kind of layout a broadcast of every 32 MiB; and those by which `Sharded`
    brings weights into the model. Host reads: yes.
    """
    with in_call(optimizer.registry, "align_copies"):
        _align(optimizer.pieces(), optimizer.transforms, optimizer.registry)


def _align(rows: Sequence[SteppedTensor], chain: TransformChain, registry: ProcessGroupRegistry) -> None:
    found: dict[_TravelKind, list[Tensor]] = {}
    said: dict[_TravelKind, list[str]] = {}
    for row, state in zip(rows, chain.states(), strict=True):
        ranks = holders_of(row.spec, registry.topology, registry.global_rank)
        if len(ranks) > 1 and row.trained:
            kind = _TravelKind(ranks, layout_kind(row.spec, registry.topology))
            named = {"it": row.tensor, **{key: state[key] for key in sorted(state) if key not in SCALAR_STATE}}
            found.setdefault(kind, []).extend(named.values())
            what = ", ".join(f"{key} {tuple(t.shape)} {t.dtype}" for key, t in named.items())
            said.setdefault(kind, []).append(f"{row.entry.name}: {what}")
    _agree(said, registry)
    for kind, tensors in sorted(found.items(), key=lambda item: item[0]):
        _share(tensors, kind.ranks, registry)
    chain.publish()


def holders_of(spec: P, topology: Topology, rank: int) -> tuple[int, ...]:
    """The ranks, ascending, that hold the piece which ``rank`` has of a parameter laid out so."""
    tied = {axis: spec.tied_coordinates(axis, topology) for axis, _ in spec.tied}
    peers = topology.peers(rank, *(axis for axis in topology.axes if axis in {*spec.replica_axes(topology), *tied}))
    return tuple(peer for peer in peers if all(topology.coordinate_of(peer, axis) in tied[axis] for axis in tied))


def _agree(said: dict[_TravelKind, list[str]], registry: ProcessGroupRegistry) -> None:
    """Raise ValueError, on every rank, where ranks would broadcast different things; names may differ, of tied copies."""
    reports = gather_objects(said, registry)
    for rank, report in enumerate(reports):
        for kind, own in report.items():
            first = kind.ranks[0]
            others = reports[first].get(kind, [])
            for mine, other in zip(own, others, strict=False):
                if mine.partition(": ")[2] != other.partition(": ")[2]:
                    raise ValueError(
                        f"copies can't be aligned: {mine} on rank {rank}, but {other} on rank {first}: one "
                        "was stepped and the other was not. Load a checkpoint, which gives both a state"
                    )
            if len(own) != len(others):
                raise ValueError(
                    f"copies can't be aligned: rank {rank} steps {len(own)} parameters that ranks {kind.ranks} hold, and "
                    f"rank {first} {len(others)}: freeze the same ones on all of them"
                )


def _share(tensors: Sequence[Tensor], ranks: tuple[int, ...], registry: ProcessGroupRegistry) -> None:
    """Broadcast the tensors' bytes, in row-major order and as many as travel together, from the first of the ranks."""
    parts: list[Tensor] = []
    copied: list[tuple[Tensor, Tensor]] = []
    nbytes = 0
    for tensor in tensors:
        dense = tensor.detach().contiguous().resolve_neg()  # the tensor itself, unless its memory is laid out otherwise
        for part in dense.view(-1).view(torch.uint8).split(BUCKET_BYTES):
            if parts and nbytes + part.numel() > BUCKET_BYTES:
                _broadcast(parts, copied, ranks, registry)
                parts, copied, nbytes = [], [], 0
            parts.append(part)
            nbytes += part.numel()
        if dense.data_ptr() != tensor.data_ptr():
            copied.append((tensor, dense))
    _broadcast(parts, copied, ranks, registry)


def _broadcast(
    parts: Sequence[Tensor],
    copied: Sequence[tuple[Tensor, Tensor]],
    ranks: tuple[int, ...],
    registry: ProcessGroupRegistry,
) -> None:
    """Set the parts to those of the first rank, and then each tensor to its dense copy, of which they were parts."""
    sizes = [part.numel() for part in parts]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=registry.device)
    slots = flat.split(sizes)
    sides: dict[torch.device, list[int]] = {}  # what is offloaded is on another device; one copy each way between two
    for index, part in enumerate(parts):
        sides.setdefault(part.device, []).append(index)
    for which in sides.values():
        sent = torch.cat([parts[index] for index in which]).to(flat.device)
        torch._foreach_copy_([slots[index] for index in which], sent.split([sizes[index] for index in which]))
    dist.broadcast(flat, ranks[0], group=registry.group_of(ranks))
    for device, which in sides.items():
        received = torch.cat([slots[index] for index in which]).to(device)
        torch._foreach_copy_([parts[index] for index in which], received.split([sizes[index] for index in which]))
    for tensor, dense in copied:
        tensor.copy_(dense)
