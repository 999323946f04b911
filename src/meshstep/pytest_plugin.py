"""A plugin of pytest: the fixture ``ranks``, a pool of processes that a test's functions run on.

    def test_norm(ranks):
        assert ranks.run(norm_of_my_model, 4) == [dense_norm] * 4

The same under ``torchrun --nproc-per-node 4 -m pytest``: ranks are then those processes. What fails in one of them fails in
all, calls of more ranks than there are processes are skipped, and in calls of fewer the others wait.

Nothing is imported before a test asks for it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from meshstep.testing import Ranks

# Of launchers; one of them there is a reason to look closer, for which torch is imported.
_SIGNS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_launched = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """A warm pool over gloo, or the processes that a launcher started; see `meshstep.testing.Ranks`."""
    from meshstep.parallel.ranks.launched import LaunchedRanks
    from meshstep.parallel.ranks.run import ranks_of_this_process

    found = ranks_of_this_process()
    yield found
    found.leave() if isinstance(found, LaunchedRanks) else found.close()


def pytest_configure(config: pytest.Config) -> None:
    """Where a launcher has started several processes, they must run the same tests with the same random cases."""
    config.stash[_launched] = any(map(os.environ.get, _SIGNS)) and _was_launched()
    if not config.stash[_launched]:
        return
    if getattr(config.option, "numprocesses", None):
        raise pytest.UsageError(
            "launched processes are the ranks: give pytest -n 0, so that each runs the tests itself"
        )
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import HealthCheck, settings

        # Times differ between processes: none may fail a test, or stop drawing, by its own clock.
        slow = [*settings().suppress_health_check, HealthCheck.too_slow]
        settings.register_profile(
            "meshstep-launched",
            settings(),
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=slow,
        )
        settings.load_profile("meshstep-launched")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that uses ranks fails in all launched processes if it does in one, and none goes on before the others."""
    report = yield
    at_end = call.when == "call" or (call.when == "setup" and not report.passed)
    if not (at_end and item.config.stash[_launched] and "ranks" in getattr(item, "fixturenames", ())):
        return report
    from meshstep.parallel.ranks.launched import LaunchedRanks
    from meshstep.parallel.ranks.run import ranks_of_this_process

    found = ranks_of_this_process()
    assert isinstance(found, LaunchedRanks)
    outcomes = found.agreed(report.longreprtext if report.failed else "")
    failures = {rank: text for rank, text in outcomes.items() if text}
    if failures and not report.failed:
        report.outcome = "failed"
        report.longrepr = "\n\n".join(f"failed on rank {rank}:\n{text}" for rank, text in failures.items())
    return report


def _was_launched() -> bool:
    from meshstep.parallel.ranks.launched import was_launched

    return was_launched()
