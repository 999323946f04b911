"""pytest plugin with the fixture ``ranks``: processes on which tests run functions.

    def test_norm(ranks):
        assert ranks.run(norm_of_my_model, 4) == [dense_norm] * 4

By default the ranks are a pool of processes. Under ``torchrun --nproc-per-node 4 -m pytest`` they are the processes of
torchrun. A test that fails in one process then fails in all. Tests that need more ranks than processes are skipped. If a
call needs fewer ranks, other processes wait.

The plugin imports torch only when a test uses the fixture.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from meshstep.testing import Ranks

# Variables of launchers. If one of them is set, the plugin imports torch to read the environment.
_SIGNS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_launched = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Provide a pool of processes over gloo, or the processes of a launcher, as `meshstep.testing.Ranks`."""
    from meshstep.parallel.ranks.run import LaunchedRanks, ranks_of_this_process

    found = ranks_of_this_process()
    yield found
    found.leave() if isinstance(found, LaunchedRanks) else found.close()


def pytest_configure(config: pytest.Config) -> None:
    """Make all processes of a launcher run the same tests with the same random cases; no effect in one process."""
    config.stash[_launched] = any(map(os.environ.get, _SIGNS)) and _was_launched()
    if not config.stash[_launched]:
        return
    if getattr(config.option, "numprocesses", None):
        raise pytest.UsageError(
            "pytest -n is given, but the launched processes must run the tests themselves; give -n 0"
        )
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import HealthCheck, settings

        # Times differ between processes, so deadlines could fail a test or end its random cases in one process only.
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
    """Fail a test with ranks in all launched processes if it fails in one, and let all processes finish it together."""
    report = yield
    at_end = call.when == "call" or (call.when == "setup" and not report.passed)
    if not (at_end and item.config.stash[_launched] and "ranks" in getattr(item, "fixturenames", ())):
        return report
    from meshstep.parallel.ranks.run import LaunchedRanks, ranks_of_this_process

    found = ranks_of_this_process()
    assert isinstance(found, LaunchedRanks)
    outcomes = found.gather_outcomes(report.longreprtext if report.failed else "")
    failures = {rank: text for rank, text in outcomes.items() if text}
    if failures and not report.failed:
        report.outcome = "failed"
        report.longrepr = "\n\n".join(f"failed on rank {rank}:\n{text}" for rank, text in failures.items())
    return report


def _was_launched() -> bool:
    from meshstep.parallel.ranks.run import was_launched

    return was_launched()
