"""Find replicated parameters that are declared sharded, in the collective that measures the norm in the first step.

A replica declared ``P("tensor")`` is counted once per rank of the axis in the norm. Its "shards" along the axis are
bitwise equal, in the weights and in the gradients. Those of a really sharded parameter are equal only if all ranks drew
them from the same seed, which is a mistake too. Each rank makes a number h of both (`BitSums`). Along each axis that
shards the parameter, coordinate 0 adds -(n - 1) h to a slot, the n - 1 other coordinates add h, and all add 1 to a
count. A slot of 0 whose count is not 0 names a parameter and an axis.

Shards that may be equal by right put a number of their own rank in the place of h, so the slot is not 0:

* without a gradient, or with a constant one (zeros; ones of a symmetric initialisation),
* with fewer than `ENOUGH` elements, or fewer than `ENOUGH_CONSTANT` and constant weights (a bias of zeros),
* empty or uneven shards, whose sizes differ.

Owned and tied parameters and DTensors are left out: their layout is not declared by a dim and an axis alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .bits import WORDS, as_words, permuted
from .plan import ReductionPlan

ENOUGH, ENOUGH_CONSTANT = 4, 8
"""Elements of a shard that is compared, and of one with constant weights."""


class EqualShards:
    """Writes and reads the slots of one plan (agreed with ``names=True``).

    Args:
        plan: Of what is stepped: parameters, or pieces of them.
        axes: For each entry the axes along which its parameter is declared sharded, and should be compared; () for none.
        device: The device of the slots.
    """

    def __init__(self, plan: ReductionPlan, axes: Sequence[Sequence[str]], device: torch.device) -> None:
        self.plan, self.axes, self.device = plan, [tuple(of_entry) for of_entry in axes], device

    def slots(self, numbers: Tensor, weights: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
        """Return this rank's part of the slots, 1-dim float64. Host synchronization: none on CUDA devices.

        Args:
            numbers: [entries, 2] int64: `BitSums` of the weights and gradients.
            weights, gradients: Of the entries.
        """
        topology, names = self.plan.topology, len(self.plan.parameter_names)
        values = torch.zeros(names, len(topology.axes), WORDS + 1, dtype=torch.float64, device=self.device)
        mixed = permuted(numbers[:, 0]) + numbers[:, 1]
        own = torch.full((), self.plan.rank + 1, dtype=torch.int64, device=self.device)
        for index, axes in enumerate(self.axes):
            if not axes:
                continue
            known = _tell_apart(weights[index], gradients[index])
            number = own if known is None else torch.where(known.to(self.device), mixed[index], own)
            words = as_words(number)
            for axis in axes:
                sign = 1.0 - topology.size(axis) if self.plan.coordinate[axis] == 0 else 1.0
                slot = values[self.plan.parameter_slots[index], topology.axes.index(axis)]
                slot[:WORDS] += sign * words
                slot[WORDS] += 1
        return values.view(-1)

    def find(self, totals: Tensor) -> list[tuple[str, str]]:
        """Return the (parameter, axis) pairs whose shards are equal.

        Args:
            totals: The sum of all ranks' `slots`, on the host.
        """
        values = totals.view(len(self.plan.parameter_names), len(self.plan.topology.axes), WORDS + 1)
        equal = (values[..., :WORDS] == 0).all(-1) & (values[..., WORDS] > 0)
        return [
            (self.plan.parameter_names[slot], self.plan.topology.axes[axis]) for slot, axis in equal.nonzero().tolist()
        ]

    def check(self, totals: Tensor) -> None:
        """Raise ValueError, on every rank alike, if shards are equal; ``totals`` as for `find`."""
        if found := self.find(totals):
            name, axis = found[0]
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            size = self.plan.topology.size(axis)
            raise ValueError(
                f"{name}{more} is declared sharded along axis {axis!r}, but all {size} shards are bitwise equal, in "
                f"weights and gradients, as those of a replica are; the norm would count it {size} times. Nothing was "
                f"stepped. If it is a replica, declare it without {axis!r}: P(). If each rank drew its shard from the same "
                "seed, draw the full tensor and cut it with shard(), or take another seed on each rank. If the shards are "
                "equal on purpose, turn the comparison off: Measure(check_replicas=False)"
            )


def _tell_apart(weights: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Return a 0-dim bool: equal shards with these values are copies; None: there are too few values to tell."""
    if gradient is None or gradient.layout is not torch.strided or not gradient.is_floating_point():
        return None
    if gradient.numel() < ENOUGH:
        return None
    known = _varies(gradient)
    return known if gradient.numel() >= ENOUGH_CONSTANT else known & _varies(weights).to(known.device)


def _varies(tensor: Tensor) -> Tensor:
    """Return a 0-dim bool: ``tensor`` has two different values; False if one is NaN."""
    low, high = torch.aminmax(tensor.detach())
    return high > low
