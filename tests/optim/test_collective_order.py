"""No order in which ranks make groups, and talk in them, is one in which they could wait for each other for ever.

Whole steps on random meshes, recorded on all ranks and then run on backends that are stricter than NCCL; see `deadlocks`.
Random cases, as many as the profile says: MESHSTEP_TEST_PROFILE=many runs about a thousand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from deadlocks import eager, lazy, of_kind, serial, stuck
from hypothesis import given, settings
from meshstep.optim import ParallelOptimizer, Sharded
from meshstep.optim.gradients import reduce_in_backward as early
from meshstep.optim.gradients.buckets import reduce_all
from meshstep.optim.gradients.reduce_in_backward import Sizes, uneven_kinds
from meshstep.optim.states import sharded
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, copy_to, declare, reduce_from
from overlap_runs import watched
from properties import WITHOUT_SHRINKING, is_full, number_of_cases
from random_programs import DRAWN, Drawn, drawn_of, options_of, recorded
from recorded_ranks import Event, Program
from torch import nn
from world import World
from zero_models import small_buckets

CASES = 60


@settings(max_examples=number_of_cases(CASES), phases=WITHOUT_SHRINKING)
@given(DRAWN)
def test_no_order_can_deadlock(drawn: Drawn) -> None:
    programs = recorded(drawn)
    for backend in (lazy, serial, *([] if drawn.asks else [eager])):
        assert backend(programs) is None, f"{backend.__name__}: {backend(programs)}"


def step_with_gaps(gaps: str, states: str) -> list[float]:
    """In backward the gradients come before two ranks meet in the model; in the second step some lack these, some those."""
    options: dict[str, Any] = {"overlap": True, "bucket_bytes": 16}
    if states == "sharded":
        options = {"states": Sharded("data", gradients=True)}
    axis, roles = ("expert", {"expert": "data"}) if gaps == "experts" else ("tensor", {})
    topology = Topology(roles=roles, data=2, **{axis: 2})  # type: ignore[arg-type]
    with ProcessGroupRegistry(topology, timeout=timedelta(seconds=10)) as registry, small_buckets(16):
        data, model = registry.coordinate["data"], registry.coordinate[axis]
        if gaps == "uneven pieces":  # after copies, and used where those are not
            specs, sizes = [P()] * 4 + [P("tensor")] * 4, [4] * 4 + [0 if model else 4] * 4
            used = [index // 4 == data for index in range(8)]
        else:
            specs, sizes = [P(owned={axis: model}) if gaps == "owners" else P()] * 4, [4] * 4
            used = [data == model] * 4
        params = [nn.Parameter(torch.ones(size)) for size in sizes]
        for index, (param, spec) in enumerate(zip(params, specs, strict=True)):
            annotate(param, spec, f"{index} of {model if spec.owned else 'all'}")
        sgd = torch.optim.SGD([{"params": params}], lr=0.5, fused=True)
        optimizer = ParallelOptimizer(sgd, registry, **options)
        for uses in ([True] * len(params), used):
            met = reduce_from(copy_to(torch.ones((), requires_grad=True), registry, axis), registry, axis)
            terms = [(met * param).sum() for param, use in zip(params, uses, strict=True) if use]
            optimizer.backward(met + sum(terms))
            optimizer.step()
            optimizer.zero_grad()
        return [param[0].item() for param in params if param.numel()]


@pytest.mark.parametrize("states", ["whole", "sharded"])
@pytest.mark.parametrize("gaps", ["experts", "owners", "uneven pieces"])
def test_gradients_that_come_on_some_ranks_only_stop_nobody(world: World, gaps: str, states: str) -> None:
    """Of experts that see other samples, of parameters that peers don't have, and of those of which peers have more."""
    # The gradient is 2, and then, with zeros of those that lack it, 1.
    for found in world.run(4, step_with_gaps, gaps, states):
        assert found == [1.0 - 0.5 * 2.0 - 0.5 * 1.0] * len(found)


class Uneven(nn.Module):
    """Three words' vectors split over two ranks, between layers that both have whole."""

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.words = nn.Parameter(torch.ones(2 - registry.coordinate["tensor"], 8))
        declare(self, {"words": P("tensor"), "*": P()})


def started_in_backward(states: str) -> set[int]:
    """The numbers of elements of the first parameters of buckets that hooks started."""
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry, small_buckets(16), watched() as watch:
        model = Uneven(registry)
        options: dict[str, Any] = {"overlap": True, "bucket_bytes": 16}
        if states == "sharded":
            options = {"states": Sharded("data", gradients=True)}
        optimizer = ParallelOptimizer(torch.optim.SGD(model.named_parameters()), registry, **options)
        optimizer.backward(torch.stack([param.sum() for param in model.parameters()]).sum())
        optimizer.step()
    return {bucket.params[0].numel() for bucket in watch.early}


@pytest.mark.parametrize("states", ["whole", "sharded"])
def test_where_some_pieces_are_uneven_the_others_gradients_do_not_wait(world: World, states: str) -> None:
    assert world.run(4, started_in_backward, states) == [{64, 8}] * 4  # weights and biases; the words have 16 or 8


# What the order rests on ----------------------------------------------------------------------------------------------


class Noted:
    """A bucket of nothing, which writes down what becomes of it."""

    adopt = False

    def __init__(self, name: str, group: Any, log: list[str]) -> None:
        self.name, self.group, self.log = name, group, log
        self.params: list[torch.Tensor] = []

    def start(self) -> Callable[[], None]:
        self.log.append(f"start {self.name}")
        return lambda: self.log.append(f"finish {self.name}")


def test_sums_over_one_group_are_finished_before_those_over_the_next_begin() -> None:
    log: list[str] = []
    one, other = object(), object()
    reduce_all([Noted("a", one, log), Noted("b", one, log), Noted("c", other, log), Noted("d", None, log)])
    assert log == [f"{what} {name}" for names in ("ab", "c", "d") for what in ("start", "finish") for name in names]


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ((("whole", 4), ("split", 8)), set()),
        ((("whole", 4), ("split", 7)), {"split"}),
        ((("whole", 4),), {"split"}),  # the last piece has no elements
        ((("split", 8), ("whole", 4)), {"whole", "split"}),
        ((("whole", 4), ("whole", 4), ("split", 7)), {"whole", "split"}),
    ],
)
def test_kinds_wait_whose_buckets_differ_within_a_stage(others: Sizes, expected: set[str]) -> None:
    ones: Sizes = (("whole", 4), ("split", 8))
    assert uneven_kinds([ones, others], Topology(tensor=2)) == expected
    assert uneven_kinds([ones, others], Topology(pipe=2)) == set()
    assert uneven_kinds([ones, ones, ones, others], Topology(pipe=2, tensor=2)) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, (("tensor",),)), ({"reduction": "per_group"}, (("data", "tensor"), ("tensor",)))],
)
def test_groups_of_an_optimizer_meet_when_it_is_made_over_nccl(
    world: World, options: dict[str, Any], expected: tuple[object, ...]
) -> None:
    assert world.run(4, met_by_optimizer, options, True) == [[expected]] * 4
    assert world.run(4, met_by_optimizer, options, False) == [[]] * 4


def met_by_optimizer(options: dict[str, Any], over_nccl: bool) -> list[tuple[object, ...]]:
    met: list[tuple[object, ...]] = []
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        params = [nn.Parameter(torch.ones(4)) for _ in range(3)]
        for param, spec in zip(params, (P(), P("tensor"), P(("data", "tensor"))), strict=True):
            annotate(param, spec)
        device = torch.device("cuda", 0) if over_nccl else torch.device("cpu")
        with (
            mock.patch.object(ProcessGroupRegistry, "device", device),
            mock.patch.object(ProcessGroupRegistry, "meet", lambda _, *groups: met.append(groups)),
        ):
            ParallelOptimizer(torch.optim.SGD(params), registry, **options)
    return met


# Negative controls ------------------------------------------------------------------------------------------------------


def test_groups_made_in_the_order_of_first_use_would_deadlock_if_making_them_were_a_meeting() -> None:
    """What torch 2.15 does over NCCL unless it is told not to; `meet` is safe there too."""
    numbers = range(8) if is_full() else (3,)  # the cheapest one that is stuck
    ask = [replace(drawn_of(number), asks=True) for number in numbers]
    made = [[of_kind(program, "make") for program in recorded(drawn)] for drawn in ask]
    assert sum(stuck(programs) is not None for programs in made) >= 3 * len(numbers) / 8
    for drawn in ask:
        assert eager(recorded(replace(drawn, asks=False))) is None


@pytest.mark.parametrize(
    ("number", "option", "symptom"),
    [
        (61, "overlap", "stuck"),
        (128, "states", "mixed"),
        pytest.param(25, "states", "stuck", marks=pytest.mark.slow),  # a mesh of 24 ranks
    ],
)
def test_gradients_that_did_not_wait_for_the_end_of_backward_would_deadlock(
    number: int, option: str, symptom: str
) -> None:
    """Reduce gradients of a model with experts in backward, with replicated states and overlap, and with sharded states.

    The ranks wait for each other forever, or the members of one group call different collectives.
    """
    drawn = drawn_of(number)
    assert option in options_of(drawn)
    assert serial(recorded(drawn)) is None
    with (
        mock.patch.object(early, "model_meets_over_data", return_value=False),
        mock.patch.object(sharded, "model_meets_over_data", return_value=False),
    ):
        programs = recorded(drawn)
    if symptom == "mixed":
        with pytest.raises(AssertionError, match=r"members of .* meet in"):
            serial(programs)
    else:
        assert serial(programs) is not None


def of_pair(*groups: str) -> Program:
    return [Event("collective", group, (0, 1), "allreduce") for group in groups]


def test_two_groups_in_opposite_orders_deadlock_where_one_collective_runs_at_a_time() -> None:
    opposite = [of_pair("a", "b"), of_pair("b", "a")]
    assert serial(opposite) == f"[0] in {opposite[0][0]}; [1] in {opposite[1][0]}"
    assert lazy(opposite) is not None
    assert serial([of_pair("a", "b")] * 2) is None


def test_members_in_different_collectives_are_seen() -> None:
    with pytest.raises(AssertionError, match="members of a meet in"):
        serial([of_pair("a"), [Event("collective", "a", (0, 1), "broadcast")]])
