"""Tests of the test harness: how random cases are drawn and reported, and which cases the shorter runs select."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import properties
import pytest
from executed_blocks import without_new_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import (
    CASES_OF_A_FILE,
    CASES_OF_A_TEST,
    default_cases,
    number_of_cases,
    random_cases,
    repetitions,
    sample,
    spread,
)
from world import World, WorldError

NUMBERS = st.lists(st.integers(0, 1000), max_size=4)


def total(numbers: list[int]) -> int:
    assert sum(numbers) < 900, "planted"
    return sum(numbers)


def test_random_cases_runs_as_many_cases_as_hypothesis_in_one_call(world: World) -> None:
    ours: list[list[int]] = []
    calls: list[int] = []
    theirs: list[list[int]] = []

    @random_cases(NUMBERS, 200)
    def together(world: World, drawn: list[list[int]]) -> None:
        calls.append(len(drawn))
        ours.extend(drawn)

    @settings(max_examples=number_of_cases(200), database=None)
    @given(NUMBERS)
    def alone(numbers: list[int]) -> None:
        theirs.append(numbers)

    together(world)
    alone()
    assert len(calls) == 1
    assert len(ours) == len(theirs)


def test_failing_random_case_is_shrunk_and_stored(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(properties, "FAILURES", tmp_path)
    seen: list[list[list[int]]] = []
    limit = 900

    @random_cases(NUMBERS, 200)
    def fails(world: World, drawn: list[list[int]]) -> None:
        seen.append(drawn)
        for numbers in drawn:
            assert sum(numbers) < limit, "planted"

    with pytest.raises(AssertionError, match="planted") as error:
        fails(world)
    assert seen[-1] == [[900]]
    assert "case=[900]" in "".join(getattr(error.value, "__notes__", []))
    limit = 10**6
    fails(world)
    assert [900] in seen[-1], "the stored case should run again"


def test_random_cases_reports_failure_that_needs_several_cases_together(world: World) -> None:
    @random_cases(NUMBERS, 200)
    def fails(world: World, drawn: list[list[int]]) -> None:
        assert len(drawn) == 1, "planted: several cases together"

    with pytest.raises(AssertionError, match="planted: several cases together"):
        fails(world)


def test_run_each_uses_world_size_of_each_case_and_returns_results_in_order_of_cases(world: World) -> None:
    drawn = [[1], [2, 3], [], [4, 5], [6]]
    results = world.run_each(total, [(len(numbers) + 1, (numbers,)) for numbers in drawn])
    assert results == [[sum(numbers)] * (len(numbers) + 1) for numbers in drawn]


def test_run_each_names_the_case_in_which_a_rank_raises() -> None:
    world = World()
    with pytest.raises(WorldError, match=r"(?s)planted.*total raised AssertionError for the arguments \(\[901\],\)"):
        world.run_each(total, [(2, ([1],)), (2, ([901],)), (2, ([2],))])
    world.close()


def item(test: str, **arguments: object) -> Any:
    """Return a fake collected test item without markers, as pytest passes it to `sample`."""
    markers: dict[str, Any] = {"get_closest_marker": lambda name: None}
    if not arguments:
        return SimpleNamespace(nodeid=test, **markers)
    return SimpleNamespace(nodeid=f"{test}[{arguments}]", callspec=SimpleNamespace(params=arguments), **markers)


def test_sample_picks_one_case_of_each_test_from_second_half_of_its_cases() -> None:
    tests = [[item(f"test {index}", mode=mode) for mode in range(20)] for index in range(100)]
    pair, alone = [item("pair", mode=mode) for mode in range(2)], item("alone")
    every = [*(case for cases in tests for case in cases), *pair, alone]
    chosen = sample(every)
    assert [sum(case in chosen for case in cases) for cases in [*tests, pair, [alone]]] == [1] * 102
    assert pair[1] in chosen
    modes = {case.callspec.params["mode"] for cases in tests for case in cases if case in chosen}
    assert modes == set(range(10, 20)), "different tests must contribute different cases"
    assert sample(every) == chosen
    marked = item("marked")
    marked.get_closest_marker = lambda name: name if name == "long" else None
    assert marked not in sample([*every, marked])


def drawn_from(
    *lists: int, file: str = "optim/test_a.py", fixtures: tuple[str, ...] = ("world",), marker: object = None
) -> list[Any]:
    """Return the cases of one test: all combinations of indices into parameter lists of these lengths."""
    return [
        SimpleNamespace(
            nodeid=f"tests/{file}::test_it[{index}]",
            callspec=SimpleNamespace(indices=dict(enumerate(index))),
            fixturenames=fixtures,
            get_closest_marker=lambda name: marker,
        )
        for index in product(*map(range, lists))
    ]


def test_default_cases_keeps_all_cases_without_ranks_and_few_with_ranks() -> None:
    alone = drawn_from(20, fixtures=("tmp_path",))
    assert default_cases(alone) == alone
    assert len(default_cases(drawn_from(20))) == CASES_OF_A_TEST
    assert len(default_cases(drawn_from(20, marker=SimpleNamespace(args=(7,))))) == 7
    assert len(default_cases(drawn_from(2))) == 2
    assert len(default_cases(drawn_from(20, file="examples/test_a.py"))) == 1


def test_spread_takes_one_case_per_section_of_parameter_list() -> None:
    taken = [case.callspec.indices[0] for case in spread(drawn_from(20), 4)]
    assert [index // 5 for index in taken] == [0, 1, 2, 3]


def test_spread_covers_every_argument_value_and_then_new_pairs() -> None:
    taken = [tuple(case.callspec.indices.values()) for case in spread(drawn_from(4, 4, 2), 4)]
    assert [{index[which] for index in taken} for which in range(3)] == [{*range(4)}, {*range(4)}, {0, 1}]
    taken = [tuple(case.callspec.indices.values()) for case in spread(drawn_from(4, 4, 2), 20)]
    assert {index[:2] for index in taken} == {*product(range(4), range(4))}
    assert {index[1:] for index in taken} == {*product(range(4), range(2))}


def test_spread_treats_arguments_that_change_together_as_one() -> None:
    cases = drawn_from(12)
    for case in cases:
        case.callspec.indices["the same list"] = case.callspec.indices[0]
    assert [case.callspec.indices[0] // 4 for case in spread(cases, 3)] == [0, 1, 2]


def test_sample_contains_few_tests_of_files_that_start_processes() -> None:
    starts, others = "tests/examples/test_a.py::test_{}", "tests/parallel/test_spec.py::test_{}"
    every = [item(name.format(index)) for name in (starts, others) for index in range(10)]
    chosen = [case.nodeid for case in sample(every)]
    assert sum(name.startswith("tests/examples/") for name in chosen) == CASES_OF_A_FILE
    assert sum(name.startswith("tests/parallel/") for name in chosen) == 10


def test_sample_leaves_out_listed_tests_and_takes_no_others_in_their_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    every = [item(f"tests/parallel/test_spec.py::test_{index}", mode=mode) for index in range(5) for mode in range(4)]
    every += [item(f"tests/examples/test_a.py::test_{index}") for index in range(10)]
    chosen = sample(every)
    names = ("tests/examples", "tests/parallel/test_spec.py::test_3")
    listed = [case.nodeid.partition("[")[0] for case in chosen if case.nodeid.startswith(names)]
    (tmp_path / "list.txt").write_text("".join(f"{test}\n" for test in listed))
    monkeypatch.setattr(properties, "NOT_ON_OLDEST", tmp_path / "list.txt")
    monkeypatch.setenv("MESHSTEP_TEST_PROFILE", "oldest-all")
    assert sample(every) == chosen
    monkeypatch.setenv("MESHSTEP_TEST_PROFILE", "oldest")
    assert sample(every) == [case for case in chosen if case.nodeid.partition("[")[0] not in listed]
    assert len(listed) == CASES_OF_A_FILE + 1


def test_oldest_sample_keeps_fast_tests_and_as_many_others_as_execute_all_blocks() -> None:
    """`tests/benchmarks/oldest_sample.py` applies this choice to a record of all tests."""
    seconds = {"fast": 0.1, "slow": 2.0, "slow and same": 3.0, "slow and most": 2.0, "slow and new": 9.0}
    blocks = {"fast": {1}, "slow": {1, 2}, "slow and same": {2, 3}, "slow and most": {2, 3}, "slow and new": {1, 4}}
    assert without_new_blocks(seconds, blocks, 0.1) == ["slow", "slow and same"]


def test_repetitions_returns_fewer_values_only_in_shorter_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    values = ("a", "b", "c")
    monkeypatch.setenv("MESHSTEP_TEST_PROFILE", "full")
    assert repetitions(values, "key", default=1) == values
    monkeypatch.setenv("MESHSTEP_TEST_PROFILE", "default")
    assert repetitions(values, "key") == values
    assert [repetitions(values, "key", default=count) for count in (1, 2, 3)] == [["a"], ["a", "c"], [*values]]
    monkeypatch.setenv("MESHSTEP_TEST_PROFILE", "oldest")
    taken = [repetitions(values, key) for key in range(20)]
    assert all(len(some) == 1 for some in taken)
    assert {value for (value,) in taken} == set(values), "different keys must select different values"
    assert taken == [repetitions(values, key) for key in range(20)], "the selection must be deterministic"
