"""`align_copies`, which makes diverged replicas of stepped tensors equal again.

An axis that sums gradients gives bitwise identical results to all ranks. Some gradients are computed separately on
every rank, such as those of a replicated layer norm on tensor ranks. They are equal only with deterministic kernels.
GPU kernels with atomic additions are not deterministic: the last bits of gradients differ, Adam turns them into full
updates, and the replicas slowly diverge. ``torch.use_deterministic_algorithms(True)`` forbids such kernels at a cost;
aligning replicas from time to time costs almost nothing.

Replicas are not averaged but set to one rank's values, so that weights, master weights and moments belong to the same
step.
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


class _BroadcastKind(NamedTuple):
    """Properties of tensors that are broadcast together."""

    ranks: tuple[int, ...]
    layout: Bucket


@torch.no_grad()
def align_copies(optimizer: ParallelOptimizer[Any]) -> None:
    """Set all replicas of stepped tensors and their states to the values of the first rank that holds them.

    Master weights are included, and the results are written to the model. Call it on every rank between two steps,
    about every few hundred steps. States that all elements of a parameter share (step counts) and tensors without
    replicas are unchanged.

        if step % 200 == 0:
            align_copies(optimizer)

    Args:
        optimizer: The optimizer.

    Raises:
        ValueError: On every rank: two replicas have different kinds of states; nothing is changed.

    Collectives: an object all-gather, one broadcast per 32 MiB and kind of layout, and the collectives by which
        `Sharded` writes weights to the model.
    Host synchronization: yes.
    """
    with in_call(optimizer.registry, "align_copies"):
        _align(optimizer.pieces(), optimizer.transforms, optimizer.registry)


def _align(rows: Sequence[SteppedTensor], chain: TransformChain, registry: ProcessGroupRegistry) -> None:
    found: dict[_BroadcastKind, list[Tensor]] = {}
    descriptions: dict[_BroadcastKind, list[str]] = {}
    for row, state in zip(rows, chain.states(), strict=True):
        ranks = holders_of(row.spec, registry.topology, registry.global_rank)
        if len(ranks) > 1 and row.trained:
            kind = _BroadcastKind(ranks, layout_kind(row.spec, registry.topology))
            named = {"it": row.tensor, **{key: state[key] for key in sorted(state) if key not in SCALAR_STATE}}
            found.setdefault(kind, []).extend(named.values())
            what = ", ".join(f"{key} {tuple(t.shape)} {t.dtype}" for key, t in named.items())
            descriptions.setdefault(kind, []).append(f"{row.entry.name}: {what}")
    _agree(descriptions, registry)
    for kind, tensors in sorted(found.items(), key=lambda item: item[0]):
        _share(tensors, kind.ranks, registry)
    chain.publish()


def holders_of(spec: P, topology: Topology, rank: int) -> tuple[int, ...]:
    """Return the ranks, ascending, that hold the same shard as ``rank`` of a parameter with this layout."""
    tied = {axis: spec.tied_coordinates(axis, topology) for axis, _ in spec.tied}
    peers = topology.peers(rank, *(axis for axis in topology.axes if axis in {*spec.replica_axes(topology), *tied}))
    return tuple(peer for peer in peers if all(topology.coordinate_of(peer, axis) in tied[axis] for axis in tied))


def _agree(descriptions: dict[_BroadcastKind, list[str]], registry: ProcessGroupRegistry) -> None:
    """Raise ValueError, on every rank, if ranks would broadcast different tensors. Names of tied parameters may differ."""
    reports = gather_objects(descriptions, registry)
    for rank, report in enumerate(reports):
        for kind, own in report.items():
            first = kind.ranks[0]
            others = reports[first].get(kind, [])
            for mine, other in zip(own, others, strict=False):
                if mine.partition(": ")[2] != other.partition(": ")[2]:
                    raise ValueError(
                        f"replicas can't be aligned: {mine} on rank {rank}, but {other} on rank {first}; one replica was "
                        "stepped and the other was not: load a checkpoint, which gives both a state"
                    )
            if len(own) != len(others):
                raise ValueError(
                    f"replicas can't be aligned: rank {rank} steps {len(own)} parameters of ranks {kind.ranks}, and rank "
                    f"{first} steps {len(others)} of them; freeze the same parameters on all these ranks"
                )


def _share(tensors: Sequence[Tensor], ranks: tuple[int, ...], registry: ProcessGroupRegistry) -> None:
    """Broadcast the tensors' bytes from the first of the ranks, in row-major order and in buckets."""
    parts: list[Tensor] = []
    copied: list[tuple[Tensor, Tensor]] = []
    nbytes = 0
    for tensor in tensors:
        dense = tensor.detach().contiguous().resolve_neg()  # a copy only if its memory is not contiguous or is negated
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
    """Broadcast the parts from the first rank, then copy each dense copy back to its tensor."""
    sizes = [part.numel() for part in parts]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=registry.device)
    slots = flat.split(sizes)
    sides: dict[
        torch.device, list[int]
    ] = {}  # offloaded parts are on another device; one transfer per device and direction
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
