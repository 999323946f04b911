"""Steps that were skipped: how many are too many, counted on the device."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ...parallel.mesh.value_checks import check_count, is_whole
from ..clip.clipper import StepDecision
from .first_window_checks import SAY_SO
from .step_agreement import Facts

LAG = 16
KINDS = 6
PARTED = "copies have parted"
DISAGREED = "ranks disagree"


@dataclass(frozen=True)
class Skip:
    """Skip a step whose gradient norm is not finite, on every rank; so many in a row are an error on every rank.

    Args:
        most_in_a_row: >= 1; noticed at most `LAG` steps late, because nobody waits for the device.
    """

    most_in_a_row: int = 50

    def check(self) -> None:
        """Raise ValueError if it is out of range."""
        if not is_whole(self.most_in_a_row, 1):
            raise ValueError(f"most_in_a_row={self.most_in_a_row!r}: give a whole number >= 1")


OnNonfinite = Literal["skip", "raise"] | Skip


def checked_nonfinite(on_nonfinite: OnNonfinite) -> OnNonfinite:
    """``on_nonfinite``; ValueError where it is none of these."""
    if isinstance(on_nonfinite, Skip):
        on_nonfinite.check()
    elif on_nonfinite not in ("skip", "raise"):
        raise ValueError(f"on_nonfinite={on_nonfinite!r}: give 'skip', 'raise' or Skip(most_in_a_row=...)")
    return on_nonfinite


def _too_many(in_a_row: int, on_nonfinite: OnNonfinite) -> str | None:
    most = (on_nonfinite if isinstance(on_nonfinite, Skip) else Skip()).most_in_a_row
    if in_a_row < most:
        return None
    return f"{in_a_row} steps in a row were skipped because the gradient norm was not finite"


class SkipMonitor:
    """Counts of skipped steps: in all; in a row because of the norm; because gradients came past `backward`; because of a
    veto; whether copies have parted; and because ranks disagreed.

    The counts live on the device. Each step copies them to host memory without waiting, and `count` reads the
    copy that was made `LAG` steps earlier, which has arrived long since. All ranks read the same step's counts, so what
    they conclude is agreed.

    Attributes:
        facts: After `DISAGREED`: this rank's facts of the step in which the ranks disagreed.
    """

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(
            KINDS, dtype=torch.float64, device=device
        )  # no integers: found_inf would be cast first
        self._copies = torch.zeros(LAG, KINDS, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._arrived: list[torch.cuda.Event | None] = [None] * LAG
        self._step = 0
        self._sent: list[Facts | None] = [None] * LAG
        self.facts: Facts | None = None
        # Views that are made once: a slice per step costs more than the addition.
        self._total_and_in_a_row = self.counts[:2]
        self._total, self._in_a_row, self._past, self._vetoed, self._has_parted, self._disagreed = self.counts.unbind()

    def count(
        self, decision: StepDecision, on_nonfinite: OnNonfinite, captured: bool, facts: Facts | None = None
    ) -> str | None:
        """Count one step, which is skipped where ``decision.skipped`` is 1, before it is made.

        Args:
            captured: A CUDA graph is made of it: the counts go on in its replays, and `poll` looks at them.
            facts: What this rank sent in it to be compared.
        Returns:
            Why training should end here, if it should, `PARTED` say; the same on every rank.
        Raises:
            RuntimeError: On every rank: gradients came past `backward`, `LAG` steps ago; or now, with ``"raise"``.
        Host reads: one or two with ``"raise"``, else none.
        """
        stats = decision.stats
        in_a_row, past, parted, disagreed = (0, 0, 0, 0) if captured else self._before()
        then = self._sent[self._step % LAG]
        self._add(decision)
        if not captured:
            self._send(facts)
        if past or (on_nonfinite == "raise" and decision.past is not None and bool(decision.past)):
            raise self._came_past(f", the first one {LAG} steps ago" if past else ", this one")
        if parted or (on_nonfinite == "raise" and stats.parted is not None and bool(stats.parted)):
            return self._parted()
        if disagreed:
            return self._have_disagreed(then)
        if on_nonfinite == "raise" and stats.disagreed is not None and bool(stats.disagreed):
            return self._have_disagreed(facts)
        if reason := _too_many(in_a_row, on_nonfinite):
            return reason
        if on_nonfinite == "raise" and bool(stats.found_inf):
            return f"the gradient norm is {float(stats.total_norm)}"
        return None

    def poll(self, on_nonfinite: OnNonfinite) -> str | None:
        """As `count`, of all steps so far, those that a CUDA graph replayed among them. Host reads: one."""
        _, in_a_row, past, _, parted, disagreed = map(int, self.counts.tolist())
        if past:
            raise self._came_past("")
        if parted:
            return self._parted()
        if disagreed:
            steps = range(max(0, self._step - LAG), self._step)  # their counts have arrived with those that were read
            first = next((step % LAG for step in steps if self._copies[step % LAG, -1]), None)
            return self._have_disagreed(None if first is None else self._sent[first])
        return _too_many(in_a_row, on_nonfinite)

    def _parted(self) -> str:
        self.counts[4] = self._step = 0
        return PARTED

    def _have_disagreed(self, facts: Facts | None) -> str:
        self.counts[5] = self._step = 0
        self.facts = facts
        return DISAGREED

    def _came_past(self, since: str) -> RuntimeError:
        self.counts[2] = self._step = 0
        return RuntimeError(
            "gradients came whose loss was not multiplied by the loss scale that they would be divided by; steps with "
            f"them were skipped{since}: {SAY_SO}"
        )

    def _add(self, decision: StepDecision) -> None:
        stats, past = decision.stats, decision.past
        if decision.skipped is stats.found_inf:  # overflow is the only reason to skip: one kernel for both counts
            self._total_and_in_a_row.add_(stats.found_inf)
        else:
            self._total.add_(decision.skipped)
            self._in_a_row.add_(stats.found_inf)
        self._in_a_row.mul_(stats.found_inf)
        if past is not None:
            self._past.add_(past)
        if stats.vetoed is not None:
            self._vetoed.add_(stats.vetoed)
        if stats.parted is not None:
            self._has_parted.copy_(stats.parted)
        if stats.disagreed is not None:
            self._disagreed.add_(stats.disagreed)

    def _send(self, facts: Facts | None) -> None:
        """To the host, without waiting."""
        slot = self._step % LAG
        self._sent[slot] = facts
        self._copies[slot].copy_(self.counts, non_blocking=True)
        if self.counts.is_cuda:
            event = self._arrived[slot] = torch.cuda.Event()
            # Not the stream of the current device, which may be another device than that of the counts.
            event.record(torch.cuda.current_stream(self.counts.device))
        self._step += 1

    def _before(self) -> tuple[int, int, int, int]:
        """Steps skipped in a row, because gradients came past, whether copies had parted, and steps skipped because ranks
        disagreed, as of `LAG` steps before this one; 0 at first."""
        if self._step < LAG:
            return 0, 0, 0, 0
        slot = self._step % LAG
        event = self._arrived[slot]
        if event is not None:
            event.synchronize()
        copied = (ctypes.c_double * KINDS).from_address(self._copies.data_ptr() + slot * KINDS * 8)
        _, in_a_row, past, _, parted, disagreed = map(int, copied)
        return in_a_row, past, parted, disagreed

    def total(self) -> int:
        """Skipped steps in all. Host reads: one."""
        return int(self.counts[0])

    def vetoed(self) -> int:
        """Those of them that some rank refused. Host reads: one."""
        return int(self.counts[3])

    def state_dict(self) -> dict[str, int]:
        """What a run that is continued goes on counting. Host reads: one."""
        total, _, _, vetoed, *_ = map(int, self.counts.tolist())
        return {"skipped_steps": total, "vetoed_steps": vetoed}

    @staticmethod
    def check_state(state: Mapping[str, Any]) -> None:
        """Raise ValueError where a count in ``state`` is none."""
        for name in ("skipped_steps", "vetoed_steps"):
            check_count(state.get(name, 0), name)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start again from there, with none in a row; what is missing, as older states lack vetoes, is 0."""
        self.counts.zero_()
        self.counts[0], self.counts[3] = state.get("skipped_steps", 0), state.get("vetoed_steps", 0)
        self._step = 0
