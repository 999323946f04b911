"""One file of tests, run twice: by pytest with a pool of ranks, and under torchrun, whose processes are the ranks."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import forked_python
import pytest

LAUNCHED = 3

CONFTEST = """\
import json, os

from meshstep.parallel.ranks import pool

pool.GRACE = 1.0  # otherwise the pool waits 5 s for ranks that are blocked by a failed rank


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        with open(f"outcomes-{os.environ.get('RANK', 'pool')}", "a") as file:
            print(json.dumps([report.location[2], report.outcome, str(report.longrepr)]), file=file)
"""

TESTS = """\
import os, time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from meshstep import ProcessGroupRegistry, Topology

LAUNCHED = "RANK" in os.environ
RANK = int(os.environ.get("RANK", 0))
only_launched = pytest.mark.skipif(not LAUNCHED, reason="needs several launched processes")


def total(scale):
    with ProcessGroupRegistry(Topology(tensor=dist.get_world_size())) as registry:
        value = torch.tensor(scale * (registry.global_rank + 1), device=registry.device)
        dist.all_reduce(value, group=registry.group("tensor"))
        return value.item()


def test_ranks_run_returns_results_of_all_ranks(ranks):
    assert ranks.run(total, 3, 2.0) == [12.0] * 3


def test_all_processes_get_results_of_fewer_ranks(ranks):
    for size in (2, 3, 1, 3, 2):
        assert ranks.run(total, size, 2.0) == [float(size * (size + 1))] * size
    assert ranks.run_each(total, [(2, (1.0,)), (1, (1.0,)), (2, (2.0,))]) == [[3.0, 3.0], [1.0], [6.0, 6.0]]


def test_four_ranks_return_the_sum_if_there_are_enough_processes(ranks):
    assert ranks.run(total, 4, 1.0) == [10.0] * 4


def large():
    return torch.full((3_000_000,), float(dist.get_rank()))


def test_ranks_run_returns_large_results(ranks):
    assert [found.mean().item() for found in ranks.run(large, 2)] == [0.0, 1.0]


@settings(max_examples=5)
@given(st.integers(0, 10**9))
def test_all_processes_draw_equal_hypothesis_examples(ranks, number):
    assert ranks.run(total, 2, number) == [3 * number] * 2


def raise_on_one():
    if dist.get_rank() == 1:
        raise ValueError("planted")
    dist.all_reduce(torch.ones(1))


def test_ranks_run_fails_if_one_rank_raises(ranks):
    ranks.run(raise_on_one, 3)


@only_launched
def test_ranks_run_fails_if_one_process_failed_before_the_call(ranks):
    assert RANK != 1, "left early"
    ranks.run(total, 3, 1.0)


@only_launched
def test_ranks_run_fails_if_one_process_passes_without_the_call(ranks):
    if RANK != 1:
        ranks.run(total, 3, 1.0)


@only_launched
def test_user_test_fails_on_all_processes_if_one_fails_after_ranks_run(ranks):
    ranks.run(total, 3, 1.0)
    assert RANK != 2, "failed late"


@only_launched
def test_ranks_run_fails_if_arguments_differ_between_processes(ranks):
    ranks.run(total, 2, float(RANK == 2))


def sleep_on_rank_1():
    if dist.get_rank() == 1:
        doze()


def doze():
    time.sleep(6)


def test_ranks_run_fails_if_one_rank_exceeds_the_timeout(ranks):
    ranks.run(sleep_on_rank_1, 2, timeout=3)


def test_user_test_skips_if_all_processes_skip(ranks):
    ranks.run(total, 2, 1.0)
    pytest.skip("as planned")


@only_launched
def test_ranks_run_leaves_default_group_of_all_processes_unchanged(ranks):
    value = torch.ones(1)
    dist.all_reduce(value)
    before = dist.group.WORLD
    assert ranks.run(total, 2, 1.0) == [3.0, 3.0]
    dist.all_reduce(value)
    assert value.item() == 9.0
    assert dist.group.WORLD is before


def test_ranks_run_succeeds_after_failed_tests(ranks):
    assert ranks.run(total, 3, 2.0) == [12.0] * 3
"""

Outcomes = dict[str, tuple[str, str]]


Ended = tuple[dict[str, Outcomes], str]


def run(folder: Path, python: Callable[..., subprocess.CompletedProcess[str]]) -> Ended:
    """Return outcome and error text of each test by process, and the printed output."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_of_a_user.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\naddopts = --strict-markers\n")
    pytest_of_it = ["-m", "pytest", "-p", "meshstep.pytest_plugin", "-p", "no:cacheprovider", "-q"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = python(*pytest_of_it, cwd=folder, env={**environment, "OMP_NUM_THREADS": "1"}, timeout=400)
    found: dict[str, Outcomes] = {}
    for path in folder.glob("outcomes-*"):
        lines: list[Any] = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.name.removeprefix("outcomes-")] = {name: (outcome, text) for name, outcome, text in lines}
    return found, done.stdout + done.stderr


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Results of both runs, which run at the same time because they mostly wait for timeouts."""
    commands: dict[str, Callable[..., subprocess.CompletedProcess[str]]] = {
        "launched": partial(forked_python.torchrun, LAUNCHED),
        "pool": forked_python.run,
    }
    with ThreadPoolExecutor() as threads:
        started = {name: threads.submit(run, tmp_path_factory.mktemp(name), commands[name]) for name in commands}
        return {name: of_run.result() for name, of_run in started.items()}


@pytest.fixture(scope="module")
def launched(ended: dict[str, Ended]) -> list[Outcomes]:
    found, printed = ended["launched"]
    assert sorted(found) == [str(rank) for rank in range(LAUNCHED)], printed
    return [found[str(rank)] for rank in range(LAUNCHED)]


@pytest.mark.long
def test_user_tests_with_ranks_fixture_have_planned_outcomes_in_a_pool(ended: dict[str, Ended]) -> None:
    found, printed = ended["pool"]
    assert [*found] == ["pool"], printed
    for name, (outcome, text) in found["pool"].items():
        expected = "failed" if "_fails_" in name else "skipped" if "_skips_" in name else "passed"
        assert outcome == expected or "needs several launched processes" in text, (name, text)


@pytest.mark.long
def test_launched_processes_report_equal_outcomes(launched: list[Outcomes]) -> None:
    first = launched[0]
    assert len(first) == TESTS.count("def test_")
    for name, (outcome, text) in first.items():
        assert {of_rank[name][0] for of_rank in launched} == {outcome}, name
        expected = "failed" if "_fails_" in name else "skipped" if "_skips_" in name else "passed"
        assert outcome == (
            "skipped" if name == "test_four_ranks_return_the_sum_if_there_are_enough_processes" else expected
        ), (name, text)


@pytest.mark.long
@pytest.mark.default_cases(99)  # all cases: unlike other tests of this file, these start no process
@pytest.mark.parametrize(
    ("test", "texts"),
    [
        (
            "test_four_ranks_return_the_sum_if_there_are_enough_processes",
            ["total needs 4 ranks, and 3 processes were launched"] * 3,
        ),
        ("test_ranks_run_fails_if_one_rank_raises", ["planted"] * 3),
        (
            "test_ranks_run_fails_if_one_process_failed_before_the_call",
            [
                "1 of 3 ranks did not make the call run(test_of_a_user.total, ...)",
                "left early",
                "rank 1: finished the test without this call: ",
            ],
        ),
        (
            "test_ranks_run_fails_if_one_process_passes_without_the_call",
            ["rank 1: finished the test without this call (the test passed there)"] * 3,
        ),
        (
            "test_user_test_fails_on_all_processes_if_one_fails_after_ranks_run",
            ["failed on rank 2:\n", "failed on rank 2:\n", "failed late"],
        ),
        (
            "test_ranks_run_fails_if_arguments_differ_between_processes",
            ["the launched processes make different calls (ranks 0-1: "] * 3,
        ),
        (
            "test_ranks_run_fails_if_one_rank_exceeds_the_timeout",
            ["did not finish within 3 seconds; its stack was"] * 3,
        ),
    ],
)
def test_each_launched_process_reports_why_a_test_failed_or_was_skipped(
    launched: list[Outcomes], test: str, texts: list[str]
) -> None:
    for of_rank, text in zip(launched, texts, strict=True):
        assert text in of_rank[test][1]


@pytest.mark.long
def test_all_launched_processes_report_the_stack_of_a_late_rank(launched: list[Outcomes]) -> None:
    for of_rank in launched:
        assert "in doze" in of_rank["test_ranks_run_fails_if_one_rank_exceeds_the_timeout"][1]


def test_launched_processes_reject_xdist(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "test_nothing.py").write_text("")
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    command = ("-m", "pytest", "-p", "meshstep.pytest_plugin", "-n", "2")
    done = forked_python.run(*command, cwd=tmp_path, env={**os.environ, **environment})
    assert "pytest -n is given, but the launched processes must run the tests themselves; give -n 0" in done.stderr
