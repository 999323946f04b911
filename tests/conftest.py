from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from contextlib import suppress

# Set before torch is imported: one intra-op thread per rank, so that ranks do not compete for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's TCPStore looks up the host name of each client that connects from ::ffff:127.0.0.1, and a lost DNS reply delays
# all ranks by five seconds. No test needs DNS, so turn lookups off.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

import pytest
import rare_collections  # noqa: F401  # sets the threshold of garbage collection
import torch
from hypothesis import HealthCheck, settings
from interpreted import Interpreted, interpreted_pool
from loops import using
from properties import default_cases, is_sample, profile, sample, starts_processes
from world import World

torch.set_num_threads(1)

# `max_examples` of each profile. A test that passes its number of cases to `number_of_cases` draws this percentage of
# it; other hypothesis tests draw `max_examples` cases. The profiles:
# "default" is `pytest` without options.
# "long" is a run with the tests that the default run leaves out because they are long.
# "once" is the run of .ci/run: the default run and the run of long tests in one.
# "oldest" is the run of .ci/run on the oldest torch, with a sample of all tests; "oldest-all" is a larger sample, with the
# tests that tests/benchmarks/oldest_sample.py found to execute no further code.
# "full" is the run with the slow tests.
# "many" is for one file: MESHSTEP_TEST_PROFILE=many pytest tests/optim/test_any_configuration.py
EXAMPLES = {"default": 10, "long": 10, "once": 10, "oldest": 10, "oldest-all": 10, "full": 100, "many": 1700}
for name, examples in EXAMPLES.items():
    settings.register_profile(
        f"meshstep-{name}",
        deadline=None,
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the profile of the random cases, and give each xdist process, with its child processes, a share of the cores.

    Shares are disjoint unless there are more xdist processes than cores. Ranks exchange short messages. To wake a rank on
    another core costs more than the message, and ranks of two test files on one core delay each other even more. A test
    file takes as long on one core as on two.

    All processes are batch jobs for the scheduler, so that a rank continues after its message wakes another rank.
    Otherwise it would often be interrupted while it holds the lock of a connection. Then the gloo thread of the other
    rank would spin on that lock, on the same core, for a full time slice.
    """
    selects_slow = re.search(r"(?<!not )\bslow\b", config.option.markexpr) is not None
    os.environ.setdefault("MESHSTEP_TEST_PROFILE", "full" if selects_slow else "default")
    settings.load_profile(f"meshstep-{profile()}")
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    worker = getattr(config, "workerinput", None)
    if worker is None or not hasattr(os, "sched_setaffinity"):
        return
    index, count = int(worker["workerid"].removeprefix("gw")), int(worker["workercount"])
    cores = sorted(os.sched_getaffinity(0))
    share = cores[len(cores) * index // count : len(cores) * (index + 1) // count]
    os.sched_setaffinity(0, share or {cores[index % len(cores)]})


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """A pool of ranks over gloo; see `world.World`."""
    pool = World()
    yield pool
    pool.close()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that the default run leaves out as slow, and move the longest files to the front.

    Without that order, one xdist process would be idle at the end. A test named on the command line keeps all cases.
    The profiles for the oldest torch mark no cases; they deselect all tests outside their sample. The profile "long"
    deselects all tests without the marker ``long``.
    """
    long = {item for item in items if item.get_closest_marker("long") is not None}
    if is_sample() or profile() == "long":
        chosen = long if profile() == "long" else set(sample(items))
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    if not is_sample():
        by_default = {item for item in default_cases(items) if profile() != "default" or item not in long}
        named = tuple(argument for argument in config.args if "::" in argument)
        for item in items:
            if item not in by_default and not item.nodeid.startswith(named):
                item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not (starts_processes(item.nodeid) or item.path.name == "test_torchtitan.py"))


def pytest_collection_finish() -> None:
    """Exclude modules and collected tests from garbage collection; otherwise each `gc.collect` would take a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Interpreted]:
    """Processes in which Triton kernels run in the interpreter of Triton."""
    with interpreted_pool() as pool:
        yield pool


@pytest.fixture
def torchs_kernels() -> Iterator[None]:
    """Use torch's kernels in this process, instead of the kernels of meshstep."""
    with using("torch"):
        yield
