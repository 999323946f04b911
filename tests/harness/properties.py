"""Properties of random cases that several ranks must show: the cases are drawn first, then run many to a call.

    @random_cases(cases(), 200)
    def test_norms_are_exact(world: World, drawn: list[Case]) -> None:
        results = world.run_each(measured, [(case.topology.world_size, (case,)) for case in drawn])
        for case, by_rank in zip(drawn, results, strict=True):
            assert by_rank == ...

A hypothesis test that calls `World.run` for each example pays for each a round trip to all workers, and a new default
group whenever the world size changes. What hypothesis draws doesn't depend on how a test that passes
goes on, so all examples can be drawn before the first one is run. If the property then fails, the same cases are drawn
again, from the same seed, and run one by one: so hypothesis finds the one that fails, shrinks it, prints it and keeps it
for the next run, as ever.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase, ReadOnlyDatabase
from hypothesis.strategies import SearchStrategy
from world import World

C = TypeVar("C")
Item = TypeVar("Item", bound=pytest.Item)
WITHOUT_SHRINKING: Sequence[Phase] = (Phase.explicit, Phase.reuse, Phase.generate)
CASES_OF_A_FILE = 1  # in a sample, of the files below: they start processes or train: seconds of Python's
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


def random_cases(
    strategy: SearchStrategy[C], count: int, *, phases: Sequence[Phase] = tuple(Phase)
) -> Callable[[Callable[[World, list[C]], None]], Callable[[World], None]]:
    """The test gets ``count`` drawn cases at once; it must hold for any list of cases just if it holds for each alone.

    Args:
        strategy: Of one case.
        count: How many are drawn; the settings' profile may say fewer (see `number_of_cases`).
        phases: Hypothesis's, for the cases one by one; `WITHOUT_SHRINKING` where one takes long.
    """

    def decorate(test: Callable[[World, list[C]], None]) -> Callable[[World], None]:
        # A database of its own: to hypothesis the function below is the same in all tests.
        failures = DirectoryBasedExampleDatabase(FAILURES / f"{test.__module__}.{test.__qualname__}")

        def draw(check: Callable[[C], None], from_seed: int, database: ExampleDatabase) -> None:
            @settings(max_examples=number_of_cases(count), phases=phases, database=database)
            @seed(from_seed)  # before the settings: it would take their database away
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
                raise  # one by one they pass

        del together.__wrapped__  # pytest would ask for its second argument
        return together

    return decorate


def number_of_cases(count: int) -> int:
    """``count``, or the profile's share of it: a profile says by its ``max_examples`` how many of 100 it draws."""
    return max(1, count * settings().max_examples // 100)


def is_sample() -> bool:
    """Whether this run of the suite is the second one, on the oldest torch, which takes a sample of the cases."""
    return os.environ.get("MESHSTEP_TEST_PROFILE") == "oldest"


def repetitions(values: Sequence[C], *key: object) -> Sequence[C]:
    """All of them, for a property that holds for each alike; in a sample one, another one for another ``key``."""
    return [values[zlib.crc32(repr(key).encode()) % len(values)]] if is_sample() else values


def starts_processes(file: str) -> bool:
    """Whether it is one of those, from the root of the project."""
    return file.removeprefix("tests/").startswith(STARTS_PROCESSES)


def sample(items: Sequence[Item]) -> list[Item]:
    """Of each parametrised test one case; the other tests whole; of a file that `STARTS_PROCESSES`, `CASES_OF_A_FILE`.

    A case of the second half: tests list one process first and the layouts of many ranks last. Which one of these a hash of
    the name says: of another test another one.
    """
    by_test: dict[str, list[Item]] = {}
    for item in items:
        by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    by_file: dict[str, list[Item]] = {}
    for test, cases in by_test.items():
        by_file.setdefault(test.partition("::")[0], []).extend(_some_of(cases[len(cases) // 2 :], 1))
    return [
        item
        for file, chosen in by_file.items()
        for item in (_some_of(chosen, CASES_OF_A_FILE) if starts_processes(file) else chosen)
    ]


def _some_of(items: Sequence[Item], count: int) -> list[Item]:
    return sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode()))[:count]
