"""Named values that are summed over all ranks in the one collective that measures the gradient norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedSum:
    """Named fields in one vector, which `GlobalNorm` sums over all ranks together with the powers.

        pack = PackedSum.of({"window_weight": weights}).with_fields({"veto": vote})
        norms = global_norm(gradients, pack.values)
        vetoed = pack.split(norms.extra)["veto"] > 0

    All ranks must pack the same fields in the same order.

    Args:
        values: This rank's summands of all fields, 1-dim float64.
        sizes: The length of each field, in order.
    Collectives: none.
    Host synchronization: none.
    """

    values: Tensor
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, fields: Mapping[str, Tensor]) -> PackedSum:
        """Pack at least one field: 1-dim float64 tensors on one device."""
        values = [*fields.values()]
        return cls(values[0] if len(values) == 1 else torch.cat(values), {name: len(of) for name, of in fields.items()})

    def with_fields(self, fields: Mapping[str, Tensor]) -> PackedSum:
        """Return a sum with ``fields`` appended, or this sum if ``fields`` is empty."""
        if not fields:
            return self
        sizes = {**self.sizes, **{name: len(values) for name, values in fields.items()}}
        if len(sizes) < len(self.sizes) + len(fields):
            twice = ", ".join({*self.sizes} & {*fields})
            raise ValueError(f"the field {twice} is packed twice: give each field a unique name")
        return PackedSum(torch.cat([self.values, *fields.values()]), sizes)

    def split(self, sums: Tensor) -> dict[str, Tensor]:
        """Return each field of the summed vector ``sums``, as a view of it."""
        if len(self.sizes) == 1:
            return dict.fromkeys(self.sizes, sums)
        return dict(zip(self.sizes, sums.split([*self.sizes.values()]), strict=True))
