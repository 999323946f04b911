"""What a step does, and what its gradients are still to be divided by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..norm.stats import GradStats


class Verdict(NamedTuple):
    """What a step does: it skips where ``skipped`` is 1, else multiplies all gradients by ``factor`` (None: by 1, or it
    has been done).

    Args:
        skipped: ``stats.skipped``.
        past: 0-dim bool: it skips because gradients came past `backward`. None: they may come as they like.
        problem: What ``commit=`` raised on this rank.
    """

    stats: GradStats
    skipped: Tensor
    factor: Tensor | None
    past: Tensor | None = None
    problem: Exception | None = None

    def after(self, earlier: Verdict) -> Verdict:
        """Of a second clip in one window, which must not hide what the first one found."""
        found_inf = torch.maximum(self.stats.found_inf, earlier.stats.found_inf)
        said = {name: getattr(earlier.stats, name) for name in ("vetoed", "parted", "spiked")}
        disagreed, before = self.stats.disagreed, earlier.stats.disagreed
        if disagreed is None or before is None:
            disagreed = before if disagreed is None else disagreed
        else:
            disagreed = disagreed | before
        stats = replace(self.stats, found_inf=found_inf, disagreed=disagreed, **said)
        return self._replace(stats=stats, skipped=stats.skipped, factor=None, problem=earlier.problem)


class Divisor(NamedTuple):
    """What gradients are to be divided by, which only the sum over all ranks tells.

    Args:
        slots: 1-dim; summed over all ranks in the collective that measures. First those of the window's weight.
        scale: The loss scale that is still in them; None: there is none, or it has been undone.
        stages: So many slots hold the weight, see `weight_slots`; 0: nobody gave any.
        data_ranks: Over so many gradients have been averaged.
        loss_scale: What backward put in, for the report.
        is_missing: From the sum of the slots a 0-dim bool: nobody put it in, though there are gradients.
        mean_of: What gradients are divided by where no rank gave a weight.
        agreement: The slot of a `StepAgreement`, whose sum is 0 where ranks agree; None: there is none.
    """

    slots: Tensor
    scale: Tensor | None = None
    stages: int = 0
    data_ranks: int = 1
    loss_scale: Tensor | None = None
    is_missing: Callable[[Tensor], Tensor] | None = None
    mean_of: int = 1
    agreement: int | None = None
