"""Logical tensors: what a checkpoint holds, whatever the layout of those who wrote it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...parallel.layout.pieces import Box, Region, Shape


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor of which this rank has parts: ``{offsets: part}``, rectangles that don't overlap."""

    shape: Shape
    dtype: torch.dtype
    parts: dict[Shape, Tensor]


@dataclass(frozen=True)
class Held:
    """What a rank has of a logical tensor, without its elements: rectangles of it."""

    shape: Shape
    dtype: torch.dtype
    boxes: tuple[Box, ...]

    def __str__(self) -> str:
        return f"a tensor of shape {self.shape}, {str(self.dtype)[6:]}"


def held_of(tensor: LogicalTensor) -> Held:
    """What this rank has of ``tensor``."""
    boxes = (Box(offsets, tuple(part.shape)) for offsets, part in tensor.parts.items())
    return Held(tensor.shape, tensor.dtype, tuple(boxes))


def part_of(region: Region, tensor: Tensor) -> LogicalTensor:
    """``tensor``, which has the region's elements in their order, as a part of the logical one."""
    return LogicalTensor(region.full_shape, tensor.dtype, region.parts(tensor))
