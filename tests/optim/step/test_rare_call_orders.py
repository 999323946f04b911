"""Unusual orders of calls in an accumulation window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from arguments import arguments
from failing import fails_in_backward
from meshstep.amp import TorchFp16
from meshstep.optim import ParallelOptimizer, PolynomialLR, Sharded
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from small_models import parameter
from torch import Tensor, nn
from world import World
from zero_models import ZERO1, ZERO2


def sgd(params: Any, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr)


def alone() -> ProcessGroupRegistry:
    return ProcessGroupRegistry(Topology())


# Windows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", TorchFp16(init_scale=1024.0)])
def test_group_with_threshold_is_clipped_by_norm_and_other_group_by_clip_value(precision: Any) -> None:
    a, b = parameter("a"), parameter("b")
    groups = [{"params": [a]}, {"params": [b], "max_norm": 1.0}]
    optimizer = ParallelOptimizer(sgd(groups), alone(), **arguments(clip_value=2.0, precision=precision))
    optimizer.backward((a * 3).sum() + (b * 3).sum())
    optimizer.step()
    assert a.tolist() == [-2.0] * 4  # clamped
    assert b.tolist() == pytest.approx([-0.5] * 4)  # the norm of 6 is clipped to 1


@pytest.mark.parametrize("precision", ["fp32", TorchFp16(init_scale=1024.0)])
def test_backward_after_explicit_clip_raises(precision: Any) -> None:
    w = parameter("w")
    optimizer = ParallelOptimizer(sgd([w]), alone(), precision=precision)
    optimizer.backward((w * 3).sum())
    optimizer.clip_grad_by_norm(1.0)
    with pytest.raises(RuntimeError, match="backward was called after the gradients of this step had been clipped"):
        optimizer.backward((w * 3).sum())
    optimizer.step()
    assert w.tolist() == pytest.approx([-0.5] * 4)
    optimizer.zero_grad()
    optimizer.backward((w * 3).sum())


@pytest.mark.parametrize(
    "states", [(), Sharded("data"), Sharded("data", gradients=True)], ids=["replicas", "ZeRO-1", "ZeRO-2"]
)
@pytest.mark.parametrize("options", [{"accumulation_steps": 2}, {}], ids=["counted", "weighted"])
def test_load_state_dict_in_counted_or_weighted_window_clears_its_gradients(options: Any, states: Any) -> None:
    w = parameter("w")
    optimizer = ParallelOptimizer(sgd([w]), ProcessGroupRegistry(Topology(data=1)), states=states, **options)
    weight = None if options else 5
    optimizer.backward((w * 100).sum(), weight=weight)
    optimizer.load_state_dict(optimizer.state_dict())
    assert w.grad is None
    for factor in (2, 4):
        optimizer.backward((w * factor).sum(), weight=weight and 1)
        if options or factor == 4:
            optimizer.step()
    assert w.tolist() == [-3.0] * 4


def test_load_state_dict_keeps_gradients_without_accumulation_steps_or_weights() -> None:
    w = parameter("w")
    optimizer = ParallelOptimizer(sgd([w]), alone())
    optimizer.backward((w * 2).sum())
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.backward(w.sum())
    optimizer.step()
    assert w.tolist() == [-3.0] * 4


@pytest.mark.parametrize("first", [True, False])
def test_micro_batch_without_loss_counts_as_zero(first: bool) -> None:
    w = parameter("w")
    optimizer = ParallelOptimizer(sgd([w]), alone(), accumulation_steps=2)
    for empty in (first, not first):
        optimizer.backward(None if empty else (w * 3).sum())
    optimizer.step()
    assert w.tolist() == [-1.5] * 4, "expected the mean over both; a missing loss counts as 0"


def one_rank_runs_out() -> list[float]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        w = parameter("w")
        optimizer = ParallelOptimizer(sgd([w]), registry, accumulation_steps=2)
        optimizer.backward((w * 3).sum())
        optimizer.backward((w * 6).sum() if registry.rank("data") == 0 else None)
        optimizer.step()
        return w.tolist()


def test_rank_without_loss_in_last_micro_batch_counts_as_zero(world: World) -> None:
    assert world.run(2, one_rank_runs_out) == [[-3.0] * 4] * 2  # (3 + 6 + 3 + 0) / 4


@pytest.mark.parametrize("steps", [None, 2])
def test_failed_backward_requires_zero_grad_before_next_window(steps: int | None) -> None:
    w = parameter("w")
    optimizer = ParallelOptimizer(sgd([w]), alone(), accumulation_steps=steps)
    optimizer.backward((w * 3).sum())
    with pytest.raises(MemoryError):
        optimizer.backward(fails_in_backward(w * 3, MemoryError("out of memory")).sum())
    for call in (optimizer.step, lambda: optimizer.backward(w.sum())):
        with pytest.raises(RuntimeError, match=r"a backward since the last step raised.*call optimizer.zero_grad\(\)"):
            call()
    optimizer.zero_grad()
    for _ in range(2):
        optimizer.backward((w * 3).sum() / (1 if steps else 2))
    optimizer.step()
    assert w.tolist() == [-3.0] * 4


def train_two_windows(options: dict[str, Any], fails: bool) -> list[list[float]]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        torch.manual_seed(3)
        model = nn.Linear(3, 2)
        declare(model, {"*": P()})
        optimizer = ParallelOptimizer(
            sgd(model.parameters(), 0.1), registry, accumulation_steps=3, **arguments(**options)
        )
        inputs = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(registry.global_rank))
        if fails:
            optimizer.backward(model(inputs[5] * 9).sum())
            assert optimizer.step() is None
            try:
                model(torch.ones(4, 7))
            except RuntimeError:
                optimizer.zero_grad()
        for x in inputs:
            optimizer.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return [param.flatten().tolist() for param in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"precision": TorchFp16(init_scale=64.0)}, ZERO1, ZERO2, {"overlap": True}])
def test_zero_grad_in_except_block_restarts_accumulation(world: World, options: dict[str, Any]) -> None:
    assert world.run(2, train_two_windows, options, True) == world.run(2, train_two_windows, options, False)


def test_exception_raised_before_window_does_not_reset_window() -> None:
    w = parameter("w")
    optimizer = ParallelOptimizer(sgd([w]), alone(), accumulation_steps=2)
    try:
        raise ImportError("no fast kernels")
    except ImportError:
        for factor in (3, 5):
            optimizer.zero_grad()
            optimizer.backward((w * factor).sum())
            optimizer.step()
    assert w.tolist() == [-4.0] * 4


@pytest.mark.parametrize("weight", [torch.tensor(torch.nan), torch.tensor(-1.0)])
def test_nan_or_negative_micro_batch_weight_tensor_skips_step(weight: Tensor) -> None:
    w = parameter("w")
    optimizer = ParallelOptimizer(sgd([w]), alone())
    optimizer.backward(w.sum(), weight=weight)
    stats = optimizer.step()
    assert stats is not None
    assert stats.found_inf == 1
    assert w.tolist() == [0.0] * 4
    with pytest.raises(ValueError, match="weight=inf: give a finite number"):
        optimizer.backward(w.sum(), weight=float("inf"))


def test_schedule_does_not_advance_if_step_raised() -> None:
    w = parameter("w")
    optimizer = ParallelOptimizer(sgd([w]), alone(), on_nonfinite="raise")
    schedule = PolynomialLR(optimizer, total_steps=10)
    for factor in (1.0, float("inf"), float("inf")):
        optimizer.zero_grad()
        optimizer.backward((w * factor).sum())
        if factor == 1.0:
            optimizer.step()
        else:
            with pytest.raises(FloatingPointError):
                optimizer.step()
        schedule.step()
    assert schedule.last_epoch == 1
