"""From the measured norms to what is done with the gradients.

    gradient to step with = gradient as it is * inverse * factor,      factor = rule(norms * inverse)

``inverse`` undoes what backward's gradients were multiplied by (the loss scale), and divides by the window's weight. A rule
sees the norms of the gradients as they will be stepped with, and so does whoever reads the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gradients.gradients import Gradients, Measure, Needs
from ..norm.global_norm import Level, Norms
from ..norm.stats import GradStats
from .policies import Clip
from .thresholds import AgreedThresholds


class Verdict(NamedTuple):
    """What a step does: it skips where ``stats.found_inf`` is 1, else multiplies all gradients by ``factor`` (None: by 1,
    or it has been done)."""

    stats: GradStats
    factor: Tensor | None


@dataclass(frozen=True)
class Clipping:
    """Measures gradients, in one collective, and applies a rule to them.

    Args:
        thresholds: Those of single param groups.
        measure: What is measured besides what a rule needs.
    """

    thresholds: AgreedThresholds
    measure: Measure

    def __call__(
        self,
        clip: Clip | None,
        gradients: Gradients,
        param_groups: Sequence[Mapping[str, Any]],
        slots: Tensor,
        inverse_of: Callable[[Tensor], Tensor | None],
        *,
        loss_scale: Tensor | None = None,
        now: bool = False,
    ) -> Verdict:
        """What is done with the gradients; it has been done where it is not one factor for all.

        Args:
            clip: None: measure only.
            gradients: As they are.
            param_groups: This rank's, which may have thresholds.
            slots: 1-dim; summed over all ranks in the same collective.
            inverse_of: From that sum what gradients and norms are multiplied by; 0-dim, None for 1.
            loss_scale: What is in the gradients, for the report.
            now: Unscale and clip in place, even where the factor could be folded into the update.
        Raises:
            ValueError: A group's threshold was changed, of which other ranks would not know.
        Collectives: one. Host reads: none.
        """
        norm_type = self.measure.norm_type if clip is None or clip.norm_type is None else clip.norm_type
        try:
            clip = self.thresholds.rule(clip, param_groups, norm_type)
        except ValueError:
            gradients.measure(Needs(norm_type), slots)  # thresholds by group need no more: the other ranks do not wait
            raise
        needs = Needs(norm_type) if clip is None else Needs(norm_type, clip.level, clip.weights, clip.unit_dim)
        norms = gradients.measure(needs, slots)
        inverse = inverse_of(norms.extra)
        inverse = None if inverse is None else inverse.to(norms.total)
        norms = norms.times(inverse)
        factors = None if clip is None else clip.factors(norms)
        shown = None if clip is None or factors is None else clip.shown(factors, norms)
        stats = self._stats(shown, norms, gradients, loss_scale)
        factor: Tensor | None = inverse
        level: Level = "total"
        if clip is not None and factors is not None:
            factors = torch.where(norms.total.isfinite(), factors, torch.ones_like(norms.total))
            factor, level = factors if inverse is None else factors * inverse, clip.level
        if factor is not None and (now or level != "total" or (clip is not None and clip.in_place)):
            gradients.multiply_(level, factor)
            factor = None
        if clip is not None and clip.in_place:
            clip.finish_(gradients.params)
        return Verdict(stats, factor)

    def _stats(self, shown: Tensor | None, norms: Norms, gradients: Gradients, loss_scale: Tensor | None) -> GradStats:
        finite, one = norms.total.isfinite(), torch.ones_like(norms.total)
        names = gradients.plan.parameter_names if self.measure.per_parameter else ()
        return GradStats(
            total_norm=norms.total,
            clip_coef=one if shown is None else torch.where(finite, shown, one),
            found_inf=finite.logical_not().float(),
            group_norms=norms.groups,
            loss_scale=None if loss_scale is None else loss_scale.clone(),
            parameter_norms=dict(zip(names, norms.parameters.unbind(), strict=True)) if names else {},
        )
