"""Counts of skipped steps on the device, and the decision to raise an error after too many skipped steps."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...parallel.mesh.deprecation import renamed_fields
from ...parallel.mesh.value_checks import check_count, is_whole
from ..clip.clipper import StepDecision
from .first_window_checks import SAY_SO
from .step_agreement import Facts

LAG = 16  # the host reads the counts of a step this many steps later
KINDS = 6  # number of counts
REPLICAS_DIVERGED = "replicas have diverged"
DISAGREED = "ranks disagree"


@renamed_fields(most_in_a_row="max_consecutive")
@dataclass(frozen=True)
class Skip:
    """A setting of ``on_nonfinite=``: skip steps with a non-finite gradient norm, and raise after too many in a row.

    All ranks skip and raise in the same step.

        optimizer = ParallelOptimizer(inner, registry, on_nonfinite=Skip(max_consecutive=10))

    Args:
        max_consecutive: The number of consecutive skipped steps after which an error is raised, an integer >= 1.
            Default 50. The error comes at most 16 steps late, because a step does not wait for the device.
    """

    max_consecutive: int = 50

    def check(self) -> None:
        """Raise ValueError if ``max_consecutive`` is not a whole number >= 1."""
        if not is_whole(self.max_consecutive, 1):
            raise ValueError(f"max_consecutive={self.max_consecutive!r}: give a whole number >= 1")


OnNonfinite = Literal["skip", "raise"] | Skip


def checked_nonfinite(on_nonfinite: OnNonfinite) -> OnNonfinite:
    if isinstance(on_nonfinite, Skip):
        on_nonfinite.check()
    elif on_nonfinite not in ("skip", "raise"):
        raise ValueError(f"on_nonfinite={on_nonfinite!r}: give 'skip', 'raise' or Skip(max_consecutive=...)")
    return on_nonfinite


def _too_many(in_a_row: int, on_nonfinite: OnNonfinite) -> str | None:
    most = on_nonfinite.max_consecutive if isinstance(on_nonfinite, Skip) else Skip.max_consecutive
    if in_a_row < most:
        return None
    return f"{in_a_row} steps in a row were skipped because the gradient norm was not finite"


def _is_one(flag: Tensor | None) -> bool:
    return flag is not None and bool(flag)


class SkipMonitor:
    """Counters of skipped steps, in total and by reason.

    There are six counts: skipped steps; consecutive steps with a non-finite norm until now; with a loss scale, steps
    whose loss was not multiplied by it ("bypassed", because backward bypassed the optimizer); steps that ``commit=``
    rejected; whether replicas have diverged (0 or 1); and steps in which settings differed between ranks ("ranks
    disagreed").

    The counts are on the device. Each step starts a copy to host memory without waiting for it. `count` reads the copy
    of `LAG` = 16 steps earlier, which has usually arrived. All ranks read the counts of the same step, so they decide
    equally.

    Attributes:
        facts: After `count` or `poll` returned `DISAGREED`: this rank's settings in the step in which ranks disagreed.
            None: they were not recorded.
    """

    def __init__(self, device: torch.device) -> None:
        # The counts are floats, because adding the float `found_inf` to integers would need a cast.
        self.counts = torch.zeros(KINDS, dtype=torch.float64, device=device)
        self._copies = torch.zeros(LAG, KINDS, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._arrived: list[torch.cuda.Event | None] = [None] * LAG
        self._step = 0
        self._sent: list[Facts | None] = [None] * LAG
        self.facts: Facts | None = None
        # This view is kept, because slicing in every step would cost more than the addition to it.
        self._total_and_in_a_row = self.counts[:2]
        self._total, self._in_a_row, self._bypassed, self._rejected, self._has_diverged, self._disagreed = (
            self.counts.unbind()
        )

    def count(
        self, decision: StepDecision, on_nonfinite: OnNonfinite, captured: bool, facts: Facts | None = None
    ) -> str | None:
        """Count one step before its update. The step is skipped if ``decision.skipped`` is 1.

        Return the reason for an error that ends training, such as `REPLICAS_DIVERGED`, equal on all ranks; None:
        training continues. If the loss was not multiplied by the loss scale, RuntimeError is raised on every rank. If a
        CUDA graph captures the step (``captured``), replays update the counts, and only `poll` reads them.

        Host synchronization: with ``"raise"``, one per checked flag (up to four), and one to read a non-finite norm.
            Otherwise the host only waits for the step `LAG` steps ago.
        """
        stats = decision.stats
        in_a_row, bypassed, diverged, disagreed = (0, 0, 0, 0) if captured else self._earlier_counts()
        then = self._sent[self._step % LAG]
        self._add(decision)
        if not captured:
            self._copy_to_host(facts)
        raises = on_nonfinite == "raise"
        if bypassed or (raises and _is_one(decision.bypassed)):
            raise self._bypass_error(
                f"The steps with these gradients were skipped, the first {LAG} steps ago"
                if bypassed
                else "This step was skipped"
            )
        if diverged or (raises and _is_one(stats.replicas_diverged)):
            return self._report_divergence()
        if disagreed:
            return self._report_disagreement(then)
        if raises and _is_one(stats.ranks_disagree):
            return self._report_disagreement(facts)
        if reason := _too_many(in_a_row, on_nonfinite):
            return reason
        if raises and bool(stats.found_inf):
            return f"the gradient norm is {float(stats.total_norm)}"
        return None

    def poll(self, on_nonfinite: OnNonfinite) -> str | None:
        """Return the reason for an error that ends training, or None, from the counts of all steps and replays until now.

        Raises:
            RuntimeError: On every rank: the loss of a step was not multiplied by the loss scale.
        Host synchronization: one.
        """
        _, in_a_row, bypassed, _, diverged, disagreed = map(int, self.counts.tolist())
        if bypassed:
            raise self._bypass_error("The steps with these gradients were skipped")
        if diverged:
            return self._report_divergence()
        if disagreed:
            steps = range(max(0, self._step - LAG), self._step)  # `tolist` has waited for these copies
            first = next((step % LAG for step in steps if self._copies[step % LAG, -1]), None)
            return self._report_disagreement(None if first is None else self._sent[first])
        return _too_many(in_a_row, on_nonfinite)

    def _report_divergence(self) -> str:
        self.counts[4] = self._step = 0
        return REPLICAS_DIVERGED

    def _report_disagreement(self, facts: Facts | None) -> str:
        self.counts[5] = self._step = 0
        self.facts = facts
        return DISAGREED

    def _bypass_error(self, skipped: str) -> RuntimeError:
        self.counts[2] = self._step = 0
        return RuntimeError(
            "some backward calls bypassed the optimizer: their loss was not multiplied by the loss scale, but step() "
            f"divides gradients by it. {skipped}; {SAY_SO}"
        )

    def _add(self, decision: StepDecision) -> None:
        stats, bypassed = decision.stats, decision.bypassed
        if decision.skipped is stats.found_inf:  # no other reason to skip: one kernel updates both counts
            self._total_and_in_a_row.add_(stats.found_inf)
        else:
            self._total.add_(decision.skipped)
            self._in_a_row.add_(stats.found_inf)
        self._in_a_row.mul_(stats.found_inf)
        if bypassed is not None:
            self._bypassed.add_(bypassed)
        if stats.rejected is not None:
            self._rejected.add_(stats.rejected)
        if stats.replicas_diverged is not None:
            self._has_diverged.copy_(stats.replicas_diverged)
        if stats.ranks_disagree is not None:
            self._disagreed.add_(stats.ranks_disagree)

    def _copy_to_host(self, facts: Facts | None) -> None:
        slot = self._step % LAG
        self._sent[slot] = facts
        self._copies[slot].copy_(self.counts, non_blocking=True)
        if self.counts.is_cuda:
            event = self._arrived[slot] = torch.cuda.Event()
            # The current device may differ from the device of the counts.
            event.record(torch.cuda.current_stream(self.counts.device))
        self._step += 1

    def _earlier_counts(self) -> tuple[int, int, int, int]:
        """Return four counts as of `LAG` steps ago; zeros in the first `LAG` steps.

        The counts are: consecutive steps with a non-finite norm, steps with bypassed gradients, whether replicas have
        diverged (0 or 1), and steps in which ranks disagreed. After `load_state_dict`, and after a report of divergence,
        disagreement or bypassed gradients, the first `LAG` steps begin again.
        """
        if self._step < LAG:
            return 0, 0, 0, 0
        slot = self._step % LAG
        event = self._arrived[slot]
        if event is not None:
            event.synchronize()
        copied = (ctypes.c_double * KINDS).from_address(self._copies.data_ptr() + slot * KINDS * 8)
        _, in_a_row, bypassed, _, diverged, disagreed = map(int, copied)
        return in_a_row, bypassed, diverged, disagreed

    def total(self) -> int:
        """Return the number of skipped steps. Host synchronization: one."""
        return int(self.counts[0])

    def rejected(self) -> int:
        """Return the number of steps that ``commit=`` rejected on any rank. Host synchronization: one."""
        return int(self.counts[3])

    def state_dict(self) -> dict[str, int]:
        """Return the counts that a resumed run continues. Host synchronization: one."""
        total, _, _, rejected, *_ = map(int, self.counts.tolist())
        return {"skipped_steps": total, "vetoed_steps": rejected}

    @staticmethod
    def check_state(state: Mapping[str, Any]) -> None:
        for name in ("skipped_steps", "vetoed_steps"):
            check_count(state.get(name, 0), name)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts.zero_()
        self.counts[0], self.counts[3] = state.get("skipped_steps", 0), state.get("vetoed_steps", 0)
        self._step = 0
