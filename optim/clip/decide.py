"""From the measured norms to what is done with the gradients.

    gradient to step with = gradient as it is * inverse * factor,      factor = rule(norms * inverse)

``inverse`` undoes what backward's gradients were multiplied by (the loss scale), and divides by the window's weight. A rule
sees the norms of the gradients as they will be stepped with, and so does whoever reads the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..gradients.gradients import Gradients
from ..norm.global_norm import Norms
from ..norm.stats import GradStats
from .policies import Clip


class Verdict(NamedTuple):
    """What a step does: it skips where ``stats.found_inf`` is 1, else multiplies all gradients by ``factor`` (None: by 1,
    or it has been done)."""

    stats: GradStats
    factor: Tensor | None


def decide(
    clip: Clip | None,
    norms: Norms,
    inverse: Tensor | None,
    gradients: Gradients,
    *,
    now: bool = False,
    names: Sequence[str] = (),
    loss_scale: Tensor | None = None,
) -> Verdict:
    """Apply a rule to what was measured, in place where it is not one factor for all.

    Args:
        clip: None: measure only.
        norms: Of the gradients as they are.
        inverse: 0-dim; None for 1.
        gradients: Those that were measured.
        now: Unscale and clip in place, even where the factor could be folded into the update.
        names: Of the parameters in ``norms.parameters``, where they are to be reported.
        loss_scale: What was in the gradients, for the report.
    Collectives: none. Host reads: none.
    """
    inverse = None if inverse is None else inverse.to(norms.total)
    norms = norms.times(inverse)
    one = torch.ones_like(norms.total)
    finite = norms.total.isfinite()
    factors = None if clip is None else clip.factors(norms)
    stats = GradStats(
        total_norm=norms.total,
        clip_coef=one if clip is None or factors is None else torch.where(finite, clip.shown(factors, norms), one),
        found_inf=finite.logical_not().float(),
        group_norms=norms.groups,
        loss_scale=None if loss_scale is None else loss_scale.clone(),
        parameter_norms=dict(zip(names, norms.parameters.unbind(), strict=True)) if names else {},
    )
    if factors is None:
        factor, level = inverse, "total"
    else:
        factors = torch.where(finite, factors, one)
        factor, level = factors if inverse is None else factors * inverse, clip.level if clip else "total"
    if factor is not None and (now or level != "total" or (clip is not None and clip.in_place)):
        gradients.multiply_(level, factor)
        factor = None
    if clip is not None:
        clip.finish_(gradients.params)
    return Verdict(stats, factor)
