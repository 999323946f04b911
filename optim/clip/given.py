"""What may be given as ``max_norm=``, and what it asks of the plan."""

from __future__ import annotations

from collections.abc import Mapping

from ...parallel.mesh.registry import ProcessGroupRegistry
from ..norm.agreement import with_names
from ..norm.named import Named
from ..norm.norms import checked_norm_type
from ..norm.plan import ReductionPlan
from ..norm.units import Units
from .named import ByName, OfGroup
from .rule import ByNorm, Clip, Threshold
from .state import ClipState

Given = Threshold | Clip | Mapping[str, OfGroup] | None
"""A threshold of the global norm; another rule; thresholds or rules by pattern (`ByName`); None: measure only."""


def clip_of(max_norm: Given) -> Clip | None:
    """The rule that ``max_norm=`` stands for, checked.

    Raises:
        ValueError: An argument is out of range.
    """
    clip: Clip | None
    if max_norm is None or isinstance(max_norm, Clip):
        clip = max_norm
    elif isinstance(max_norm, Mapping):
        clip = ByName(max_norm)
    else:
        clip = ByNorm(max_norm)
    if clip is not None:
        clip.check()
        if clip.norm_type is not None:
            checked_norm_type(clip.norm_type)
    return clip


def in_use(max_norm: Given) -> ClipState | None:
    """The rule, with nothing remembered yet; raises as `clip_of`."""
    clip = clip_of(max_norm)
    return None if clip is None else ClipState(clip)


def planned_for(clip: Clip | None, plan: ReductionPlan, registry: ProcessGroupRegistry) -> ReductionPlan:
    """``plan``, with what the rule needs to know of it.

    Raises:
        ValueError: On every rank: it does not go with a parameter, or no parameter with it.
    Collectives: an object all-gather, where the rule speaks of parameters and their names have not been agreed.
    """
    if clip is None or not ClipState(clip).needs_names:
        return plan
    plan = plan if plan.parameter_names else with_names(plan, registry)
    if clip.level == "units":
        Units.of(plan, (), clip.unit_dim)
    if clip.level == "named":
        Named.of(plan.parameter_names, clip.patterns)
    return plan


def check_packed(clip: Clip | None, reduction: str) -> None:
    """Raise ValueError where a rule needs more than the other reduction measures."""
    if clip is not None and reduction != "packed" and (clip.weights or clip.level == "units"):
        raise ValueError(f"max_norm={clip!r} needs measure=Measure(reduction='packed'), in which everything travels")
