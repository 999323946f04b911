"""The update of shards without a gradient whose full tensor has a gradient on other ranks.

In the dense model a parameter either has a gradient, and all of its elements are stepped, or has none and is not
stepped. In a parallel model one shard may have no gradient while other shards of the tensor have one: for example
grouped experts ``P("expert", None, None)`` on a rank that got no tokens. All shards of such a tensor must be stepped,
with zeros in place of missing gradients.

Each rank counts, for each full tensor, its shards with a gradient. The collective that measures the gradient norm sums
these counts. A rank steps each shard without a gradient in a separate update with zero gradients. The device skips this
update if the sum of the tensor's counts is 0. This needs no host synchronization and no further collective. If an
elementwise optimizer can't step in several calls (`may_step_in_several_calls`), the host reads the sums instead. A
full-tensor optimizer such as Muon steps all tensors in one call, and restores those whose sum is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from ..clip.clipper import SHARD_COUNTS
from ..gradients.in_place import gradient_dtype
from ..kernels.device_constants import Constants
from ..norm.param_table import ParamTable, SteppedTensor

_NOTHING: nullcontext[Mapping[Tensor, Tensor]] = nullcontext({})


class MissingShards:
    """The update of this rank's shards without a gradient, with zero gradients if another shard has a gradient.

    If any parameter is sharded, the model plan of ``table`` must have parameter names. With ``with_empty``, empty
    shards get a flag in `filled` too, because full-tensor optimizers have states for them.
    """

    def __init__(self, table: ParamTable, device: torch.device, with_empty: bool) -> None:
        plan, self._device = table.model_plan, device
        is_sharded = any(plan.topology.size(*bucket.distinct) > 1 for bucket in plan.buckets)  # equal on all ranks
        self._count = len(plan.parameter_names) if is_sharded else 0
        self._rows: list[tuple[SteppedTensor, int]] = []
        for row in table if self._count else ():
            shards = plan.topology.size(*row.model_entry.spec.distinct_axes(plan.topology))
            if row.trained and shards > 1 and row.logical_index is not None and (row.tensor.numel() or with_empty):
                self._rows.append((row, row.logical_index))
        self._constants = Constants()
        self._missing: list[tuple[SteppedTensor, int]] = []

    def field(self) -> dict[str, Tensor]:
        """Return, for each logical parameter, this rank's number of shards with a gradient, to be summed over all ranks.

        Call it after the gradients were reduced. The dict has one 1-dim float64 tensor, a field of the all-reduce of
        the norm. It is empty if no parameter is sharded and there is one pipeline stage.
        """
        if not self._count:
            return {}
        missing = [at for at, (row, _) in enumerate(self._rows) if row.grad_tensor.grad is None]
        self._missing = [self._rows[at] for at in missing if self._rows[at][0].leaf.requires_grad]
        key = SHARD_COUNTS, *missing
        return {SHARD_COUNTS: self._constants(key, lambda: self._counts(missing), torch.float64, self._device)}

    def _counts(self, missing: list[int]) -> list[float]:
        counts, without = [0.0] * self._count, {*missing}
        for at, (_, slot) in enumerate(self._rows):
            counts[slot] += at not in without
        return counts

    def filled(self, counts: Tensor | None, skip: Tensor) -> AbstractContextManager[Mapping[Tensor, Tensor]]:
        """Return a context manager in which this rank's shards without a gradient have gradients of zeros.

        It yields a dict from each stepped tensor that got a gradient of zeros to a 0-dim flag. The flag is 1, to skip
        the update of the tensor, if ``skip`` is 1 or if no shard of its parameter has a gradient on any rank.
        ``counts`` is the sum of `field` over all ranks; None if `field` was empty.
        """
        return _NOTHING if counts is None or not self._missing else self._filled(counts, skip)

    @contextmanager
    def _filled(self, counts: Tensor, skip: Tensor) -> Iterator[Mapping[Tensor, Tensor]]:
        missing = self._missing
        slots = [slot for _, slot in missing]
        places = self._constants(("slots", *slots), slots.copy, torch.int64, self._device)
        absent = (counts.to(self._device)[places] == 0).to(skip.dtype)
        flags = torch.maximum(absent.to(skip.device), skip).unbind()
        for row, _ in missing:
            row.grad_tensor.grad = torch.zeros_like(row.grad_tensor, dtype=gradient_dtype(row.grad_tensor))
        try:
            yield {row.tensor: flag for (row, _), flag in zip(missing, flags, strict=True)}
        finally:
            for row, _ in missing:
                row.grad_tensor.grad = None
