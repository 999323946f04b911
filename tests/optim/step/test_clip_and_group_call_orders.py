"""Unusual orders of calls, calls on some ranks only, and calls after an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from failing import fails_in_backward
from meshstep.amp import Bf16
from meshstep.optim import ByNorm, Offloaded, ParallelOptimizer, Sharded, global_norm, sync_gradients
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World


def weight(name: str | None, spec: P | None = None, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    param = nn.Parameter(torch.zeros(4, dtype=dtype))
    annotate(param, spec or P(), name)
    return param


def sgd(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [None, 1])
def test_explicit_clip_does_not_complete_window_after_failed_backward(steps: int | None) -> None:
    a, b = weight("a"), weight("b")
    optimizer = ParallelOptimizer(sgd([a, b]), ProcessGroupRegistry(Topology()), accumulation_steps=steps)
    with pytest.raises(ArithmeticError):
        optimizer.backward((a * 3).sum() + fails_in_backward(b, ArithmeticError("planted")).sum())
    optimizer.clip_grad_by_norm(1.0)
    with pytest.raises(RuntimeError, match="a backward since the last step raised"):
        optimizer.step()
    optimizer.zero_grad()
    assert float(a.detach().abs().sum()) == 0
    optimizer.backward((a * 3).sum())
    assert optimizer.step() is not None


def changed_threshold() -> tuple[str, float, float]:
    """Return the error, "skipped" or "stepped", the first weight, and the first weight after a step after `refresh`.

    Before `refresh`, both param groups of the first stage get the threshold 0.5, and the group of the second stage too.
    """
    with ProcessGroupRegistry(Topology(pipe=2)) as registry:
        a, b = weight("a"), weight("b")
        groups = [{"params": [a], "max_norm": 1.0}, {"params": [b], "max_norm": 1.0}]
        first = registry.rank("pipe") == 0
        optimizer = ParallelOptimizer(sgd(groups if first else groups[:1]), registry)
        optimizer.backward((a * 3).sum() + (b.sum() if first else 0))
        if first:
            optimizer.param_groups[1]["max_norm"] = 2.0
        try:
            stats = optimizer.step()
            text = "skipped" if stats.skipped else "stepped"
        except ValueError as error:
            text = str(error)
        unchanged = float(a[0])
        optimizer.zero_grad()
        for own in optimizer.param_groups:
            own["max_norm"] = 0.5
        optimizer.refresh()
        optimizer.backward((a * 3).sum() + (b.sum() if first else 0))
        optimizer.step()
        return text, unchanged, float(a[0])


def test_group_threshold_changed_on_one_stage_raises_until_refresh(world: World) -> None:
    (first, *weights_of_first), (second, *weights_of_second) = world.run(2, changed_threshold)
    assert "Ranks without some of these groups do not see the change" in first
    assert "call optimizer.refresh() on every rank" in first
    assert second == "skipped"
    assert weights_of_first == weights_of_second == [0.0, pytest.approx(-0.5 / 8**0.5)]


def clipped_sums() -> tuple[str, float]:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        a, b = weight("a", P(partial="tensor")), weight("b", P(partial="tensor"))
        groups = [{"params": [a], "max_norm": 1.0}, {"params": [b], "max_norm": 2.0}]
        optimizer = ParallelOptimizer(sgd(groups), registry)
        optimizer.backward((a * 3).sum() + (b * 3).sum())
        optimizer.clip_grad_by_norm(1.0)
        with pytest.raises(ValueError, match="is already summed") as caught:
            sync_gradients([a, b], registry)
        return str(caught.value), float(global_norm([a, b], registry).total_norm)


def test_sync_gradients_after_explicit_clip_raises_for_summed_partial_gradients(world: World) -> None:
    for _, norm in world.run(2, clipped_sums):
        assert norm == pytest.approx(5**0.5, rel=1e-5)


def added_without_a_name() -> tuple[str, int, float]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        a = weight("a", dtype=torch.bfloat16)
        mode = Bf16(stochastic_rounding=True)
        optimizer = ParallelOptimizer(sgd([a]), registry, precision=mode)
        with pytest.raises(ValueError, match="has no name") as caught:
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))]})
        optimizer.backward((a.float() * 3).sum())
        stats = optimizer.step()
        assert stats is not None
        inner = sgd([weight(None, dtype=torch.bfloat16)])
        given = inner.param_groups[0]["params"][0]
        with pytest.raises(ValueError, match="has no name"):
            ParallelOptimizer(inner, registry, precision=mode, states=Offloaded(1.0))
        assert inner.param_groups[0]["params"][0] is given, "the failed construction changed the optimizer"
        return str(caught.value), len(optimizer.param_groups), float(stats.total_norm)


def test_rejected_param_group_leaves_optimizer_unchanged(world: World) -> None:
    for _, groups, norm in world.run(2, added_without_a_name):
        assert groups == 1
        assert norm == pytest.approx(6.0)


def added_within_no_sync(overlap: bool) -> tuple[list[float], list[float]]:
    """Return the gradient after the backward inside `no_sync`, and the weight after the step."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        annotate(model.weight, P(), "w")
        model.register_parameter("later", weight("later"))
        wrapped = model if overlap else DistributedDataParallel(model)
        ddp = None if overlap else wrapped
        optimizer = ParallelOptimizer(sgd([model.weight]), registry, data_parallel=ddp, overlap=overlap)
        with optimizer.no_sync():
            optimizer.add_param_group({"params": [model.later]})
            optimizer.backward(wrapped(torch.full((1, 4), 1.0 + registry.global_rank)).sum())
            assert model.weight.grad is not None
            gradient: list[float] = model.weight.grad.flatten().tolist()
        optimizer.step()
        return gradient, model.weight.flatten().tolist()


@pytest.mark.parametrize("overlap", [False, True])
def test_param_group_added_inside_no_sync_does_not_enable_reduction(world: World, overlap: bool) -> None:
    weights = [-1.5] * 4  # `step` averages the gradients
    assert world.run(2, added_within_no_sync, overlap) == [([1.0] * 4, weights), ([2.0] * 4, weights)]


def wrong_on_one_rank(kind: str) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        plain = sgd([weight("a")])
        wrapped = ParallelOptimizer(sgd([weight("b")]), registry)
        first = registry.global_rank == 0
        options: dict[str, Any] = {"max_grad_norm": 0.5} if first and kind == "other name" else {}
        with pytest.raises(TypeError) as caught:
            ParallelOptimizer(wrapped if first and kind == "wrapped" else plain, registry, **options)
        return str(caught.value)


@pytest.mark.parametrize(("kind", "says"), [("wrapped", "already"), ("other name", "write max_norm=")])
def test_wrong_constructor_call_on_one_rank_raises_on_all_ranks(world: World, kind: str, says: str) -> None:
    for text in world.run(2, wrong_on_one_rank, kind):
        assert says in text


def cleared_by_the_inner_optimizer() -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        a = weight("a", dtype=torch.bfloat16)
        inner = sgd([a])
        optimizer = ParallelOptimizer(inner, registry, precision="bf16", overlap=True)
        optimizer.backward((a.float() * 3).sum())
        optimizer.step()
        type(inner).zero_grad(inner)  # clears gradients of the master weights only
        optimizer.backward((a.float() * 3).sum())
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        return str(caught.value)


def test_stale_gradients_with_master_weights_and_overlap_raise(world: World) -> None:
    for text in world.run(2, cleared_by_the_inner_optimizer):
        assert "still contains the gradient of an earlier step" in text


def thawed_after_a_group_was_added() -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        a, b, c = weight("a"), weight("b"), weight("c")
        optimizer = ParallelOptimizer(sgd([a, b]), registry)
        b.requires_grad_(False)
        optimizer.add_param_group({"params": [c]})
        b.requires_grad_(True)
        optimizer.backward(((a + b + c) * (1.0 + registry.global_rank)).sum())
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        return str(caught.value)


def test_unfreezing_after_adding_a_group_without_refresh_raises(world: World) -> None:
    for text in world.run(2, thawed_after_a_group_was_added):
        assert "b was frozen when" in text


def test_duplicate_state_placement_is_rejected() -> None:
    with pytest.raises(ValueError, match="each kind of placement once"):
        ParallelOptimizer(sgd([weight("a")]), ProcessGroupRegistry(Topology(data=1)), states=(Sharded(), Sharded()))


def test_setting_max_norm_to_its_own_value_keeps_rule() -> None:
    optimizer = ParallelOptimizer(sgd([weight("a")]), ProcessGroupRegistry(Topology()), max_norm=ByNorm(1.0, 3.0))
    optimizer.max_norm = optimizer.max_norm
    assert optimizer.clip == ByNorm(1.0, 3.0)
