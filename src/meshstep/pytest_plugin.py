"""pytest plugin with the fixture ``ranks``, with which a test runs functions on several processes.

    def test_norm(ranks):
        assert ranks.run(norm_of_my_model, 4) == [dense_norm] * 4

By default the ranks are a pool of processes. Under ``torchrun --nproc-per-node 4 -m pytest`` the ranks are the processes of
torchrun, and each process runs all tests. If a test with the fixture fails in one process, it then fails in all
processes; failures in the teardown of a test are not exchanged. A test that needs more ranks than there are processes
is skipped. If a call needs fewer ranks, the other processes wait.

The plugin imports torch only when a test uses the fixture, or if an environment variable of a launcher is set.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from meshstep.testing import Ranks

# Environment variables that launchers set. If one of these variables is set, the plugin parses them with a function whose
# import loads torch.
_SIGNS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_launched = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Provide a `meshstep.testing.Ranks`: the processes of a launcher if there are several, else a pool over gloo."""
    from meshstep.parallel.ranks.run import LaunchedRanks, ranks_of_this_process

    found = ranks_of_this_process()
    yield found
    found.leave() if isinstance(found, LaunchedRanks) else found.close()


def pytest_configure(config: pytest.Config) -> None:
    """Detect whether a launcher has started several processes; if so, make them draw the same Hypothesis examples."""
    config.stash[_launched] = any(map(os.environ.get, _SIGNS)) and _was_launched()
    if not config.stash[_launched]:
        return
    if getattr(config.option, "numprocesses", None):
        raise pytest.UsageError(
            "pytest -n is given, but the launched processes must run the tests themselves; give -n 0"
        )
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import HealthCheck, settings

        # Run times differ between processes, so a deadline could fail a test, or end its examples, in one process only.
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
    """Exchange the outcome of a test with the fixture ``ranks`` between launched processes.

    If the test failed in one process, it fails in all processes. Failures in the teardown of the test are not
    exchanged. No process starts the next test before all processes have finished this test, or a timeout has passed.
    """
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
