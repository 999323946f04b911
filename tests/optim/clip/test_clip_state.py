"""State of clipping rules: when it changes, and how it is saved and loaded. Rejected rules."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Mapping
from math import inf, nan
from typing import Any

import pytest
import torch
from meshstep.amp import NaiveFp16
from meshstep.optim import (
    AdaGC,
    Adaptive,
    ByGroup,
    ByName,
    ByNorm,
    ByPreviousNorm,
    ByValue,
    Clip,
    ClipResult,
    ClipState,
    Norms,
    ParallelOptimizer,
    PerParameter,
    PerParameterState,
    SkipSpikes,
    TorchStates,
    WarmUp,
    ZClip,
    clip_grad_norm_,
    sync_gradients,
)
from meshstep.parallel import ProcessGroupRegistry, Topology
from planted import LAYOUTS, Planted
from probes import collectives, no_host_reads
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from world import World

STATEFUL: dict[str, Clip] = {
    "warm-up": ByNorm(WarmUp(40.0, 5.0, 3)),
    "z": ZClip(z=0.5, warm_up=2),
    "adaptive means": AdaGC(30.0, decay=0.5, warm_up=1),
    "previous": ByPreviousNorm(9.0),
    "spikes": SkipSpikes(3.0, {"up": ZClip(warm_up=2), "*": None}, window=4, warm_up=2),
    "named": ByName({"up": ZClip(warm_up=2), "b*": 1.0}, others=ByPreviousNorm(3.0)),
}


def sgd(model: Planted) -> torch.optim.Optimizer:
    groups: Any = model.groups()
    return torch.optim.SGD(groups, lr=0.25, momentum=0.5, fused=True)


def give_gradients(model: Planted, size: float = 1.0) -> None:
    for param in model.parameters():
        param.grad = torch.full_like(param, size)


def alone(rule: Any, **options: Any) -> tuple[Planted, ParallelOptimizer]:
    model, registry = Planted(LAYOUTS["one rank"], 0), ProcessGroupRegistry(Topology())
    if "precision" in options:
        options["precision"].prepare(model, registry)
    return model, ParallelOptimizer(sgd(model), registry, max_norm=rule, **options)


def step(model: Planted, optimizer: ParallelOptimizer, size: float = 1.0) -> Any:
    optimizer.zero_grad()
    optimizer.backward(model(0) * size)
    return optimizer.step()


def values(optimizer: ParallelOptimizer) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in optimizer.clip_state.items()}


# Updates of the state -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", STATEFUL)
def test_nonfinite_or_rejected_step_leaves_clip_rule_state_unchanged(label: str) -> None:
    """Skip one step by a NaN in the loss, and reject another by ``commit=``."""
    answers = iter([True, True, True, True, False, True])
    model, optimizer = alone(STATEFUL[label], commit=lambda: next(answers))
    for _ in range(3):
        step(model, optimizer)
    before = values(optimizer)
    for size in (nan, 2.0):
        assert step(model, optimizer, size).skipped
        assert values(optimizer) == before
    step(model, optimizer, 1.5)
    assert values(optimizer) != before


def test_second_clip_after_a_rejected_first_clip_leaves_rule_state_unchanged() -> None:
    """Ranks vote only in the first clip of a window."""
    model, optimizer = alone(ZClip(warm_up=2), commit=lambda: False)
    optimizer.backward(model(0))
    for _ in range(2):
        optimizer.clip_grads()
    stats: Any = optimizer.step()
    assert stats.skipped
    assert values(optimizer) == {"steps": 0.0, "mean": 0.0, "var": 0.0}


def test_explicit_clip_leaves_rule_state_unchanged() -> None:
    model, optimizer = alone(ZClip(warm_up=2))
    step(model, optimizer)
    before = values(optimizer)
    optimizer.zero_grad()
    optimizer.backward(model(0))
    optimizer.clip_grad_by_norm(1.0)
    optimizer.step()
    assert values(optimizer) == before


@pytest.mark.parametrize("label", STATEFUL)
def test_rule_state_is_updated_in_place_without_host_synchronization(label: str) -> None:
    model, optimizer = alone(STATEFUL[label])
    step(model, optimizer)
    places = {name: tensor.data_ptr() for name, tensor in optimizer.clip_state.items()}
    assert places
    for size in (1.0, 2.0, 40.0, 1.0):
        optimizer.zero_grad()
        optimizer.backward(model(0) * size)
        with no_host_reads():
            optimizer.step()
    assert {name: tensor.data_ptr() for name, tensor in optimizer.clip_state.items()} == places


def test_one_rule_object_can_be_shared_by_several_optimizers() -> None:
    rule = ZClip(warm_up=2)
    (first, one), (second, other) = alone(rule), alone(rule)
    for size in (1.0, 3.0):
        step(first, one, size)
    step(second, other, 7.0)
    assert values(one)["steps"] == 2
    assert values(other)["steps"] == 1
    assert values(other)["mean"] > values(one)["mean"]


def test_setting_equal_rule_keeps_state_and_different_rule_resets_state() -> None:
    model, optimizer = alone(ZClip(warm_up=2))
    step(model, optimizer)
    optimizer.max_norm = ZClip(warm_up=2)
    step(model, optimizer)
    assert values(optimizer)["steps"] == 2
    optimizer.max_norm = {"up": ZClip(warm_up=2), "*": None}
    step(model, optimizer)
    assert values(optimizer)["up/steps"] == 1
    optimizer.max_norm = None
    assert optimizer.clip_state == {}


def test_added_parameters_start_with_initial_rule_state() -> None:
    model, optimizer = alone(AdaGC(30.0, warm_up=1))
    step(model, optimizer)
    before = dict(zip(optimizer.plan.parameter_names, values(optimizer)["mean"], strict=True))
    new = torch.nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [new]})
    optimizer.zero_grad()
    optimizer.backward(model(0) * 0 + new.sum() * 0)
    optimizer.step()
    after = dict(zip(optimizer.plan.parameter_names, values(optimizer)["mean"], strict=True))
    assert {name: after[name] for name in before} == before
    assert [after[name] for name in after.keys() - before.keys()] == [inf]


def test_warm_up_threshold_applies_to_groups_without_own_max_norm() -> None:
    model, optimizer = alone(WarmUp(8.0, 2.0, steps=2))
    optimizer.param_groups[1]["max_norm"] = 1.0
    for threshold in (8.0, 5.0, 2.0, 2.0):
        stats = step(model, optimizer)
        assert float(stats.clip_coef) == pytest.approx(threshold / (float(stats.group_norms[0]) + 1e-6), rel=1e-12)


# Spikes -----------------------------------------------------------------------------------------------------------------


def test_step_skipped_as_spike_does_not_count_as_overflow() -> None:
    """The loss scale does not back off, and grows as if the step had been applied."""
    precision = NaiveFp16(init_scale=4.0, growth_interval=6)
    model, optimizer = alone(SkipSpikes(3.0, window=4, warm_up=2), precision=precision)
    sizes = (1.0, 1.0, 20.0, 20.0, 1.0)
    found = [step(model, optimizer, size) for size in sizes]
    assert [bool(stats.spiked) for stats in found] == [False, False, True, True, False]
    assert [float(stats.found_inf) for stats in found] == [0.0] * 5
    assert optimizer.skipped_steps == 2
    assert optimizer.loss_scale is not None
    assert float(optimizer.loss_scale.scale) == 4.0
    assert "skipped (a spike)" in str(found[2])
    step(model, optimizer)
    assert float(optimizer.loss_scale.scale) == 8.0


@pytest.mark.parametrize("of", ["median", "mean"])
def test_skip_spikes_accepts_lasting_change_of_norms(of: Any) -> None:
    model, optimizer = alone(SkipSpikes(2.0, statistic=of, window=6, warm_up=3))
    found = [bool(step(model, optimizer, size).spiked) for size in [1.0] * 6 + [5.0] * 12]
    assert found[6]
    assert not any(found[-4:])


def test_skip_spikes_applies_steps_while_the_median_of_norms_is_zero() -> None:
    model, optimizer = alone(SkipSpikes(3.0, window=4, warm_up=2))
    found = [bool(step(model, optimizer, size).spiked) for size in [0.0, 0.0, 0.0, 5.0, 0.0, 5.0]]
    assert found == [False] * 6


class SpikesOfLargestElement(SkipSpikes):
    norm_type = inf
    in_place = True

    def finish_(self, gradients_of: Any) -> None:
        for param in gradients_of:
            if param.grad is not None:
                param.grad.zero_()


def test_subclass_of_skip_spikes_without_inner_rule_sets_attributes_of_rules() -> None:
    model, optimizer = alone(SpikesOfLargestElement(3.0, window=4, warm_up=2))
    before = [param.detach().clone() for param in model.parameters()]
    give_gradients(model)
    largest = max(float(param.grad.abs().max()) for param in model.parameters() if param.grad is not None)
    stats: Any = optimizer.step()
    assert float(stats.total_norm) == largest
    assert all(map(torch.equal, before, model.parameters())), "`finish_` must be called"


def test_spike_of_one_named_group_leaves_rule_states_of_other_groups_unchanged() -> None:
    rule = ByName({"up": SkipSpikes(3.0, window=4, warm_up=2), "gain": ByNorm(WarmUp(8.0, 2.0, 9))}, others=ZClip())
    model, optimizer = alone(rule)
    for _ in range(2):
        step(model, optimizer)
    before = values(optimizer)
    assert step(model, optimizer, 20.0).spiked
    changed = {name for name, value in values(optimizer).items() if value != before[name]}
    assert changed == {"up/steps", "up/norms"}
    step(model, optimizer)
    assert values(optimizer)["gain/steps"] == values(optimizer)["/steps"] == 3


# Norms that are not finite ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [inf, nan])
@pytest.mark.parametrize("label", [*STATEFUL, "number", "parameters"])
def test_clip_coefficient_is_1_for_nonfinite_norm(label: str, size: float) -> None:
    rules: dict[str, Any] = {**STATEFUL, "number": 1.0, "parameters": PerParameter(1.0)}
    model, optimizer = alone(rules[label])
    stats = step(model, optimizer, size)
    assert float(stats.found_inf) == 1
    assert float(stats.clip_coef) == 1
    step(model, optimizer)


# Saving and loading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", STATEFUL)
def test_copied_and_pickled_optimizer_keeps_rule_state(label: str) -> None:
    model, optimizer = alone(STATEFUL[label])
    for size in (1.0, 2.0, 3.0):
        step(model, optimizer, size)
    state = optimizer.state_dict()["meshstep"]["clip"]
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.state_dict()["meshstep"]["clip"] == state
        assert other.clip == optimizer.clip


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (None, "has no state of a clipping rule"),
        (ByNorm(WarmUp(2.0, 1.0, 5)), "is for ByNorm and does not fit"),
        (SkipSpikes(3.0, window=8, warm_up=2), "is for SkipSpikes and does not fit"),
    ],
)
def test_loading_without_matching_clip_rule_state_warns_and_resets_state(saved: Clip | None, said: str) -> None:
    model, optimizer = alone(saved)
    step(model, optimizer)
    state = optimizer.state_dict()
    other, loaded = alone(SkipSpikes(3.0, window=4, warm_up=2))
    step(other, loaded)
    with pytest.warns(UserWarning, match=rf"SkipSpikes keeps norms, steps.*{said}.*starts from the initial values"):
        loaded.load_state_dict(state)
    step(other, loaded)
    assert values(loaded)["steps"] == 1
    _, without = alone(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        without.load_state_dict(state)  # an optimizer without a stateful rule ignores saved rule state


@pytest.mark.parametrize("label", STATEFUL)
def test_torch_state_dict_functions_save_and_load_rule_state(label: str) -> None:
    model, optimizer = alone(STATEFUL[label])
    for size in (1.0, 2.0, 3.0):
        step(model, optimizer, size)
    saved = get_optimizer_state_dict(model, TorchStates(optimizer))
    other, loaded = alone(STATEFUL[label])
    set_optimizer_state_dict(other, TorchStates(loaded), saved)
    assert loaded.state_dict()["meshstep"]["clip"] == optimizer.state_dict()["meshstep"]["clip"]


# Named groups -----------------------------------------------------------------------------------------------------------


def unmatched(groups: Any) -> str:
    layout = LAYOUTS["pipe, tied"]
    with ProcessGroupRegistry(layout.topology) as registry:
        model = Planted(layout, registry.global_rank)
        with pytest.raises(ValueError, match="pattern") as raised:
            ParallelOptimizer(sgd(model), registry, max_norm=groups)
        optimizer = ParallelOptimizer(sgd(model), registry)
        with pytest.raises(ValueError, match="pattern"):
            optimizer.max_norm = groups
        assert optimizer.max_norm is None
        return str(raised.value)


def test_max_norm_pattern_without_matching_parameter_raises_on_every_rank(world: World) -> None:
    first, second = world.run(2, unmatched, {"gain": 1.0, "experts.*": 0.5})
    assert first == second
    assert "'experts.*' matches no parameter; the names are bias" in first
    first, second = world.run(2, unmatched, {"b*": 1.0, "bias": 0.5})
    assert first == second
    assert (
        "the pattern 'bias' matches (bias@pipe=0, bias@pipe=1) is already matched by an earlier pattern; move 'bias'"
        in first
    )


def test_max_norm_patterns_that_leave_parameters_unmatched_raise(world: World) -> None:
    first, second = world.run(2, unmatched, {"gain": 1.0, "t*": 0.5})
    assert first == second
    assert "no pattern of max_norm={'gain': ..., 't*': ...} matches" in first
    assert "add '*' with a threshold for these parameters, or '*': None to leave them unclipped" in first
    assert "bias@pipe=0" in first
    inner, _ = world.run(2, unmatched, SkipSpikes(3.0, {"gain": 1.0, "t*": 0.5}))
    assert inner == first


@pytest.mark.parametrize(
    ("rule", "unclipped"),
    [
        ({"weight": 0.5, "*": None}, ("*",)),
        ({"weight": 0.5, "*": inf}, ("*",)),
        (ByName({"weight": 0.5}, others=None), ("others",)),
        (ByName({"weight": 0.5, "bias": None}, others=None), ("bias", "others")),
        (SkipSpikes(3.0, {"weight": 0.5, "*": None}), ("*",)),
        ({"weight": 0.5, "*": 1.0}, ()),
        (0.5, ()),
    ],
)
def test_stats_list_unclipped_groups(rule: Any, unclipped: tuple[str, ...]) -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        model = torch.nn.Linear(3, 2)
        model.register_parameter("gain", torch.nn.Parameter(torch.ones(2)))
        optimizer = ParallelOptimizer(torch.optim.SGD(model.named_parameters(), lr=1.0), registry, max_norm=rule)
        optimizer.backward(1000 * (model(torch.ones(1, 3)) * model.gain).sum())
        before = model.bias.detach().clone()
        stats = optimizer.step()
        assert stats.unclipped == unclipped
        assert ("not clipped: " + ", ".join(unclipped) in str(stats)) == bool(unclipped)
        if unclipped:
            torch.testing.assert_close(before - model.bias.detach(), torch.full((2,), 1000.0))


def norms_by_name() -> dict[str, float]:
    """Return the norm per pattern. Two patterns match a parameter of one stage, one matches a tied parameter, and "*"
    matches all others."""
    layout = LAYOUTS["pipe, tied"]
    with ProcessGroupRegistry(layout.topology) as registry:
        model = Planted(layout, registry.global_rank)
        optimizer = ParallelOptimizer(
            sgd(model), registry, max_norm={"gain": 0.5, "up@pipe=1": 1.0, "t*": 1.0, "*": 2.0}
        )
        stats = step(model, optimizer)
        return {pattern: float(norm) for pattern, norm in stats.named_norms.items()}


def test_norms_per_name_pattern_include_all_pipeline_stages(world: World) -> None:
    layout = LAYOUTS["pipe, tied"]
    norms = {key: float(layout.gradient(key, 0).norm()) for key in layout.keys}
    first, second = world.run(2, norms_by_name)
    assert first == second
    rest = [norm for key, norm in norms.items() if key not in (("gain", 0), ("up", 1), ("table", 0))]
    want = [norms["gain", 0], norms["up", 1], norms["table", 0], sum(norm**2 for norm in rest) ** 0.5]
    assert [*first.values()] == pytest.approx(want, rel=1e-12)


# `clip_grad_norm_` without a `ParallelOptimizer` ----------------------------------------------------------------------

ON_LISTS: dict[str, Clip] = {
    **STATEFUL,
    "by parameter": PerParameter(1.0),
    "adaptive": Adaptive(0.5),
    "by value": ByValue(0.25),
}


def clipped_alone(name: str) -> dict[str, list[Any]]:
    """Clip with `clip_grad_norm_` and with an optimizer; norms, coefficients and gradients must be bitwise equal. Return
    the coefficients and the states of each rule."""
    layout = LAYOUTS[name]
    found = {}
    with ProcessGroupRegistry(layout.topology) as registry:
        for label, rule in ON_LISTS.items():
            told = []
            model, other = (Planted(layout, registry.global_rank, torch.float64) for _ in range(2))
            clip = ClipState(rule)
            optimizer = ParallelOptimizer(
                torch.optim.SGD(other.parameters(), lr=0.0),
                registry,
                max_norm=rule,
                check_replicas=False,
            )
            for index, size in enumerate((1.0, 0.25, 30.0, 1.0, 2.0)):
                model.zero_grad()
                (model(2 * index) * size).backward()
                params = dict(model.named_parameters())
                sync_gradients(params.values(), registry)
                with collectives() as seen:
                    stats = clip_grad_norm_(params.items(), clip, registry)
                optimizer.zero_grad()
                optimizer.backward(other(2 * index) * size)
                same = optimizer.step()
                assert torch.equal(stats.total_norm, same.total_norm)
                assert torch.equal(stats.clip_coef, same.clip_coef)
                assert torch.equal(stats.skipped, same.skipped)
                assert sum(seen.values()) == 1 or index == 0
                for one, two in zip(model.parameters(), other.parameters(), strict=True):
                    assert stats.skipped or torch.equal(one.grad, two.grad), label  # type: ignore[arg-type]
                told.append([float(stats.clip_coef), copy.deepcopy(clip.state_dict())])
            assert clip.state_dict() == ClipState(rule).state_dict() or clip.state_dict()["state"]
            found[label] = told
    return found


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", ["tensor", "grid", "pipe, tied"])
def test_clip_grad_norm_with_clip_state_matches_optimizer(world: World, name: str) -> None:
    by_rank = world.run(LAYOUTS[name].topology.world_size, clipped_alone, name)
    assert all(told == by_rank[0] for told in by_rank)


def another_list() -> str:
    """Pass a shorter parameter list on rank 1 in the third call; the fourth call is valid again.

    Return the error on rank 1, and the state of the rule on other ranks.
    """
    layout = LAYOUTS["tensor"]
    with ProcessGroupRegistry(layout.topology) as registry:
        model, clip, said = Planted(layout, registry.global_rank), ClipState(AdaGC(warm_up=1)), ""
        for call in range(4):
            give_gradients(model)
            params = list(model.named_parameters())
            sync_gradients([param for _, param in params], registry)
            before = clip.state_dict()
            if call == 2 and registry.global_rank == 1:
                with pytest.raises(ValueError, match="give the same list in every call") as raised:
                    clip_grad_norm_(params[:2], clip, registry)
                said = str(raised.value)
            else:
                stats = clip_grad_norm_(params, clip, registry)
                assert bool(stats.found_inf) == (call == 2)
            assert (clip.state_dict() == before) == (call == 2)
        return said or str(clip.state_dict())


def test_clip_state_with_parameters_changed_on_one_rank_raises_only_there(world: World) -> None:
    first, second = world.run(2, another_list)
    assert "the list of parameters differs from the list of the first call with this ClipState of AdaGC" in second
    assert "mean" in first


def error_on_one_rank() -> str:
    """Pass a shorter parameter list on rank 1 in the second call, with ``error_if_nonfinite``; return this rank's error."""
    layout = LAYOUTS["tensor"]
    with ProcessGroupRegistry(layout.topology) as registry:
        model, clip = Planted(layout, registry.global_rank), ClipState(PerParameter(1.0))
        params = list(model.named_parameters())
        for shown in (params, params[:2] if registry.global_rank == 1 else params):
            give_gradients(model)
            sync_gradients([param for _, param in params], registry)
            try:
                clip_grad_norm_(shown, clip, registry, error_if_nonfinite=True)
            except (ValueError, RuntimeError) as error:
                return str(error)
        return ""


def test_error_if_nonfinite_says_that_another_rank_raised(world: World) -> None:
    first, second = world.run(2, error_on_one_rank)
    assert "but another rank raised an error: skip the step" in first
    assert "give the same list in every call" in second


def test_clip_state_can_be_saved_and_loaded() -> None:
    registry = ProcessGroupRegistry(Topology())
    model = Planted(LAYOUTS["one rank"], 0)
    clip, other = ClipState(AdaGC(3.0, decay=0.5, warm_up=1)), ClipState(AdaGC(3.0, decay=0.5, warm_up=1))
    for size in (1.0, 2.0, 3.0):
        give_gradients(model, size)
        clip_grad_norm_(model.named_parameters(), clip, registry)
    other.load_state_dict(clip.state_dict())
    for state in (clip, other):
        give_gradients(model, 4.0)
        clip_grad_norm_(model.named_parameters(), state, registry)
    assert clip.state_dict() == other.state_dict()


def test_clip_state_rejects_options_that_differ_from_first_call() -> None:
    registry = ProcessGroupRegistry(Topology())
    model, clip = Planted(LAYOUTS["one rank"], 0), ClipState(ByValue(0.5))
    give_gradients(model)
    clip_grad_norm_(model.parameters(), clip, registry, norm_type=3.0)
    clip_grad_norm_(model.parameters(), clip, registry, norm_type=3.0)
    with pytest.raises(ValueError, match=r"norm_type=2\.0, reduction='packed': the first call .* norm_type=3\.0"):
        clip_grad_norm_(model.parameters(), clip, registry)


class ByWeightNorm(Clip):
    weights = True

    def factors(self, norms: Norms) -> Tensor:
        return (norms.weights[0] / norms.total).clamp(max=1.0)


def test_clip_state_of_rule_that_needs_weight_norms_multiplies_gradients_by_its_factor() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    weight.grad = torch.tensor([6.0, 8.0])
    clip_grad_norm_([weight], ClipState(ByWeightNorm()), ProcessGroupRegistry(Topology()))
    assert weight.grad.tolist() == pytest.approx([3.0, 4.0])


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (ZClip(), "ZClip has state"),
        (PerParameter(1.0), "PerParameter distinguishes parameters"),
        ({"up": 1.0}, "ByName distinguishes parameters"),
        (ByGroup((1.0,)), "ByGroup distinguishes parameters"),
        (ByValue(0.5), "ByValue changes gradients in place"),
        (ByWeightNorm(), "ByWeightNorm needs norms of weights"),
    ],
)
def test_clip_grad_norm_raises_if_rule_needs_clip_state(rule: Any, why: str) -> None:
    model = Planted(LAYOUTS["one rank"], 0)
    give_gradients(model)
    with pytest.raises(TypeError, match=rf"{why}: create clip = ClipState\(.*\) once"):
        clip_grad_norm_(model.parameters(), rule, ProcessGroupRegistry(Topology()))
    with pytest.raises(ValueError, match="global_norm"):
        clip_grad_norm_(model.parameters(), None, ProcessGroupRegistry(Topology()))


# Rejected arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        (ZClip(z=0.0), ValueError, "z=0.0: give a finite number > 0"),
        (ZClip(decay=1.0), ValueError, "decay=1.0: give a number >= 0 and < 1"),
        (ZClip(warm_up=1), ValueError, "warm_up=1: give a whole number >= 2"),
        (AdaGC(factor=inf), ValueError, "factor=inf: give a finite number > 0"),
        (
            AdaGC(max_norm=-1.0),
            ValueError,
            r"max_norm=-1.0: give a finite number > 0$",
        ),
        (SkipSpikes(1.0), ValueError, r"factor=1.0: give a number > 1"),
        (SkipSpikes(warm_up=5, window=4), ValueError, "the window never has 5 norms"),
        (SkipSpikes(statistic="middle"), ValueError, "statistic='middle': give 'median' or 'mean'"),  # type: ignore[arg-type]
        (ByGroup((0.5, -1.0)), ValueError, r"ByGroup thresholds\[1\]=-1.0: give a finite number > 0"),
        (ByGroup((0.5,), nan), ValueError, "ByGroup others=nan: give a finite number > 0"),
        (ByPreviousNorm(0.0), ValueError, "max_norm=0.0: give a finite number > 0"),
        (ByNorm(WarmUp(-1.0, 1.0, 5)), ValueError, "WarmUp start=-1.0: give a finite number > 0"),
        (ByNorm(WarmUp(2.0, 1.0, 0)), ValueError, "WarmUp steps=0: give a whole number >= 1"),
        ({}, ValueError, "ByName has no groups"),
        ({"up": -1.0}, ValueError, "of 'up': max_norm=-1.0: give a finite number > 0"),
        (
            {"up": PerParameter(1.0)},
            ValueError,
            "the rule of 'up' is PerParameter.*give a rule without norm_type that multiplies all gradients by one factor",
        ),
        (ByName({"up": 1.0}, others=ByValue(1.0)), ValueError, "the rule of others= is ByValue"),
        ({("up", "down"): 1.0}, TypeError, r"^a key of max_norm= has the tuple \('up', 'down'\), expected one glob"),
        ({3: 1.0}, TypeError, "^a key of max_norm= has the int 3, expected one glob"),
        (Adaptive(unit_dim={("up",): 1}), TypeError, "^a key of unit_dim= has the tuple"),  # type: ignore[dict-item]
        (Adaptive(unit_dim={"up": [1]}), TypeError, r"^unit_dim= has the list \[1\] for 'up', expected one dim"),  # type: ignore[dict-item]
        (Adaptive(unit_dim="up"), TypeError, "^unit_dim= has the str 'up'"),  # type: ignore[arg-type]
    ],
)
def test_rule_with_invalid_argument_is_rejected_at_construction_and_assignment(
    rule: Any, error: Any, message: str
) -> None:
    _, optimizer = alone(None)
    with pytest.raises(error, match=message):
        alone(rule)
    with pytest.raises(error, match=message):
        optimizer.max_norm = rule
    assert optimizer.max_norm is None


def test_by_name_with_list_instead_of_dict_is_rejected() -> None:
    with pytest.raises(TypeError, match=r"^the groups of ByName are a list, expected a dict from globs"):
        ByName([("up", 1.0)])  # type: ignore[arg-type]


class Forgetful(Clip):
    def decide(self, norms: Norms, state: Mapping[str, Tensor]) -> ClipResult:
        return ClipResult(None, {"sum": norms.total})


class Silent(Clip):
    pass


class LongestOfEach(Clip):
    """A rule of level "total" that keeps state per parameter."""

    def initial(self) -> Mapping[str, Any]:
        return {"longest": PerParameterState(0.0), "last": [0.0, 0.0]}

    def decide(self, norms: Norms, state: Mapping[str, Tensor]) -> ClipResult:
        return ClipResult(None, {"longest": state["longest"] + 1, "last": torch.stack([norms.total, state["last"][0]])})


def test_custom_rule_without_methods_or_with_state_missing_in_initial_raises() -> None:
    with pytest.raises(TypeError, match=r"Forgetful.decide\(\) returned a state 'sum', but initial\(\) has only \[\]"):
        step(*alone(Forgetful()))
    with pytest.raises(NotImplementedError, match=r"Silent has neither factors\(norms\) nor decide"):
        step(*alone(Silent()))


def test_custom_rule_keeps_state_per_parameter_and_saves_it_by_name() -> None:
    model, optimizer = alone(LongestOfEach())
    step(model, optimizer)
    assert values(optimizer)["longest"] == [1.0] * 6
    assert optimizer.state_dict()["meshstep"]["clip"]["state"]["longest"] == dict.fromkeys(
        optimizer.plan.parameter_names, 1.0
    )
