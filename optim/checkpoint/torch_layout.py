"""The states of one parameter as DTensors of the full parameter's shape, whoever has which part of them, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.interop.local import has_dtensors
from ...parallel.layout.pieces import Region
from ...parallel.layout.spec import P
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..norm.entries import ParameterEntry
from ..states.pieces import Piece


@dataclass(frozen=True)
class LaidOut:
    """One of the model's parameters, and where this rank's states of it are.

    Args:
        param: As the model has it.
        local: This rank's plain tensor of it.
        held: (position in the optimizer, piece) of what is stepped for it here.
        cut_over: The axes of `Sharded`, if its ranks step pieces of ``local``.
    """

    registry: ProcessGroupRegistry
    param: Tensor
    local: Tensor
    entry: ParameterEntry
    held: list[tuple[int, Piece]]
    cut_over: tuple[str, ...] | None

    def spec_and_region(self) -> tuple[P, Region]:
        """How a state of the parameter is laid out as a DTensor, and what this rank has of it."""
        entry, registry = self.entry, self.registry
        if entry.full_shape is None:
            raise ValueError(
                f"{entry.name}: nothing tells how its pieces of unequal sizes are cut; use save_checkpoint"
            )
        if entry.spec.blocks:
            raise ValueError(
                f"{entry.name}: a DTensor can't say that several blocks are cut, as {entry.spec} does; use save_checkpoint"
            )
        if any(isinstance(at, str) for _, at in entry.spec.owned):
            raise ValueError(
                f"{entry.name}: a DTensor can't say that pieces lie on a diagonal, as {entry.spec} does; use "
                "save_checkpoint"
            )
        if self.cut_over is None or not entry.shape:
            return entry.spec, self._region()
        dims = [entry.spec.cuts(dim) for dim in range(len(entry.shape))]
        spec = P((*dims[0], self.cut_over), *dims[1:])
        rows = -(-entry.shape[0] // registry.size(*self.cut_over))
        first = min(registry.rank(*self.cut_over) * rows, entry.shape[0])
        shape = (min(rows, entry.shape[0] - first), *entry.shape[1:])
        where = registry.topology, registry.coordinate
        return spec, Region.of_shard(entry.full_shape, shape, spec, *where, entry.name)

    def whole(self, pieces: list[tuple[Piece, Any]]) -> Tensor:
        """One state of one parameter, as a DTensor where it is split."""
        from torch.distributed.tensor import DTensor, Shard

        spec, region = self.spec_and_region()
        if self.cut_over is None:
            local: Tensor = pieces[0][1].detach()
        else:
            local = self._together({piece.offset: value for piece, value in pieces}).view(self.entry.shape)
            if self.entry.shape:
                local = local.narrow(0, self._first_row(region), region.shape[0]).clone()
        axes = self._cut_axes(spec)
        if not axes:
            return local
        stride = torch.empty(region.full_shape, device="meta").stride()
        return DTensor.from_local(
            local.contiguous(),
            self.registry.device_mesh(*axes),
            [Shard(dim) for dim in axes.values()],
            run_check=False,
            shape=torch.Size(region.full_shape),
            stride=stride,
        )

    def _cut_axes(self, spec: P) -> dict[tuple[str, ...], int]:
        """The axes of each dim of the DTensor's mesh, with the dim that they cut."""
        dims = {axes: dim for dim in range(len(self.entry.shape)) for axes in spec.cuts(dim)}
        return {axes: dim for axes, dim in dims.items() if self.registry.size(*axes) > 1}

    def _first_row(self, region: Region) -> int:
        """Of a region within this rank's local tensor."""
        return region.offsets[0] - self._region().offsets[0] if region.numel else 0

    def _region(self) -> Region:
        entry, registry = self.entry, self.registry
        assert entry.full_shape is not None
        return Region.of_shard(
            entry.full_shape, entry.shape, entry.spec, registry.topology, registry.coordinate, entry.name
        )

    def _together(self, parts: Mapping[int, Tensor]) -> Tensor:
        """The flattened local tensor, from the parts that the ranks of the axis have of it, by offset; bit for bit.

        Collectives: an object all-gather and an all-reduce over the axis.
        """
        assert self.cut_over is not None
        group = self.registry.group(*self.cut_over)
        dtypes: list[Any] = [None] * self.registry.size(*self.cut_over)
        dist.all_gather_object(dtypes, next((part.dtype for part in parts.values()), None), group=group)
        dtype = next(found for found in dtypes if found is not None)
        flat = torch.zeros(self.local.numel(), dtype=dtype, device=self.registry.device)
        for offset, part in parts.items():
            flat[offset : offset + part.numel()].copy_(part.reshape(-1))
        dist.all_reduce(flat.view(torch.uint8), group=group)  # one rank has each element, all others zeros
        return flat

    def local_part(self, value: Tensor) -> Tensor:
        """This rank's whole local tensor of a saved state. Collectives: where it is a DTensor of another layout, or cut."""
        if not has_dtensors((value,)):
            return value if value.shape == self.entry.shape else self._region().of(value)
        from torch.distributed.tensor import DTensor, Shard

        assert isinstance(value, DTensor)
        spec, region = self.spec_and_region()
        axes = self._cut_axes(spec)
        # By what all ranks know alike: pieces of another layout may have the shape of this one's.
        same = axes and value.device_mesh == self.registry.device_mesh(*axes)
        if not same or list(value.placements) != [Shard(dim) for dim in axes.values()]:
            return self._region().of(value.full_tensor())
        rows = value._local_tensor
        if self.cut_over is None:
            return rows
        parts = {self._first_row(region) * (rows.numel() // region.shape[0]): rows} if region.numel else {}
        return self._together(parts).view(self.entry.shape)
