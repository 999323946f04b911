"""Values put together: by where they belong, in one order on every rank and device, and over the world."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.mesh.registry import ProcessGroupRegistry


class Slots:
    """Sums of values by slot. ``index_add_`` on a GPU would add in whatever order, and give other bits to each rank.

    Args:
        slots: Of each value; None: it is in none.
        count: How many slots there are.
        device: Of the values.
    """

    def __init__(self, slots: Sequence[int | None], count: int, device: torch.device) -> None:
        members: list[list[int]] = [[] for _ in range(count)]
        for index, slot in enumerate(slots):
            if slot is not None:
                members[slot].append(index)
        longest = max(map(len, members), default=0)
        nothing = len(slots)  # the place of a zero, which `__call__` adds
        rows = [[*of_slot, *[nothing] * (longest - len(of_slot))] for of_slot in members]
        self._members = torch.tensor(rows, dtype=torch.int64).reshape(count, longest).to(device)

    def __call__(self, values: Tensor) -> Tensor:
        """[..., values] -> [..., slots]. Host reads: none."""
        padded = torch.cat([values, values.new_zeros(*values.shape[:-1], 1)], -1)
        return padded[..., self._members].sum(-1)


def world_sum(packed: Tensor, registry: ProcessGroupRegistry) -> Tensor:
    """The sum over all ranks, on the device of what is given; an all-reduce, but on one rank."""
    if registry.topology.world_size == 1:
        return packed
    wire = packed.to(registry.device, copy=True)
    dist.all_reduce(wire, group=registry.group(*registry.topology.axes))
    return wire.to(packed.device)
