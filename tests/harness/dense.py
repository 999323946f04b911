"""Helpers to compare what ranks hold with a dense model in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from meshstep.parallel import P, ProcessGroupRegistry, spec_of, unshard
from meshstep.parallel.mesh.flat_collectives import ALL_GATHER, REDUCE_SCATTER
from torch import Tensor, nn

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Equal shapes, and values within the tolerance of the dtype, relative to the largest one expected."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} for {tuple(expected.shape)}"
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-300)
    assert error <= TOLERANCE[dtype or actual.dtype], f"relative error {error:.2e}"


def full_grad(param: Tensor | None, spec: P, registry: ProcessGroupRegistry) -> Tensor:
    """The gradient of the logical parameter; partial ones summed, as the optimizer does."""
    grad = None
    if param is not None:
        assert param.grad is not None
        grad = param.grad.clone()
        for axis in spec.partial:
            if registry.size(axis) > 1:
                dist.all_reduce(grad, group=registry.group(axis))
    return unshard(grad, spec, registry)


def assert_same_parameters(module: nn.Module, dense: nn.Module, registry: ProcessGroupRegistry) -> None:
    """The full initial weights are bit for bit the dense model's (same seed)."""
    expected = dict(dense.named_parameters())
    assert dict(module.named_parameters()).keys() == expected.keys()
    for name, param in module.named_parameters():
        assert torch.equal(unshard(param, spec_of(param), registry), expected[name]), name


def assert_same_grads(module: nn.Module, dense: nn.Module, registry: ProcessGroupRegistry) -> None:
    expected = dict(dense.named_parameters())
    for name, param in module.named_parameters():
        grad = expected[name].grad
        assert grad is not None
        assert_near(full_grad(param, spec_of(param), registry), grad)


# What they are called in the tests, and in this torch.
COUNTED = {name: name for name in ("all_reduce", "all_to_all_single", "broadcast", "reduce")} | {
    "all_gather_single": ALL_GATHER,
    "reduce_scatter_single": REDUCE_SCATTER,
}


@contextmanager
def collectives() -> Iterator[Counter[str]]:
    """Counts the collectives that are issued meanwhile, by the name that the torch.distributed function has in 2.13.

    A dispatch mode would see them too, but its first use imports the compiler: seconds on each rank.
    """
    seen: Counter[str] = Counter()
    before = {called: getattr(dist, called) for called in COUNTED.values()}
    for name, called in COUNTED.items():
        setattr(dist, called, partial(_count, seen, name, before[called]))
    try:
        yield seen
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def _count(seen: Counter[str], name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    seen[name] += 1
    return function(*args, **kwargs)
