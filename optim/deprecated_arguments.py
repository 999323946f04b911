"""Deprecated arguments of `ParallelOptimizer`: ``measure=Measure(...)`` and ``data_parallel=Reduce(...)``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..parallel.mesh.call_tracker import level_of_caller
from .gradients.buckets import Exchange
from .norm.measure import CheckReplicas, Commit, Reduction


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

        ParallelOptimizer(adamw, registry, data_parallel=Reduce(overlap=True, exchange=Bf16Wire()))  # deprecated
        ParallelOptimizer(adamw, registry, overlap=True, compression=Bf16Wire())

    Args:
        overlap: Write ``overlap=``.
        average_data: Write ``average_data=``.
        exchange: Write ``compression=``.
        bucket_bytes: Write ``bucket_bytes=``.
    """

    overlap: bool = False
    average_data: bool = True
    exchange: Exchange | None = None
    bucket_bytes: int | None = None


_NEW_NAMES = {"per_parameter": "per_parameter_norms", "exchange": "compression"}


def replace_deprecated(options: dict[str, Any], other: dict[str, Any], caller: str) -> TypeError | None:
    """Set ``options`` to the values in a `Measure` and a `Reduce`, with a DeprecationWarning for each of the two.

    Args:
        options: Arguments by name, maybe a `Reduce` among them. One that has its default counts as not given.
        other: Keyword arguments of other names. A `Measure` is removed from it.
        caller: The class whose arguments these are, for the texts.
    Returns: The error for a value that is given in both ways; None if there is none.
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
    """Move the fields of ``record`` that differ from their defaults into ``options``."""
    given = {field.name: getattr(record, field.name) for field in fields(record)}
    defaults = {field.name: field.default for field in fields(record)}
    given = {key: value for key, value in given.items() if not _is_same(value, defaults[key])}
    new = {_NEW_NAMES.get(key, key): value for key, value in given.items()}
    old_text = f"{name}={type(record).__name__}({_text_of(given)})"
    for key, old_key in zip(new, given, strict=True):
        if key in options and not _is_same(options[key], defaults[old_key]):
            return TypeError(
                f"{key} is given twice, as {_text_of({key: options[key]})} and in {old_text}: leave it out of "
                f"{type(record).__name__}, which is deprecated"
            )
    write = f"write {_text_of(new)} instead" if new else f"leave {name} out"
    warnings.warn(f"{caller}({old_text}) is deprecated: {write}", DeprecationWarning, stacklevel=level_of_caller())
    options.update(new)
    return None


def _is_same(value: object, default: object) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))


def _text_of(arguments: Mapping[str, object]) -> str:
    """Return arguments as a call has them; a function by its name."""
    return ", ".join(f"{name}={getattr(value, '__name__', None) or repr(value)}" for name, value in arguments.items())
