"""Logical tensors: what a checkpoint holds, whatever the layout of those who wrote it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...parallel.layout.pieces import Region, Shape


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor of which this rank has parts: ``{offsets: part}``, rectangles that don't overlap."""

    shape: Shape
    dtype: torch.dtype
    parts: dict[Shape, Tensor]


@dataclass(frozen=True)
class Stored:
    """What is known of a stored tensor without reading it."""

    shape: Shape
    dtype: torch.dtype


def part_of(region: Region, tensor: Tensor) -> LogicalTensor:
    """``tensor``, which has the region's elements in their order, as a part of the logical one."""
    return LogicalTensor(region.full_shape, tensor.dtype, region.parts(tensor))
