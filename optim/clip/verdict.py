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
        stats = replace(self.stats, found_inf=found_inf, **said)
        return self._replace(stats=stats, skipped=stats.skipped, factor=None, problem=earlier.problem)


class Divisor(NamedTuple):
    """What gradients are to be divided by, which only the sum over all ranks tells.

    Args:
        slots: 1-dim; summed over all ranks in the collective that measures.
        inverse: From that sum what gradients and norms are multiplied by; 0-dim, None for 1.
        loss_scale: The part of it that backward put in, for the report.
        is_missing: From that sum a 0-dim bool: nobody put it in, though there are gradients.
    """

    slots: Tensor
    inverse: Callable[[Tensor], Tensor | None]
    loss_scale: Tensor | None = None
    is_missing: Callable[[Tensor], Tensor] | None = None
