"""Memory of a frozen model beside a small trained one: states, masters, gradients and buckets."""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import Any

import pytest
import torch
from meshstep.amp import Bf16
from meshstep.optim import Fingerprints, HalfStates, Offloaded, ParallelOptimizer, Replayable
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from placements import EXCHANGES
from torch import Tensor, nn
from world import World

OPTIONS: dict[str, dict[str, Any]] = {
    **EXCHANGES,
    "offload": {"states": Offloaded(1.0)},
    "half states": {"states": HalfStates()},
    "replayable": {"states": Replayable()},
    "norms": {"per_parameter_norms": True},
    "fingerprints": {"check_replicas": Fingerprints(every=2)},
}
LAYERS, NUMEL = 30, 100_000  # of the frozen model: 3 million elements


def live_storages() -> dict[int, int]:
    """Return the bytes of all storages of live tensors and gradients by address."""
    gc.collect()
    found: dict[int, int] = {}
    for tensor in (value for value in gc.get_objects() if issubclass(type(value), Tensor)):
        for value in (tensor, tensor.grad if tensor.is_leaf else None):
            if value is not None:
                # Earlier tests on this rank may have left tensors without memory, as of a trace, which raise an error.
                with suppress(RuntimeError):
                    found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return found


def added_bytes(*case: Any) -> tuple[int, int]:
    """Return the result of a second call of `added_bytes_once`, because the first call also creates constants."""
    added_bytes_once(*case)
    return added_bytes_once(*case)


def added_bytes_once(how: str, mode: str, frozen: bool, declared: bool) -> tuple[int, int]:
    """Return the bytes that an optimizer has after three steps on this rank, and the number of states of the base.

    Frozen or not, the base's parameters are passed to the optimizer. ``declared``: they have specs.
    """
    precision: Any = Bf16(split_masters=True) if mode == "split" else mode
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        dtype = torch.float32 if mode == "fp32" else torch.bfloat16
        base = {f"base{i}": nn.Parameter(torch.ones(NUMEL, dtype=dtype)) for i in range(LAYERS)}
        head = {f"head{i}": nn.Parameter(torch.ones(100, dtype=dtype)) for i in range(3)}
        for name, param in (base | head if declared else head).items():
            annotate(param, P(), name)
        for param in base.values():
            param.requires_grad_(not frozen)
        before = live_storages()
        adamw = torch.optim.AdamW([*head.items(), *base.items()], lr=0.1, fused=True)
        optimizer = ParallelOptimizer(adamw, registry, max_norm=1.0, precision=precision, **OPTIONS[how])
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.backward(torch.stack([p.float().square().sum() for p in (base | head).values()]).sum())
            optimizer.step()
        states = sum(param in optimizer.state for param in base.values())
        after = live_storages()
        return sum(nbytes for address, nbytes in after.items() if address not in before), states


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "undeclared"])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "split"])
@pytest.mark.parametrize("how", OPTIONS)
def test_optimizer_needs_no_states_and_few_bytes_for_frozen_base_model(
    world: World, how: str, mode: str, declared: bool
) -> None:
    if how == "replayable" and mode == "split":
        pytest.skip("Replayable does not support split masters")
    per_tensor = 600 if how == "fingerprints" else 100  # bytes per tensor for the collective of a step
    for nbytes, states in world.run(4, added_bytes, how, mode, True, declared):
        assert states == 0
        assert nbytes < 20_000 + LAYERS * per_tensor


@pytest.mark.long
def test_byte_count_includes_states_and_gradients_of_trained_base(world: World) -> None:
    """Negative control of `test_optimizer_needs_no_states_and_few_bytes_for_frozen_base_model`."""
    (nbytes, states), *_ = world.run(4, added_bytes, "whole", "fp32", False, True)
    assert states == LAYERS
    assert nbytes > 12 * LAYERS * NUMEL  # two moments and the gradient
