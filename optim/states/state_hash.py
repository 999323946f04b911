"""A hash of the training state that does not depend on how ranks share the state.

The hash is a sum modulo 2^64 over all elements of weights and optimizer states. Each element adds a pseudo-random number
that depends on the bits of the element, on its index in the full tensor, and on the names of parameter and state. Sums of
integers modulo 2^64 have the same value in every order, so each rank adds its shards, and one all-reduce adds the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.layout.shard import Region
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..norm.param_table import ParamTable
from ..norm.replicas import splitmix64_finalizer

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASK = 2**63 - 1  # clears the sign bit, so that the hash has no sign in hexadecimal
_BLOCK = 2**20  # elements that are hashed at once


def hash_of_state(
    table: ParamTable,
    params: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    others: Mapping[str, Tensor],
    registry: ProcessGroupRegistry,
    device: torch.device,
) -> Tensor:
    """Return the hash of the training state, 0-dim int64 in [0, 2^63), equal on all ranks.

    ``params`` are the model parameters, in the order of ``table.model_plan``; instead of DTensors, their local tensors.
    ``states`` has one dict of state tensors by name per stepped tensor. A tensor with as many elements as the stepped
    tensor, and at least one dim, holds one value per element. Any other tensor holds the state of a full tensor, such
    as a step count. ``others`` are further tensors, equal on all ranks.
    Collectives: one all-reduce over all ranks; none on a single rank. Host synchronization: none if all tensors are on
    ``device``; otherwise for copies between devices.
    """
    topology, total = registry.topology, torch.zeros((), dtype=torch.int64, device=device)
    model = table.model_plan
    for entry, param in compress(model.pair_entries(params), model.are_first_replicas):
        total += _hash(param, entry.region(topology, model.coordinate), f"{entry.name} model").to(device)
    for row, state in compress(zip(table, states, strict=True), table.plan.are_first_replicas):
        total += _hash(row.tensor, row.region, f"{row.name} stepped").to(device)
        for key, value in sorted(state.items()):
            salt = f"{row.name} {key}"
            if value.numel() == row.tensor.numel() and value.dim():
                total += _hash(value, row.region, salt).to(device)
            elif row.region is None or (row.region.start == 0 and not any(row.region.offsets)):
                total += _hash(value, None, salt).to(device)
    if registry.global_rank == 0:
        for name, value in sorted(others.items()):
            total += _hash(value, None, name).to(device)
    if topology.world_size == 1:
        return total & _MASK
    wire = total.to(registry.device)
    dist.all_reduce(wire, group=registry.group(*topology.axes))
    return wire.to(device) & _MASK


def _hash(tensor: Tensor, region: Region | None, salt: str) -> Tensor:
    """Return the hash of a tensor's elements, 0-dim int64.

    ``region`` is the part of the full tensor that ``tensor`` holds; None: ``tensor`` is a full tensor. Each ``salt``
    gives another hash.
    """
    start = int.from_bytes(blake2b(salt.encode(), digest_size=8).digest(), "little", signed=True)
    tensor = tensor.detach().resolve_neg()
    if region is None:
        region = Region(tuple(tensor.shape), tuple(((0, length),) for length in tensor.shape), 0, tensor.numel())
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for index, values in region.elements(tensor, _BLOCK):
        words = values.view(_BITS[values.element_size()]).to(torch.int64)
        total += splitmix64_finalizer(words ^ splitmix64_finalizer(index + start)).sum()
    return total
