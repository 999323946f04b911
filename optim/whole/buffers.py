"""Flat memory for what travels between ranks, kept from one step to the next."""

from __future__ import annotations

import torch
from torch import Tensor


class Buffers:
    """One flat tensor for each use, as long as the longest that was asked for, until the next asks for the same use.

    Only on a CPU, where fresh memory costs a page fault for each 4 KiB that is written, more than what is written there. A
    GPU's allocator keeps memory itself, and lends it to whoever needs it between two steps.
    """

    def __init__(self) -> None:
        self._kept: dict[object, Tensor] = {}

    def flat(self, use: object, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[numel], with anything in it."""
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        numbytes = numel * dtype.itemsize
        kept = self._kept.get(use)
        if kept is None or kept.numel() < numbytes:
            kept = self._kept[use] = torch.empty(numbytes, dtype=torch.uint8, device=device)
        return kept[:numbytes].view(dtype)

    @property
    def numbytes(self) -> int:
        """What is kept."""
        return sum(kept.numel() for kept in self._kept.values())
