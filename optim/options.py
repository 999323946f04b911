"""The arguments of `ParallelOptimizer`: their types, for those that pass them on, and errors that say what to write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, TypedDict, TypeVar

import torch
from torch import nn

from ..amp.by_name import Mode
from ..amp.precision import Precision
from ..parallel.mesh.agreement import on_all_ranks
from ..parallel.mesh.registry import ProcessGroupRegistry, check_registry
from .clip.given import Given
from .norm.measure import Measure
from .norm.stats import GradStats
from .states.link import Placement
from .step.data_parallel import Reduce
from .step.several import Several
from .step.skips import OnNonfinite

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

    data_parallel: nn.Module | Sequence[nn.Module] | Reduce | None
    max_norm: Given
    precision: Mode | Precision


# Errors ---------------------------------------------------------------------------------------------------------------

# What arguments of version 0.1 are called now.
_NOW = {
    "norm_type": "measure=Measure(norm_type=...)",
    "reduction": "measure=Measure(reduction=...)",
    "per_parameter_norms": "measure=Measure(per_parameter=True)",
    "check_replicas": "measure=Measure(check_replicas=True)",
    "clip_value": "max_norm=ByValue(...)",
    "average_data": "data_parallel=Reduce(average_data=False)",
    "shard_states": "states=Sharded('data')",
    "shard_gradients": "states=Sharded('data', gradients=True)",
    "offload": "states=Offloaded(0.5)",
    "max_skips_in_a_row": "on_nonfinite=Skip(most_in_a_row=...)",
}

# What the same thing is called in other libraries, and where to write what stands in an argument.
ELSEWHERE = {
    "commit": "measure=Measure(commit=...)",
    "max_grad_norm": "max_norm=...",
    "clip_grad_norm": "max_norm=...",
    "clip_grad": "max_norm=...",
    "gradient_clipping": "max_norm=...",
    "gradient_clip_val": "max_norm=...",
    "gradient_accumulation_steps": "accumulation_steps=...",
    "accumulate_grad_batches": "accumulation_steps=...",
    "mixed_precision": "precision=...",
    "dtype": "precision=...",
    "model": "data_parallel=..., where it is the model that averages gradients, and else leave it out",
}


def wrong_arguments(given: Iterable[str], optimizer: torch.optim.Optimizer, kind: type) -> TypeError | None:
    """The error for arguments that there are not, with what to write, or for an optimizer of the ``kind`` to be made; None
    where there is neither."""
    if isinstance(optimizer, kind):
        return TypeError(f"the optimizer is a {kind.__name__} already; wrap a plain torch optimizer")
    for name in given:
        known = sorted({*AllOptions.__annotations__, "accumulation_steps"})
        return renamed(name) or TypeError(f"ParallelOptimizer has no argument {name}=: {what_instead(name, known)}")
    return None


def what_instead(name: str, known: Sequence[str], elsewhere: Mapping[str, str] = ELSEWHERE) -> str:
    """What to write in the place of an argument that there is not, of those that there are."""
    if name in elsewhere:
        return f"write {elsewhere[name]}"
    if near := get_close_matches(name, known, n=1):
        return f"write {near[0]}=..."
    return f"there are {', '.join(known)}"


def as_one(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], registry: ProcessGroupRegistry
) -> torch.optim.Optimizer:
    """The torch optimizer, or several as one.

    Raises:
        TypeError, ValueError: It is none, or a list that can't be one; on every rank if it is right on some: they are in
            the constructor's first agreement then. TypeError: The registry is a process group or a mesh of torch.
    """

    check_registry(registry)

    def made() -> torch.optim.Optimizer:
        if isinstance(optimizer, (list, tuple)):
            return Several(optimizer)
        if isinstance(optimizer, torch.optim.Optimizer):
            return optimizer
        kind = type(optimizer).__name__
        raise TypeError(
            f"the optimizer is a {kind}, not a torch optimizer: make one of the parameters first, "
            "ParallelOptimizer(torch.optim.AdamW(model.parameters(), lr=...), registry)"
        )

    try:
        return made()
    except (TypeError, ValueError):
        return on_all_ranks(made, registry)


def renamed(name: str) -> TypeError | None:
    """The error for an argument that has another name now."""
    if name not in _NOW:
        return None
    return TypeError(f"{name}= was an argument in version 0.1; write {_NOW[name]}, all from meshstep.optim")


def check_loss(loss: object, call: str) -> None:
    """Raise TypeError for what is no tensor in place of a loss."""
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"{call}(loss) was given a {type(loss).__name__}: give the loss itself, a 0-dim tensor that backward can start "
            "from; of several losses their sum"
        )
