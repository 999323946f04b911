"""Split an optimizer's step into several calls. Each call updates one bucket, which is a subset of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Bucket = Sequence[list[Tensor]]
"""The parameters of one bucket: one list per param group of the optimizer."""

holders: list[torch.optim.Optimizer] = []
"""Optimizers that are in a `holding` block, in which their param groups contain the parameters of one bucket only.

Code that caches parameters by param group must not cache these param groups, because they are temporary.
"""


def split_runs(items: Iterable[T], numel: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield lists of consecutive items that have at most ``most`` elements together. A larger item gets its own list."""
    run, held = list[T](), 0
    for item in items:
        size = numel(item)
        if run and held + size > most:
            yield run
            run, held = [], 0
        run.append(item)
        held += size
    if run:
        yield run


def split_groups(
    groups: Iterable[Sequence[Tensor]], is_split: Callable[[Tensor], bool], most: int, *, by_device: bool = False
) -> list[Bucket]:
    """Return the buckets of the tensors in ``groups``, which has the tensors of each param group; at least one bucket.

    A bucket has tensors for which ``is_split`` returns True, of up to ``most`` elements together, or one larger tensor. The
    first bucket also has all other tensors. With ``by_device``, the split tensors of a bucket are on one device.
    """
    groups = [*groups]
    buckets: list[Bucket] = [[[tensor for tensor in group if not is_split(tensor)] for group in groups]]
    numel, device = 0, None
    for index, group in enumerate(groups):
        for tensor in filter(is_split, group):
            # The devices are compared even if `numel` is 0, because the bucket may hold only empty tensors.
            if (numel and numel + tensor.numel() > most) or (by_device and device not in (None, tensor.device)):
                buckets.append([[] for _ in groups])
                numel = 0
            buckets[-1][index].append(tensor)
            numel, device = numel + tensor.numel(), tensor.device
    return buckets


def step_by_bucket(
    optimizer: torch.optim.Optimizer, buckets: Iterable[Bucket], step: Callable[[Bucket], object]
) -> None:
    """Call ``step(bucket)`` once per bucket, with param groups that contain only the bucket's parameters.

    A param group of some optimizers (schedule-free ones) has a step counter, which must advance once per step and not once
    per bucket. Before each bucket, all entries of the param groups except ``"params"`` are therefore set to their values
    from before the first bucket. This resets Python numbers, but not a tensor that the optimizer changes in place.
    """
    groups = optimizer.param_groups
    before: list[tuple[dict[str, Any], dict[str, Any]]] = [(group, dict(group)) for group in groups]
    for bucket in buckets:
        for group, entries in before:
            group.update(entries)
        with holding(optimizer, bucket):
            step(bucket)


@contextmanager
def holding(optimizer: torch.optim.Optimizer, bucket: Bucket) -> Iterator[None]:
    """Context manager in which the optimizer's param groups contain only the parameters of ``bucket``."""
    before = [(group, group["params"]) for group in optimizer.param_groups]
    holders.append(optimizer)
    try:
        for (group, _), params in zip(before, bucket, strict=True):
            group["params"] = params
        yield
    finally:
        holders.pop()
        for group, params in before:
            group["params"] = params
