"""Properties of a `ParallelOptimizer`: parameters, plans, window, transforms, reasons why gradients are not local.

Also explicit clipping, and the loss scale that observers see.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshstep.amp import GradScaler
from meshstep.optim import ParallelOptimizer, Sharded, StepObserver
from meshstep.optim.step.window import Window
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn


def model_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(dtype)
    declare(model, {"*": P()})
    return model


def optimizer_of(model: nn.Sequential, **options: Any) -> ParallelOptimizer[Any]:
    groups = [{"params": [*layer.parameters()]} for layer in model]
    sgd = torch.optim.SGD(groups, lr=0.1, fused=True)
    return ParallelOptimizer(sgd, ProcessGroupRegistry(Topology(data=1)), **options)


def loss_of(model: nn.Sequential) -> Tensor:
    loss: Tensor = model(torch.ones(3, 4, dtype=next(model.parameters()).dtype)).float().square().sum()
    return loss


def test_model_param_groups_contain_model_parameters_instead_of_masters() -> None:
    model = model_of(torch.bfloat16)
    optimizer = optimizer_of(model, precision="bf16")
    given = [param for group in optimizer.model_param_groups for param in group]
    assert all(one is other for one, other in zip(given, model.parameters(), strict=True))
    assert [len(group) for group in optimizer.model_param_groups] == [2, 2]
    assert optimizer.param_groups[0]["params"][0] is not given[0]
    assert [entry.shape for entry in optimizer.model_plan.entries] == [tuple(param.shape) for param in given]
    assert optimizer.device == torch.device("cpu")


def test_add_param_group_creates_new_model_plan() -> None:
    model, more = model_of(), model_of()
    optimizer = optimizer_of(model)
    before = optimizer.model_plan
    assert optimizer.model_plan is before
    optimizer.add_param_group({"params": [*more.parameters()]})
    assert optimizer.model_plan is not before
    assert len(optimizer.model_param_groups) == 3
    assert len(optimizer.model_plan.entries) == 8


def test_micro_batches_property_counts_micro_batches_of_current_window() -> None:
    model = model_of()
    optimizer = optimizer_of(model, accumulation_steps=2)
    assert optimizer.accumulation_steps == 2
    found = []
    for _ in range(3):
        optimizer.backward(loss_of(model))
        found.append(optimizer.micro_batches)
        optimizer.step()
        optimizer.zero_grad()
    assert found == [1, 2, 1]
    assert optimizer_of(model_of()).accumulation_steps is None


def test_not_local_returns_one_reason_per_argument_that_prevents_local_gradients() -> None:
    assert optimizer_of(model_of()).not_local() == []
    (overlap,) = optimizer_of(model_of(), overlap=True).not_local()
    assert overlap.startswith("overlap=True averages gradients")
    (other,) = optimizer_of(model_of(), average_data=False).not_local()
    assert other.startswith("other code averages gradients (average_data=False)")
    (sharded,) = optimizer_of(model_of(), states=Sharded("data", gradients=True)).not_local()
    assert sharded.startswith("Sharded(gradients=True) averages gradients while backward runs")


def test_clip_grads_clips_once_by_max_norm() -> None:
    model, other = model_of(), model_of()
    clipped, stepped = optimizer_of(model, max_norm=0.5), optimizer_of(other, max_norm=0.5)
    clipped.backward(loss_of(model))
    stats = clipped.clip_grads()
    squares = sum(param.grad.double().square().sum() for param in model.parameters() if param.grad is not None)
    assert float(stats.total_norm) > 0.5
    assert float(squares) ** 0.5 == pytest.approx(0.5, rel=1e-5)
    assert clipped.step() is stats
    stepped.backward(loss_of(other))
    assert torch.equal(stepped.step().total_norm, stats.total_norm)
    for one, same in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, same)


def test_clip_grads_before_last_micro_batch_of_window_returns_none() -> None:
    model = model_of()
    optimizer = optimizer_of(model, max_norm=0.5, accumulation_steps=2)
    optimizer.backward(loss_of(model))
    assert optimizer.clip_grads() is None
    optimizer.backward(loss_of(model))
    assert float(optimizer.step().total_norm) > 0.5


def test_clip_grads_without_max_norm_only_measures() -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    optimizer.backward(loss_of(model))
    before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    assert float(optimizer.clip_grads().total_norm) > 0
    for old, param in zip(before, model.parameters(), strict=True):
        assert param.grad is not None
        assert torch.equal(old, param.grad)


class Scales(StepObserver):
    def __init__(self) -> None:
        self.found: list[float | None] = []

    def reduced_grads(self, window: Window) -> None:
        self.found.append(None if window.scale is None else float(window.scale))


def test_observer_sees_loss_scale_of_gradients_or_none_without_loss_scaling() -> None:
    for precision, expected in (("fp32", None), ("fp16", 2.0**16)):
        model = model_of(torch.float16 if precision == "fp16" else torch.float32)
        optimizer = optimizer_of(model, precision=precision)
        scales = Scales()
        optimizer.add_observer(scales)
        optimizer.backward(loss_of(model))
        optimizer.step()
        assert scales.found == [expected]


def scaled_norm(asked: bool) -> tuple[float, list[Tensor]]:
    """Return the norm and weights after two micro-batches whose losses a `GradScaler` scales.

    ``asked``: call `clip_grad_by_norm` after the first micro-batch.
    """
    model = model_of()
    optimizer, scales = optimizer_of(model, accumulation_steps=2, max_norm=0.5), Scales()
    optimizer.add_observer(scales)
    scaler = GradScaler(optimizer.registry, init_scale=8.0)
    optimizer.backward(scaler.scale(loss_of(model)))
    if asked:
        optimizer.clip_grad_by_norm(0.5)
    optimizer.backward(scaler.scale(loss_of(model)))
    scaler.step(optimizer)
    assert scales.found == [8.0]
    assert optimizer.last_stats is not None
    return float(optimizer.last_stats.total_norm), [param.detach().clone() for param in model.parameters()]


def test_explicit_clip_within_accumulation_window_accounts_for_grad_scaler() -> None:
    (norm, params), (expected, others) = scaled_norm(True), scaled_norm(False)
    assert norm == pytest.approx(expected)
    for one, other in zip(params, others, strict=True):
        torch.testing.assert_close(one, other)


def test_transforms_property_contains_master_weights() -> None:
    optimizer = optimizer_of(model_of(torch.bfloat16), precision="bf16")
    assert optimizer.transforms.transforms
    assert all(tensor.dtype == torch.float32 for tensor in optimizer.transforms.stepped)
    assert optimizer.grad_sync is None
