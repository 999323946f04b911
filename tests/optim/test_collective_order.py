"""Ranks create process groups and call collectives in an order that cannot deadlock.

The first test and some negative controls record complete steps of all ranks on random meshes. Simulated backends that are
stricter than NCCL run the records (`tests/harness/deadlocks.py`). With MESHSTEP_TEST_PROFILE=many, the first test has
about a thousand cases. The other tests run on real ranks, or test single functions.
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


@pytest.mark.long
@settings(max_examples=number_of_cases(CASES), phases=WITHOUT_SHRINKING)
@given(DRAWN)
def test_recorded_collectives_of_random_meshes_cannot_deadlock(drawn: Drawn) -> None:
    programs = recorded(drawn)
    for backend in (lazy, serial, *([] if drawn.asks else [eager])):
        assert backend(programs) is None, f"{backend.__name__}: {backend(programs)}"


def step_with_gaps(gaps: str, states: str) -> list[float]:
    """Run two steps whose gradients are computed before the model's own collective in backward. In the second step, some
    gradients are missing on some ranks.

    Return the first element of each parameter.
    """
    options: dict[str, Any] = {"overlap": True, "bucket_bytes": 16}
    if states == "sharded":
        options = {"states": Sharded("data", gradients=True)}
    axis, roles = ("expert", {"expert": "data"}) if gaps == "experts" else ("tensor", {})
    topology = Topology(roles=roles, data=2, **{axis: 2})  # type: ignore[arg-type]
    with ProcessGroupRegistry(topology, timeout=timedelta(seconds=10)) as registry, small_buckets(16):
        data, model = registry.coordinate["data"], registry.coordinate[axis]
        # `used`: for each parameter, whether this rank's second loss depends on it.
        if gaps == "uneven pieces":
            # Data rank 0 uses the replicated parameters; data rank 1 uses the unevenly sharded ones that follow them.
            specs, sizes = [P()] * 4 + [P("tensor")] * 4, [4] * 4 + [0 if model else 4] * 4
            used = [index // 4 == data for index in range(8)]
        else:
            # Ranks with equal coordinates use all parameters; other ranks use none.
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
def test_gradients_missing_on_some_ranks_do_not_cause_hang(world: World, gaps: str, states: str) -> None:
    """The cases are an expert axis whose ranks see different samples, owner-only parameters, and uneven shards."""
    # The first gradient is 2. The second is 1, because ranks without it count as zeros in the mean.
    for found in world.run(4, step_with_gaps, gaps, states):
        assert found == [1.0 - 0.5 * 2.0 - 0.5 * 1.0] * len(found)


class Uneven(nn.Module):
    """An embedding of three words, sharded over two tensor ranks, and two replicated linear layers."""

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.words = nn.Parameter(torch.ones(2 - registry.coordinate["tensor"], 8))
        declare(self, {"words": P("tensor"), "*": P()})


def started_in_backward(states: str) -> set[int]:
    """Return the element counts of the first parameters of the buckets that were started by hooks in backward."""
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
def test_replicated_gradients_are_reduced_in_backward_despite_unevenly_sharded_parameter(
    world: World, states: str
) -> None:
    # The replicated weights have 64 elements, and the biases 8. The embedding has 16 elements on one rank, 8 on the other.
    assert world.run(4, started_in_backward, states) == [{64, 8}] * 4


# Properties that prevent deadlocks ------------------------------------------------------------------------------------


class Noted:
    """An empty bucket that records its calls."""

    adopt = False

    def __init__(self, name: str, group: Any, log: list[str]) -> None:
        self.name, self.group, self.log = name, group, log
        self.params: list[torch.Tensor] = []

    def start(self) -> Callable[[], None]:
        self.log.append(f"start {self.name}")
        return lambda: self.log.append(f"finish {self.name}")


def test_reductions_over_one_group_finish_before_next_group_starts() -> None:
    log: list[str] = []
    one, other = object(), object()
    reduce_all([Noted("a", one, log), Noted("b", one, log), Noted("c", other, log), Noted("d", None, log)])
    assert log == [f"{what} {name}" for names in ("ab", "c", "d") for what in ("start", "finish") for name in names]


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ((("whole", 4), ("split", 8)), set()),
        ((("whole", 4), ("split", 7)), {"split"}),
        ((("whole", 4),), {"split"}),  # the other rank has no elements of the sharded parameter
        ((("split", 8), ("whole", 4)), {"whole", "split"}),
        ((("whole", 4), ("whole", 4), ("split", 7)), {"whole", "split"}),
    ],
)
def test_uneven_kinds_finds_bucket_kinds_that_differ_between_ranks_of_a_stage(
    others: Sizes, expected: set[str]
) -> None:
    ones: Sizes = (("whole", 4), ("split", 8))
    assert uneven_kinds([ones, others], Topology(tensor=2)) == expected
    assert uneven_kinds([ones, others], Topology(pipe=2)) == set()
    assert uneven_kinds([ones, ones, ones, others], Topology(pipe=2, tensor=2)) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, (("tensor",),)), ({"reduction": "per_group"}, (("data", "tensor"), ("tensor",)))],
)
def test_process_groups_are_connected_at_construction_over_nccl(
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
            mock.patch.object(ProcessGroupRegistry, "connect", lambda _, *groups: met.append(groups)),
        ):
            ParallelOptimizer(torch.optim.SGD(params), registry, **options)
    return met


# Negative controls ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_groups_created_on_first_use_would_deadlock_if_creation_were_collective() -> None:
    """`connect` at construction is safe even if torch creates process groups collectively."""
    numbers = range(8) if is_full() else (3,)  # the cheapest case that deadlocks
    ask = [replace(drawn_of(number), asks=True) for number in numbers]
    made = [[of_kind(program, "make") for program in recorded(drawn)] for drawn in ask]
    assert sum(stuck(programs) is not None for programs in made) >= 3 * len(numbers) / 8
    for drawn in ask:
        assert eager(recorded(replace(drawn, asks=False))) is None


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "option", "symptom"),
    [
        (61, "overlap", "stuck"),
        (128, "states", "mixed"),
        pytest.param(25, "states", "stuck", marks=pytest.mark.slow),  # a mesh of 24 ranks
    ],
)
def test_reducing_expert_gradients_in_backward_would_hang_or_mix_collectives(
    number: int, option: str, symptom: str
) -> None:
    """Reduce gradients of a model with experts in backward, with replicated states and overlap, or with ZeRO-2.

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


def test_serial_backend_reports_two_groups_in_opposite_orders() -> None:
    opposite = [of_pair("a", "b"), of_pair("b", "a")]
    assert serial(opposite) == f"[0] in {opposite[0][0]}; [1] in {opposite[1][0]}"
    assert lazy(opposite) is not None
    assert serial([of_pair("a", "b")] * 2) is None


def test_serial_backend_reports_different_collectives_in_one_group() -> None:
    with pytest.raises(AssertionError, match="members of a meet in"):
        serial([of_pair("a"), [Event("collective", "a", (0, 1), "broadcast")]])
