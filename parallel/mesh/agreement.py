"""Checks that every rank makes together, so that an error on one rank is an error on all and nobody is left waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from .registry import ProcessGroupRegistry

T = TypeVar("T")


def gather_objects(value: T, registry: ProcessGroupRegistry) -> list[T]:
    """``value`` of every rank, by global rank. For set-up only: it pickles and waits for the host.

    Collectives: two all-gathers over the world (none on one rank). Host reads: yes.
    """
    world_size = registry.topology.world_size
    if world_size == 1:
        return [value]
    values: list[T | None] = [None] * world_size
    dist.all_gather_object(values, value, group=registry.group(*registry.topology.axes))
    return values  # type: ignore[return-value]


def on_all_ranks(function: Callable[[], T], registry: ProcessGroupRegistry) -> T:
    """``function()``, whose error on any rank is raised on every rank.

    Every rank must call it at the same point; ``function`` must issue no collective.

    Raises:
        The rank's own error where it has one; else a ValueError, TypeError or RuntimeError with the rank and the text of
        the first one that failed: of the same type if it is one of these, and a RuntimeError that names the type if not.
    Collectives: those of `gather_objects`. Host reads: yes.
    """
    try:
        result, error = function(), None
    except Exception as caught:  # of any type: the other ranks must not wait for this one
        result, error = None, caught
    reports = gather_objects(None if error is None else (type(error).__name__, str(error)), registry)
    if error is not None:
        raise error
    for rank, report in enumerate(reports):
        if report is not None:
            kind, text = report
            if kind in _SAME_KIND:
                raise _SAME_KIND[kind](f"rank {rank}: {text}")
            raise RuntimeError(f"rank {rank}: {kind}: {text}")
    return result  # type: ignore[return-value]


_SAME_KIND: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "TypeError": TypeError,
    "RuntimeError": RuntimeError,
}
