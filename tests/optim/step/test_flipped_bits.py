"""Flipped bits in one replica of a weight, gradient or state, and the fingerprints that detect them."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from flips import EVERY, LAYOUTS, Run, What, bits_of, flip
from hypothesis import strategies as st
from meshstep.optim import Fingerprints, Offloaded, ParallelOptimizer, ReplicaMismatchError
from meshstep.optim.step import skips
from meshstep.optim.step.skips import LAG
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from probes import collectives, no_host_reads
from properties import random_cases
from torch import nn
from world import World

SIZES = {name: layout.topology.world_size for name, layout in LAYOUTS.items()}
STATES: list[What] = ["parameter", "gradient", "exp_avg", "exp_avg_sq", "step"]
# A lag shorter than `LAG`, to save time in tests: all steps before the error are skipped anyway.
SOON = 3


def flipped(
    name: str, what: What, parameter: str, bit: int, victim: int, at: int, lag: int = SOON
) -> tuple[list[tuple[str, str, str, tuple[int, ...]]], int, bool]:
    """Return the mismatches, the step of the error, and whether weights and state are still those before the comparison.

    Step -1: no error, because the gradients were non-finite in the step of the flip, or for another reason (then the third
    value is False). ``lag`` replaces `LAG`.
    """
    with LAYOUTS[name].registry() as registry, mock.patch.object(skips, "LAG", lag):
        run = Run(name, registry)
        before, held = run.everything(), False
        for step in range(3 * EVERY + lag):
            run.backward()
            if step == at and what == "gradient":
                run.complete()
            if step == at and registry.global_rank == victim:
                flip(run.tensor(what, parameter), bit)
            compared = step % EVERY == 0
            if compared and step >= at and not held:
                before, held = run.everything(), True
            try:
                run.optimizer.step()
            except ReplicaMismatchError as error:
                found = [(m.name, m.axis, m.kind, m.ranks) for m in error.mismatches]
                return found, step, bits_of(before) == bits_of(run.everything())
            if step == at and run.optimizer.last_stats is not None and run.optimizer.last_stats.found_inf:
                return [], -1, bits_of(before) == bits_of(run.everything())
        return [], -1, False


def kind_of(name: str, what: What) -> str:
    if what == "model":
        return "parameter"
    if what == "parameter":
        return "master" if "masters" in name else "stepped weight" if LAYOUTS[name].placements else "parameter"
    return what if what == "gradient" else f"state {what}"


# Layouts whose stepped tensor is the model's parameter or a view of it, so that a flip changes both.
WITHIN = ("ZeRO-1, copied over tensor", "one of two offloaded")


@pytest.mark.parametrize("what", STATES)
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "fp16 masters"])
def test_fingerprints_name_tensor_with_flipped_bit_and_skip_steps(world: World, name: str, what: What) -> None:
    """The lowest mantissa bit is flipped in a step that compares replicas. The error is raised ``lag`` steps later."""
    layout, parameter = LAYOUTS[name], LAYOUTS[name].bit_of
    victim = 1 if "ZeRO" in name else SIZES[name] - 1  # a rank that holds the shard
    copies = layout.copies(parameter, victim)
    lag = LAG if what == "parameter" else SOON
    for found, step, kept in world.run(SIZES[name], flipped, name, what, parameter, 0, victim, EVERY, lag):
        # With three replicas, the majority tells which one is wrong.
        expected = {(parameter, kind_of(name, what), (victim,) if len(copies) > 2 else copies)}
        if name in WITHIN and what == "parameter":
            expected.add((parameter, "parameter", (victim,)))
        assert {(of, kind, ranks) for of, _, kind, ranks in found} == expected
        assert {axis for _, axis, _, _ in found} <= {*dict(layout.axes)}
        assert step == EVERY + lag
        assert kept


@pytest.mark.parametrize("name", ["bf16 masters", "ZeRO-1, copied over tensor"])
def test_fingerprints_name_model_weight_with_flipped_bit_with_zero1_or_masters(world: World, name: str) -> None:
    """The bit is flipped in the model's parameter: with ZeRO-1 on a rank that steps no shard of it, with bf16 masters
    beside its master weight."""
    for found, step, kept in world.run(4, flipped, name, "model", "bias", 3, 3, EVERY):
        assert {(of, kind, ranks) for of, _, kind, ranks in found} == {("bias", "parameter", (3,))}
        assert step == EVERY + SOON
        assert kept


def test_fingerprints_find_bit_flipped_between_comparisons_in_next_comparison(world: World) -> None:
    """In the next comparison, moments and gradients differ too, and the error lists all of them."""
    for found, step, kept in world.run(2, flipped, "data", "exp_avg", "matrix", 20, 1, EVERY + 1, LAG):
        assert ("matrix", "data", "state exp_avg", (0, 1)) in found
        assert {of for of, *_ in found} == {"matrix"}
        assert step == 2 * EVERY + LAG
        assert kept


@st.composite
def flips(draw: st.DrawFn) -> tuple[str, What, str, int, int, int]:
    """Draw arguments of `flipped`: a bit of a replicated tensor, flipped in a step that compares replicas. In other
    steps, updates before the next comparison might round away the lowest bit."""
    name = draw(st.sampled_from(sorted(LAYOUTS)))
    what = draw(st.sampled_from(STATES))
    parameter = "bias" if "ZeRO" in name else draw(st.sampled_from(["bias", "matrix"]))
    victim = draw(st.integers(0, 1 if "ZeRO" in name else SIZES[name] - 1))  # data rank 0 holds the shard of the bias
    bit = draw(st.sampled_from([0, 22, 30, 31]) | st.integers(0, 31))
    return name, what, parameter, bit, victim, EVERY


@random_cases(flips(), 60)
def test_fingerprints_find_randomly_drawn_flipped_bit_of_a_replica(
    world: World, drawn: list[tuple[str, What, str, int, int, int]]
) -> None:
    """Any of the 32 bits may be flipped; 0, 22, 30 and 31 are drawn more often. If the flip makes a gradient
    non-finite, the step is skipped as an overflow and no mismatch is reported."""
    results = world.run_each(flipped, [(SIZES[case[0]], case) for case in drawn])
    for (name, what, parameter, _, victim, _), by_rank in zip(drawn, results, strict=True):
        assert len({repr((found, step)) for found, step, _ in by_rank}) == 1
        found, step, _ = by_rank[0]
        # torch's kernel counts a skipped step up and down again, which does not restore a count that the flip made
        # tiny.
        assert all(kept for rank, (*_, kept) in enumerate(by_rank) if what != "step" or rank != victim)
        if step < 0:
            assert what == "gradient"
            continue
        assert {of.partition("@")[0] for of, *_ in found} == {parameter}  # the name may have a stage as suffix
        assert all(victim in ranks for *_, ranks in found)
        assert kind_of(name, what) in {kind for _, _, kind, _ in found}
        assert step == EVERY + SOON


def watched(steps: int, name: str, options: dict[str, Any], scale: float) -> tuple[int, int, bytes]:
    """Return (steps, skipped steps, bits of weights and state) of a run without flipped bits; the loss of every fourth
    step is ``scale`` times as large."""
    with LAYOUTS[name].registry() as registry, mock.patch.object(skips, "LAG", SOON):
        run = Run(name, registry, **options)
        for step in range(steps):
            run.step(scale if step % 4 == 3 else 1.0)
        run.optimizer.poll()
        return run.steps, run.optimizer.skipped_steps, bits_of(run.everything())


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_fingerprints_do_not_change_clean_run(world: World, name: str) -> None:
    """The runs have accumulation and clipping, and overflows in fp16."""
    scale = 1e6 if "fp16" in name else 1.0
    runs = [
        world.run(SIZES[name], watched, 4 * SOON, name, {"accumulation_steps": 2, "every": every}, scale)
        for every in (1, 3, None)
    ]
    assert runs[0] == runs[1] == runs[2]
    assert all((skipped > 2) is ("fp16" in name) for _, skipped, _ in runs[0])


def test_fingerprints_report_no_mismatch_after_overflow(world: World) -> None:
    for _, skipped, _ in world.run(2, watched, 5 + SOON, "fp16 masters", {"accumulation_steps": 2, "every": 1}, 1e6):
        assert skipped > 0


def test_fingerprints_without_replicated_tensor_warn(world: World) -> None:
    for warned in world.run(2, uncopied):
        assert warned == ["check_replicas=Fingerprints(...) compares nothing on"]


def uncopied() -> list[str]:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = nn.ParameterList([torch.ones(3)])
        declare(model, {"*": P("tensor")})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ParallelOptimizer(optimizer, registry, check_replicas=Fingerprints())
        return [str(w.message)[:52] for w in caught if "Fingerprints" in str(w.message)]


def overhead(every: int | None) -> list[list[str]]:
    with ProcessGroupRegistry(LAYOUTS["data x tensor"].topology) as registry:
        run, logs = Run("data x tensor", registry, every=every), []
        for step in range(5):
            run.backward()
            with no_host_reads() if step else nullcontext(), collectives() as log:
                run.optimizer.step()
            logs.append([str(event) for event in log])
        return logs


def test_fingerprints_need_no_additional_collective_or_host_synchronization(world: World) -> None:
    for with_watch, without in zip(world.run(6, overhead, 2), world.run(6, overhead, None), strict=True):
        assert list(map(len, with_watch)) == list(map(len, without))
        assert min(map(len, without)) > 0


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_fingerprints_reject_invalid_interval(every: Any) -> None:
    with pytest.raises(ValueError, match=r"Fingerprints\(every=.*\): give a whole number of steps >= 1"):
        Fingerprints(every=every).check()


def healed() -> tuple[list[tuple[int, ...]], int]:
    """Return the ranks of each error, and the number of skipped steps, of a run that repairs the bit after the
    error."""
    with ProcessGroupRegistry(LAYOUTS["data x tensor"].topology) as registry:
        run, errors = Run("data x tensor", registry), []
        for step in range(2 * EVERY + LAG):
            run.backward()
            if step == EVERY and registry.global_rank == 4:
                flip(run.tensor("exp_avg", "bias"), 0)
            try:
                run.optimizer.step()
            except ReplicaMismatchError as error:
                errors += [mismatch.ranks for mismatch in error.mismatches]
                if registry.global_rank == 4:
                    flip(run.tensor("exp_avg", "bias"), 0)
        run.optimizer.poll()
        return errors, run.optimizer.skipped_steps


def test_run_continues_after_flipped_bit_is_repaired(world: World) -> None:
    for errors, skipped in world.run(6, healed):
        assert set(errors) == {(4,)}
        assert skipped == LAG + 1  # from the comparing step to the step of the error


def polled(what: str) -> str:
    with ProcessGroupRegistry(LAYOUTS["data"].topology) as registry:
        run = Run("data", registry, on_nonfinite="raise" if what == "raise" else "skip")
        for step in range(EVERY + 1):
            run.backward()
            if step == EVERY and registry.global_rank == 1:
                flip(run.tensor("parameter", "matrix"), 31)
            try:
                run.optimizer.step()
            except ReplicaMismatchError as error:
                return f"in step {step}: {error.mismatches[0]}"
        assert "replicas differ" in str(run.optimizer.last_stats)
        if what == "load":
            run.optimizer.load_state_dict(run.optimizer.state_dict())
        try:
            run.optimizer.poll()
        except ReplicaMismatchError as error:
            return f"poll: {error.mismatches[0]}"
        try:
            run.step()
            run.optimizer.poll()
        except ReplicaMismatchError as error:
            return f"next step: {error.mismatches[0]}"
        return "nothing"


@pytest.mark.parametrize(
    ("what", "when"),
    [("poll", "poll"), ("raise", f"in step {EVERY}"), ("load", "next step")],
)
def test_flipped_bit_raises_in_poll_in_step_with_on_nonfinite_raise_or_after_loading(
    world: World, what: str, when: str
) -> None:
    """Loading a state discards the mismatch found before it. The next step compares again."""
    told = "matrix: the parameter differs along axis 'data', between ranks 0, 1, without a majority"
    assert world.run(2, polled, what) == [f"{when}: {told}"] * 2


def a_stage_without_weights() -> str:
    with ProcessGroupRegistry(Topology(data=2, pipe=2)) as registry:
        groups: list[Any] = [{"params": []}]
        model = nn.ParameterDict({"w": torch.ones(4, dtype=torch.bfloat16)})
        declare(model, {"*": P()})
        if registry.coordinate["pipe"] == 0:
            groups = [{"params": [*model.named_parameters()]}]
        fingerprints = Fingerprints(every=1)
        adamw = torch.optim.AdamW(groups, lr=0.1, fused=True)
        optimizer = ParallelOptimizer(adamw, registry, precision="bf16", check_replicas=fingerprints)
        for step in range(3):
            optimizer.zero_grad()
            here = registry.coordinate["pipe"] == 0
            optimizer.backward(model["w"].float().square().sum() if here else None)
            if step == 2 and registry.global_rank == 2:
                flip(optimizer.stepped_tensors()[0].tensor, 0)
            optimizer.step()
        try:
            optimizer.poll()
        except ReplicaMismatchError as error:
            return f"{error.mismatches[0].name}, {error.mismatches[0].kind}, {error.mismatches[0].ranks}"
        return "nothing"


def test_fingerprints_find_flipped_bit_if_one_stage_has_no_weights(world: World) -> None:
    """The vector of packed fingerprints must have the same length on ranks without master weights."""
    assert world.run(4, a_stage_without_weights) == ["w, master, (0, 2)"] * 4


def tied_beside_others(fraction: float) -> str:
    """Step a tied table that is the largest parameter on the first stage only. Flip a bit, and return the difference."""
    with ProcessGroupRegistry(Topology(data=2, pipe=2)) as registry:
        first = registry.coordinate["pipe"] == 0
        model = nn.ParameterDict({"table": torch.ones(4, 3), "own": torch.ones(2 if first else 20)})
        declare(model, {"table": P(tied={"pipe": (0, -1)}), "own": P()})
        adamw = torch.optim.AdamW(model.named_parameters(), lr=0.1, fused=True)
        options: Any = {"check_replicas": Fingerprints(every=1), "max_norm": 0.5}
        optimizer = ParallelOptimizer(adamw, registry, states=Offloaded(fraction), **options)
        for step in range(2):
            optimizer.zero_grad()
            optimizer.backward(torch.stack([param.square().sum() for param in model.parameters()]).sum())
            if step and registry.global_rank == 1:
                flip(next(piece.tensor for piece in optimizer.stepped_tensors() if piece.name == "table"), 0)
            optimizer.step()
        try:
            optimizer.poll()
        except ReplicaMismatchError as error:
            return f"{error.mismatches[0].name}, {error.mismatches[0].kind}, {error.mismatches[0].ranks}"
        return "nothing"


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_fingerprints_find_flipped_bit_of_offloaded_tied_parameter(world: World, fraction: float) -> None:
    """With the fraction 0.5, the first stage alone would offload the table, because its other parameter is smaller."""
    assert world.run(4, tied_beside_others, fraction) == ["table, stepped weight, (1,)"] * 4
