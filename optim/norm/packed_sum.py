"""Named fields in one vector, which the collective of the gradient norm also sums over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedSum:
    """Named fields in one vector, which `GlobalNorm` sums over all ranks in the collective of the norm.

        pack = PackedSum.of({"window_weight": weights}).with_fields({"veto": vote})
        norms = GlobalNorm(plan, registry)(gradients, pack.values)
        rejected = pack.split(norms.extra)["veto"] > 0

    All ranks must pack the same fields in the same order.
    """

    values: Tensor
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, fields: Mapping[str, Tensor]) -> PackedSum:
        """Return a `PackedSum` of ``fields``: one or more 1-dim float64 tensors by name, all on one device."""
        values = [*fields.values()]
        return cls(
            values[0] if len(values) == 1 else torch.cat(values), {name: of.numel() for name, of in fields.items()}
        )

    def with_fields(self, fields: Mapping[str, Tensor]) -> PackedSum:
        if not fields:
            return self
        sizes = {**self.sizes, **{name: len(values) for name, values in fields.items()}}
        if len(sizes) < len(self.sizes) + len(fields):
            twice = ", ".join({*self.sizes} & {*fields})
            raise ValueError(f"the field {twice} is packed twice: give each field a unique name")
        return PackedSum(torch.cat([self.values, *fields.values()]), sizes)

    def split(self, sums: Tensor) -> dict[str, Tensor]:
        """Return the fields of ``sums`` by name, as views. ``sums`` is the vector `values` summed over all ranks."""
        if len(self.sizes) == 1:
            return dict.fromkeys(self.sizes, sums)
        return dict(zip(self.sizes, sums.split([*self.sizes.values()]), strict=True))
