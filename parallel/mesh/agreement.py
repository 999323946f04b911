"""Gather objects from all ranks, compare settings between ranks, and run a function on all ranks.

Every rank must call `gather_objects`, `on_all_ranks`, `on_all_ranks_with` and `check_same` at the same point. Other
functions are local. `on_all_ranks` raises an error of one rank on every rank, so that no rank waits for a failed rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .call_tracker import check_same_call, current_call, track_call
from .process_group_collectives import NotPicklableError, all_gather_objects
from .registry import ProcessGroupRegistry
from .value_checks import python_number

T = TypeVar("T")
V = TypeVar("V")


def gather_objects(value: T, registry: ProcessGroupRegistry) -> list[T]:
    """Gather ``value`` from every rank and return the list of values, indexed by global rank.

    Every rank must call this function at the same point. The host pickles the value and waits for all ranks. Use this
    function during set-up, not in every step.

        gather_objects(registry.global_rank, registry)  # [0]; on 2 ranks [0, 1]

    Args:
        value: Any object that `pickle` accepts.
        registry: Provides the process group of all ranks.
    Returns:
        One value per rank. With one rank the list holds ``value`` itself.
    Raises:
        TypeError: On every rank: `pickle` does not accept the value of a rank.
        RuntimeError: Ranks called this function from different public calls of this library (raised on every rank); or
            a collective failed.
    Collectives: one all-gather over the world, or two if a value is large; over gloo each is a gather and a broadcast.
    None with one rank.
    Host synchronization: yes, except with one rank.
    """
    if registry.topology.world_size == 1:
        return [value]
    with track_call("gather_objects", registry):
        world = registry.group(*registry.topology.axes)
        error = None
        try:
            gathered: list[Any] = all_gather_objects((current_call(), value), world, registry.device)
        except NotPicklableError as caught:  # raised before the collective, in which the other ranks wait
            error = caught
            gathered = all_gather_objects((current_call(), caught), world, registry.device)
        check_same_call([call for call, _ in gathered])
        if error is not None:
            raise error
        values = [found for _, found in gathered]
        for rank, found in enumerate(values):
            if isinstance(found, NotPicklableError):
                raise TypeError(f"rank {rank}: {found}")
        return values


def on_all_ranks(function: Callable[[], T], registry: ProcessGroupRegistry) -> T:
    """Call ``function()`` and return its result; an error on any rank is raised on every rank.

    Every rank must call this function at the same point.

        size = on_all_ranks(lambda: os.path.getsize(path), registry)  # a file that is missing on one rank stops all ranks

    Args:
        function: Takes no arguments, and must issue no collective.
        registry: Provides the process group of all ranks.
    Returns:
        The result of ``function()`` on this rank.
    Raises:
        Exception: ``function`` failed on this rank; its error is raised unchanged.
        ValueError, TypeError: ``function`` failed on other ranks only, and the error of the first of these ranks has
            this type. The message has the rank and the text of its error.
        RuntimeError: ``function`` failed on other ranks only, with any other error; the message has its rank and text.
            Also raised if a collective failed, or if ranks called this function from different public calls.
    Collectives: those of `gather_objects`.
    Host synchronization: yes, except with one rank.
    """
    return on_all_ranks_with(lambda: (function(), None), registry)[0]


def on_all_ranks_with(function: Callable[[], tuple[T, V]], registry: ProcessGroupRegistry) -> tuple[T, list[V]]:
    """Call ``function()``, which returns ``(result, value)``. Return this rank's result and the values of all ranks.

    An error on any rank is raised on every rank, as by `on_all_ranks`. ``function`` must issue no collective, and
    ``value`` must be picklable.

    Collectives and host synchronization: those of `gather_objects`.
    """
    result: Any = None
    value: Any = None
    error: Exception | None = None
    try:
        result, value = function()
    except Exception as caught:  # any type: without this rank, the other ranks would wait in the gather below
        error = caught
    reports = gather_objects((value, None if error is None else (type(error).__name__, str(error))), registry)
    if error is not None:
        raise error
    for rank, (_, report) in enumerate(reports):
        if report is not None:
            kind, text = report
            if kind in _SAME_KIND:
                raise _SAME_KIND[kind](f"rank {rank}: {text}")
            raise RuntimeError(f"rank {rank}: {kind}: {text}")
    return result, [value for value, _ in reports]


_SAME_KIND: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "TypeError": TypeError,
    "RuntimeError": RuntimeError,
}


def check_same(settings: Mapping[str, object], registry: ProcessGroupRegistry) -> None:
    """Raise ValueError on every rank if a setting has different values on two ranks.

    Every rank must call this function at the same point. A setting is compared only between the ranks that pass it.
    Two values count as equal if `describe` returns the same text for both.

    Collectives: those of `gather_objects`.
    Host synchronization: yes. With one rank, only if a setting has a tensor of at most 16 elements on a device.
    """
    check_all_say_the_same(gather_objects(described(settings), registry))


def described(settings: Mapping[str, object]) -> dict[str, str]:
    """Return the text of each setting, as `describe` returns it."""
    return {name: describe(value) for name, value in settings.items()}


def check_all_say_the_same(by_rank: Sequence[Mapping[str, str]]) -> None:
    """Raise ValueError for the first setting that differs between two ranks that have it.

    ``by_rank`` has, per global rank, the result of `described`.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, settings in enumerate(by_rank):
        for name, value in settings.items():
            first_rank, first_value = first.setdefault(name, (rank, value))
            if value != first_value:
                raise ValueError(
                    f"{name} is {first_value} on rank {first_rank} and {value} on rank {rank}: give the same value on all "
                    "ranks, or replicas diverge"
                )


def describe(value: object, depth: int = 4, reads_devices: bool = True) -> str:
    """Return a text for comparing an argument between ranks. Equal arguments of the same type have equal texts.

    The text of ints, floats, strings, lists, tuples, dicts and tensors of up to 16 elements has all their values; 1 and 1.0
    have the same text. A larger tensor is described by its shape, a dataclass or another object with a ``__dict__`` by its
    type name and its attributes, a function, a class or a `torch.dtype` by its name. An `nn.Module`, another callable
    object, an object of any other type, and an object nested deeper than ``depth`` are described by their type name.

    ``reads_devices=False`` gives every tensor on a device the same text. With True, a tensor on a device has the same text
    as on the CPU, and a tensor of at most 16 elements on a device needs a host synchronization.
    """
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else float.__repr__(value)
    if isinstance(value, Tensor):
        if not reads_devices and not value.is_cpu:
            return "a tensor on a device"
        return describe(value.tolist()) if value.numel() <= 16 else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(describe(item, depth, reads_devices) for item in value)})"
    if isinstance(value, Mapping):
        items = sorted(
            (describe(key, depth, reads_devices), describe(item, depth, reads_devices)) for key, item in value.items()
        )
        return f"{{{', '.join(f'{key}: {item}' for key, item in items)}}}"
    if value is None or isinstance(value, (bool, int, str, type)):
        return repr(value)
    if type(number := python_number(value)) is not type(value):
        return describe(number)
    if isinstance(value, nn.Module) or depth == 0:
        return type(value).__name__
    if is_dataclass(value):
        attributes = {field.name: getattr(value, field.name) for field in fields(value)}
    elif hasattr(value, "__dict__") and not callable(value):
        attributes = dict(sorted(vars(value).items()))
    else:
        return str(getattr(value, "__qualname__", value if isinstance(value, torch.dtype) else type(value).__name__))
    shown = ", ".join(f"{name}={describe(item, depth - 1, reads_devices)}" for name, item in attributes.items())
    return f"{type(value).__name__}({shown})"
