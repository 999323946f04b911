"""Lists that mix DTensors and plain parameters, compared with the dense model."""

from __future__ import annotations

import sys
from math import inf
from typing import Any

import pytest
import torch
from cases import slice_of
from dtensors import LocalOperations, local, mixed, registry_of
from meshstep.optim import ParallelOptimizer, clip_grad_norm_, clip_grad_value_, global_norm
from meshstep.parallel import spec_of
from probes import no_host_reads
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from world import World

GRID = (("data", 2), ("tensor", 2))


# Mixed lists ----------------------------------------------------------------------------------------------------------


def measured(norm_type: float) -> list[tuple[float, float]]:
    results = []
    with registry_of(GRID) as registry:
        params, dense = mixed(registry)
        expected = float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in dense]), norm_type))
        results.append((float(global_norm(params, registry, norm_type).total_norm), expected))
        with LocalOperations() as seen, no_host_reads():
            stats = clip_grad_norm_(params, 0.5, registry, norm_type)
        assert seen.collectives == (["_allgather_base_"] if norm_type == inf else ["allreduce_"])
        results.append((float(stats.total_norm), expected))
        results.append((float(global_norm(params, registry, norm_type).total_norm), 0.5))
        clip_grad_value_(params, 1e-3, registry)
        grads = [local(param.grad).abs() for param in params if param.grad is not None]
        results.append((float(torch.cat([grad.flatten() for grad in grads]).max()), 1e-3))
        # No attribute of the parameter refers to the gradient.
        params[0].grad = None
        assert all(getattr(value, "grad", None) is None for value in vars(params[0]).values())
        with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
            nn.utils.clip_grad_norm_(params, 0.5, norm_type)
    return results


@pytest.mark.parametrize("norm_type", [1.0, 2.0, inf])
def test_norm_and_clipping_of_mixed_dtensor_and_plain_parameters_match_dense_model(
    world: World, norm_type: float
) -> None:
    for results in world.run(4, measured, norm_type):
        for found, expected in results:
            assert found == pytest.approx(expected, rel=2e-6)


def stepped(fused: bool) -> list[tuple[Tensor, Tensor]]:
    """Step DTensors and plain parameters in one group from a state made by torch. Return shards found and expected."""
    with registry_of(GRID) as registry:
        params, dense = mixed(registry)
        options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
        inner = torch.optim.AdamW(params, **options)
        inner.step()  # torch steps mixed lists one parameter at a time
        optimizer = ParallelOptimizer(inner, registry, max_norm=0.3)
        if fused:
            for group in optimizer.param_groups:
                group["fused"] = True
        full = [nn.Parameter(torch.zeros_like(grad)) for grad in dense]
        expected = torch.optim.AdamW(full, **options)
        for param, grad in zip(full, dense, strict=True):
            param.grad = grad.clone()
        expected.step()
        for _ in range(3):
            stats = optimizer.step()
            assert stats is not None
            nn.utils.clip_grad_norm_(full, 0.3)
            expected.step()
        optimizer.zero_grad()
        assert all(param.grad is None for param in params)
        return [
            (
                local(param),
                slice_of(whole.detach(), spec_of(param), registry.topology, registry.global_rank),
            )
            for param, whole in zip(params, full, strict=True)
        ]


@pytest.mark.parametrize("fused", [False, True])
def test_steps_of_mixed_dtensor_and_plain_parameters_match_dense_model(world: World, fused: bool) -> None:
    for pairs in world.run(4, stepped, fused):
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def stepped_by_a_trainer() -> float:
    """Make a step with a gradient of zeros on the stepped tensor, as trainers do to create states."""
    with registry_of((("data", 2),)) as registry:
        param = nn.Parameter(distribute_tensor(torch.ones(4, 3), registry.device_mesh("data"), [Shard(0)]))
        optimizer = ParallelOptimizer(torch.optim.Adagrad([param], lr=0.1), registry)
        param.grad = param.detach() * 0 + 1
        optimizer.step()
        param.grad = None
        (stepped,) = optimizer.optimizer.param_groups[0]["params"]
        before = float(optimizer.optimizer.state[stepped]["step"])
        stepped.grad = torch.zeros_like(stepped)
        optimizer.step()
        return float(optimizer.optimizer.state[stepped]["step"]) - before


def test_zero_gradient_set_on_stepped_tensor_increments_its_step_count(world: World) -> None:
    assert world.run(2, stepped_by_a_trainer) == [1.0, 1.0]


# Imports ----------------------------------------------------------------------------------------------------------------


def test_optimizer_of_plain_parameters_does_not_import_dtensor_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """`meshstep.parallel.interop.dtensor` imports all of torch's DTensor code, which takes seconds."""
    monkeypatch.setitem(sys.modules, "meshstep.parallel.interop.dtensor", None)
    with registry_of((("data", 1),)) as registry:
        param = nn.Parameter(torch.ones(3))
        optimizer = ParallelOptimizer(torch.optim.SGD([param], lr=0.1), registry, max_norm=1.0)
        optimizer.backward(param.sum())
        assert optimizer.step() is not None
