"""Properties of random cases on several ranks: all cases are drawn first, and many are run in one call to the pool.

    @random_cases(cases(), 200)
    def test_norms_are_exact(world: World, drawn: list[Case]) -> None:
        results = world.run_each(measured, [(case.topology.world_size, (case,)) for case in drawn])
        for case, by_rank in zip(drawn, results, strict=True):
            assert by_rank == ...

A hypothesis test that calls `World.run` per example pays a round trip to all workers for each one, and a new default
group whenever the world size changes. Hypothesis draws the same examples whether or not a passing test ran, so all of
them can be drawn before the first one is run. If the property fails, the same cases are drawn again from the same seed
and run one by one, so that hypothesis finds the failing case, shrinks it, prints it and stores it for the next run, as
usual.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase, ReadOnlyDatabase
from hypothesis.strategies import SearchStrategy
from world import World

C = TypeVar("C")
Item = TypeVar("Item", bound=pytest.Item)
WITHOUT_SHRINKING: Sequence[Phase] = (Phase.explicit, Phase.reuse, Phase.generate)
CASES_OF_A_TEST = 2  # in the default run, per test with ranks; a test in a file of STARTS_PROCESSES keeps one case
CASES_OF_A_FILE = 1  # in the run on the oldest torch (`sample`), per file of STARTS_PROCESSES: these take seconds
STARTS_PROCESSES = (
    "docs/test_gpu_suite.py",
    "docs/test_speed_tables.py",
    "docs/test_types.py",
    "examples/",
    "optim/checkpoint/test_checkpoint_kill.py",
    "optim/proof/test_command.py",
    "optim/telemetry/test_outputs.py",
    "parallel/test_calls.py",
    "parallel/test_launch.py",
    "parallel/test_launched_ranks.py",
    "parallel/test_ranks.py",
)
FAILURES = Path(__file__).parents[2] / ".hypothesis" / "cases"
NOT_ON_OLDEST = Path(__file__).with_name("not_on_oldest_torch.txt")  # by tests/benchmarks/oldest_sample.py


def random_cases(
    strategy: SearchStrategy[C], count: int, *, phases: Sequence[Phase] = tuple(Phase)
) -> Callable[[Callable[[World, list[C]], None]], Callable[[World], None]]:
    """Pass ``count`` drawn cases to the test in one call.

    The test must pass for a list of cases if, and only if, it passes for each case alone. The profile may reduce
    ``count`` (see `number_of_cases`). ``phases`` are those of reruns of single cases; `WITHOUT_SHRINKING` if a case
    takes long.
    """

    def decorate(test: Callable[[World, list[C]], None]) -> Callable[[World], None]:
        # Each test gets its own database: for hypothesis the function below is the same in all tests.
        failures = DirectoryBasedExampleDatabase(FAILURES / f"{test.__module__}.{test.__qualname__}")

        def draw(check: Callable[[C], None], from_seed: int, database: ExampleDatabase) -> None:
            @settings(max_examples=number_of_cases(count), phases=phases, database=database)
            @seed(from_seed)  # is applied before `settings`, because it sets database=None
            @given(case=strategy)
            def each(case: C) -> None:
                check(case)

            each()

        @wraps(test)
        def together(world: World) -> None:
            drawn: list[C] = []
            from_seed = random.SystemRandom().getrandbits(64)
            draw(drawn.append, from_seed, ReadOnlyDatabase(failures))
            try:
                test(world, drawn)
            except Exception:
                draw(lambda case: test(world, [case]), from_seed, failures)
                raise  # the cases fail only together

        del together.__wrapped__  # pytest would look for a fixture for the second argument
        return together

    return decorate


def number_of_cases(count: int) -> int:
    """Return ``max_examples`` percent of ``count``, at least 1. The hypothesis profile sets ``max_examples``."""
    return max(1, count * settings().max_examples // 100)


def profile() -> str:
    return os.environ.get("MESHSTEP_TEST_PROFILE", "default")


def is_full() -> bool:
    """Return whether this run includes all cases."""
    return profile() in ("full", "many")


def is_sample() -> bool:
    return profile() in ("oldest", "oldest-all")


def repetitions(values: Sequence[C], *key: object, default: int | None = None) -> Sequence[C]:
    """Return the values for which a test repeats itself: all of them, or fewer in a shorter run.

    The hash of ``key`` selects the single value of the sample on the oldest torch. ``default`` is the number of
    values in the default run, spread over ``values``. None: all values.
    """
    if is_sample():
        return [values[zlib.crc32(repr(key).encode()) % len(values)]]
    if not is_full() and default is not None:
        return [values[(len(values) - 1) * index // max(1, default - 1)] for index in range(default)]
    return values


def starts_processes(file: str) -> bool:
    return file.removeprefix("tests/").startswith(STARTS_PROCESSES)


def sample(items: Sequence[Item]) -> list[Item]:
    """Return one case per test without the marker ``long``; of a file in `STARTS_PROCESSES`, `CASES_OF_A_FILE`.

    The case is from the second half of a test's list, because tests list one process first and the layouts of many
    ranks last. A hash of the name decides which case.

    The profile "oldest" also leaves out the tests in `NOT_ON_OLDEST`: the tests over a tenth of a second that execute
    only code that other tests of the sample execute.
    """
    left_out = {*NOT_ON_OLDEST.read_text().splitlines()} if profile() == "oldest" else set()
    by_test: dict[str, list[Item]] = {}
    for item in items:
        if item.get_closest_marker("long") is None:
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    by_file: dict[str, list[Item]] = {}
    for test, cases in by_test.items():
        by_file.setdefault(test.partition("::")[0], []).extend(_some_of(cases[len(cases) // 2 :], 1))
    return [
        item
        for file, chosen in by_file.items()
        for item in (_some_of(chosen, CASES_OF_A_FILE) if starts_processes(file) else chosen)
        if item.nodeid.partition("[")[0] not in left_out
    ]


def default_cases(items: Sequence[Item]) -> list[Item]:
    """Return the cases of the default run and of the run of long tests; the caller marks the other cases as ``slow``.

    A test without ranks keeps all cases, and a test with ranks keeps `CASES_OF_A_TEST`. A test in a file of
    `STARTS_PROCESSES` keeps one case. The marker ``default_cases(count)`` sets another number for one test.
    """
    by_test: dict[str, list[Item]] = {}
    for item in items:
        by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [item for cases in by_test.values() for item in spread(cases, _default_count(cases[0], len(cases)))]


def _default_count(item: pytest.Item, every: int) -> int:
    marker = item.get_closest_marker("default_cases")
    if marker is not None:
        return int(marker.args[0])
    needs_ranks = any(fixture in ("world", "interpreted") for fixture in getattr(item, "fixturenames", ()))
    return 1 if starts_processes(item.nodeid) else CASES_OF_A_TEST if needs_ranks else every


def spread(cases: Sequence[Item], count: int) -> list[Item]:
    """Return ``count`` cases of one test, in their order, that differ in as many arguments as possible.

    Each further case adds as many pairs of argument values as possible to the pairs of the cases before it. If
    several cases add equally many pairs, a hash of the case's name decides, so that tests with equal arguments get
    different cases. If the test has one argument only, its list of cases is divided into ``count`` sections of equal
    length, and each section gives one case.
    """
    if count >= len(cases):
        return list(cases)
    arguments = _arguments(cases)
    if len(arguments[0]) < 2:
        bounds = [len(cases) * piece // count for piece in range(count + 1)]
        return [min(cases[start:end], key=_hash) for start, end in pairwise(bounds)]
    pairs = [{*combinations(values, 1), *combinations(values, 2)} for values in arguments]
    covered: set[Any] = set()
    chosen: list[int] = []
    for _ in range(count):
        others = [index for index in range(len(cases)) if index not in chosen]
        chosen.append(min(others, key=lambda index: (-len(pairs[index] - covered), _hash(cases[index]))))
        covered |= pairs[chosen[-1]]
    return [cases[index] for index in sorted(chosen)]


def _arguments(cases: Sequence[pytest.Item]) -> list[tuple[tuple[int, int], ...]]:
    """Return for each case the index of the value of each argument that varies; arguments that change together count as
    one."""
    indices = [dict[str, int](case.callspec.indices) if hasattr(case, "callspec") else {} for case in cases]
    columns = dict.fromkeys(tuple(of.get(name, -1) for of in indices) for name in indices[0])
    varied = [column for column in columns if len(set(column)) > 1]
    return [tuple(enumerate(row)) for row in zip(*varied, strict=True)] if varied else [() for _ in cases]


def _some_of(items: Sequence[Item], count: int) -> list[Item]:
    return sorted(items, key=_hash)[:count]


def _hash(item: pytest.Item) -> int:
    return zlib.crc32(item.nodeid.encode())
