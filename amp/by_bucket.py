"""Make an optimizer step in several calls. Each call updates one bucket, a subset of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Bucket = Sequence[list[Tensor]]
"""One list of parameters per param group."""

holders: list[torch.optim.Optimizer] = []
"""Optimizers whose param groups are currently restricted to a bucket. Caches must not keep these param groups."""


def step_by_bucket(
    optimizer: torch.optim.Optimizer, buckets: Iterable[Bucket], step: Callable[[Bucket], object]
) -> None:
    """Call ``step`` once per bucket, with param groups that contain only the bucket's parameters.

    Before every call, the entries of the param groups are reset to their objects from before the first call. Step
    counters in param groups, such as those in schedule-free optimizers, therefore advance once and not once per bucket,
    if they are Python numbers. A tensor in a param group that the optimizer changes in place advances with every call.

    Args:
        optimizer: The optimizer whose param groups are replaced during the calls.
        buckets: For each bucket, one list of parameters per param group.
        step: Called with the bucket; updates the parameters in the optimizer's param groups.
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
    """Restrict the optimizer's param groups to the parameters of ``bucket`` within the context."""
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
