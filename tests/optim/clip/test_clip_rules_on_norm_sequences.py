"""Stateful rules and named groups match an independent reference on random norm sequences and several layouts.

The gradients are set by `tests/harness/planted.py`, and multiplied by `trace`: a random factor per step, which is larger
in steps with a spike. The reference (`tests/harness/dense_rules.py`) computes with Python floats in one process, from
the norms of the dense model in float64.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_rules import DenseRule
from meshstep.optim import (
    AdaGC,
    ByName,
    ByNorm,
    ByPreviousNorm,
    Clip,
    ClipResult,
    Norms,
    ParallelOptimizer,
    PerParameter,
    Sharded,
    SkipSpikes,
    WarmUp,
    ZClip,
    load_checkpoint,
    save_checkpoint,
)
from meshstep.parallel import P, ProcessGroupRegistry, Topology
from planted import LAYOUTS, Dense, Full, Key, Layout, Part, Planted, parts
from world import World

STEPS = 16
HALF = 10  # step at which a run is saved, after the warm-ups
END = 14  # end of a saved and of a resumed run, after the last spike
SPIKES = {8: 30.0, 12: 12.0, 13: 9.0}
CLOSE = 1e-12


@dataclass(frozen=True)
class Experts(Layout):
    """A layout with an expert axis whose ranks see different samples."""

    @property
    def topology(self) -> Topology:
        return Topology(roles={"expert": "data"}, **dict(self.axes))


@dataclass(frozen=True)
class Config:
    layout: Layout
    options: dict[str, Any] = field(default_factory=dict)
    micros: int = 1

    @property
    def ranks(self) -> int:
        return self.layout.topology.world_size


_EXPERTS = Experts((("data", 2), ("expert", 2)), {"up": P("expert"), "kernel": P("expert"), "down": P(None, "expert")})
CONFIGS = {
    "one rank": Config(LAYOUTS["one rank"]),
    "1-D": Config(LAYOUTS["tensor"]),
    "2-D": Config(LAYOUTS["grid"]),
    "pipe": Config(LAYOUTS["pipe, tied"]),
    "experts": Config(_EXPERTS),
    "ZeRO-1": Config(LAYOUTS["data"], {"states": Sharded("data")}),
    "ZeRO-2, 1-D, windows": Config(
        LAYOUTS["data x tensor"], {"states": Sharded("data", gradients=True), "accumulation_steps": 2}, micros=2
    ),
}
RULES: dict[str, Clip] = {
    "warm-up": ByNorm(WarmUp(40.0, 5.0, steps=9)),
    "warm-up, by parameter": PerParameter(WarmUp(2.0, 9.0, steps=5)),
    "z": ZClip(z=1.5, decay=0.8, warm_up=6),
    "z with max_norm": ZClip(z=2.0, decay=0.9, warm_up=5, max_norm=WarmUp(60.0, 15.0, steps=20)),
    "adaptive means": AdaGC(max_norm=12.0, factor=1.05, decay=0.7, warm_up=4),
    "previous": ByPreviousNorm(11.0),
    "spikes, median": SkipSpikes(3.0, window=7, warm_up=5),
    "spikes, mean": SkipSpikes(3.0, 9.0, statistic="mean", window=9, warm_up=5),
    "spikes, then named groups": SkipSpikes(4.0, {"down": 1.0, "*": ZClip(z=1.0, warm_up=3)}, window=6, warm_up=3),
    "spikes, then means": SkipSpikes(3.0, AdaGC(12.0, 1.0, 0.6, warm_up=3), window=8, warm_up=4),
    "named": ByName({"up": 3.0, "*n*": ZClip(z=1.0, decay=0.6, warm_up=4), "b*": None}, others=ByPreviousNorm(2.0)),
}


def trace(step: int) -> float:
    return random.Random(step).uniform(0.3, 1.2) * SPIKES.get(step, 1.0)


@dataclass
class Told:
    """Results of one rank over a run."""

    parts: list[Part]
    names: tuple[str, ...]
    norms: list[float]
    coefs: list[float]
    skipped: list[float]
    spiked: list[bool]
    states: list[dict[str, Any]]
    moved_by_skips: bool = False

    def bits(self) -> list[Any]:
        """Return norms, clip coefficients, skip flags and rule states of all steps. They must not contain NaN."""
        return [self.norms, self.coefs, self.skipped, self.states]


def made(config: Config, registry: ProcessGroupRegistry, rule: Clip | None) -> tuple[Planted, ParallelOptimizer]:
    model = Planted(config.layout, registry.global_rank, torch.float64)
    groups: Any = model.groups()
    inner = torch.optim.SGD(groups, lr=0.25, momentum=0.5, fused=True)
    return model, ParallelOptimizer(inner, registry, max_norm=rule, **config.options)


def backward(config: Config, model: Planted, optimizer: ParallelOptimizer, step: int) -> None:
    optimizer.zero_grad()
    for micro in range(config.micros):
        optimizer.backward(model(2 * step, micro) * trace(step))


def run(config: Config, model: Planted, optimizer: ParallelOptimizer, steps: range) -> Told:
    told, skipped_before = Told([], optimizer.plan.parameter_names, [], [], [], [], []), optimizer.skipped_steps
    for step in steps:
        backward(config, model, optimizer, step)
        before = bits_of(config, optimizer) if step in SPIKES else []
        stats = optimizer.step()
        assert stats is not None
        told.norms.append(float(stats.total_norm))
        told.coefs.append(float(stats.clip_coef))
        told.skipped.append(float(stats.skipped))
        told.spiked.append(stats.spiked is not None and bool(stats.spiked))
        told.states.append({name: value.tolist() for name, value in optimizer.clip_state.items()})
        if stats.skipped:
            told.moved_by_skips |= bits_of(config, optimizer) != before
        assert not stats.found_inf
    assert optimizer.skipped_steps - skipped_before == sum(told.skipped)
    told.parts = parts(config.layout, optimizer)
    return told


def bits_of(config: Config, optimizer: ParallelOptimizer) -> list[bytes]:
    """Return the bytes of all weights and optimizer states."""
    held = parts(config.layout, optimizer)
    return [value.numpy().tobytes() for part in held for value in (part.value, *part.state.values())]


def on_traces(config: Config, rules: list[Clip]) -> list[Told]:
    with ProcessGroupRegistry(config.layout.topology) as registry:
        return [run(config, *made(config, registry, rule), range(STEPS)) for rule in rules]


# The reference ----------------------------------------------------------------------------------------------------------


@dataclass
class Expected:
    """Results of the dense model."""

    rule: Clip
    dense: Dense
    norms: list[float] = field(default_factory=list)
    coefs: list[float] = field(default_factory=list)
    skipped: list[float] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reference = DenseRule(self.rule)

    def go_on(self, config: Config, steps: range) -> Expected:
        of_layout = Dense(config.layout)
        for step in steps:
            gradients: Full = {k: g * trace(step) for k, g in of_layout.gradients(2 * step, config.micros).items()}
            norms = {key: float(gradient.norm()) for key, gradient in gradients.items()}
            factors = self.reference(norms)
            self.norms.append(sqrt(sum(norm * norm for norm in norms.values())))
            self.skipped.append(float(factors is None))
            self.coefs.append(-1.0 if factors is None else min(factors.values()))
            self.states.append(copy.deepcopy(self.reference.state))
            if factors is not None:
                self.dense.step({key: gradient * factors[key] for key, gradient in gradients.items()})
        return self


def expected(rule: Clip, config: Config) -> Expected:
    return Expected(rule, Dense(config.layout)).go_on(config, range(STEPS))


def key_of(name: str) -> Key:
    """Return (name, stage) of a parameter name such as "up@pipe=1"; the stage is 0 without a suffix."""
    plain, _, stage = name.partition("@")
    return plain, int(stage.rpartition("=")[2] or 0)


def assert_as_expected(told: Told, want: Expected, label: str) -> None:
    assert told.skipped == want.skipped, label
    assert told.norms == pytest.approx(want.norms, rel=CLOSE), label
    made = [(found, coef) for found, coef in zip(told.coefs, want.coefs, strict=True) if coef >= 0]
    assert [found for found, _ in made] == pytest.approx([coef for _, coef in made], rel=CLOSE), label
    for step, (state, known) in enumerate(zip(told.states, want.states, strict=True)):
        for name, value in known.items():
            found = state[name]
            if isinstance(value, dict):
                found, value = found, [value[key_of(parameter)] for parameter in told.names]
            assert found == pytest.approx(value, rel=CLOSE, abs=1e-11), f"{label}: {name} after step {step}"
    for part in told.parts:
        for found, full in ((part.value, want.dense.weights), (part.state["momentum_buffer"], want.dense.buffers)):
            error = float((found.flatten() - part.of(full[part.key])).abs().max() / full[part.key].abs().max())
            assert error < CLOSE, f"{label}: {part.key} is {error:.1e} off"


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_stateful_and_named_rules_match_reference_on_several_layouts(world: World, name: str) -> None:
    config = CONFIGS[name]
    by_rank = world.run(config.ranks, on_traces, config, list(RULES.values()))
    for index, (label, rule) in enumerate(RULES.items()):
        want = expected(rule, config)
        for rank, told in enumerate(by_rank):
            assert told[index].bits() == by_rank[0][index].bits(), f"{label}: ranks 0 and {rank} report different bits"
            assert not told[index].moved_by_skips, f"{label}: a skipped step on rank {rank} changed state"
            assert told[index].spiked == [bool(skip) for skip in told[index].skipped], label
            assert_as_expected(told[index], want, f"{label} on rank {rank}")


def test_norm_sequence_makes_most_rules_clip_or_skip_in_some_steps_only() -> None:
    """`SkipSpikes` rules skip some of the steps with a spike and no others. The other rules skip no step, and clip in
    some steps but not in all. The rules "named" and "warm-up, by parameter" may clip in all steps."""
    for label, rule in RULES.items():
        want = expected(rule, CONFIGS["one rank"])
        found = {step for step, skipped in enumerate(want.skipped) if skipped}
        if isinstance(rule, SkipSpikes):
            assert found, label
            assert found <= {*SPIKES}, label
        else:
            assert not found
            assert len({coef < 1 for coef in want.coefs}) == 2 or label in ("named", "warm-up, by parameter"), label


class ByLocalMean(SkipSpikes):
    """A deliberately wrong rule: detects spikes from a norm that differs between ranks."""

    def decide(self, norms: Norms, state: Any) -> ClipResult:
        import torch.distributed as dist

        return super().decide(norms._replace(total=norms.total * (1 + dist.get_rank())), state)


def test_rule_that_differs_between_ranks_fails_comparison_with_reference(world: World) -> None:
    config, wrong = CONFIGS["1-D"], ByLocalMean(3.0, 9.0, window=7, warm_up=5)
    by_rank = world.run(2, on_traces, config, [wrong])
    assert by_rank[0][0].bits() != by_rank[1][0].bits()
    with pytest.raises(AssertionError):
        assert_as_expected(by_rank[1][0], expected(SkipSpikes(3.0, 9.0, window=7, warm_up=5), config), "wrong")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (ZClip(1.5, 0.8, 6), ZClip(1.5, 0.81, 6)),
        (AdaGC(12.0, 1.05, 0.7, 4), AdaGC(12.0, 1.05, 0.7, 5)),
        (SkipSpikes(3.0, 9.0, "mean", 9, 5), SkipSpikes(3.0, 9.0, "median", 9, 5)),
    ],
)
def test_comparison_with_reference_distinguishes_rules_with_slightly_different_arguments(
    right: Clip, wrong: Clip
) -> None:
    config = CONFIGS["one rank"]
    told = on_traces(config, [right])[0]
    assert_as_expected(told, expected(right, config), "right")
    with pytest.raises(AssertionError):
        assert_as_expected(told, expected(wrong, config), "wrong")


# Resuming -------------------------------------------------------------------------------------------------------------

RESUMED = ["warm-up", "z", "adaptive means", "previous", "spikes, then means", "named"]
"""Rules whose state loads on another layout; state per parameter is found by parameter name."""


def saved_and_continued(config: Config, path: Path) -> dict[str, Told]:
    found = {}
    with ProcessGroupRegistry(config.layout.topology) as registry:
        for label in RESUMED:
            model, optimizer = made(config, registry, RULES[label])
            run(config, model, optimizer, range(HALF))
            save_checkpoint(path / label, model, optimizer)
            found[label] = run(config, model, optimizer, range(HALF, END))
    return found


def resumed(config: Config, path: Path) -> dict[str, Told]:
    found = {}
    with ProcessGroupRegistry(config.layout.topology) as registry:
        for label in RESUMED:
            model, optimizer = made(config, registry, RULES[label])
            load_checkpoint(path / label, model, optimizer)
            found[label] = run(config, model, optimizer, range(HALF, END))
            rule = optimizer.clip
            assert rule is not None
            optimizer = copy.deepcopy(optimizer)
            assert optimizer.state_dict()["meshstep"]["clip"]["state"].keys() == rule.initial().keys()
    return found


@pytest.mark.long
def test_resumed_rules_are_bitwise_identical_on_same_layout_and_close_on_others(world: World, tmp_path: Path) -> None:
    first = CONFIGS["ZeRO-2, 1-D, windows"]
    by_rank = world.run(4, saved_and_continued, first, tmp_path)
    again = world.run(4, resumed, first, tmp_path)
    for label in RESUMED:
        for one, other in zip(by_rank, again, strict=True):
            assert one[label].bits() == other[label].bits(), label
            for part, same in zip(one[label].parts, other[label].parts, strict=True):
                assert torch.equal(part.value, same.value), label
    for name in ("one rank", "2-D", "experts"):
        config = CONFIGS[name]
        elsewhere = world.run(config.ranks, resumed, config, tmp_path)
        for label in RESUMED:
            want = cut(Expected(RULES[label], Dense(first.layout)).go_on(first, range(HALF)))
            want.go_on(config, range(HALF, END))
            for rank, told in enumerate(elsewhere):
                assert told[label].bits() == elsewhere[0][label].bits(), f"{label} on {name}"
                assert_as_expected(told[label], want, f"{label} on rank {rank} of {name}")


def cut(want: Expected) -> Expected:
    """Drop the recorded results, but keep the state of the rule."""
    for said in (want.norms, want.coefs, want.skipped, want.states):
        said.clear()
    return want
