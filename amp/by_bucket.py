"""An optimizer's step in several calls, each of which sees a bucket of the parameters, and which together are one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Bucket = Sequence[list[Tensor]]
"""The parameters of each param group that are in it."""

holders: list[torch.optim.Optimizer] = []
"""Those whose param groups hold a bucket now, of which nobody should keep anything."""


def step_by_bucket(
    optimizer: torch.optim.Optimizer, buckets: Iterable[Bucket], step: Callable[[Bucket], object]
) -> None:
    """Call ``step`` for each bucket, with param groups that hold only the bucket.

    What groups count themselves (the steps and sums of weights of schedule-free optimizers) each call finds as it was
    before the first: so all of them make the same step, and afterwards it is one further. Numbers, that is; a tensor in
    a group that the optimizer changes in place moves on with every call.
    """
    groups = optimizer.param_groups
    before: list[dict[str, Any]] = [dict(group) for group in groups]
    for bucket in buckets:
        for group, numbers in zip(groups, before, strict=True):
            group.update(numbers)
        with holding(optimizer, bucket):
            step(bucket)


@contextmanager
def holding(optimizer: torch.optim.Optimizer, bucket: Bucket) -> Iterator[None]:
    """With param groups that hold only the bucket."""
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    holders.append(optimizer)
    try:
        for group, params in zip(groups, bucket, strict=True):
            group["params"] = params
        yield
    finally:
        holders.pop()
        for group, params in zip(groups, whole, strict=True):
            group["params"] = params
