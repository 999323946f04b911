"""Count skipped steps on the device, and notice too many in a row without ever waiting for it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..norm.stats import GradStats

LAG = 16


class SkipMonitor:
    """Counts of skipped steps: in all, and in a row.

    The counts live on the device. Each step copies them to host memory without waiting, and `in_a_row_before` reads the
    copy that was made `LAG` steps earlier, which has arrived long since. All ranks read the same step's counts, so what
    they conclude is agreed.
    """

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        self._copies = torch.zeros(LAG, 2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._arrived: list[torch.cuda.Event | None] = [None] * LAG
        self._step = 0

    def update(self, found_inf: Tensor) -> None:
        """Count one step. Args: found_inf: 0-dim, 1 when it was skipped. Host reads: none."""
        skipped = found_inf.to(torch.int64)
        self.counts.add_(skipped)
        self.counts[1].mul_(skipped)
        if self.counts.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        slot = self._step % LAG
        self._copies[slot].copy_(self.counts, non_blocking=True)
        if self.counts.is_cuda:
            self._arrived[slot] = torch.cuda.Event()
            self._arrived[slot].record()  # type: ignore[union-attr]
        self._step += 1

    def in_a_row_before(self) -> int:
        """Skipped steps in a row as of `LAG` steps before this one; 0 in the first steps."""
        if self._step < LAG:
            return 0
        slot = self._step % LAG
        event = self._arrived[slot]
        if event is not None:
            event.synchronize()
        address = self._copies.data_ptr() + slot * 2 * 8 + 8
        return ctypes.c_int64.from_address(address).value

    def total(self) -> int:
        """Skipped steps in all. Host reads: one."""
        return int(self.counts[0])

    def restore(self, total: int) -> None:
        """Start again from ``total`` skipped steps and none in a row."""
        self.counts[0], self.counts[1] = total, 0
        self._step = 0


@dataclass(frozen=True)
class Skip:
    """Skip a step whose gradient norm is not finite, on every rank; so many in a row are an error on every rank.

    Args:
        most_in_a_row: >= 1; noticed at most `LAG` steps late, because nobody waits for the device.
    """

    most_in_a_row: int = 50

    def check(self) -> None:
        """Raise ValueError if it is out of range."""
        if self.most_in_a_row < 1:
            raise ValueError(f"most_in_a_row={self.most_in_a_row}: give a number >= 1")


OnNonfinite = Literal["skip", "raise"] | Skip


def checked_nonfinite(on_nonfinite: OnNonfinite) -> OnNonfinite:
    """``on_nonfinite``; ValueError where it is none of these."""
    if isinstance(on_nonfinite, Skip):
        on_nonfinite.check()
    elif on_nonfinite not in ("skip", "raise"):
        raise ValueError(f"on_nonfinite={on_nonfinite!r}: give 'skip', 'raise' or Skip(most_in_a_row=...)")
    return on_nonfinite


def reason_to_stop(on_nonfinite: OnNonfinite, monitor: SkipMonitor, stats: GradStats) -> str | None:
    """Why training should end here, if it should; the same on every rank. Host reads: one with ``"raise"``, else none."""
    most = (on_nonfinite if isinstance(on_nonfinite, Skip) else Skip()).most_in_a_row
    in_a_row = monitor.in_a_row_before()
    if in_a_row >= most:
        return f"{in_a_row} steps in a row were skipped because the gradient norm was not finite"
    if on_nonfinite == "raise" and bool(stats.found_inf):
        return f"the gradient norm is {float(stats.total_norm)}"
    return None
