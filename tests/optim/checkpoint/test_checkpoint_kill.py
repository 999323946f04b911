"""A run killed with SIGKILL during training or saving resumes, and ends bitwise identical to an uninterrupted run."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked_python
import killable
import pytest
import torch
from killable import SAVE_AGAIN_AT, SAVE_AT, STEPS, Plan
from world import forkserver

TIMEOUT = 300.0  # torchrun starts its ranks up to three times, which takes over a minute on a busy machine
RANKS = 2


class Run:
    """The processes of one attempt, forked from a process that has imported torch."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._processes: list[Any] = []
        for rank in range(RANKS):
            process = forkserver().Process(target=killable.start_in_fork, args=(plan, rank, RANKS))
            process.start()
            self._processes.append(process)

    def _codes(self) -> list[int | None]:
        return [process.exitcode for process in self._processes]

    def finish(self) -> list[dict[str, Any]]:
        self._wait(lambda: None not in self._codes())
        assert self._codes() == [0] * RANKS
        return [torch.load(self.plan.result(rank)) for rank in range(RANKS)]

    def kill(self) -> None:
        self._wait(self.plan.mark.exists)
        time.sleep(0.1)  # lets the other rank run as far as it can
        assert self._codes() == [None] * RANKS
        self._kill()
        self._wait(lambda: None not in self._codes())
        assert self._codes() == [-signal.SIGKILL] * RANKS

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _wait(self, condition: Any) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            if time.monotonic() > deadline or any(code not in (None, 0, -signal.SIGKILL) for code in self._codes()):
                self._kill()
                raise AssertionError(f"exit codes {self._codes()}")
            time.sleep(0.02)


CASES = {
    "fp32, ZeRO-2": Plan("", 0, {"data": 2}, "fp32", options={"shard_states": "data", "shard_gradients": True}),
    "bf16": Plan("", 0, {"tensor": 2}, "bf16"),
    "fp16_naive": Plan("", 0, {"data": 2}, "fp16_naive"),
    "SOAP": Plan("", 0, {"tensor": 2}, "fp16_naive", kind="SOAP"),
    "Muon": Plan("", 0, {"tensor": 2}, "bf16", kind="Muon"),
    "Adafactor": Plan("", 0, {"data": 2}, "fp16_naive", options={"shard_states": "data"}, kind="Adafactor"),
    "Adafactor on owner ranks": Plan("", 0, {"tensor": 2}, "bf16", kind="whole(Adafactor)"),
}
_expected: dict[str, list[dict[str, Any]]] = {}


def expected(case: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if case not in _expected:
        _expected[case] = Run(replace(CASES[case], directory=str(tmp_path_factory.mktemp("whole")))).finish()
    return _expected[case]


def assert_same_end(found: list[dict[str, Any]], wanted: list[dict[str, Any]], start: int) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one["start"] == start
        assert one["losses"] == other["losses"][start:]
        assert len(one["losses"]) == STEPS - start
        assert one["model"].keys() == other["model"].keys()
        assert all(torch.equal(tensor, other["model"][name]) for name, tensor in one["model"].items())


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_run_killed_in_training_resumes_bitwise_identically(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, case: str
) -> None:
    plan = replace(CASES[case], directory=str(tmp_path))
    Run(replace(plan, stop="training")).kill()
    resumed = Run(replace(plan, attempt=1)).finish()
    assert_same_end(resumed, expected(case, tmp_path_factory), SAVE_AT)


@pytest.mark.long
@pytest.mark.parametrize(("where", "start"), [("writing", SAVE_AT), ("renaming", SAVE_AT), ("removing", SAVE_AGAIN_AT)])
def test_run_killed_while_saving_resumes_bitwise_identically(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, where: str, start: int
) -> None:
    case = "fp16_naive"
    plan = replace(CASES[case], directory=str(tmp_path))
    Run(replace(plan, stop=where)).kill()
    # A random token stands between the number and the suffix of a directory being written.
    left = sorted(re.sub(r"\.\w+\.writing", ".writing", entry.name) for entry in plan.checkpoints.iterdir())
    assert (
        left
        == {
            "writing": ["meshstep-00000001", "meshstep-00000002.writing"],
            "renaming": ["meshstep-00000001", "meshstep-00000002.writing"],
            "removing": ["meshstep-00000001.removing", "meshstep-00000002"],
        }[where]
    )
    resumed = Run(replace(plan, attempt=1)).finish()
    assert_same_end(resumed, expected(case, tmp_path_factory), start)
    # The resumed run saves after step SAVE_AGAIN_AT, and this removes leftovers. If it starts there, it does not save.
    assert len(list(plan.checkpoints.iterdir())) == (2 if where == "removing" else 1)


@pytest.mark.default_cases(2)  # the mark `slow` below selects the cases
@pytest.mark.parametrize("deaths", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rank_killed_under_torchrun_restarts_and_resumes_bitwise_identically(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, deaths: int
) -> None:
    """The ranks are fresh interpreters, whose hash seeds differ at each start and on each rank."""
    case = "fp32, ZeRO-2"
    plan = replace(CASES[case], directory=str(tmp_path), stop="dying", second_save=False, deaths=deaths)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*torchrun, "--max-restarts", "2", killable.__file__, killable.encoded(plan)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked_python.run(*command, env=environment, timeout=TIMEOUT)  # forks the launcher only
    assert done.returncode == 0, done.stderr
    assert sorted(mark.name for mark in tmp_path.glob("died-*")) == ["died-0", "died-1"][:deaths]
    resumed = [torch.load(plan.result(rank)) for rank in range(RANKS)]
    assert_same_end(resumed, expected(case, tmp_path_factory), SAVE_AT)
