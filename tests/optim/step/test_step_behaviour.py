"""How a step behaves: collectives, host reads, non-finite gradients, torch's surroundings, replicas that differ."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshstep.optim import ParallelOptimizer, ReplicaMismatchError
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from optimizers import arguments
from probes import HostReadError, collectives, no_host_reads
from scenarios import SCENARIOS, backward, batch, build
from torch import Tensor, nn
from world import World

OPTIMIZERS: dict[str, Callable[[Any, bool], torch.optim.Optimizer]] = {
    "adamw": lambda params, fused: torch.optim.AdamW(params, lr=1e-2, fused=fused),
    "adam": lambda params, fused: torch.optim.Adam(params, lr=1e-2, fused=fused),
    "sgd": lambda params, fused: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=fused),
    "sgd, dampening": lambda params, fused: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.3, fused=fused),
    "adagrad": lambda params, fused: torch.optim.Adagrad(params, lr=1e-2, fused=fused),
}


def optimizer_for(
    name: str, registry: ProcessGroupRegistry, kind: str = "adamw", fused: bool = True, **options: Any
) -> tuple[nn.Module, ParallelOptimizer]:
    model = build(SCENARIOS[name], registry, torch.float32)
    assert model is not None
    return model, ParallelOptimizer(OPTIMIZERS[kind](model.parameters(), fused), registry, **arguments(**options))


# Collectives and host reads -------------------------------------------------------------------------------------------


def count_collectives(name: str, options: dict[str, Any]) -> list[Counter[str]]:
    with ProcessGroupRegistry(SCENARIOS[name].topology) as registry:
        model, optimizer = optimizer_for(name, registry, **options)
        counts = []
        for step in range(3):
            optimizer.zero_grad()
            backward(SCENARIOS[name], model, optimizer, batch(step))
            with collectives() as seen:
                optimizer.step()
            counts.append(seen)
        return counts


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("tensor", {}, {"all_reduce": 1}),
        ("tensor", {"max_norm": 0.3, "per_parameter_norms": True}, {"all_reduce": 1}),
        ("tensor", {"norm_type": float("inf")}, {"all_gather_single": 1}),
        ("grid, bias on row 0", {"max_norm": 1.0}, {"all_reduce": 2}),  # the partial table's sum, and the norm
        # The data average of split parameters and of copied ones, and the norm.
        ("data x tensor", {"max_norm": 0.3, "check_replicas": True}, {"all_reduce": 3}),
        ("data x sequence parallel", {}, {"all_reduce": 3}),  # data; data x tensor for partial ones; the norm
    ],
)
def test_one_collective_measures(world: World, name: str, options: dict[str, Any], expected: dict[str, int]) -> None:
    for counts in world.run(SCENARIOS[name].topology.world_size, count_collectives, name, options):
        assert counts[1:] == [expected, expected]


def step_without_reading(name: str, kind: str, fused: bool, options: dict[str, Any]) -> bool:
    with ProcessGroupRegistry(SCENARIOS[name].topology) as registry:
        model, optimizer = optimizer_for(name, registry, kind, fused, **options)
        for step in range(20):  # further than the skip monitor looks back
            optimizer.zero_grad()
            backward(SCENARIOS[name], model, optimizer, batch(step))
            if step == 0:
                optimizer.step()
                continue
            try:
                with no_host_reads():
                    optimizer.step()
            except HostReadError:
                return False
        return True


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_fused_step_reads_nothing(world: World, kind: str) -> None:
    assert all(world.run(2, step_without_reading, "tensor", kind, True, {"max_norm": 0.3}))


@pytest.mark.parametrize(
    "options", [{}, {"clip_value": 0.01}, {"norm_type": float("inf"), "max_norm": 0.1}, {"per_parameter_norms": True}]
)
def test_options_read_nothing(world: World, options: dict[str, Any]) -> None:
    assert all(world.run(4, step_without_reading, "data x sequence parallel", "adamw", True, options))


def test_an_optimizer_that_is_not_fused_reads(world: World) -> None:
    assert not any(world.run(2, step_without_reading, "tensor", "adamw", False, {}))


# Non-finite gradients -------------------------------------------------------------------------------------------------


def snapshot(model: nn.Module, optimizer: ParallelOptimizer) -> list[Tensor]:
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    return [value.detach().clone() for value in (*model.parameters(), *state)]


def plant(
    name: str, kind: str, fused: bool, value: float, when: int, options: dict[str, Any]
) -> tuple[bool, list[float], int, list[Tensor]]:
    """Train 4 steps, with ``value`` planted on the last rank before step ``when``; and without that batch at all."""
    scenario = SCENARIOS[name]
    with ProcessGroupRegistry(scenario.topology) as registry:
        results = []
        for planted in (True, False):
            model, optimizer = optimizer_for(name, registry, kind, fused, **options)
            unchanged, found = True, []
            for step in range(4):
                if step == when and not planted:
                    continue
                optimizer.zero_grad()
                backward(scenario, model, optimizer, batch(step))
                before = snapshot(model, optimizer)
                if step == when and dist.get_rank() == dist.get_world_size() - 1:
                    grad = next(model.parameters()).grad
                    assert grad is not None
                    grad.view(-1)[1] = value
                stats = optimizer.step()
                assert stats is not None
                found.append(float(stats.found_inf))
                if step == when:
                    after = snapshot(model, optimizer)
                    # A first step that is skipped may have made states, of zeros; it must not have changed any.
                    unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=when > 0)) and (
                        when > 0 or all(not state.any() for state in after[len(before) :])
                    )
            results.append((unchanged, found, optimizer.skipped_steps, snapshot(model, optimizer)))
        same = all(torch.equal(a, b) for a, b in zip(results[0][3], results[1][3], strict=True))
        unchanged, found, skipped, end = results[0]
        return unchanged and same, found, skipped, end


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("kind", "fused"), [(k, True) for k in OPTIMIZERS] + [("adamw", False), ("sgd", False)])
def test_every_rank_skips_and_nothing_changes(world: World, kind: str, fused: bool, value: float) -> None:
    for when in (0, 2):
        for fine, found, skipped, _ in world.run(2, plant, "tensor", kind, fused, value, when, {"max_norm": 0.4}):
            assert fine
            assert found == [float(step == when) for step in range(4)]
            assert skipped == 1


@pytest.mark.parametrize("name", ["data x tensor", "grid, bias on row 0"])
@pytest.mark.parametrize("options", [{"norm_type": float("inf"), "max_norm": 0.1}, {"reduction": "per_group"}])
def test_every_rank_skips_in_every_reduction(world: World, name: str, options: dict[str, Any]) -> None:
    for fine, found, skipped, _ in world.run(4, plant, name, "adamw", True, float("nan"), 1, options):
        assert fine
        assert (found, skipped) == ([0.0, 1.0, 0.0, 0.0], 1)


def raise_on_nonfinite(options: dict[str, Any], steps: int) -> str:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        model, optimizer = optimizer_for("tensor", registry, **options)
        try:
            for step in range(steps):
                optimizer.zero_grad()
                backward(SCENARIOS["tensor"], model, optimizer, batch(step))
                if dist.get_rank() == 1 and model.down.weight.grad is not None:  # type: ignore[union-attr]
                    model.down.weight.grad[0, 0] = torch.nan  # type: ignore[union-attr, operator]
                optimizer.step()
        except FloatingPointError as error:
            return f"step {step}: {error}"
        return "no error"


def test_nonfinite_raises_on_every_rank_with_the_names(world: World) -> None:
    for message in world.run(2, raise_on_nonfinite, {"on_nonfinite": "raise"}, 3):
        assert message.startswith("step 0: the gradient norm is nan")
        assert "not finite now: down.weight" in message


def test_too_many_skips_in_a_row_are_an_error_on_every_rank(world: World) -> None:
    messages = world.run(2, raise_on_nonfinite, {"max_skips_in_a_row": 5}, 40)
    assert len(set(messages)) == 1
    assert messages[0].startswith("step 20: 5 steps in a row were skipped")  # noticed 16 steps after the fifth
    assert "down.weight" in messages[0]


# torch's surroundings -------------------------------------------------------------------------------------------------


def small() -> tuple[nn.Linear, ProcessGroupRegistry]:
    torch.manual_seed(5)
    return nn.Linear(4, 3), ProcessGroupRegistry(Topology())


def test_schedulers_hooks_and_isinstance() -> None:
    model, registry = small()
    optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=1.0, fused=True), registry, max_norm=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    calls = []
    before = optimizer.register_step_pre_hook(lambda opt, args, kwargs: calls.append(("pre", opt)))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: calls.append(("post", opt)))
    rates = []
    for _ in range(4):
        optimizer.zero_grad()
        optimizer.backward(model(torch.ones(2, 4)).square().sum())
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
        before.remove()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert rates == pytest.approx([1.0, 0.1, 0.1, 0.01])
    assert calls == [("pre", optimizer)] + [("post", optimizer)] * 4
    assert optimizer.state is optimizer.optimizer.state
    assert "max_norm=0.5" in repr(optimizer)
    assert optimizer.grad_norm is not None
    assert optimizer.grad_norm > 0.5


def test_state_dict_continues_bit_for_bit() -> None:
    model, registry = small()

    def make(module: nn.Module) -> ParallelOptimizer:
        return ParallelOptimizer(torch.optim.AdamW(module.parameters(), lr=0.1, fused=True), registry, max_norm=0.5)

    def train(module: nn.Module, opt: ParallelOptimizer, value: float) -> None:
        opt.zero_grad()
        opt.backward(module(torch.full((2, 4), value)).square().sum())
        opt.step()

    optimizer = make(model)
    train(model, optimizer, 1.0)
    train(model, optimizer, torch.nan)
    twin = copy.deepcopy(model)
    resumed = make(twin)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.skipped_steps == optimizer.skipped_steps == 1
    for value in (2.0, 3.0):
        train(model, optimizer, value)
        train(twin, resumed, value)
    assert torch.equal(model.weight, twin.weight)
    resumed.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
    assert resumed.skipped_steps == 0


def test_explicit_clipping_measures_once_and_clips_once() -> None:
    model, registry = small()
    optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), registry, max_norm=100.0)
    optimizer.backward(model(torch.ones(2, 4)).square().sum() * 30)
    stats = optimizer.clip_grad_by_norm(0.25)
    assert stats is not None
    grads = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    assert torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads])) == pytest.approx(0.25, rel=1e-4)
    before = [param.detach().clone() for param in model.parameters()]
    assert optimizer.step() is stats
    for old, new, grad in zip(before, model.parameters(), grads, strict=True):
        torch.testing.assert_close(new, old - grad)


def test_clip_by_value_reports_the_norm_before() -> None:
    model, registry = small()
    optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), registry)
    optimizer.backward(model(torch.ones(2, 4)).square().sum() * 30)
    true = torch.nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
    stats = optimizer.clip_grad_by_value(0.01)
    assert stats is not None
    assert stats.total_norm == pytest.approx(float(true), rel=1e-6)
    assert all(param.grad is not None and param.grad.abs().max() <= 0.01 for param in model.parameters())
    with_option = ParallelOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), registry, **arguments(clip_value=0.005)
    )
    before = model.bias.detach().clone()
    with_option.step()
    assert float((before - model.bias.detach()).abs().max()) == pytest.approx(0.005, rel=1e-3)


def group_norms() -> tuple[list[float], dict[str, float], float, list[float]]:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
        third = nn.Parameter(torch.zeros(1))
        for param, spec, name in ((first, P("tensor"), "first"), (second, P(), "second"), (third, P(), "third")):
            annotate(param, spec, name)
        groups: Any = [{"params": [first]}, {"params": [second], "max_norm": 2.0}]
        optimizer = ParallelOptimizer(
            torch.optim.SGD(groups, lr=1.0, fused=True), registry, **arguments(max_norm=2.5, per_parameter_norms=True)
        )
        optimizer.add_param_group({"params": [third]})
        first.grad = torch.tensor([3.0, 0.0]) if registry.global_rank == 0 else torch.tensor([0.0, 4.0])
        second.grad, third.grad = torch.tensor([0.0, 6.0, 8.0]), torch.zeros(1)
        stats = optimizer.step()
        assert stats is not None
        norms = {name: float(value) for name, value in stats.parameter_norms.items()}
        steps = [float(first.abs().max()), float(second.abs().max())]
        return stats.group_norms.tolist(), norms, float(stats.total_norm), steps


def test_groups_with_their_own_threshold_and_norms_of_groups_and_parameters(world: World) -> None:
    for rank, (groups, parameters, total, (first, second)) in enumerate(world.run(2, group_norms)):
        assert groups == pytest.approx([5.0, 10.0, 0.0])
        assert parameters == pytest.approx({"first": 5.0, "second": 10.0, "third": 0.0})
        assert total == pytest.approx(125**0.5)
        assert first == pytest.approx((3.0, 4.0)[rank] * 0.5, rel=1e-5)  # the others' norm is 5: 2.5 / 5
        assert second == pytest.approx(8.0 * 0.2, rel=1e-5)  # its own is 10: 2 / 10


# Replicas that differ -------------------------------------------------------------------------------------------------


def disturbed(what: str) -> str:
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        model, optimizer = optimizer_for("data x tensor", registry, check_replicas=True)
        moved = registry.coordinate["tensor"] == 1
        if what == "parameter" and moved:
            with torch.no_grad():
                model.norm.weight[2] += 1e-6  # type: ignore[union-attr, index, operator]
        before = snapshot(model, optimizer)
        backward(SCENARIOS["data x tensor"], model, optimizer, batch(0))
        if what == "gradient" and moved:
            model.down.bias.grad[0] *= -1  # type: ignore[union-attr, index, operator]
        try:
            optimizer.step()
        except ReplicaMismatchError as error:
            unchanged = all(torch.equal(a, b) for a, b in zip(before, snapshot(model, optimizer), strict=True))
            return ", ".join(map(str, error.mismatches)) + ("" if unchanged else " and stepped")
        return "no error"


def test_replicas_that_agree_pass(world: World) -> None:
    assert world.run(4, disturbed, "nothing") == ["no error"] * 4


def test_a_gradient_that_differs_is_named(world: World) -> None:
    assert world.run(4, disturbed, "gradient") == ["down.bias: the gradient differs along axis 'tensor'"] * 4


def test_a_parameter_that_differs_is_named(world: World) -> None:
    for report in world.run(4, disturbed, "parameter"):
        assert report.startswith("norm.weight: the parameter differs along axis 'tensor'")
        assert "stepped" not in report
