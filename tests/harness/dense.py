"""Comparison of the tensors of ranks with a dense model, and a count of collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from meshstep.parallel import P, ProcessGroupRegistry, shard, spec_of, unshard
from meshstep.parallel.mesh.process_group_collectives import ALL_GATHER, REDUCE_SCATTER
from torch import Tensor, nn

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Assert equal shapes and values within the dtype's tolerance, relative to the largest expected value."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected shape {tuple(expected.shape)}"
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-300)
    assert error <= TOLERANCE[dtype or actual.dtype], f"relative error {error:.2e}"


def full_grad(param: Tensor | None, spec: P, registry: ProcessGroupRegistry) -> Tensor:
    """Return the full gradient of a parameter; partial gradients are summed, as the optimizer does.

    ``param`` is None on a rank that does not hold the parameter.
    """
    grad = None
    if param is not None:
        assert param.grad is not None
        grad = param.grad.clone()
        for axis in spec.partial:
            if registry.size(axis) > 1:
                dist.all_reduce(grad, group=registry.group(axis))
    return unshard(grad, spec, registry)


def assert_same_parameters(module: nn.Module, dense: nn.Module, registry: ProcessGroupRegistry) -> None:
    """Assert that the full initial weights are bitwise identical to those of the dense model (same seed)."""
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


def assert_layer_is_dense(
    layer: nn.Module,
    dense: nn.Module,
    x: Tensor,
    takes: P,
    gives: P,
    specs: Mapping[str, P],
    registry: ProcessGroupRegistry,
) -> None:
    """Assert that weights, output and gradients of a sharded layer equal those of the dense layer on the full input.

    Shards may have unequal sizes. The dense weight is transposed first if the sharded layer stores its transpose.
    ``takes`` and ``gives`` are the layouts of input and output. ``specs`` includes parameters that this rank does not
    hold.
    """
    assert {name: spec_of(param) for name, param in layer.named_parameters()} == {
        name: spec for name, spec in specs.items() if spec.holds(registry.coordinate, registry.topology)
    }
    transposed = isinstance(dense, nn.Linear) and not hasattr(layer, "classes")

    def piece(full: Tensor, spec: P) -> Tensor:
        return shard(full, spec, registry, uneven=True)

    def expected(full: Tensor) -> Tensor:
        return full.t() if transposed and full.dim() == 2 else full

    for name, spec in specs.items():
        assert torch.equal(unshard(getattr(layer, name), spec, registry), expected(dense.get_parameter(name))), name
    reference, local = x.detach().clone(), piece(x, takes)
    for tensor in (reference, local):
        tensor.requires_grad_(x.is_floating_point())
    wanted, output = dense(reference), layer(local)
    weight = torch.randn_like(wanted)
    torch.autograd.backward((wanted * weight).sum())
    torch.autograd.backward((output * piece(weight, gives)).sum())
    assert_near(output, piece(wanted, gives))
    if x.is_floating_point():
        assert local.grad is not None
        assert reference.grad is not None
        assert_near(local.grad, piece(reference.grad, takes))
    for name, spec in specs.items():
        grad = dense.get_parameter(name).grad
        assert grad is not None
        assert_near(full_grad(getattr(layer, name), spec, registry), expected(grad))


# Functions of torch.distributed: the name in torch 2.13, which tests use, and the name in the installed torch.
COUNTED = {name: name for name in ("all_reduce", "all_to_all_single", "broadcast", "reduce")} | {
    "all_gather_single": ALL_GATHER,
    "reduce_scatter_single": REDUCE_SCATTER,
}


@contextmanager
def collectives() -> Iterator[Counter[str]]:
    """Count the collectives issued within the block, by their torch.distributed function names in torch 2.13.

    A dispatch mode would also see them, but its first use imports the compiler, which takes seconds on each rank.
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
