"""Steps with non-finite gradients: skipped on every rank, or an error on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshstep.optim import ParallelOptimizer, Skip
from meshstep.optim.step.skips import LAG
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from optimizers import OPTIMIZERS, optimizer_for, snapshot
from scenarios import SCENARIOS, backward, batch
from torch import Tensor, nn
from world import World


def plant(
    name: str, kind: str, fused: bool, value: float, when: int, options: dict[str, Any]
) -> tuple[bool, list[float], int, list[Tensor]]:
    """Compare 4 steps, with ``value`` in a gradient of the last rank in step ``when``, with the steps without ``when``.

    Return whether step ``when`` changed nothing and both runs end with equal tensors; and of the run with ``value``,
    the ``found_inf`` of each step, the number of skipped steps, and the final tensors.
    """
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
                    # A skipped first step may create states of zeros, but must not change any.
                    unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=when > 0)) and (
                        when > 0 or all(not state.any() for state in after[len(before) :])
                    )
            results.append((unchanged, found, optimizer.skipped_steps, snapshot(model, optimizer)))
        same = all(torch.equal(a, b) for a, b in zip(results[0][3], results[1][3], strict=True))
        unchanged, found, skipped, end = results[0]
        return unchanged and same, found, skipped, end


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("kind", "fused"), [(k, True) for k in OPTIMIZERS] + [("adamw", False), ("sgd", False)])
def test_nonfinite_gradient_skips_step_on_every_rank_without_changes(
    world: World, kind: str, fused: bool, value: float
) -> None:
    for when in (0, 2):
        for fine, found, skipped, _ in world.run(2, plant, "tensor", kind, fused, value, when, {"max_norm": 0.4}):
            assert fine
            assert found == [float(step == when) for step in range(4)]
            assert skipped == 1


@pytest.mark.parametrize("name", ["data x tensor", "grid, bias on row 0"])
@pytest.mark.parametrize("options", [{"norm_type": float("inf"), "max_norm": 0.1}, {"reduction": "per_group"}])
def test_nonfinite_gradient_skips_step_with_infinity_norm_or_reduction_per_group(
    world: World, name: str, options: dict[str, Any]
) -> None:
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


def test_on_nonfinite_raise_raises_on_every_rank_with_parameter_names(world: World) -> None:
    for message in world.run(2, raise_on_nonfinite, {"on_nonfinite": "raise"}, 3):
        assert message.startswith("step 0: the gradient norm is nan")
        assert "not finite now: down.weight" in message


def test_too_many_skipped_steps_in_a_row_raise_on_every_rank(world: World) -> None:
    messages = world.run(2, raise_on_nonfinite, {"max_skips_in_a_row": 5}, 40)
    assert len(set(messages)) == 1
    assert messages[0].startswith("step 20: 5 steps in a row were skipped")  # detected 16 steps after the fifth
    assert "down.weight" in messages[0]


def skip_in_two_rows(most: int) -> tuple[str, int]:
    """Skip three steps, apply one, skip three more, and run enough steps for the counts to arrive.

    Return the error, and the number of skipped steps.
    """
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        model, optimizer = optimizer_for("tensor", registry, max_skips_in_a_row=most)
        try:
            for step in range(7 + LAG + 1):
                optimizer.zero_grad()
                backward(SCENARIOS["tensor"], model, optimizer, batch(step))
                if step in (0, 1, 2, 4, 5, 6):
                    model.down.weight.grad[0, 0] = torch.nan  # type: ignore[union-attr, operator, index]
                optimizer.step()
        except FloatingPointError as error:
            return str(error), optimizer.skipped_steps
        return "no error", optimizer.skipped_steps


def test_applied_step_resets_count_of_consecutive_skips(world: World) -> None:
    assert world.run(2, skip_in_two_rows, 4) == [("no error", 6)] * 2
    for message, _ in world.run(2, skip_in_two_rows, 3):
        assert message.startswith("3 steps in a row were skipped")


def test_error_about_skipped_first_step_is_raised_exactly_16_steps_later() -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        model = nn.Linear(2, 1)
        declare(model, {"*": P()})
        adamw = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer = ParallelOptimizer(adamw, registry, on_nonfinite=Skip(max_consecutive=1))
        for step in range(LAG + 1):
            optimizer.zero_grad()
            optimizer.backward(model(torch.full((1, 2), torch.inf if step == 0 else 1.0)).sum())
            if step < LAG:
                optimizer.step()
        with pytest.raises(FloatingPointError, match="1 steps in a row were skipped"):
            optimizer.step()
