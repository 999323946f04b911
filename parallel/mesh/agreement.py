"""Checks that every rank makes together, so that an error on one rank is an error on all and nobody is left waiting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .call_tracker import check_same_call, current_call, in_call
from .process_group_collectives import all_gather_objects
from .registry import ProcessGroupRegistry

T = TypeVar("T")
V = TypeVar("V")


def gather_objects(value: T, registry: ProcessGroupRegistry) -> list[T]:
    """``value`` of every rank, by global rank. For set-up only: it pickles and waits for the host.

    Raises:
        RuntimeError: On every rank: ranks have met that are in different calls of this library.
    Collectives: those of `all_gather_objects` over the world: one round, two of large values, none on one rank. Host reads:
    yes.
    """
    if registry.topology.world_size == 1:
        return [value]
    with in_call(registry, "gather_objects"):
        world = registry.group(*registry.topology.axes)
        calls, values = zip(*all_gather_objects((current_call(), value), world, registry.device), strict=True)
        check_same_call(calls)
        return list(values)


def on_all_ranks(function: Callable[[], T], registry: ProcessGroupRegistry) -> T:
    """``function()``, whose error on any rank is raised on every rank.

    Every rank must call it at the same point; ``function`` must issue no collective.

    Raises:
        The rank's own error where it has one; else a ValueError, TypeError or RuntimeError with the rank and the text of
        the first one that failed: of the same type if it is one of these, and a RuntimeError that names the type if not.
    Collectives: those of `gather_objects`. Host reads: yes.
    """
    return on_all_ranks_with(lambda: (function(), None), registry)[0]


def on_all_ranks_with(function: Callable[[], tuple[T, V]], registry: ProcessGroupRegistry) -> tuple[T, list[V]]:
    """As `on_all_ranks`, of a function that returns what stays here and what all are told: this rank's, and what it told
    on each, by global rank. In the one gather that an error takes anyway."""
    try:
        (result, told), error = function(), None
    except Exception as caught:  # of any type: the other ranks must not wait for this one
        result, told, error = None, None, caught
    reports = gather_objects((told, None if error is None else (type(error).__name__, str(error))), registry)
    if error is not None:
        raise error
    for rank, (_, report) in enumerate(reports):
        if report is not None:
            kind, text = report
            if kind in _SAME_KIND:
                raise _SAME_KIND[kind](f"rank {rank}: {text}")
            raise RuntimeError(f"rank {rank}: {kind}: {text}")
    values: list[Any] = [value for value, _ in reports]
    return result, values  # type: ignore[return-value]


_SAME_KIND: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "TypeError": TypeError,
    "RuntimeError": RuntimeError,
}


def check_same(settings: Mapping[str, object], registry: ProcessGroupRegistry) -> None:
    """Compare settings by name over all ranks that have one of that name. Every rank must call it at the same point.

    Raises:
        ValueError: On every rank, with the first setting that differs and both values.
    Collectives: those of `gather_objects`. Host reads: yes.
    """
    check_all_say_the_same(gather_objects(described(settings), registry))


def described(settings: Mapping[str, object]) -> dict[str, str]:
    """Settings as texts, for `check_all_say_the_same`."""
    return {name: describe(value) for name, value in settings.items()}


def check_all_say_the_same(by_rank: Sequence[Mapping[str, str]]) -> None:
    """Raise ValueError, with the first of the settings that differs among those who have one of that name."""
    first: dict[str, tuple[int, str]] = {}
    for rank, said in enumerate(by_rank):
        for name, value in said.items():
            known, other = first.setdefault(name, (rank, value))
            if value != other:
                raise ValueError(
                    f"{name} is {other} on rank {known} and {value} on rank {rank}: give all ranks the same, or the "
                    "copies of the model drift apart"
                )


def describe(value: object, depth: int = 4) -> str:
    """What an argument is, as text that is the same in every process; 1 and 1.0 are the same."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else float.__repr__(value)
    if isinstance(value, Tensor):
        return describe(value.tolist()) if value.numel() <= 16 else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(describe(item, depth) for item in value)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {describe(item, depth)}' for key, item in sorted(value.items()))}}}"
    if value is None or isinstance(value, (bool, int, str, type)):
        return repr(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item") and type(item := value.item()) is not type(value):
        return describe(item)  # a number of numpy's
    if isinstance(value, nn.Module) or depth == 0:
        return type(value).__name__
    if is_dataclass(value):
        said = {field.name: getattr(value, field.name) for field in fields(value)}
    elif hasattr(value, "__dict__") and not callable(value):
        said = dict(sorted(vars(value).items()))
    else:
        return str(getattr(value, "__qualname__", value if isinstance(value, torch.dtype) else type(value).__name__))
    return f"{type(value).__name__}({', '.join(f'{name}={describe(item, depth - 1)}' for name, item in said.items())})"
