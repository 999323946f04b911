"""ZeRO-1 and ZeRO-2, compared with replicated states in many precision modes and layouts and with several norms."""

from __future__ import annotations

from functools import cache
from math import inf
from typing import Any

import pytest
import torch
from arguments import arguments
from meshstep.optim import ParallelOptimizer, Sharded
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare, shard
from optimizers import FOR_HALF_TYPES, adamw
from precision_modes import MODES
from scenarios import SCENARIOS, Scenario, backward, build, dense_1d, full_tensors
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from world import World
from zero_models import (
    BOTH,
    DATA2,
    DATA4,
    REPLICAS,
    ZERO1,
    ZERO2,
    Axes,
    difference,
    rows,
    size_of,
    small_buckets,
    wide_model,
)


def train(
    axes: Axes, mode: str, kind: str, steps: int, options: dict[str, Any], micro: int = 1, bucket: int = 256
) -> tuple[dict[str, Tensor], list[float], dict[str, float]]:
    """Return full parameters, norms per step, and the last norms per parameter."""
    with ProcessGroupRegistry(Topology(roles=None, **dict(axes))) as registry, small_buckets(bucket):
        scenario = Scenario(axes, "1d", dense_1d)
        model = build(scenario, registry, torch.float32)
        assert model is not None
        MODES[mode].prepare(model, registry)
        if options.get("data_parallel"):
            options = {**options, "data_parallel": DistributedDataParallel(model, process_group=registry.group("data"))}
        optimizer = ParallelOptimizer(
            FOR_HALF_TYPES[kind](model.parameters()),
            registry,
            **arguments(precision=MODES[mode], accumulation_steps=micro, **options),
        )
        run = options.get("data_parallel", model)
        norms = []
        for step in range(steps):
            ids = shard(rows(step), P(registry.topology.data_axes), registry)
            for part in ids.chunk(micro):
                optimizer.zero_grad()
                optimizer.backward(run(part))
                optimizer.step()
            assert optimizer.last_stats is not None
            norms.append(float(optimizer.last_stats.total_norm))
            each = {name: float(norm) for name, norm in optimizer.last_stats.parameter_norms.items()}
        whole = full_tensors(scenario, model, registry, gradients=False)
        return {name: tensor.float() for name, tensor in whole.items()}, norms, each


@cache
def thirty_replicated_steps(world: World, axes: Axes) -> tuple[dict[str, Tensor], list[float]]:
    expected, norms, _ = world.run(size_of(axes), train, axes, "fp32", "sgd", 30, {"max_norm": 0.3})[0]
    assert min(norms) < 0.3 < max(norms)
    return expected, norms


@pytest.mark.long
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("options", [ZERO1, ZERO2], ids=["zero1", "zero2"])
@pytest.mark.parametrize("axes", [DATA2, DATA4, BOTH, REPLICAS], ids=str)
def test_thirty_steps_with_zero1_and_zero2_match_replicated_states(
    world: World, axes: Axes, options: dict[str, Any]
) -> None:
    expected, norms = thirty_replicated_steps(world, axes)
    sharded = {"max_norm": 0.3, **options}
    for found, measured, _ in world.run(size_of(axes), train, axes, "fp32", "sgd", 30, sharded):
        assert difference(found, expected) <= 1e-6
        assert measured == pytest.approx(norms, rel=1e-6)


# Allowed differences relative to the largest parameter. ZeRO may sum a gradient in another order.
TOLERANCE = {
    "fp32": 1e-6,
    "fp16": 1e-4,
    "bf16": 1e-2,
    "fp16_naive": 2e-3,
    "O2": 2e-3,
    "O3": 1e-2,
    "bf16 stochastic": 3e-2,
}


@pytest.mark.long
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("mode", TOLERANCE)
def test_zero1_and_zero2_match_replicated_steps_in_precision_modes(world: World, mode: str) -> None:
    clip = {"max_norm": 0.3}
    expected, norms, _ = world.run(4, train, BOTH, mode, "adamw", 10, clip)[0]
    for options in (ZERO1, ZERO2):
        runs = world.run(4, train, BOTH, mode, "adamw", 10, {**clip, **options})
        assert all(difference(run[0], runs[0][0]) == 0 for run in runs)
        assert difference(runs[0][0], expected) <= TOLERANCE[mode]
        assert runs[0][1] == pytest.approx(norms, rel=2 * TOLERANCE[mode])


@pytest.mark.parametrize("reduction", ["packed", "per_group"])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, inf])
def test_norms_with_zero2_match_norms_of_replicated_states(world: World, p: float, reduction: str) -> None:
    options = {"max_norm": 1e6, "norm_type": p, "reduction": reduction, "per_parameter_norms": True}
    _, norms, each = world.run(4, train, BOTH, "fp32", "plain sgd", 2, options)[0]
    for _, found, found_each in world.run(4, train, BOTH, "fp32", "plain sgd", 2, {**options, **ZERO2}):
        assert found == pytest.approx(norms, rel=1e-6)
        assert found_each == pytest.approx(each, rel=1e-6)
        assert len(each) == 9


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("data x sequence parallel", "tensor"),  # partial gradients are summed over this axis
        ("grid, bias on row 0", "row"),  # one bias is replicated over this axis
        ("grid, bias on columns", "col"),
        ("data x pipe, tied", "data"),  # both stages must shard the tied table equally
        ("a rank without gradients", "data"),
        ("a stage without parameters", "tensor"),
    ],
)
def test_zero1_and_zero2_over_data_and_model_axes_match_replicated_steps(world: World, name: str, axis: str) -> None:
    size = SCENARIOS[name].topology.world_size
    runs = world.run(size, train_scenario, name, {})
    for options in ({"shard_states": axis}, {"shard_states": axis, "shard_gradients": True}):
        for (expected, norms), (found, measured) in zip(
            runs, world.run(size, train_scenario, name, options), strict=True
        ):
            assert difference(found, expected) <= 1e-12
            assert measured == pytest.approx(norms, rel=1e-12)


def train_scenario(name: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], list[float]]:
    scenario = SCENARIOS[name]
    with ProcessGroupRegistry(scenario.topology) as registry, small_buckets():
        model = build(scenario, registry, torch.float64)
        params: Any = list(model.parameters()) if model is not None else [{"params": []}]
        optimizer = ParallelOptimizer(
            torch.optim.AdamW(params, lr=1e-2, fused=False),
            registry,
            **arguments(max_norm=scenario.threshold, **options),
        )
        norms = []
        for step in range(6):
            optimizer.zero_grad()
            backward(scenario, model, optimizer, rows(step, 4))
            stats = optimizer.step()
            assert stats is not None
            norms.append(float(stats.total_norm))
        return full_tensors(scenario, model, registry, gradients=False), norms


def test_zero1_with_ddp_matches_ddp_alone(world: World) -> None:
    expected, norms, _ = world.run(2, train, DATA2, "bf16", "adamw", 10, {"data_parallel": True})[0]
    options = {"data_parallel": True, **ZERO1}
    for found, measured, _ in world.run(2, train, DATA2, "bf16", "adamw", 10, options, 2):
        assert difference(found, expected) <= 2e-2
        assert measured == pytest.approx(norms, rel=2e-2)


def train_by_ddp(options: dict[str, Any]) -> list[list[float]]:
    """Train in a DDP over three ranks. Return the parameters."""
    with ProcessGroupRegistry(Topology(data=3)) as registry:
        torch.manual_seed(0)
        model = nn.Linear(5, 4)
        declare(model, {"*": P()})
        ddp = DistributedDataParallel(model, process_group=registry.group("data"))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = ParallelOptimizer(sgd, registry, data_parallel=ddp, **options)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + registry.global_rank))
            optimizer.backward(ddp(x).square().mean())
            optimizer.step()
        return [param.flatten().tolist() for param in model.parameters()]


def test_zero1_does_not_average_again_after_ddp(world: World) -> None:
    """A sum of three equal gradients, divided by 3, would differ from the gradient in the last bits."""
    assert world.run(3, train_by_ddp, {"states": Sharded("data")}) == world.run(3, train_by_ddp, {})


def train_dtensors(options: dict[str, Any]) -> list[Tensor]:
    """Train a DTensor sharded over tensor and a plain parameter for four steps. Return the local parameters."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        torch.manual_seed(4)
        model: Any = nn.Module()
        mesh = registry.device_mesh("tensor")
        model.weight = nn.Parameter(distribute_tensor(torch.randn(6, 5), mesh, [Shard(0)]))
        model.bias = nn.Parameter(torch.randn(3))
        declare(model, {"weight": P("tensor"), "bias": P("tensor")})
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry, **arguments(max_norm=0.1, **options))
        for step in range(4):
            assert isinstance(model.weight, DTensor)
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + registry.coordinate["data"]))
            optimizer.zero_grad()
            optimizer.backward(((x @ model.weight.to_local().t() + model.bias) ** 2).mean())
            optimizer.step()
        return [model.weight.to_local().detach().clone(), model.bias.detach().clone()]


def test_zero1_and_zero2_with_dtensors_match_replicated_steps(world: World) -> None:
    expected = world.run(4, train_dtensors, {})
    for options in (ZERO1, ZERO2):
        for found, wanted in zip(world.run(4, train_dtensors, options), expected, strict=True):
            assert all(
                torch.allclose(one, other, rtol=1e-6, atol=1e-7) for one, other in zip(found, wanted, strict=True)
            )


def train_tail(by_ddp: bool, options: dict[str, Any]) -> list[Tensor]:
    """Train windows of three micro-batches. DDP does not synchronize the last window, which has only two.

    Return the final parameters.
    """
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = wide_model()
        if by_ddp:
            options = {**options, "data_parallel": DistributedDataParallel(model)}
        optimizer = ParallelOptimizer(
            adamw(model.parameters()), registry, **arguments(max_norm=0.1, accumulation_steps=3, **options)
        )
        for step in range(5):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2 * step + registry.coordinate["data"]))
            optimizer.backward(options.get("data_parallel", model)(x).square().mean())
            optimizer.step(final=step == 4)
            optimizer.zero_grad()
        return [param.detach().clone() for param in model.parameters()]


def test_zero1_with_ddp_and_shorter_last_window_matches_reduction_by_optimizer(world: World) -> None:
    expected = world.run(2, train_tail, False, {})[0]
    for found in world.run(2, train_tail, True, ZERO1):
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
