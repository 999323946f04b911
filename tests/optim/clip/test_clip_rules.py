"""Clipping rules: comparison with a dense model on many layouts, collectives, skipped steps and errors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import inf, prod
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from cases import Case, Param, axes_of, parameters_on, slice_of
from dense_rules import DenseRule as Remembering
from hypothesis import given, settings
from hypothesis import strategies as st
from meshstep.amp import Bf16, NaiveFp16
from meshstep.optim import (
    AdaGC,
    Adaptive,
    ByGroup,
    ByName,
    ByNorm,
    ByPreviousNorm,
    ByValue,
    Clip,
    ClipState,
    Norms,
    Offloaded,
    ParallelOptimizer,
    PerParameter,
    Sharded,
    SkipSpikes,
    WarmUp,
    ZClip,
    broadcast_weights,
    clip_grad_norm_,
)
from meshstep.optim.clip.base import resolve_threshold
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, declare
from meshstep.testing.strategies import specs, topologies
from planted import LAYOUTS, Dense, Full, Part, Planted, parts, run_step
from probes import collectives, no_host_reads
from properties import number_of_cases
from torch import Tensor, nn
from world import World
from zero_models import small_buckets

STEPS = 3  # a large gradient, a small gradient, a large gradient


class ByLastNorm(Clip):
    """Limit the gradient norm to ``factor`` times the clipped norm of the previous step."""

    def __init__(self, factor: float = 2.0) -> None:
        self.factor, self.last = factor, torch.tensor(torch.inf)

    def factors(self, norms: Norms) -> Tensor:
        last = self.last.to(norms.total)
        factor = (self.factor * last / norms.total.clamp(min=1e-12)).clamp(max=1.0)
        self.last = torch.where(norms.total.isfinite() & (norms.total > 0), norms.total * factor, last)
        return factor


RULES: dict[str, Clip] = {
    **{f"by norm, p={p}": ByNorm(m, p) for p, m in ((1.0, 40.0), (2.0, 7.0), (3.0, 4.0), (inf, 3.0))},
    **{f"by parameter, p={p}": PerParameter(m, p) for p, m in ((1.0, 20.0), (2.0, 3.0), (3.0, 2.0), (inf, 1.5))},
    **{
        f"by group, p={p}": ByGroup((None, m), 1.5 * m, p) for p, m in ((1.0, 30.0), (2.0, 4.0), (3.0, 2.5), (inf, 2.0))
    },
    "by group, both": ByGroup((3.0, 2.0), norm_type=2.0),
    "by value": ByValue(0.5),
    "by group and value": ByGroup((4.0, None), 2.0, 2.0, clip_value=0.75),
    "adaptive": Adaptive(0.5),
    "adaptive, columns": Adaptive(0.5, unit_dim=1),
    "adaptive, by glob": Adaptive(0.5, eps=2.0, unit_dim={"down": 1, "k*": -1, "t*": 1}),
    "user-defined": ByLastNorm(),
}
_NAMES = {"up": 3.0, "*n*": 2.0, "b*": None}
NAMED: dict[str, Clip] = {
    f"by name, p={p}": ByName(_NAMES, others=m, norm_type=p)
    for p, m in ((1.0, 40.0), (2.0, 1.5), (3.0, 2.5), (inf, 2.0))
}
REMEMBERING: dict[str, Clip] = {
    "warm-up": ByNorm(WarmUp(1.0, 40.0, steps=2)),
    "z": ZClip(z=0.5, warm_up=2),
    "adaptive means": AdaGC(1e3, decay=0.5, warm_up=1),
    "by name, some of them": ByName({"up": ZClip(z=0.5, warm_up=2), "t*": 0.5}, others=1.5),
    "without a spike": SkipSpikes(1e4, ByPreviousNorm(5.0), window=2, warm_up=1),
}


@dataclass(frozen=True)
class Config:
    layout: str
    options: dict[str, Any] = field(default_factory=dict)
    micros: int = 1
    weighted: bool = False
    tolerance: float = 2e-6

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout].topology.world_size


ZERO1, ZERO2 = Sharded("data"), Sharded("data", gradients=True)
CONFIGS = {
    "one rank": Config("one rank"),
    "tensor": Config("tensor"),
    "grid": Config("grid"),
    "data x tensor": Config("data x tensor"),
    "pipe, tied": Config("pipe, tied"),
    "split over a pipeline": Config("split over a pipeline"),
    "ZeRO-1": Config("data", {"states": ZERO1}),
    "ZeRO-2 x tensor": Config("data x tensor", {"states": ZERO2}),
    "ZeRO over a grid": Config("grid", {"states": Sharded("row")}),
    "offload": Config("tensor", {"states": Offloaded(0.5)}),
    "bf16 masters": Config("grid", {"precision": Bf16()}),
    "loss scale": Config("tensor", {"precision": NaiveFp16(init_scale=64.0)}),
    "weights": Config("data x tensor", {"accumulation_steps": 2}, micros=2, weighted=True),
    "all options": Config(
        "data x tensor",
        {"states": (ZERO2, Offloaded(0.5)), "precision": NaiveFp16(init_scale=64.0), "accumulation_steps": 2},
        micros=2,
        weighted=True,
        tolerance=5e-4,  # the compared weights are the half-precision weights on the device
    ),
}


@dataclass
class Told:
    """Results of some steps with a rule: this rank's shards, bits of the reported numbers, norms and clip coefficients."""

    parts: list[Part]
    bits: list[bytes]
    norms: list[float]
    coefs: list[float]


def sgd(model: Planted, fused: bool = True, **options: Any) -> torch.optim.Optimizer:
    groups: Any = [{**group, **options.get(f"group{i}", {})} for i, group in enumerate(model.groups())]
    return torch.optim.SGD(groups, lr=0.25, momentum=0.5, fused=fused)


def make(config: Config, registry: ProcessGroupRegistry, rule: Clip, **more: Any) -> tuple[Planted, ParallelOptimizer]:
    model = Planted(LAYOUTS[config.layout], registry.global_rank)
    options = {**config.options, **more}
    if "precision" in options:
        options["precision"].prepare(model, registry)
    return model, ParallelOptimizer(sgd(model), registry, max_norm=rule, **options)


def trained(config: Config, rules: list[Clip], steps: int = STEPS) -> list[Told]:
    layout, told = LAYOUTS[config.layout], []
    with ProcessGroupRegistry(layout.topology) as registry, small_buckets(64):
        for rule in rules:
            model, optimizer = make(config, registry, rule)
            stats = []
            for step in range(steps):
                run_step(model, optimizer, step, config.micros, config.weighted)
                taken = optimizer.step()
                assert taken is not None
                stats.append(taken)
            bits = [value.numpy().tobytes() for s in stats for value in (s.total_norm, s.clip_coef, s.group_norms)]
            coefs = [float(s.clip_coef) for s in stats]
            told.append(Told(parts(layout, optimizer), bits, [float(s.total_norm) for s in stats], coefs))
    return told


# The dense model ------------------------------------------------------------------------------------------------------


def norm_of(tensors: list[Tensor], p: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(torch.cat([torch.zeros(1), *(tensor.flatten() for tensor in tensors)]), p)
    return norm


def coefficient(norm: Tensor, most: float) -> Tensor:
    return (most / (norm + 1e-6)).clamp(max=1.0)


class DenseRule:
    """A clip rule, written independently of the library for full gradients in one process."""

    def __init__(self, rule: Clip, dense: Dense) -> None:
        self.rule, self.dense, self.last = rule, dense, torch.tensor(inf)
        self.p = 2.0 if rule.norm_type is None else rule.norm_type
        self.remembering = Remembering(rule) if rule in REMEMBERING.values() else None

    def __call__(self, g: Full, w: Full) -> Full:
        rule, total = self.rule, norm_of(list(g.values()), self.p)
        if self.remembering is not None:
            factors = self.remembering({key: float(grad.norm()) for key, grad in g.items()})
            assert factors is not None
            return {key: grad * factors[key] for key, grad in g.items()}
        if isinstance(rule, ByName):
            return self.by_name(rule, g)
        if isinstance(rule, ByNorm):
            assert isinstance(rule.max_norm, float)
            return {key: grad * coefficient(total, rule.max_norm) for key, grad in g.items()}
        if isinstance(rule, ByValue):
            return {key: grad.clamp(-rule.clip_value, rule.clip_value) for key, grad in g.items()}
        if isinstance(rule, PerParameter):
            assert isinstance(rule.max_norm, float)
            return {key: grad * coefficient(norm_of([grad], self.p), rule.max_norm) for key, grad in g.items()}
        if isinstance(rule, ByGroup):
            return self.by_group(rule, g)
        if isinstance(rule, Adaptive):
            return {key: self.adaptive(rule, key[0], grad, w[key]) for key, grad in g.items()}
        assert isinstance(rule, ByLastNorm)
        factor = (rule.factor * self.last / total).clamp(max=1.0)
        self.last = total * factor
        return {key: grad * factor for key, grad in g.items()}

    def by_name(self, rule: ByName, g: Full) -> Full:
        found: Full = {}
        for pattern, own in (*rule.groups, ("*", rule.others)):
            keys = [key for key in g if key not in found and fnmatchcase(key[0], pattern)]
            assert isinstance(own, ByNorm | None)
            most = inf if own is None else own.max_norm
            assert isinstance(most, float)
            norm = norm_of([g[key] for key in keys], self.p)
            found |= {key: g[key] * coefficient(norm, most) for key in keys}
        return found

    def by_group(self, rule: ByGroup, g: Full) -> Full:
        found: Full = {}
        groups = list(zip(self.dense.in_groups(g), rule.thresholds, strict=True))
        others = [key for keys, own in groups if own is None for key in keys]
        for keys, own in groups:
            most = inf if own is None and rule.others is None else rule.others if own is None else own
            assert isinstance(most, float)
            norm = norm_of([g[key] for key in (others if own is None else keys)], self.p)
            bound = inf if rule.clip_value is None else rule.clip_value
            found |= {key: (g[key] * coefficient(norm, most)).clamp(-bound, bound) for key in keys}
        return found

    @staticmethod
    def adaptive(rule: Adaptive, name: str, g: Tensor, w: Tensor) -> Tensor:
        if g.dim() < 2:
            return g * min(1.0, rule.clipping * max(float(w.norm()), rule.eps) / max(float(g.norm()), 1e-6))
        dims = {"*": rule.unit_dim} if isinstance(rule.unit_dim, int) else rule.unit_dim
        dim = next((dim for pattern, dim in dims.items() if fnmatchcase(name, pattern)), 0) % g.dim()
        found = []
        for grad, weight in zip(g.unbind(dim), w.unbind(dim), strict=True):
            longest = rule.clipping * max(float(weight.norm()), rule.eps)
            found.append(grad * min(1.0, longest / max(float(grad.norm()), 1e-6)))
        return torch.stack(found, dim)


def assert_as_dense(told: list[Told], rule: Clip, config: Config, label: str, dense_rule: Clip | None = None) -> None:
    """Assert that norms, weights and momentum of every rank equal those of the dense model.

    Also assert that all ranks report bitwise equal numbers, and that the rule clips in some steps but not in all.
    """
    dense = Dense(LAYOUTS[config.layout])
    clip = DenseRule(dense_rule or rule, dense)
    norms, clipped = [], []
    for step in range(STEPS):
        gradients = dense.gradients(step, config.micros, config.weighted)
        norms.append(float(norm_of(list(gradients.values()), clip.p)))
        smaller = clip(gradients, dense.weights)
        clipped.append(any(not torch.allclose(smaller[key], gradients[key]) for key in gradients))
        dense.step(smaller)
    assert {True, False} <= set(clipped), f"{label}: the rule must clip in some steps but not in all: {clipped}"
    for rank, one in enumerate(told):
        assert one.bits == told[0].bits, f"{label}: ranks 0 and {rank} report different bits"
        assert one.norms == pytest.approx(norms, rel=1e-6), f"{label}: norms of rank {rank}"
        for part in one.parts:
            for kind, found, full in (
                ("weights", part.value, dense.weights),
                ("gradients", part.state["momentum_buffer"].flatten(), dense.buffers),
            ):
                error = float((found - part.of(full[part.key])).abs().max() / full[part.key].abs().max())
                assert error < config.tolerance, f"{label}: {kind} of {part.key} on rank {rank} are {error:.1e} off"


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_rules_match_dense_model_in_many_configurations(world: World, name: str) -> None:
    config = CONFIGS[name]
    by_rank = world.run(config.ranks, trained, config, list(RULES.values()))
    for index, (label, rule) in enumerate(RULES.items()):
        assert_as_dense([told[index] for told in by_rank], rule, config, label)


@pytest.mark.long
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", ["offload", "bf16 masters", "loss scale", "weights", "all options"])
def test_named_and_stateful_rules_match_dense_model(world: World, name: str) -> None:
    """test_clip_rules_on_norm_sequences.py has no offload, master weights, loss scale or weighted micro-batches."""
    config, rules = CONFIGS[name], {**NAMED, **REMEMBERING}
    by_rank = world.run(config.ranks, trained, config, list(rules.values()))
    for index, (label, rule) in enumerate(rules.items()):
        assert_as_dense([told[index] for told in by_rank], rule, config, label)


class ByLocalNorms(Clip):
    """A deliberately wrong rule: every rank clips its shard by the norm of that shard."""

    in_place = True

    def factors(self, norms: Norms) -> None:
        return None

    def finish_(self, gradients_of: Any) -> None:
        for param in gradients_of:
            if param.grad is not None:
                param.grad.mul_(coefficient(param.grad.double().norm(), 3.0).float())


@pytest.mark.parametrize("name", ["tensor", "grid", "ZeRO-1"])
def test_rule_using_local_norms_fails_comparison_with_dense_model(world: World, name: str) -> None:
    config = CONFIGS[name]
    right, wrong = zip(*world.run(config.ranks, trained, config, [PerParameter(3.0), ByLocalNorms()]), strict=True)
    assert_as_dense(list(right), PerParameter(3.0), config, "right")
    with pytest.raises(AssertionError, match="off"):
        assert_as_dense(list(wrong), ByLocalNorms(), config, "wrong", dense_rule=PerParameter(3.0))


def test_rule_using_local_norms_is_correct_without_sharding(world: World) -> None:
    """Sharding is the only cause of the failure in `test_rule_using_local_norms_fails_comparison_with_dense_model`."""
    wrong = [told[0] for told in world.run(1, trained, CONFIGS["one rank"], [ByLocalNorms()])]
    assert_as_dense(wrong, ByLocalNorms(), CONFIGS["one rank"], "one rank", dense_rule=PerParameter(3.0))


# Collectives, host synchronizations, skipped steps ------------------------------------------------------------------


def counted(config: Config, rules: list[Clip]) -> list[list[Counter[str]]]:
    found = []
    with ProcessGroupRegistry(LAYOUTS[config.layout].topology) as registry:
        for rule in rules:
            model, optimizer = make(config, registry, rule)
            counts = []
            for step in range(3):
                run_step(model, optimizer, step)
                with collectives() as seen:
                    optimizer.step()
                counts.append(seen)
            found.append(counts[1:])
    return found


def test_each_rule_needs_one_collective_per_step_after_first_step_on_tensor_ranks(world: World) -> None:
    rules = {**RULES, **NAMED, **REMEMBERING}
    for by_rule in world.run(2, counted, CONFIGS["tensor"], list(rules.values())):
        for (label, rule), counts in zip(rules.items(), by_rule, strict=True):
            expected = {"all_gather_single" if rule.norm_type == inf else "all_reduce": 1}
            assert counts == [expected, expected], label


@pytest.mark.long
def test_rules_of_finite_norm_type_issue_same_collectives_as_rule_that_does_not_clip(world: World) -> None:
    config = CONFIGS["data x tensor"]
    rules = [rule for rule in RULES.values() if rule.norm_type != inf]
    for by_rule in world.run(4, counted, config, [Unclipped(), *rules]):
        assert by_rule[0][0]["all_reduce"] > 1
        assert all(counts == by_rule[0] for counts in by_rule)


class Unclipped(Clip):
    def factors(self, norms: Norms) -> None:
        return None


def reads(config: Config, rules: list[Clip], fused: bool) -> list[str]:
    """Return an error for each rule with which a step after the first one synchronized the host."""
    found = []
    with ProcessGroupRegistry(LAYOUTS[config.layout].topology) as registry:
        for rule in rules:
            model = Planted(LAYOUTS[config.layout], registry.global_rank)
            optimizer = ParallelOptimizer(sgd(model, fused), registry, max_norm=rule, **config.options)
            for step in range(4):
                run_step(model, optimizer, step)
                if step == 0:
                    optimizer.step()
                    continue
                try:
                    with no_host_reads():
                        optimizer.step()
                except AssertionError as error:
                    found.append(f"{rule}: {error}")
                    break
    return found


@pytest.mark.long
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", ["tensor", "ZeRO-1"])
def test_fused_steps_after_first_need_no_host_synchronization_with_each_rule(world: World, name: str) -> None:
    rules = {**RULES, **NAMED, **REMEMBERING}
    assert world.run(2, reads, CONFIGS[name], list(rules.values()), True) == [[], []]


def test_step_with_unfused_optimizer_synchronizes_with_host(world: World) -> None:
    rules = list(RULES.values())
    assert all(len(found) == len(rules) for found in world.run(2, reads, CONFIGS["tensor"], rules, False))


def with_a_nan(config: Config, rules: list[Clip]) -> list[tuple[list[float], bool, int]]:
    """Put a NaN into a gradient of the last rank in the second step.

    Return for each rule `found_inf` per step, whether the second step left weights and optimizer states unchanged and the
    final weights are finite, and the count of skipped steps.
    """
    found = []
    layout = LAYOUTS[config.layout]
    with ProcessGroupRegistry(layout.topology) as registry:
        for rule in rules:
            model, optimizer = make(config, registry, rule)
            skipped, same = [], True
            for step in range(STEPS):
                run_step(model, optimizer, step)
                before = parts(layout, optimizer)
                if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
                    grad = next(param.grad for param in model.parameters() if param.grad is not None)
                    grad.view(-1)[0] = torch.nan
                stats = optimizer.step()
                assert stats is not None
                skipped.append(float(stats.found_inf))
                if step == 1:
                    after = parts(layout, optimizer)
                    same = all(torch.equal(a.value, b.value) for a, b in zip(before, after, strict=True)) and all(
                        torch.equal(a.state[k], b.state[k]) for a, b in zip(before, after, strict=True) for k in a.state
                    )
            finite = all(bool(part.value.isfinite().all()) for part in parts(layout, optimizer))
            found.append((skipped, same and finite, optimizer.skipped_steps))
    return found


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", ["tensor", "grid", "pipe, tied", "ZeRO-1"])
def test_nan_on_one_rank_skips_step_on_all_ranks_with_every_rule(world: World, name: str) -> None:
    config, rules = CONFIGS[name], {**RULES, **NAMED, **REMEMBERING}
    for by_rule in world.run(config.ranks, with_a_nan, config, list(rules.values())):
        for label, told in zip(rules, by_rule, strict=True):
            assert told == ([0.0, 1.0, 0.0], True, 1), label


# Rejected rules -------------------------------------------------------------------------------------------------------


def uneven(rule: Clip, dim: int) -> str:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        full = torch.ones(5, 4)
        spec = P("tensor") if dim == 0 else P(None, "tensor")
        params = [
            nn.Parameter(torch.ones(4)),
            nn.Parameter(slice_of(full, spec, registry.topology, registry.global_rank)),
        ]
        for name, param, said in zip(("plain", "odd"), params, (P(), spec), strict=True):
            annotate(param, said, name)
        given = torch.optim.SGD(params, lr=1.0, fused=True)
        try:
            optimizer = ParallelOptimizer(given, registry, max_norm=rule)
        except ValueError as error:
            assert given.param_groups[0]["params"][1] is params[1]
            return str(error)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        return f"stepped {float(params[0].detach().sum()):g}"


def test_adaptive_clipping_raises_on_all_ranks_for_uneven_shards_without_full_shape(world: World) -> None:
    messages = world.run(2, uneven, Adaptive(), 0)
    assert messages[0] == messages[1]
    assert messages[0].startswith("odd has shards of unequal sizes")


def test_per_parameter_rule_accepts_uneven_shards_and_adaptive_rule_even_shards(world: World) -> None:
    # The gradient has four ones, and clipping to norm 1 changes each to 0.5.
    assert world.run(2, uneven, PerParameter(1.0), 0) == ["stepped 2"] * 2
    assert world.run(2, uneven, Adaptive(1.0), 1) == ["stepped 0"] * 2


def test_invalid_unit_dim_is_rejected_on_all_ranks(world: World) -> None:
    messages = world.run(2, uneven, Adaptive(unit_dim={"odd": 2}), 1)
    assert messages[0] == messages[1]
    assert "unit_dim=2 is not a dim of odd, whose shape is (5, 4)" in messages[0]


@pytest.mark.parametrize(
    "rule",
    [
        ByNorm(0.0),
        ByNorm(1.0, 0.5),
        ByValue(inf),
        ByGroup((1.0, -1.0)),
        ByGroup((None, None), torch.nan),
        ByGroup((1.0, None), clip_value=-1.0),
        PerParameter(-1.0),
        Adaptive(0.0),
        Adaptive(eps=0.0),
    ],
)
def test_rule_with_out_of_range_number_is_rejected(rule: Clip) -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        model = Planted(LAYOUTS["one rank"], 0)
        optimizer = ParallelOptimizer(sgd(model), registry)
        with pytest.raises(ValueError, match=r"finite number > 0|number >= 1"):
            ParallelOptimizer(sgd(model), registry, max_norm=rule)
        with pytest.raises(ValueError, match=r"finite number > 0|number >= 1"):
            optimizer.max_norm = rule
        assert optimizer.max_norm is None


def constant(steps: Tensor) -> Tensor:
    return torch.ones_like(steps)


@pytest.mark.parametrize(
    "rule",
    [
        ByValue(cast(float, constant)),
        ByGroup((cast(float, constant), None)),
        ByGroup((1.0, None), clip_value=cast(float, constant)),
        Adaptive(cast(float, constant)),
        AdaGC(cast(float, constant)),
    ],
)
def test_rule_with_function_instead_of_number_is_rejected(rule: Clip) -> None:
    with ProcessGroupRegistry(Topology()) as registry, pytest.raises(TypeError, match=r"constant.* a number"):
        ParallelOptimizer(sgd(Planted(LAYOUTS["one rank"], 0)), registry, max_norm=rule)


def test_adaptive_rule_clips_tiny_gradient_as_if_its_norm_were_1e_minus_6() -> None:
    weight = nn.Parameter(torch.zeros(1, 2))
    weight.grad = torch.tensor([[3e-7, 4e-7]])
    with ProcessGroupRegistry(Topology()) as registry:
        annotate(weight, P(), "weight")
        clip_grad_norm_([weight], ClipState(Adaptive(1e-4, eps=1e-3)), registry)
    torch.testing.assert_close(weight.grad, torch.tensor([[3e-8, 4e-8]]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("rule", [PerParameter(1.0), Adaptive(), ByGroup((1.0, None)), ByLastNorm()])
def test_group_max_norm_is_rejected_with_rule_that_does_not_support_it(rule: Clip) -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        model = Planted(LAYOUTS["one rank"], 0)
        with pytest.raises(ValueError, match="param group 1 has its own max_norm"):
            ParallelOptimizer(sgd(model, group1={"max_norm": 2.0}), registry, max_norm=rule)
        optimizer = ParallelOptimizer(sgd(model, group1={"max_norm": 2.0}), registry, max_norm=1.0)
        with pytest.raises(ValueError, match="param group 1 has its own max_norm"):
            optimizer.max_norm = rule
        assert optimizer.max_norm == 1.0


def late_group_threshold(rule: Clip) -> tuple[str, list[float]]:
    """Set ``max_norm`` of a param group on rank 1 in the second step. Return the error, and `skipped` per step."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = nn.Linear(4, 3)
        declare(model, {"*": P()})
        broadcast_weights(model, registry)
        optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), registry, max_norm=rule)
        said, skipped = "", []
        for step in range(2):
            optimizer.zero_grad()
            optimizer.backward(model(torch.ones(2, 4)).sum())
            if step and registry.global_rank:
                optimizer.param_groups[0]["max_norm"] = 1.0
            try:
                skipped.append(float(optimizer.step().skipped))
            except ValueError as error:
                said = str(error)
        return said, skipped


@pytest.mark.parametrize("rule", [PerParameter(1.0), Adaptive(0.5)])
def test_group_max_norm_set_after_first_step_on_one_rank_raises_there_and_other_ranks_skip_the_step(
    world: World, rule: Clip
) -> None:
    (_, of_first), (said, of_second) = world.run(2, late_group_threshold, rule)
    assert "param group 0 has its own max_norm" in said
    assert (of_first, of_second) == ([0.0, 1.0], [0.0])


def test_clip_grad_norm_of_adaptive_rule_requires_packed_reduction() -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        model = Planted(LAYOUTS["one rank"], 0)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        with pytest.raises(ValueError, match="reduction='packed'"):
            clip_grad_norm_(model.parameters(), ClipState(Adaptive()), registry, reduction="per_group")


def test_rule_set_after_construction_clips_as_if_given_to_constructor() -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        found = []
        for is_set in (True, False):
            model = Planted(LAYOUTS["one rank"], 0)
            rule = AdaGC(0.5, decay=0.5, warm_up=1)
            optimizer = ParallelOptimizer(sgd(model), registry, max_norm=None if is_set else rule)
            if is_set:
                optimizer.max_norm = rule
            names = optimizer._clip.names if optimizer._clip is not None else ()
            for _ in range(3):
                for param in model.parameters():
                    param.grad = torch.ones_like(param)
                optimizer.step()
            found.append((names, [param.detach().clone() for param in model.parameters()]))
        (names, values), (other_names, other_values) = found
        assert names == other_names
        assert all(map(torch.equal, values, other_values))


def test_skip_spikes_without_spike_gives_results_of_its_inner_rule() -> None:
    rules = {**RULES, **NAMED, **REMEMBERING, "user-defined": ByLastNorm()}
    inner = trained(CONFIGS["one rank"], [*rules.values()])
    rules["user-defined"] = ByLastNorm()  # a new object, because this rule keeps state in an attribute
    outer = trained(CONFIGS["one rank"], [SkipSpikes(inner=rule) for rule in rules.values()])
    for name, expected, told in zip(rules, inner, outer, strict=True):
        assert told.bits == expected.bits, name
        assert all(
            torch.equal(part.value, other.value) for part, other in zip(told.parts, expected.parts, strict=True)
        ), name


def test_resolve_threshold_passes_step_count_to_function_and_returns_number() -> None:
    def halved(steps: Tensor) -> Tensor:
        return 1 / (1 + steps)

    assert resolve_threshold(halved, {"steps": torch.ones(())}) == 0.5
    assert resolve_threshold(2.0, {}) == 2.0
    assert resolve_threshold(None, {}) is None


def test_adaptive_rule_requires_packed_reduction() -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        model = Planted(LAYOUTS["one rank"], 0)
        with pytest.raises(ValueError, match="reduction='packed'"):
            ParallelOptimizer(sgd(model), registry, max_norm=Adaptive(), reduction="per_group")
        optimizer = ParallelOptimizer(sgd(model), registry, reduction="per_group")
        with pytest.raises(ValueError, match="reduction='packed'"):
            optimizer.max_norm = Adaptive()
        assert optimizer.max_norm is None


# Changing rules, and rules combined with group thresholds -------------------------------------------------------------


def one_rule_a_step(config: Config, rules: list[Clip]) -> Told:
    layout = LAYOUTS[config.layout]
    with ProcessGroupRegistry(layout.topology) as registry:
        model, optimizer = make(config, registry, rules[0])
        for step, rule in enumerate(rules):
            optimizer.max_norm = rule
            run_step(model, optimizer, 2 * step)
            optimizer.step()
        return Told(parts(layout, optimizer), [], [], [])


def check_one_rule_a_step(world: World, name: str, rules: list[Clip]) -> None:
    config = CONFIGS[name]
    dense = Dense(LAYOUTS[config.layout])
    for step, rule in enumerate(rules):
        dense.step(DenseRule(rule, dense)(dense.gradients(2 * step), dense.weights))
    for told in world.run(config.ranks, one_rule_a_step, config, rules):
        for part in told.parts:
            full = dense.weights[part.key]
            assert float((part.value - part.of(full)).abs().max() / full.abs().max()) < 2e-6, part.key


@pytest.mark.parametrize("name", ["tensor", "ZeRO-1"])
def test_rule_can_be_changed_between_steps(world: World, name: str) -> None:
    chosen = ("by norm, p=2.0", "adaptive", "adaptive, columns", "by parameter, p=2.0", "by value", "by group, both")
    rules = [RULES[label] for label in chosen]
    check_one_rule_a_step(world, name, rules)
    check_one_rule_a_step(world, name, rules[::-1])


def groups_with_thresholds(config: Config, first: Clip | float, norm_type: float) -> tuple[list[Told], str]:
    """Give group 1 its own threshold and group 0 none; then change the threshold of group 1.

    Return this rank's shards after the step with each threshold, and the rule in ``optimizer.max_norm`` as text.
    """
    layout = LAYOUTS[config.layout]
    with ProcessGroupRegistry(layout.topology) as registry:
        model = Planted(layout, registry.global_rank)
        inner = sgd(model, group1={"max_norm": 2.0})
        optimizer = ParallelOptimizer(inner, registry, max_norm=first, norm_type=norm_type, **config.options)
        found = []
        for step, own in enumerate((2.0, 4.0)):
            optimizer.param_groups[1]["max_norm"] = own
            run_step(model, optimizer, 2 * step)
            optimizer.step()
            found.append(Told(parts(layout, optimizer), [], [], []))
        return found, repr(optimizer.max_norm)


@pytest.mark.parametrize("norm_type", [2.0, 3.0, inf])
@pytest.mark.parametrize("first", [3.0, ByNorm(3.0), ByValue(0.75)])
def test_group_thresholds_combine_with_norm_and_value_rules(
    world: World, first: Clip | float, norm_type: float
) -> None:
    config = CONFIGS["tensor"]
    dense = Dense(LAYOUTS[config.layout])
    value = first.clip_value if isinstance(first, ByValue) else None
    steps = []
    for step, own in enumerate((2.0, 4.0)):
        rule = ByGroup((None, own), None if value else 3.0, norm_type, value)
        dense.step(DenseRule(rule, dense)(dense.gradients(2 * step), dense.weights))
        steps.append(dict(dense.weights))
    for found, shown in world.run(2, groups_with_thresholds, config, first, norm_type):
        assert shown == repr(3.0 if isinstance(first, (float, ByNorm)) else first)
        for told, weights in zip(found, steps, strict=True):
            for part in told.parts:
                full = weights[part.key]
                assert float((part.value - part.of(full)).abs().max() / full.abs().max()) < 2e-6, part.key


@pytest.mark.parametrize(("norm_type", "others"), [(1.0, 45.0), (3.0, 2.5)])
def test_group_rule_without_norm_type_uses_optimizer_norm_type(world: World, norm_type: float, others: float) -> None:
    config = Config("tensor", {"norm_type": norm_type})
    rule, same = ByGroup((None, None), others), ByGroup((None, None), others, norm_type)
    for clip in (rule, same, SkipSpikes(inner=rule), SkipSpikes(inner=SkipSpikes(inner=rule))):
        by_rank = world.run(2, trained, config, [clip])
        assert_as_dense([told[0] for told in by_rank], same, config, repr(clip))


def explicitly(config: Config, rule: Clip | None, then: tuple[str, float]) -> tuple[Told, bool]:
    layout = LAYOUTS[config.layout]
    with ProcessGroupRegistry(layout.topology) as registry:
        model = Planted(layout, registry.global_rank)
        optimizer = ParallelOptimizer(sgd(model), registry, max_norm=rule, **config.options)
        run_step(model, optimizer, 0)
        kind, threshold = then
        clip = optimizer.clip_grad_by_norm if kind == "norm" else optimizer.clip_grad_by_value
        stats = clip(threshold)
        again = optimizer.step() is stats
        return Told(parts(layout, optimizer), [], [], []), again


@pytest.mark.parametrize("then", [("norm", 0.5), ("value", 0.25)])
@pytest.mark.parametrize("label", ["by norm, p=2.0", "by parameter, p=2.0", "adaptive", "by group, both", "by value"])
def test_explicit_clip_before_step_replaces_clipping_rule(world: World, label: str, then: tuple[str, float]) -> None:
    config = CONFIGS["tensor"]
    dense = Dense(LAYOUTS[config.layout])
    rule: Clip = ByNorm(then[1]) if then[0] == "norm" else ByValue(then[1])
    dense.step(DenseRule(rule, dense)(dense.gradients(0), dense.weights))
    for told, again in world.run(2, explicitly, config, RULES[label], then):
        assert again
        for part in told.parts:
            full = dense.weights[part.key]
            assert float((part.value - part.of(full)).abs().max() / full.abs().max()) < 2e-6, part.key


# Random layouts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Random:
    """A clipping rule, and parameters on a mesh with complete gradients."""

    case: Case
    rule: Clip


def stepped_gradients(drawn: list[Random]) -> list[tuple[list[Tensor | None], bytes]]:
    """Return for each case the gradients after the step on this rank, and the bits of the reported norm and
    coefficient."""
    found = []
    with ProcessGroupRegistry(drawn[0].case.topology) as registry:
        for one in drawn:
            case, rank = one.case, registry.global_rank
            named = parameters_on(case, registry)
            for name, param in named:
                index = int(name[1:])
                weight = slice_of(
                    weights_of(case, index, case.stage_of(rank)), case.params[index].spec, case.topology, rank
                )
                param.data.copy_(weight)
                if param.grad is not None:  # the step sums partial and tied gradients over ranks
                    param.grad /= case.topology.size(*case.params[index].spec.partial) * tied_holders(case, index)
            groups: Any = [{"params": [q for name, q in named if int(name[1:]) % 2 == group]} for group in range(2)]
            optimizer = ParallelOptimizer(torch.optim.SGD(groups, lr=0.0), registry, max_norm=one.rule)
            stats = optimizer.step()
            assert stats is not None
            held = {name: param.grad for name, param in named}
            grads = [held.get(f"p{index}") for index in range(len(case.params))]
            found.append((grads, stats.total_norm.numpy().tobytes() + stats.clip_coef.numpy().tobytes()))
    return found


def tied_holders(case: Case, index: int) -> int:
    spec = case.params[index].spec
    return prod(len(spec.tied_coordinates(axis, case.topology)) for axis, _ in spec.tied)


def weights_of(case: Case, index: int, stage: tuple[int, ...]) -> Tensor:
    return Case(case.axes, case.params, case.seed + 1).full_gradient(index, stage) + 1.0


def dense_gradients(one: Random) -> dict[tuple[int, tuple[int, ...]], Tensor]:
    """Return the clipped gradient of each logical parameter, by index and stage."""
    case = one.case
    grads: Full = {}
    weights: Full = {}
    found = {}
    for rank in range(case.topology.world_size):
        for index in range(len(case.params)):
            if case.holds(index, rank):
                stage = case.stage_of(rank)
                if {*case.params[index].spec.named_axes} & {*case.topology.pipe_axes}:
                    stage = ()
                found[index, case.stage_of(rank)] = key = (f"p{index}@{stage}", index % 2)
                grads[key] = case.full_gradient(index, case.stage_of(rank))
                weights[key] = weights_of(case, index, case.stage_of(rank))
    clipped = OneOfTwoGroups(one.rule)(grads, weights)
    return {where: clipped[key] for where, key in found.items()}


class OneOfTwoGroups(DenseRule):
    """`DenseRule` for parameters whose key contains the index of their param group."""

    def __init__(self, rule: Clip) -> None:
        super().__init__(rule, self)  # type: ignore[arg-type]

    def __call__(self, g: Full, w: Full) -> Full:
        return super().__call__(g, w) if g else {}

    def in_groups(self, full: Full) -> list[list[tuple[str, int]]]:
        return [[key for key in full if key[1] == group] for group in range(2)]


@st.composite
def batches(draw: st.DrawFn) -> list[Random]:
    """Draw several cases on one mesh, so that the mesh is built only once."""
    topology = draw(topologies(4))
    found = []
    for _ in range(6):
        rule = draw(st.sampled_from(list(RULES.values())[:-1]))  # the last rule has state
        params = []
        for index in range(draw(st.integers(1, 4))):
            shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
            spec = draw(specs(topology, shape, uneven=True))
            if isinstance(rule, Adaptive):  # `Adaptive` rejects uneven shards declared without full_shape=
                shape = tuple(n * topology.size(*spec.dim_axes(dim)) for dim, n in enumerate(shape))
            if isinstance(rule, Adaptive) and rule.unit_dim == 1:
                shape, spec = (shape, spec) if len(shape) != 1 else ((), P())
            missing = draw(st.integers(0, 5)) == 0 and index > 0  # a first step without any gradient raises
            params.append(Param(shape, spec, torch.float64, missing))
        found.append(
            Random(
                Case(axes_of(topology), tuple(params), draw(st.integers(0, 2**16)), draw(st.sampled_from([3.0, 1e-2]))),
                rule,
            )
        )
    return found


@settings(max_examples=number_of_cases(30))
@given(drawn=batches())
def test_stateless_rules_match_dense_model_on_random_layouts(world: World, drawn: list[Random]) -> None:
    topology = drawn[0].case.topology
    by_rank = world.run(topology.world_size, stepped_gradients, drawn)
    for which, one in enumerate(drawn):
        dense = dense_gradients(one)
        for rank, told in enumerate(by_rank):
            grads, bits = told[which]
            assert bits == by_rank[0][which][1], f"ranks 0 and {rank} report different bits: {one}"
            for index, grad in enumerate(grads):
                if grad is not None:
                    full = dense[index, one.case.stage_of(rank)]
                    expected = slice_of(full, one.case.params[index].spec, topology, rank)
                    assert torch.allclose(grad, expected, rtol=1e-9, atol=1e-12), f"rank {rank}, p{index}: {one}"
