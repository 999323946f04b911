"""The arguments of `ParallelOptimizer`: types of ``**options``, unknown names, and deprecated spellings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import torch
from torch import nn

from ..amp.modes import Mode, Precision
from ..parallel.mesh.deprecation import warn_deprecated
from .clip.rules import ClipSpec
from .gradients.buckets import CommHook
from .norm.measure import CheckReplicas, Commit, GradStats, Reduction
from .states.param_transform import StatePlacement
from .step.data_parallel import SumOrder
from .step.first_window_checks import OnMissingParams
from .step.skips import OnNonfinite

# Types of options -----------------------------------------------------------------------------------------------------

# `StepOptions` and `AllOptions` are the types of ``**options`` in functions that pass them on to `ParallelOptimizer`.
#
# `Stats_co` is the return type of `ParallelOptimizer.step`. With ``accumulation_steps`` it includes None, the result before
# the last micro-batch of an accumulation window.
if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    Stats_co = TypeVarWithDefault("Stats_co", covariant=True, default=GradStats | None)
else:
    Stats_co = TypeVar("Stats_co", covariant=True)


class StepOptions(TypedDict, total=False):
    """The arguments of `ParallelOptimizer` that `Booster` accepts as ``**options``."""

    norm_type: float
    reduction: Reduction
    per_parameter_norms: bool
    overlap: bool
    compression: CommHook | None
    bucket_bytes: int | None
    states: StatePlacement | Sequence[StatePlacement]
    check_replicas: CheckReplicas
    commit: Commit | None
    on_nonfinite: OnNonfinite
    on_missing_params: OnMissingParams
    sum_order: SumOrder


class AllOptions(StepOptions, total=False):
    """The keyword arguments of `ParallelOptimizer`, except ``accumulation_steps``.

    The constructor's overloads list ``accumulation_steps`` separately, because it decides the return type of `step`.
    """

    data_parallel: nn.Module | Sequence[nn.Module] | None
    average_data: bool
    max_norm: ClipSpec
    precision: Mode | Precision


# Unknown arguments ----------------------------------------------------------------------------------------------------

# Names of arguments in other libraries or in earlier versions, with the text that an error tells the user to write.
ELSEWHERE = {
    "measure": "the arguments of Measure as arguments of their own, norm_type=..., check_replicas=... and so on",
    "offload": "states=Offloaded(0.5)",
    "cpu_offload": "states=Offloaded(1.0)",
    "zero_stage": "states=Sharded('data'), or Sharded('data', gradients=True) for stage 2",
    "exchange": "compression=...",
    "comm_hook": "compression=...",
    "overlap_grad_reduce": "overlap=True",
    "bucket_cap_mb": "bucket_bytes=...",
    "max_grad_norm": "max_norm=...",
    "clip_grad_norm": "max_norm=...",
    "clip_grad": "max_norm=...",
    "gradient_clipping": "max_norm=...",
    "gradient_clip_val": "max_norm=...",
    "gradient_accumulation_steps": "accumulation_steps=...",
    "accumulate_grad_batches": "accumulation_steps=...",
    "mixed_precision": "precision=...",
    "dtype": "precision=...",
    "model": "data_parallel=model if the model is a DistributedDataParallel or fully_shard module, else leave it out",
}


def wrong_arguments(given: Iterable[str], optimizer: torch.optim.Optimizer, kind: type) -> TypeError | None:
    """Return a TypeError if ``optimizer`` is already wrapped, or for the first unknown argument in ``given``; else None."""
    if isinstance(optimizer, kind):
        return TypeError(f"the optimizer is a {kind.__name__} already; wrap a plain torch optimizer")
    for name in given:
        known = sorted({*AllOptions.__annotations__, "accumulation_steps"})
        return TypeError(f"ParallelOptimizer has no argument {name}=: {what_instead(name, known)}")
    return None


def what_instead(name: str, known: Sequence[str], elsewhere: Mapping[str, str] = ELSEWHERE) -> str:
    """Return advice for the unknown argument ``name``: the argument to write instead, or all known arguments."""
    if name in elsewhere:
        return f"write {elsewhere[name]}"
    if near := get_close_matches(name, known, n=1):
        return f"write {near[0]}=..."
    return f"the arguments are {', '.join(known)}"


# Deprecated arguments: ``measure=Measure(...)`` and ``data_parallel=Reduce(...)`` -------------------------------------


@dataclass(frozen=True)
class Measure:
    """Deprecated: give these values to `ParallelOptimizer` as arguments of their own.

        ParallelOptimizer(adamw, registry, measure=Measure(per_parameter=True, check_replicas=False))  # deprecated
        ParallelOptimizer(adamw, registry, per_parameter_norms=True, check_replicas=False)

    Args:
        norm_type: Write ``norm_type=``.
        reduction: Write ``reduction=``.
        per_parameter: Write ``per_parameter_norms=``.
        check_replicas: Write ``check_replicas=``.
        commit: Write ``commit=``.
    """

    norm_type: float = 2.0
    reduction: Reduction = "packed"
    per_parameter: bool = False
    check_replicas: CheckReplicas = "first"
    commit: Commit | None = None


@dataclass(frozen=True)
class Reduce:
    """Deprecated: give these values to `ParallelOptimizer` as arguments of their own.

        ParallelOptimizer(adamw, registry, data_parallel=Reduce(overlap=True, exchange=Bf16Compression()))  # deprecated
        ParallelOptimizer(adamw, registry, overlap=True, compression=Bf16Compression())

    Args:
        overlap: Write ``overlap=``.
        average_data: Write ``average_data=``.
        exchange: Write ``compression=``.
        bucket_bytes: Write ``bucket_bytes=``.
    """

    overlap: bool = False
    average_data: bool = True
    exchange: CommHook | None = None
    bucket_bytes: int | None = None


_NEW_NAMES = {"per_parameter": "per_parameter_norms", "exchange": "compression"}


def replace_deprecated(options: dict[str, Any], other: dict[str, Any], caller: str) -> TypeError | None:
    """Copy the values of a `Measure` and of a `Reduce` into ``options``, with a DeprecationWarning for each object.

    Return the error for a value that is given both in ``options`` and in a `Measure` or `Reduce`; None if there is
    none. An argument with its default value counts as not given.
    """
    error = None
    if isinstance(measure := other.get("measure"), Measure):
        del other["measure"]
        error = _replace(options, "measure", measure, caller)
    if isinstance(reduce := options.get("data_parallel"), Reduce):
        options["data_parallel"] = None
        error = error or _replace(options, "data_parallel", reduce, caller)
    return error


def _replace(options: dict[str, Any], name: str, record: Measure | Reduce, caller: str) -> TypeError | None:
    """Copy the fields of ``record`` that differ from their defaults into ``options``, with a DeprecationWarning.

    If ``options`` has a value other than the default for such a field, return a TypeError and change nothing.
    """
    defaults = {field.name: field.default for field in fields(record)}
    given = {key: value for key, value in vars(record).items() if not _is_same(value, defaults[key])}
    new = {_NEW_NAMES.get(key, key): value for key, value in given.items()}
    old_text = f"{name}={type(record).__name__}({_text_of(given)})"
    for old_key in given:
        key = _NEW_NAMES.get(old_key, old_key)
        if key in options and not _is_same(options[key], defaults[old_key]):
            return TypeError(
                f"{key} is given twice, as {_text_of({key: options[key]})} and in {old_text}: leave {old_key} out of "
                f"{type(record).__name__}(...), which is deprecated"
            )
    write = f"write {_text_of(new)} instead" if new else f"leave {name} out"
    warn_deprecated(f"{caller}({old_text})", write)
    options.update(new)
    return None


def _is_same(value: object, default: object) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))


def _text_of(arguments: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={getattr(value, '__name__', None) or repr(value)}" for name, value in arguments.items())
