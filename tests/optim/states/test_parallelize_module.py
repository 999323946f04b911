"""torch's parallelize_module: tensor- and sequence-parallel DTensor parameters."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensors import Axes, randn, registry_of
from meshstep.amp import Bf16
from meshstep.optim import ParallelOptimizer, Sharded, global_norm
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


LARGE, SMALL = 256.0, 1.0  # in bfloat16, 256 + 1 is 256


def accumulated(precision: Bf16, options: dict[str, Any], unfrozen: bool) -> list[float]:
    """Return the norms of two steps, each on one large and three small gradients of a bfloat16 model."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    with registry_of(GRID) as registry:
        model = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        parallelize_module(model, registry.device_mesh("tensor"), ColwiseParallel())
        model.weight.requires_grad_(not unfrozen)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = ParallelOptimizer(adamw, registry, precision=precision, accumulation_steps=4, **options)
        if unfrozen:
            model.weight.requires_grad_()
            optimizer.refresh()
        norms = []
        for step in range(2):
            for factor in (LARGE, SMALL, SMALL, SMALL):
                optimizer.backward(4 * factor * model(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
            stats = optimizer.step()
            assert stats is not None
            norms.append(float(stats.total_norm))
            optimizer.zero_grad(set_to_none=step == 0)
        return norms


@pytest.mark.parametrize(
    ("precision", "options", "unfrozen"),
    [
        (Bf16(), {}, False),
        (Bf16(split_masters=True), {"overlap": True}, False),
        (Bf16(), {"states": Sharded("data")}, True),
        (Bf16(), {"states": Sharded("data", gradients=True)}, False),
    ],
)
def test_gradients_of_bfloat16_dtensors_accumulate_in_float32(
    world: World, precision: Bf16, options: dict[str, Any], unfrozen: bool
) -> None:
    for norms in world.run(4, accumulated, precision, options, unfrozen):
        assert norms == pytest.approx([4 * (LARGE + 3 * SMALL)] * 2, rel=1e-6)


def save_before_backward() -> list[str]:
    """Return the texts of the warnings when the parameters of a bfloat16 model with an optimizer are saved."""
    with registry_of((("tensor", 2),)) as registry:
        block = parallel_block(registry).bfloat16()
        declare(block, {"norm.*": P(partial="tensor"), "*": P()})
        ParallelOptimizer(torch.optim.AdamW(block.parameters()), registry, precision="bf16")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.save([*block.parameters()], io.BytesIO())
        return [str(warning.message) for warning in caught]


def test_saving_half_precision_dtensor_parameters_before_backward_warns_of_nothing(world: World) -> None:
    assert world.run(2, save_before_backward) == [[]] * 2
