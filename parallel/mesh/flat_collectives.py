"""Collectives from one flat tensor into another, under the names that torch has for them since 2.13 or had before."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def all_gather_flat(whole: Tensor, own: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> Any:
    """Fill ``whole`` with all ranks' ``own``, one after the other. Both 1-dim. Returns the work, with ``async_op``."""
    return getattr(dist, ALL_GATHER)(whole, own, group=group, async_op=async_op)


def reduce_scatter_flat(own: Tensor, whole: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> Any:
    """Fill ``own`` with this rank's part of the sum of all ranks' ``whole``. Both 1-dim. Returns the work, with
    ``async_op``."""
    return getattr(dist, REDUCE_SCATTER)(own, whole, group=group, async_op=async_op)
