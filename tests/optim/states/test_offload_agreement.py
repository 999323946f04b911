"""Agreement of ranks on the parameters that `Offloaded` steps on the CPU.

Replicas on a CPU and on a GPU would round differently. On a CPU a wrong choice changes no result, so these tests
compare the choices themselves.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from unittest import mock

from configurations import ADDED_GROUP, MODEL, Case, case_of
from configured_runs import Rank, Report, offloaded_pieces, registry_of
from hypothesis import given
from hypothesis import strategies as st
from judged_runs import replicas_offloaded_on_some_ranks
from meshstep.optim import Offloaded, ParallelOptimizer, ParamTransform, Position, Sharded, StatePlacement
from meshstep.optim.states import offloaded as states_offloaded
from meshstep.optim.states.offloaded import Piece, offloaded, offloaded_on_all_ranks
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from meshstep.parallel.mesh.agreement import on_all_ranks_with
from properties import random_cases
from torch import nn, ones
from world import World

# Random layouts -------------------------------------------------------------------------------------------------------


def offload_case(number: int) -> Case:
    """Draw a case with a partial offload, in which a param group may be added and parameters may be unfrozen."""
    case, rng = case_of(number), random.Random(number)
    setting = replace(case.setting, offload=rng.choice([0.1, 0.3, 0.5, 0.7, 0.9]))
    precision = "fp32" if case.precision == "bf16, half gradients" else case.precision
    return replace(case, setting=setting, resumed=None, precision=precision, vetoed=None, frozen=None, differing=None)


def choice(case: Case) -> Report:
    """Make an optimizer, add a param group if the case has one, unfreeze parameters, and report the offloaded pieces."""
    with registry_of(case.setting) as registry:
        rank, report = Rank(case, case.setting, registry), Report()
        frozen = [param for name, param in rank.model.items() if case.draw("frozen", name) % 3 == 0]
        for param in frozen:
            param.requires_grad_(False)
        optimizer = rank.optimizer()
        if case.added is not None:
            rank.add_group(optimizer)
        for param in frozen:
            param.requires_grad_(True)
        optimizer.refresh()
        rank.see(optimizer, report)
        return report


@random_cases(st.integers(0, 2**32 - 1).map(offload_case), 150)
def test_ranks_offload_the_same_replicas_and_at_least_the_given_fraction(world: World, drawn: list[Case]) -> None:
    by_case = world.run_each(choice, [(case.setting.at.topology.world_size, (case,)) for case in drawn])
    for case, reports in zip(drawn, by_case, strict=True):
        problems = [problem for report in reports for problem in report.problems]
        problems += replicas_offloaded_on_some_ranks(case.setting, reports)
        assert not problems, f"{problems} in {case}"


def test_drawn_offload_cases_cover_owned_tied_and_added_parameters_and_zero1_and_zero2() -> None:
    cases = [offload_case(number) for number in range(150)]
    specs = [case.setting.at.spec(name) for case in cases for name in MODEL]
    assert any(spec.owned for spec in specs)
    assert any(spec.tied for spec in specs)
    assert {case.setting.states for case in cases} >= {"whole", "zero1", "zero2"}
    assert any(case.added is not None and MODEL[name].group == ADDED_GROUP for case in cases for name in case.names)


# Layouts with a known choice ------------------------------------------------------------------------------------------


def names_offloaded(topology: Topology, sizes: list[dict[str, int]], specs: dict[str, P], *states: Any) -> list[str]:
    """Return the names of this rank's offloaded tensors.

    ``sizes[rank]`` is {parameter name: number of elements} of global rank ``rank``. ``specs`` may name parameters that
    this rank does not have.
    """
    with ProcessGroupRegistry(topology) as registry:
        model = nn.ParameterDict({name: ones(size) for name, size in sizes[registry.global_rank].items()})
        declare(model, {name: spec for name, spec in specs.items() if name in model})
        optimizer: ParallelOptimizer[Any] = ParallelOptimizer(_adamw(model), registry, states=states)
        pieces = zip(optimizer.stepped_tensors(), offloaded_pieces(optimizer), strict=True)
        return [piece.name for piece, on_cpu in pieces if on_cpu]


def _adamw(model: nn.Module) -> Any:
    from torch.optim import AdamW

    return AdamW(model.named_parameters(), lr=1e-3, fused=True)


def test_tied_parameters_with_different_names_are_offloaded_on_both_stages(world: World) -> None:
    sizes = [{"embedding": 12, "own": 2}, {"head": 12, "own": 20}]
    specs = {"embedding": P(tied={"pipe": (0, -1)}), "head": P(tied={"pipe": (0, -1)}), "own": P()}
    assert [offloaded([*of_rank.values()], 0.5) for of_rank in sizes] == [[0], [1]]  # chosen by each rank alone
    found = world.run(2, names_offloaded, Topology(pipe=2), sizes, specs, Offloaded(0.5))
    assert found == [["embedding"], ["head", "own"]]


def test_replica_beside_owner_only_parameter_is_offloaded_on_all_ranks(world: World) -> None:
    sizes = [{"weight": 6, "norm": 3}, {"weight": 6, "norm": 3, "bias": 7}]
    specs = {"weight": P("tensor"), "norm": P(), "bias": P(owned={"tensor": 1})}
    assert [offloaded([*of_rank.values()], 0.6) for of_rank in sizes] == [[0], [1, 2]]  # chosen by each rank alone
    found = world.run(2, names_offloaded, Topology(tensor=2), sizes, specs, Offloaded(0.6))
    assert found == [["norm", "weight"], ["bias", "norm"]]  # the shards of the weight are no replicas


def test_offload_of_shards_without_replicas_is_chosen_by_each_rank_alone(world: World) -> None:
    """A rank does not offload more because other data ranks hold other parts of the same parameters."""
    sizes = {"a": 30, "b": 14, "c": 9, "d": 11}
    placements = Sharded("data"), Offloaded(0.5)
    alone = world.run(4, numels_of_pieces, sizes)
    chosen = [[pieces[index][0] for index in offloaded([numel for _, numel in pieces], 0.5)] for pieces in alone]
    assert len({*map(tuple, chosen)}) > 1
    assert (
        world.run(4, names_offloaded, Topology(data=4), [sizes] * 4, dict.fromkeys(sizes, P()), *placements) == chosen
    )


def numels_of_pieces(sizes: dict[str, int]) -> list[tuple[str, int]]:
    """Return the name and the number of elements of each tensor that this rank steps with ZeRO-1."""
    with ProcessGroupRegistry(Topology(data=4)) as registry:
        model = nn.ParameterDict({name: ones(size) for name, size in sizes.items()})
        optimizer: ParallelOptimizer[Any] = ParallelOptimizer(_adamw(model), registry, states=Sharded("data"))
        return [(piece.name, piece.tensor.numel()) for piece in optimizer.stepped_tensors()]


def gathers(fraction: float) -> int:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        agree = mock.Mock(side_effect=on_all_ranks_with)
        with mock.patch.object(states_offloaded, "on_all_ranks_with", agree):
            ParallelOptimizer(_adamw(nn.Linear(2, 3)), registry, states=Offloaded(fraction))
        return agree.call_count


def test_offload_agreement_gathers_once_and_only_for_fractions_between_0_and_1(world: World) -> None:
    assert [world.run(2, gathers, fraction) for fraction in (0.0, 0.5, 1.0)] == [[0, 0], [1, 1], [0, 0]]


# The ranges of elements -----------------------------------------------------------------------------------------------

SHARDS = st.sampled_from([Piece(0, (), 0, 0), Piece(1, (0,), 0, 0), Piece(1, (1,), 0, 0)])
PIECES = st.builds(
    lambda shard, start, size: shard._replace(start=start, stop=start + size),
    SHARDS,
    st.integers(0, 30),
    st.integers(1, 9),
)


@given(st.lists(st.lists(st.tuples(PIECES, st.booleans()), max_size=6), max_size=5))
def test_shards_that_overlap_offloaded_shards_are_offloaded(drawn: list[list[tuple[Piece, bool]]]) -> None:
    expected, size = {piece for of_rank in drawn for piece, chosen in of_rank if chosen}, -1
    while len(expected) > size:
        size = len(expected)
        elements = {(*piece[:2], element) for piece in expected for element in range(*piece[2:])}
        expected |= {
            piece
            for of_rank in drawn
            for piece, _ in of_rank
            if any((*piece[:2], element) in elements for element in range(*piece[2:]))
        }
    assert offloaded_on_all_ranks(drawn) == expected


# Errors ---------------------------------------------------------------------------------------------------------------


class FailingOnOneRank(StatePlacement):
    """A placement whose transform fails on rank 1 only, before `Offloaded`."""

    position = Position.SHARD

    def check(self, context: Any) -> None:
        pass

    def transform(self, context: Any) -> ParamTransform:
        transform = ParamTransform()
        if context.registry.global_rank == 1:
            transform.install = self._fail  # type: ignore[method-assign]
        return transform

    @staticmethod
    def _fail(optimizer: object, positions: object) -> Any:
        raise MemoryError("no memory for shards")


def error_of_each() -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        try:
            ParallelOptimizer(_adamw(nn.Linear(2, 3)), registry, states=(FailingOnOneRank(), Offloaded(0.5)))
        except (MemoryError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"


def test_error_on_one_rank_in_param_transform_before_offloaded_is_raised_on_all_ranks(world: World) -> None:
    assert world.run(2, error_of_each) == [
        "RuntimeError: rank 1: MemoryError: no memory for shards",
        "MemoryError: no memory for shards",
    ]
