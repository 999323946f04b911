"""The types of what a `ParallelOptimizer` is given beside the optimizer and its registry, for those that pass it on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict, TypeVar

from torch import nn

from ..amp.by_name import Mode
from ..amp.precision import Precision
from .clip.policies import Clip
from .norm.measure import Measure
from .norm.stats import GradStats
from .states.link import Placement
from .step.data_parallel import Reduce
from .step.update import OnNonfinite

# What `step` returns: GradStats; with managed accumulation None as well, in the middle of a window.
if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    Stats_co = TypeVarWithDefault("Stats_co", covariant=True, default=GradStats | None)
else:
    Stats_co = TypeVar("Stats_co", covariant=True)


class StepOptions(TypedDict, total=False):
    """The arguments of `ParallelOptimizer` that a `Booster` passes on as they are."""

    states: Placement | Sequence[Placement]
    measure: Measure
    on_nonfinite: OnNonfinite


class AllOptions(StepOptions, total=False):
    """All but ``accumulation_steps``, by which the type of `step` is told."""

    data_parallel: nn.Module | Reduce | None
    max_norm: float | Clip | None
    precision: Mode | Precision
