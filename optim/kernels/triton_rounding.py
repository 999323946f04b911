"""Launcher of the Triton kernel in `triton_rounding_kernel`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .device_constants import Tables
from .rounding_noise import LANES, ROWS
from .triton_rounding_kernel import CHUNK, round_chunks

_tables = Tables()


def round_by_triton(
    targets: Sequence[Tensor], sources: Sequence[Tensor], keys: array[int], numbers: array[int], step: int
) -> None:
    """Round contiguous float32 sources into contiguous bfloat16 targets with one launch.

    No tensor is empty. All tensors are on one device, which the kernel supports. ``keys`` has the key of each tensor's
    noise, and ``numbers`` the tensor's index among the tensors with this key.
    """
    device = targets[0].device
    addresses = [array("Q", [tensor.data_ptr() for tensor in tensors]) for tensors in (targets, sources)]
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        cut = _tables.chunks_of(array("q", [tensor.numel() for tensor in targets]), CHUNK, device)
        kernel: Any = round_chunks[(cut.count,)]
        kernel(
            *(_tables.of(table, device) for table in addresses),
            cut.numels,
            cut.chunks,
            _tables.of(keys, device),
            _tables.of(numbers, device),
            step,
            all(address % 16 == 0 for table in addresses for address in table),
            LANES,
            ROWS,
            CHUNK,
        )
