"""Errors of one rank in a step.

The rank raises its error, and no rank waits. If the error comes before the step decision, all ranks skip the step. Most
tests plant an error on the last rank in step `BAD`. Without the code that they test, the other ranks would take the
step, wait for the last rank, or end with a gloo error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf, nan
from typing import Any

import pytest
import torch
from failing import fails_in_backward
from loops import using
from meshstep.amp import Bf16, TorchFp16
from meshstep.optim import Adaptive, ByNorm, Clip, ParallelOptimizer, PerParameter, Sharded, StepObserver
from meshstep.optim.kernels.choice import Kernels
from meshstep.optim.kernels.native import built
from meshstep.optim.step.skips import LAG
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from torch import nn
from world import World

BAD = 2  # the step in which the last rank has an error


class PlantedError(Exception):
    """The error that a test plants."""


def adamw(groups: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, fused=True, **{"lr": 0.1, **options})


class FailingObserver(StepObserver):
    """An observer that raises at one place of a step while ``fails`` is True."""

    fails = False

    def __init__(self, place: str) -> None:
        self.place = place

    def _at(self, place: str) -> None:
        if self.fails and place == self.place:
            raise PlantedError(place)

    def local_grads(self, window: Any) -> None:
        self._at("local")

    def reduced_grads(self, window: Any) -> None:
        self._at("reduced")

    def update(self, request: Any, update: Any) -> None:
        self._at("before update")
        update(request)
        self._at("after update")


class FailingRule(Clip):
    """A clipping rule that raises while ``fails`` is True, which a rule must not do."""

    fails = False

    def factors(self, norms: Any) -> torch.Tensor:
        if self.fails:
            raise PlantedError("rule")
        return torch.ones_like(norms.total)


class Unreadable:
    """A hyper-parameter whose value can't be read."""

    def item(self) -> float:
        raise PlantedError("hyper-parameter")


@dataclass
class Run:
    """Trains two parameters in two param groups. The last rank calls ``plant`` before step `BAD` and
    ``repair`` after it.

    ``uneven``: only the last rank has the second group. ``one_more``: the last rank makes one more step.
    ``everywhere``: all ranks call ``plant``. The result of `train` has a text per step: "moved" or "kept", with an error.
    """

    plant: Callable[[Run], object]
    repair: Callable[[Run], object] = lambda run: None
    mesh: dict[str, int] = field(default_factory=lambda: {"data": 2})
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    thresholds: bool = False
    uneven: bool = False
    clip: bool = False
    prepare: Callable[[Run], object] = lambda run: None
    one_more: bool = False
    everywhere: bool = False
    breaks_backward: bool = False

    def train(self, plants: bool, steps: int) -> tuple[list[str], list[float], int]:
        torch.manual_seed(0)
        with ProcessGroupRegistry(
            Topology(roles=None, **self.mesh), timeout=timedelta(seconds=10), exclusive_groups=True
        ) as registry:
            last = registry.global_rank == 1
            stage = registry.rank("pipe") if "pipe" in self.mesh else 0
            self.a, self.b = (nn.Parameter(torch.ones(4, dtype=self.dtype)) for _ in range(2))
            annotate(self.a, P(), f"a{stage}")
            annotate(self.b, P(), f"b{stage}")
            own = [self.a, self.b] if last or not self.uneven else [self.a]
            more = {"max_norm": 1.0} if self.thresholds else {}
            self.optimizer = ParallelOptimizer(adamw([{"params": [p], **more} for p in own]), registry, **self.options)
            self.prepare(self)
            results = []
            for step in range(steps + (last and self.one_more)):
                self.optimizer.zero_grad()
                planted = plants and (last or self.everywhere) and step == BAD
                if planted:
                    self.plant(self)
                before, error = self.a.detach().clone(), ""
                self.backward(own)
                clip: list[Callable[[], object]] = [lambda: self.optimizer.clip_grad_by_norm(1.0)] if self.clip else []
                for call in (*clip, self.optimizer.step):
                    try:
                        call()
                    except Exception as raised:
                        error = f" {type(raised).__name__}: {raised}"
                results.append(("kept" if torch.equal(before, self.a) else "moved") + error)
                if planted:
                    self.repair(self)
            scale = self.optimizer.loss_scale
            scales = [] if scale is None else [float(value) for value in scale.state_dict().values()]
            return results, [*self.a.tolist(), *scales], self.optimizer.skipped_steps

    def backward(self, own: list[nn.Parameter]) -> None:
        losses = [(param.float() * torch.arange(1.0, 5.0)).sum() for param in own]
        if not self.breaks_backward:
            self.optimizer.backward(sum(losses[1:], losses[0]))
            return
        self.breaks_backward = False
        with pytest.raises(PlantedError):
            self.optimizer.backward(losses[0] + fails_in_backward(self.b, PlantedError("backward")).float().sum())


def group(index: int, key: str, value: object) -> dict[str, Any]:
    """Return the arguments of a `Run` that sets an entry of a param group, and restores it."""
    kept: list[Any] = []

    def plant(run: Run) -> None:
        kept.append(run.optimizer.param_groups[index].get(key))
        run.optimizer.param_groups[index][key] = value

    def repair(run: Run) -> None:
        run.optimizer.param_groups[index][key] = kept[0]

    return {"plant": plant, "repair": repair}


def observer(place: str, **options: Any) -> dict[str, Any]:
    """Return the arguments of a `Run` whose observer raises at ``place``."""
    failing = FailingObserver(place)
    return {
        "prepare": lambda run: run.optimizer.add_observer(failing),
        "plant": lambda run: setattr(failing, "fails", True),
        "repair": lambda run: setattr(failing, "fails", False),
        **options,
    }


def remove_group(run: Run) -> None:
    run.removed = run.optimizer.optimizer.param_groups.pop()  # type: ignore[attr-defined]


def restore_group(run: Run) -> None:
    run.optimizer.optimizer.param_groups.append(run.removed)  # type: ignore[attr-defined]


def break_backward(run: Run) -> None:
    run.breaks_backward = True


FEWER = "ValueError: max_norm of this rank's param groups is [1.0, 3.0], but the ranks agreed on [1.0, 1.0]"
UNEVEN = {"mesh": {"pipe": 2}, "thresholds": True, "uneven": True}
FP16 = {"dtype": torch.float16, "options": {"precision": TorchFp16(init_scale=64.0, growth_interval=4)}}
SKIPPED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "threshold": (lambda: {**group(1, "max_norm", 3.0), **UNEVEN}, FEWER),
    "threshold, explicit clip": (lambda: {**group(1, "max_norm", 3.0), **UNEVEN, "clip": True}, FEWER),
    "NaN threshold": (
        lambda: {**group(1, "max_norm", nan), **UNEVEN},
        "ValueError: max_norm of param group 1=nan: give a finite number > 0",
    ),
    "threshold is a rule": (
        lambda: {**group(1, "max_norm", ByNorm(1.0)), **UNEVEN},
        "TypeError: max_norm of param group 1=ByNorm(max_norm=1.0, norm_type=None): give a number",
    ),
    "unreadable hyper-parameter": (lambda: group(0, "weight_decay", Unreadable()), "PlantedError: hyper-parameter"),
    "tensor on another device as lr": (
        lambda: group(0, "lr", torch.zeros((), device="meta")),
        "NotImplementedError: Cannot copy out of meta tensor",
    ),
    "local_grads": (lambda: observer("local"), "PlantedError: local"),
    "local_grads, overlap": (lambda: observer("local", options={"overlap": True}), "PlantedError: local"),
    "local_grads, loss scale": (lambda: observer("local", **FP16), "PlantedError: local"),
    "reduced_grads": (lambda: observer("reduced"), "PlantedError: reduced"),
    "reduced_grads, ZeRO": (lambda: observer("reduced", options={"states": Sharded("data")}), "PlantedError: reduced"),
    "reduced_grads, explicit clip": (lambda: observer("reduced", clip=True), "PlantedError: reduced"),
    "backward": (lambda: {"plant": break_backward}, "RuntimeError: a backward since the last step raised an error"),
    "backward, ZeRO": (
        lambda: {"plant": break_backward, "options": {"states": Sharded("data")}},
        "RuntimeError: a backward since the last step raised an error",
    ),
    "backward, ZeRO-2": (
        lambda: {"plant": break_backward, "options": {"states": Sharded("data", gradients=True)}},
        "RuntimeError: a backward since the last step raised an error",
    ),
    "backward, overlap": (
        lambda: {"plant": break_backward, "options": {"overlap": True}},
        "RuntimeError: a backward since the last step raised an error",
    ),
    "backward, explicit clip": (
        lambda: {"plant": break_backward, "clip": True},
        "RuntimeError: a backward since the last step raised an error",
    ),
}


def run_case(case: str, plants: bool, steps: int) -> tuple[list[str], list[float], int]:
    return Run(**SKIPPED[case][0]()).train(plants, steps)


@pytest.mark.parametrize("case", SKIPPED)
def test_error_before_step_decision_on_one_rank_skips_step_on_all_ranks(world: World, case: str) -> None:
    """The error is raised at once on its rank, and 16 steps later on all ranks."""
    (first, values, skipped), (last, other_values, also_skipped) = world.run(2, run_case, case, True, BAD + LAG + 2)
    assert first[BAD] == "kept"
    assert last[BAD].startswith(f"kept {SKIPPED[case][1]}")
    late = "kept RuntimeError: ranks disagree about a step, which was skipped on all of them: rank 1 raised "
    for of_rank in (first, last):
        assert of_rank[BAD + LAG].startswith(late + SKIPPED[case][1])
        others = [text for step, text in enumerate(of_rank) if step not in (BAD, BAD + LAG)]
        assert others == ["moved"] * (BAD + LAG)
    assert values == other_values, "weights or loss scales differ"
    assert skipped == also_skipped == 1


@pytest.mark.parametrize("case", SKIPPED)
def test_run_without_planted_error_applies_all_steps(world: World, case: str) -> None:
    for results, _, skipped in world.run(2, run_case, case, False, BAD + 2):
        assert results == ["moved"] * (BAD + 2)
        assert skipped == 0


# Settings that differ and make the update of one rank fail ------------------------------------------------------------

DIFFERENT: dict[str, tuple[Callable[[], dict[str, Any]], str, str]] = {
    "text as lr": (
        lambda: group(0, "lr", "text"),
        "ValueError: could not convert string",
        "lr of param group 0 is 0.1 on rank 0 and 'text' on rank 1",
    ),
    "text as lr, loss scale": (
        lambda: {**group(0, "lr", "text"), **FP16},
        "ValueError: could not convert string",
        "lr of param group 0 is 0.1 on rank 0 and 'text' on rank 1",
    ),
    "text as lr, ZeRO": (
        lambda: {**group(0, "lr", "text"), "options": {"states": Sharded("data")}},
        "ValueError: could not convert string",
        "lr of param group 0 is 0.1 on rank 0 and 'text' on rank 1",
    ),
    "removed param group": (
        lambda: {"plant": remove_group, "repair": restore_group},
        "",
        "param group 1 is present on rank 0 and missing on rank 1. Add and remove param groups on every rank",
    ),
}


def run_different(case: str, kernels: Kernels, plants: bool, steps: int) -> tuple[list[str], list[float], int]:
    with using(kernels):
        return Run(**DIFFERENT[case][0]()).train(plants, steps)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("case", DIFFERENT)
def test_invalid_lr_or_removed_group_on_one_rank_skips_step_on_all_ranks(
    world: World, case: str, kernels: Kernels
) -> None:
    _, text, late = DIFFERENT[case]
    if text and (kernels == "torch" or built() is None):
        # With ZeRO, the last rank has no elements of this param group, so torch's kernels don't read its lr.
        text = "" if "ZeRO" in case else "TypeError: _fused_adamw_() received an invalid combination of arguments"
    (first, values, _), (last, other_values, _) = world.run(2, run_different, case, kernels, True, BAD + LAG + 2)
    assert first[BAD] == "kept"
    assert last[BAD].startswith("kept " + text if text else "kept")
    for of_rank in (first, last):
        assert of_rank[BAD + LAG].startswith("kept RuntimeError: ranks disagree about a step")
        assert late in of_rank[BAD + LAG]
        assert [text for step, text in enumerate(of_rank) if step not in (BAD, BAD + LAG)] == ["moved"] * (BAD + LAG)
    assert values == other_values, "weights or loss scales differ"


# Errors after which the steps of the ranks no longer correspond, or their weights differ ------------------------------


def to_double(run: Run) -> None:
    run.a.data = run.a.data.double()


def to_float(run: Run) -> None:
    run.a.data = run.a.data.float()


def fail(*_: object) -> None:
    raise PlantedError("hook")


def fail_in_hook(run: Run) -> None:
    run.hook = run.optimizer.optimizer.register_step_pre_hook(fail)  # type: ignore[attr-defined]


RULE = FailingRule()
LEFT: dict[str, tuple[Callable[[], dict[str, Any]], str, bool]] = {  # True: the error comes after the step decision
    "converted parameter": (
        lambda: {"plant": to_double, "repair": to_float},
        "RuntimeError: a0 was torch.float32 when the optimizer was made",
        False,
    ),
    "hook of the update": (
        lambda: {"plant": fail_in_hook, "repair": lambda run: run.hook.remove()},
        "PlantedError: hook",
        True,
    ),
    "rule": (
        lambda: {
            "options": {"max_norm": RULE},
            "plant": lambda run: setattr(FailingRule, "fails", True),
            "repair": lambda run: setattr(FailingRule, "fails", False),
        },
        "PlantedError: rule",
        True,
    ),
}


def run_left(case: str, later: bool) -> tuple[list[str], list[float], int]:
    run = Run(**LEFT[case][0](), one_more=not later)
    return run.train(True, BAD + LAG + 3)


@pytest.mark.parametrize("case", LEFT)
def test_steps_after_a_step_that_raised_on_one_rank_only_are_skipped(world: World, case: str) -> None:
    """Otherwise, a rank that catches the error would step with gradients of another step, or with other weights."""
    _, text, is_after_decision = LEFT[case]
    (first, *_), (last, *_) = world.run(2, run_left, case, is_after_decision)
    assert last[BAD].startswith("kept " + text)
    assert first[:BAD] == last[:BAD] == ["moved"] * BAD
    rest = [first[BAD:], last[BAD + 1 :]]
    if is_after_decision:
        assert rest[0].pop(0) == "moved"  # the other rank had taken the step before the error
    late = (
        "kept RuntimeError: ranks disagree about a step, which was skipped on all of them: the number of calls of "
        f"step() or of a clip that raised on one rank only is 0 on rank 0 and 1 (the last: {text}"
    )
    for of_rank in rest:
        assert of_rank[:LAG] == ["kept"] * LAG
        assert of_rank[LAG].startswith(late)
        assert of_rank[LAG + 1 :] == ["kept"] * len(of_rank[LAG + 1 :])


def failure_on_every_rank() -> tuple[list[str], int]:
    """Let the hook of the update fail on both ranks in one step. Return the errors and the number of skipped steps."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        a = nn.Parameter(torch.ones(4))
        annotate(a, P(), "a")
        optimizer = ParallelOptimizer(adamw([a]), registry)
        fails, errors = [False], []

        def hook(*_: object) -> None:
            if fails[0]:
                raise PlantedError("hook")

        optimizer.optimizer.register_step_pre_hook(hook)
        for step in range(BAD + 2):
            fails[0] = step == BAD
            optimizer.zero_grad()
            optimizer.backward(a.sum())
            try:
                optimizer.step()
            except PlantedError as error:
                errors.append(str(error))
        return errors, optimizer.skipped_steps


def test_error_on_every_rank_does_not_skip_later_steps(world: World) -> None:
    assert world.run(2, failure_on_every_rank) == [(["hook"], 0)] * 2


def loaded_after_failure() -> list[str]:
    """Load the state of an earlier step after the update has failed on rank 1. Return the results of all steps."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        a = nn.Parameter(torch.ones(4))
        annotate(a, P(), "a")
        optimizer = ParallelOptimizer(adamw([a]), registry)
        results = []
        for step in range(4):
            optimizer.zero_grad()
            optimizer.backward(a.sum())
            if step == 1:
                saved, weights = optimizer.state_dict(), a.detach().clone()
            fails = step == 1 == registry.rank("data")
            hook = optimizer.optimizer.register_step_pre_hook(fail) if fails else None
            before = a.detach().clone()
            try:
                optimizer.step()
            except PlantedError:
                results.append("failed")
            results.append("kept" if torch.equal(before, a) else "moved")
            if hook is not None:
                hook.remove()
            if step == 2:
                optimizer.load_state_dict(saved)
                a.data.copy_(weights)
        return results


def test_loading_a_state_ends_skipping_after_failure_on_one_rank(world: World) -> None:
    first, last = world.run(2, loaded_after_failure)
    assert first == ["moved", "moved", "kept", "moved"]
    assert last == ["moved", "failed", "kept", "kept", "moved"]


def failed_after_load() -> list[str]:
    """Load a state, let the first update fail on rank 1, and return the last error of the steps, in a list."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        a = nn.Parameter(torch.ones(4))
        annotate(a, P(), "a")
        optimizer = ParallelOptimizer(adamw([a]), registry)
        optimizer.load_state_dict(optimizer.state_dict())
        errors = []
        for step in range(LAG + 2):
            optimizer.zero_grad()
            optimizer.backward(a.sum())
            hook = optimizer.optimizer.register_step_pre_hook(fail) if step == 0 == 1 - registry.rank("data") else None
            try:
                optimizer.step()
            except (PlantedError, RuntimeError) as error:
                errors.append(str(error))
            if hook is not None:
                hook.remove()
        return errors[-1:]


def test_failed_steps_after_a_loaded_state_are_counted_from_zero(world: World) -> None:
    for (error,) in world.run(2, failed_after_load):
        assert "raised on one rank only is 0 on rank 0 and 1 (the last: " in error


# Errors of transforms and of observers on one rank --------------------------------------------------------------------


def written_weights(kernels: Kernels) -> tuple[list[str], bool]:
    """Write the weights of one rank in place, which master weights reject. Return the errors of that step and the next
    one, and whether the weights changed."""
    with using(kernels), ProcessGroupRegistry(Topology(data=2)) as registry:
        a = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        annotate(a, P(), "a")
        optimizer = ParallelOptimizer(adamw([a]), registry, precision=Bf16(split_masters=False))
        errors = list[str]()
        before = a.detach().clone()
        for step in range(BAD + 2):
            optimizer.zero_grad()
            optimizer.backward(a.float().sum())
            if step == BAD:
                if registry.global_rank:
                    with torch.no_grad():
                        a.mul_(2)
                before = a.detach().clone()
            try:
                optimizer.step()
            except RuntimeError as raised:
                errors.append(str(raised))
        return errors, not torch.equal(before, a)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_overwritten_weights_with_masters_on_one_rank_skip_steps_on_all_ranks(world: World, kernels: Kernels) -> None:
    (nothing, first), (errors, last) = world.run(2, written_weights, kernels)
    assert nothing == []
    assert len(errors) == 2
    assert all("was changed since the last step" in error for error in errors)
    assert not first
    assert not last


@pytest.mark.parametrize("place", ["local", "reduced", "before update", "after update"])
def test_observer_error_in_single_process_is_raised_and_next_step_succeeds(place: str) -> None:
    a, failing = nn.Parameter(torch.ones(4)), FailingObserver(place)
    annotate(a, P(), "a")
    optimizer = ParallelOptimizer(adamw([a]), ProcessGroupRegistry(Topology()))
    optimizer.add_observer(failing)
    for failing.fails in (True, False):
        optimizer.zero_grad()
        optimizer.backward(a.sum())
        if failing.fails:
            with pytest.raises(PlantedError, match=place):
                optimizer.step()
        else:
            assert optimizer.step() is not None


def observed_updates(place: str, options: dict[str, Any]) -> tuple[list[str], list[float], int]:
    return Run(**observer(place, **options)).train(True, BAD + LAG + 2)


@pytest.mark.parametrize("options", [{}, {"options": {"states": Sharded("data")}}, FP16], ids=["plain", "ZeRO", "fp16"])
@pytest.mark.parametrize("place", ["before update", "after update"])
def test_observer_error_around_update_on_one_rank_skips_no_update(
    world: World, place: str, options: dict[str, Any]
) -> None:
    (first, values, skipped), (last, other_values, also_skipped) = world.run(2, observed_updates, place, options)
    assert first == ["moved"] * len(first)
    assert last[BAD] == f"moved PlantedError: {place}"
    assert [text for step, text in enumerate(last) if step != BAD] == ["moved"] * (len(last) - 1)
    assert values == other_values, "weights or loss scales differ"
    assert skipped == also_skipped == 0


def threshold_and_observer_errors() -> list[str]:
    failing = FailingObserver("after update")

    def plant(run: Run) -> None:
        failing.fails = True
        run.optimizer.optimizer.param_groups[0]["max_norm"] = Unreadable()

    def repair(run: Run) -> None:
        failing.fails = False
        run.optimizer.optimizer.param_groups[0]["max_norm"] = 1.0

    run = Run(plant, repair, thresholds=True, prepare=lambda run: run.optimizer.add_observer(failing))
    return run.train(True, BAD + LAG)[0]


def test_observer_error_in_a_step_with_an_earlier_error_is_not_raised_by_the_next_step(world: World) -> None:
    first, last = world.run(2, threshold_and_observer_errors)
    assert first == ["moved"] * BAD + ["kept"] + ["moved"] * (LAG - 1)
    assert last[BAD].startswith("kept ")
    assert "max_norm" in last[BAD]
    assert last[BAD + 1 :] == ["moved"] * (LAG - 1)


# Rules of one rank whose norms need another collective ----------------------------------------------------------------


def set_rule(rule: Any) -> dict[str, Any]:
    return {
        "options": {"max_norm": 1.0},
        "plant": lambda run: setattr(run.optimizer, "max_norm", rule),
        "repair": lambda run: setattr(run.optimizer, "max_norm", 1.0),
    }


RULES: dict[str, Callable[[], dict[str, Any]]] = {
    "norm of order inf": lambda: set_rule(ByNorm(1.0, inf)),
    "norms per parameter": lambda: set_rule(PerParameter(1.0)),
    "norms per unit": lambda: set_rule(Adaptive(0.1)),
    "norms per parameter, ZeRO": lambda: {
        **set_rule(PerParameter(1.0)),
        "options": {"states": Sharded("data"), "max_norm": 1.0},
    },
    "norm of order inf, fixed order": lambda: {
        **set_rule(ByNorm(1.0, inf)),
        "options": {"sum_order": "fixed", "accumulation_steps": 1, "max_norm": 1.0},
    },
}


def changed_rule(case: str, everywhere: bool) -> tuple[list[str], list[float], int]:
    return Run(**RULES[case](), everywhere=everywhere).train(True, BAD + LAG + 2)


@pytest.mark.parametrize("case", RULES)
def test_clip_rule_that_needs_another_collective_on_one_rank_skips_step(world: World, case: str) -> None:
    (first, values, skipped), (last, other_values, _) = world.run(2, changed_rule, case, False)
    assert first == last
    assert [step for step, text in enumerate(first) if text != "moved"] == [BAD, BAD + LAG]
    assert first[BAD] == "kept"
    assert "max_norm is 1 on rank 0 and " in first[BAD + LAG]
    assert values == other_values
    assert skipped == 1


@pytest.mark.parametrize("case", RULES)
def test_clip_rule_changed_on_all_ranks_skips_no_step(world: World, case: str) -> None:
    (first, values, skipped), (last, other_values, _) = world.run(2, changed_rule, case, True)
    assert first == last == ["moved"] * (BAD + LAG + 2)
    assert values == other_values
    assert skipped == 0
