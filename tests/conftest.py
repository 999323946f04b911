from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import suppress

# Before torch is imported anywhere: one intra-op thread a rank, or the ranks fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing here needs a name server, but a store of torch's asks one for the name of whoever connects from ::ffff:127.0.0.1,
# and all wait for it: five seconds where an answer is lost. So nobody is asked.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

import pytest
import torch
from hypothesis import HealthCheck, settings
from interpreted import Interpreted, interpreted_pool
from loops import using
from properties import is_sample, sample, starts_processes
from world import World

torch.set_num_threads(1)
# To look for garbage after each 700 objects took an eighth of the time of these processes: most objects here live long.
gc.set_threshold(100_000)

# "oldest" is for a second run of the suite, on the oldest torch: what it looks for shows in any case, not in a rare one.
# A tenth of the random cases, and of the listed ones what `properties.sample` and `repetitions` leave. "many",
# seventeen times the cases, for one file: MESHSTEP_TEST_PROFILE=many pytest tests/optim/test_any_configuration.py
for profile, examples in (("default", 100), ("oldest", 10), ("many", 1700)):
    settings.register_profile(
        f"meshstep-{profile}",
        deadline=None,
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
settings.load_profile(f"meshstep-{os.environ.get('MESHSTEP_TEST_PROFILE', 'default')}")


def pytest_configure(config: pytest.Config) -> None:
    """Give each of xdist's processes its own share of the cores, with all that it starts.

    Ranks talk in short messages. On the same core the next rank goes on where one waits; to wake one on another core
    costs more than the message, and the ranks of two files in each other's way cost more than that. A file alone on one
    of two cores takes as long as on both.

    All are batch jobs to the scheduler: a rank goes on after it has woken another one with a message. If it were
    interrupted there, it would often hold the lock of a connection, and gloo's thread would spin on that, on the same
    core, for its whole time slice.
    """
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first, or one process works at the end while the other waits."""
    if is_sample():
        chosen = set(sample(items))
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    items.sort(key=lambda item: not (starts_processes(item.nodeid) or item.path.name == "test_torchtitan.py"))


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Interpreted]:
    """Processes in which Triton's kernels are interpreted."""
    with interpreted_pool() as pool:
        yield pool


@pytest.fixture
def torchs_kernels() -> Iterator[None]:
    """In this process torch's kernels compute, not the library's."""
    with using("torch"):
        yield
