"""What ranks say of a step besides their gradients, in the collective that measures: whether it is to be made at all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..norm.measure import Commit
from ..norm.watch import Watch


class Ballot:
    """One rank's say, and the outcome; the same on all ranks.

    Args:
        commit: Asked on each rank, once for each update.
        watch: Of copies.
        device: Where votes are counted.

    Attributes:
        problem: What `commit` raised on this rank, or was wrong with its answer, in the last round: a veto elsewhere.
    """

    def __init__(self, commit: Commit | None, watch: Watch | None, device: torch.device) -> None:
        self.commit, self.watch, self.device = commit, watch, device
        self.problem: Exception | None = None

    def slots(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """What this rank adds, each 1-dim float64. Host reads: none."""
        votes = [] if self.commit is None else [self._vote(self.commit).view(1)]
        return votes if self.watch is None else votes + self.watch.slots(gradients)

    def _vote(self, commit: Commit) -> Tensor:
        """0-dim: 1 against the step, else 0."""
        self.problem = None
        try:
            answer = commit()
            if isinstance(answer, Tensor) and answer.dtype == torch.bool and answer.dim() == 0:
                if not answer.is_cpu:
                    return answer.logical_not().to(self.device, torch.float64, non_blocking=True)
                answer = bool(answer)  # it is here, and nobody waits
            if not isinstance(answer, bool):
                raise TypeError(f"commit= returned {answer!r}: return True or False, or a 0-dim tensor of dtype bool")
        except Exception as error:  # the others are in the collective, or will be
            self.problem, answer = error, False
        return torch.full((), float(not answer), dtype=torch.float64, device=self.device)

    def count(self, totals: Sequence[Tensor], finite: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(vetoed, parted), each 0-dim float32, from the sums of what `slots` gave.

        Args:
            finite: 0-dim bool: the gradients' norm is.
        """
        vetoed = None
        if self.commit is not None:
            vetoed, totals = (totals[0][0] > 0).float(), totals[1:]
        if self.watch is None:
            return vetoed, None
        self.watch.look(totals, finite)
        return vetoed, self.watch.parted
