"""torch's parallelize_module: tensor- and sequence-parallel DTensor parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensors import Axes, randn, registry_of
from meshstep.optim import ParallelOptimizer, global_norm
from meshstep.parallel import P, declare
from sequence_parallel import GRID, assert_trained, parallel_block, train_block
from world import World


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("axes", [(("tensor", 2),), GRID])
def test_parallelize_module_matches_dense_model(world: World, axes: Axes, functional: bool) -> None:
    for found in world.run(2 * len(axes), train_block, axes, functional, {}):
        assert_trained(found)


@pytest.mark.parametrize(
    "options",
    [
        {"shard_states": "data"},
        {"shard_states": "data", "shard_gradients": True},
        {"offload": 0.5},
        {"check_replicas": True, "per_parameter_norms": True, "reduction": "per_group"},
    ],
)
def test_parallelize_module_with_zero_offload_or_replica_check_matches_dense_model(
    world: World, options: dict[str, Any]
) -> None:
    for found in world.run(4, train_block, GRID, False, options):
        assert_trained(found)


def misdeclared(kind: str) -> str:
    with registry_of((("tensor", 2),)) as registry:
        block = parallel_block(registry)
        if kind == "complete":
            declare(block, {"norm.*": P(partial="tensor"), "down.bias": P(partial="tensor"), "*": P()})
        elif kind == "measured":
            declare(block, {"norm.*": P(partial="tensor"), "*": P()})
        else:
            declare(block, {"*": P()})
        block(randn(2, 2, 6)).sum().backward()
        try:
            if kind in ("measured", "pending"):
                global_norm(block.parameters(), registry)
            else:
                ParallelOptimizer(torch.optim.SGD(block.parameters()), registry).step()
        except ValueError as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "pending",
            "the gradient of norm.weight is Partial(sum) over 'tensor', but the parameter is Replicate(); "
            "declare the parameter P(partial='tensor')",
        ),
        ("complete", "down.bias is declared partial over 'tensor', but its gradient is complete"),
        (
            "measured",
            "the gradient of norm.weight (P(partial='tensor')) is partial: it must still be summed over tensor",
        ),
    ],
)
def test_partial_gradients_that_contradict_specs_or_are_unreduced_raise(world: World, kind: str, message: str) -> None:
    for found in world.run(2, misdeclared, kind):
        assert message in found


def loaded() -> str:
    """Change DTensor weights after the optimizer was made; master weights must not overwrite the change silently.

    Return the error, or else the rank.
    """
    with registry_of((("tensor", 2),)) as registry:
        block = parallel_block(registry).bfloat16()
        declare(block, {"norm.*": P(partial="tensor"), "*": P()})
        optimizer = ParallelOptimizer(torch.optim.SGD(block.parameters(), lr=0.5), registry, precision="bf16")
        with torch.no_grad():
            block.up.weight.mul_(2)
        block(randn(2, 2, 6).bfloat16()).sum().backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)
        return str(dist.get_rank())


def test_changed_dtensor_weights_with_master_weights_raise(world: World) -> None:
    for found in world.run(2, loaded):
        assert found.startswith("up.weight was changed since the last step")
