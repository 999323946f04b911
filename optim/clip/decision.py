"""From the measured norms to what is done with the gradients: one factor for all, or one for each param group.

    gradient to step with = gradient as it is * inverse * coef,     coef = min(1, max_norm / (norm * inverse + 1e-6))

``inverse`` undoes what backward's gradients were multiplied by (the loss scale). It is folded into the same factor, and
every norm that is reported or compared with a threshold is the unscaled one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..norm.global_norm import Norms
from ..norm.stats import GradStats
from .functional import clip_coefficient


class Decision(NamedTuple):
    """What a step does: ``factor`` multiplies all gradients (None: 1); where param groups have thresholds of their own,
    ``group_factors`` has one factor for each instead."""

    stats: GradStats
    factor: Tensor | None
    group_factors: list[Tensor] | None


def decide(
    norms: Norms,
    inverse: Tensor | None,
    max_norm: float | None,
    group_thresholds: Sequence[float | None],
    norm_type: float,
    names: Sequence[str] = (),
) -> Decision:
    """Clip by the unscaled norm, or skip where it is not finite.

    Args:
        norms: As measured, of the gradients as they are.
        inverse: 0-dim, > 0; None for 1.
        max_norm: For all gradients, but for the groups that have a threshold; None: no clipping.
        group_thresholds: For each param group of this rank its own threshold, or None.
        norm_type: The p of the norms.
        names: Of the parameters in ``norms.parameters``.
    Collectives: none. Host reads: none.
    """
    if inverse is not None:
        inverse = inverse.to(norms.total)
        norms = Norms(norms.total * inverse, norms.groups * inverse, norms.parameters * inverse, norms.extra)
    common = None if max_norm is None else clip_coefficient(norms.total, max_norm)
    group_factors = None
    if any(threshold is not None for threshold in group_thresholds):
        common, group_factors = _by_group(norms, max_norm, group_thresholds, norm_type)
        if inverse is not None:
            group_factors = [factor * inverse for factor in group_factors]
    stats = GradStats(
        total_norm=norms.total,
        clip_coef=torch.ones_like(norms.total) if common is None else common,
        found_inf=norms.total.isfinite().logical_not().float(),
        group_norms=norms.groups,
        parameter_norms=dict(zip(names, norms.parameters.unbind(), strict=True)) if names else {},
    )
    factor = inverse if common is None else common if inverse is None else common * inverse
    return Decision(stats, None if group_factors else factor, group_factors)


def _by_group(
    norms: Norms, max_norm: float | None, thresholds: Sequence[float | None], norm_type: float
) -> tuple[Tensor, list[Tensor]]:
    """The coefficient of the groups without a threshold, which are clipped by their norm together; and all of them."""
    by_group = norms.groups.unbind()
    # A rank may have fewer groups than there are: the norms of the others still belong to the common one.
    others = [norm for i, norm in enumerate(by_group) if i >= len(thresholds) or thresholds[i] is None]
    one = torch.ones_like(norms.total)
    common = one
    if max_norm is not None and others:
        common = clip_coefficient(torch.linalg.vector_norm(torch.stack(others), norm_type), max_norm)
    factors = []
    for norm, threshold in zip(by_group, thresholds, strict=False):
        coef = common if threshold is None else clip_coefficient(norm, threshold)
        factors.append(torch.where(norms.total.isfinite(), coef, one))
    return common, factors
