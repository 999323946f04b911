"""How a flat buffer of gradients is summed over a group: what goes over the wire.

An exchange starts a sum and returns what finishes it, so that buckets overlap with each other and with backward. It keeps
what it has to remember in the bucket's ``memory``; all ranks of the group give the same exchange.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

Finish = Callable[[], object]
Memory = dict[str, Tensor]


class Exchange(ABC):
    """Sums flat gradients over a group. Collectives: one a call. Host reads: none."""

    @abstractmethod
    def all_reduce(self, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        """Start to put the sum of all ranks' ``flat`` (1-dim, contiguous) in its place; the result finishes it."""

    @abstractmethod
    def reduce_scatter(self, own: Tensor, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        """Start to put this rank's slice of the sum of all ranks' ``flat`` into ``own``; the result finishes it."""


class Exact(Exchange):
    """Sums in the gradients' own dtype."""

    def all_reduce(self, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        work: Any = dist.all_reduce(flat, group=group, async_op=True)
        return work.wait  # type: ignore[no-any-return]

    def reduce_scatter(self, own: Tensor, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        work: Any = dist.reduce_scatter_single(own, flat, group=group, async_op=True)
        held: list[Tensor] = [flat]  # the collective reads it until it has finished

        def finish() -> None:
            work.wait()
            held.clear()

        return finish
