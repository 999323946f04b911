"""A non-finite gradient in one shard on one rank, in most precision modes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import inf, nan
from typing import Any

import pytest
import torch.distributed as dist
from meshstep.amp import NaiveFp16, Precision, TorchFp16
from meshstep.parallel import ProcessGroupRegistry, Topology
from precision_modes import MODES, differences, make, snapshot
from scenarios import SCENARIOS, Scenario, batch, dense_1d
from world import World

ONE_PROCESS = Scenario((("tensor", 1),), "1d", dense_1d)
STEPS, BAD = 6, (0, 2)  # the steps with an overflow: before and after optimizer states exist


@dataclass
class Report:
    """Results of one rank."""

    skipped: list[int] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)  # loss scales before each step, and after the last step
    changed: list[str] = field(default_factory=list)  # names of tensors that a step in `BAD` changed
    moved: bool = True  # whether every other step changed the parameters
    unlike_twin: list[str] = field(default_factory=list)


def plant(name: str, mode: str, kind: str, value: float, options: dict[str, Any]) -> Report:
    """Train with ``value`` planted in one shard of the last rank in the steps `BAD`. Then train a twin that omits these
    steps, with the same loss scales."""
    scenario, report = SCENARIOS[name], Report()
    with ProcessGroupRegistry(scenario.topology) as registry:
        ends = []
        for planted in (True, False):
            model, optimizer = make(scenario, registry, MODES[mode], kind, **options)
            scale = optimizer.loss_scale
            for step in range(STEPS):
                bad = step in BAD
                if bad and not planted:
                    continue
                if scale is not None:
                    if planted:
                        report.scales.append(float(scale.scale))
                    scale.scale.fill_(report.scales[step])
                optimizer.zero_grad()
                optimizer.backward(model(batch(step)))
                before = snapshot(model, optimizer)
                if bad and dist.get_rank() == dist.get_world_size() - 1:
                    grad = model.get_parameter("up.weight").grad
                    assert grad is not None
                    grad.view(-1)[3] = value
                stats = optimizer.step()
                assert stats is not None
                if scale is not None:
                    assert stats.loss_scale == report.scales[step]  # the scale of backward, not the updated scale
                after = snapshot(model, optimizer)
                if planted and bool(stats.found_inf):
                    report.skipped.append(step)
                    # A skipped first step may create states of zeros.
                    new = {key: value for key, value in after.items() if key not in before}
                    report.changed += [key for key, value in new.items() if value.any()]
                    report.changed += differences(before, {key: after[key] for key in before})
                elif planted:
                    report.moved &= bool(differences(before, {key: after[key] for key in before}))
            if planted:
                assert optimizer.skipped_steps == len(BAD)
                report.scales += [] if scale is None else [float(scale.scale)]
            ends.append(snapshot(model, optimizer))
    report.unlike_twin = differences(*ends)
    return report


# Scales before each step and after the last, relative to the first; steps 0 and 2 overflow.
SCALES: dict[str, list[float]] = {
    "fp16": [1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25],
    "fp16_naive": [1, 1, 1, 0.5, 0.5, 0.5, 0.5],  # hysteresis 2 tolerates the first overflow
    "O1": [1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25],
    "O2": [1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25],
    "O3": [1, 1, 1, 1, 1, 1, 1],  # constant
}


@pytest.mark.parametrize("name", ["tensor", "grid, bias on row 0"])
@pytest.mark.parametrize(
    ("mode", "value"), [*((mode, inf) for mode in SCALES), ("bf16", nan), ("fp32", nan), ("O2", nan)]
)
def test_overflow_on_one_rank_skips_step_on_all_ranks_and_changes_only_loss_scale(
    world: World, name: str, mode: str, value: float
) -> None:
    check(world.run(SCENARIOS[name].topology.world_size, plant, name, mode, "adamw", value, {}), mode)


@pytest.mark.parametrize("mode", ["fp16", "fp16_naive", "O3"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("adamw, not fused", {"max_norm": 0.3}),
        ("sgd", {"clip_value": 0.01}),
        ("sgd", {"norm_type": inf, "max_norm": 0.1}),
    ],
)
def test_overflow_with_clipping_or_unfused_optimizer_changes_nothing_but_loss_scale(
    world: World, mode: str, kind: str, options: dict[str, Any]
) -> None:
    check(world.run(2, plant, "tensor", mode, kind, inf, options), mode)


def check(reports: list[Report], mode: str) -> None:
    scale = MODES[mode].make_loss_scale()
    for report in reports:
        assert report.skipped == list(BAD)
        assert report.scales == ([] if scale is None else [float(scale.scale) * factor for factor in SCALES[mode]])
        assert (report.changed, report.moved, report.unlike_twin) == ([], True, [])


def test_nonfinite_gradient_with_stochastic_rounding_skips_step(world: World) -> None:
    for report in world.run(4, plant, "grid, bias on row 0", "bf16 stochastic", "adamw", nan, {}):
        assert (report.skipped, report.changed, report.moved) == (list(BAD), [], True)


@pytest.mark.parametrize("mode", ["fp16", "fp16_naive", "O2", "O3"])
def test_explicit_clip_before_step_does_not_hide_overflow(mode: str) -> None:
    with ProcessGroupRegistry(Topology(tensor=1)) as registry:
        model, optimizer = make(ONE_PROCESS, registry, MODES[mode])
        for call in (partial(optimizer.clip_grad_by_value, 0.1), partial(optimizer.clip_grad_by_norm, 0.1)):
            optimizer.zero_grad()
            optimizer.backward(model(batch(0)))
            before = snapshot(model, optimizer)
            grad = model.get_parameter("up.weight").grad
            assert grad is not None
            grad[0, 0] = inf
            stats = call()
            assert stats is not None
            assert float(stats.found_inf) == 1
            optimizer.clip_grad_by_value(0.01)  # makes all gradients finite
            optimizer.step()
            after = snapshot(model, optimizer)
            assert differences(before, {key: after[key] for key in before}) == []
        assert optimizer.skipped_steps == 2
        assert optimizer.loss_scale is not None
        start = MODES[mode].make_loss_scale()
        assert start is not None
        assert float(optimizer.loss_scale.scale) == float(start.scale) * SCALES[mode][3]


# Overflows caused by the loss scale -----------------------------------------------------------------------------------

TOO_HIGH = 2.0**40
SEARCHING: dict[str, Precision] = {
    "fp16": TorchFp16(init_scale=TOO_HIGH),
    "fp16_naive": NaiveFp16(init_scale=TOO_HIGH),
}


def search(name: str, mode: str) -> tuple[list[float], list[float], list[str]]:
    """Run 36 steps that start with a much too large loss scale. Return the scales, the sum of each final tensor, and the
    names of the tensors that skipped steps changed."""
    scenario = SCENARIOS[name]
    with ProcessGroupRegistry(scenario.topology) as registry:
        model, optimizer = make(scenario, registry, SEARCHING[mode], max_norm=0.4)
        assert optimizer.loss_scale is not None
        start, scales, changed = snapshot(model, optimizer), [TOO_HIGH], []
        for step in range(36):
            optimizer.zero_grad()
            optimizer.backward(model(batch(step)))
            before = snapshot(model, optimizer)
            stats = optimizer.step()
            assert stats is not None
            after = snapshot(model, optimizer)
            if bool(stats.found_inf):
                changed += differences({k: before[k] for k in start}, {k: after[k] for k in start})
            scales.append(float(optimizer.loss_scale.scale))
        assert optimizer.skipped_steps < 30
        assert len(differences(start, after)) > len(start) / 2
        return scales, [float(value.double().sum()) for value in after.values()], changed


@pytest.mark.long
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("mode", SEARCHING)
def test_too_large_initial_loss_scale_decreases_equally_on_all_ranks(world: World, mode: str) -> None:
    runs = world.run(4, search, "grid, bias on row 0", mode)
    scales = runs[0][0]
    assert all(run[0] == scales and run[2] == [] for run in runs)
    assert all(after in (before, before / 2) for before, after in pairwise(scales))
    assert 2.0**8 < scales[-1] == scales[-3] < 2.0**30
