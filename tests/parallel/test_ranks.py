"""A pool of ranks: results, errors, and the processes and files that it ends."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked_python
import pytest
import torch
import torch.distributed as dist
from meshstep.parallel.ranks import pool as pool_of_ranks
from meshstep.testing import RankPool, RanksError, run_ranks
from name_servers import without_names
from torch import Tensor

PATIENCE = 60.0


def scaled_sum(scale: float) -> tuple[int, float]:
    value = torch.tensor(scale * dist.get_rank())
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool() as ranks:
        yield ranks


# Results --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
def test_pool_returns_results_in_rank_order(pool: RankPool, size: int) -> None:
    total = 2.0 * sum(range(size))
    assert pool.run(scaled_sum, size, 2.0) == [(rank, total) for rank in range(size)]


@dataclass
class Payload:
    weight: Tensor
    name: str


def changed(payload: Payload, *, by: float) -> Payload:
    payload.weight += by * (dist.get_rank() + 1)
    return payload


def test_pool_copies_arguments_and_results(pool: RankPool) -> None:
    given = Payload(torch.zeros(3), "weight")
    found = pool.run(functools.partial(changed, by=2.0), 2, given)
    assert [payload.weight.tolist() for payload in found] == [[2.0] * 3, [4.0] * 3]
    assert [payload.name for payload in found] == ["weight"] * 2
    assert given.weight.tolist() == [0.0] * 3


def own_process() -> tuple[int, int, float]:
    return os.getpid(), torch.get_num_threads(), torch.rand(()).item()


def test_pool_reuses_processes_and_seeds_ranks_equally(pool: RankPool) -> None:
    first, second = pool.run(own_process, 2), pool.run(own_process, 2)
    assert first == second
    assert len({pid for pid, _, _ in first} | {os.getpid()}) == 3
    assert {threads for _, threads, _ in first} == {1}
    assert len({drawn for _, _, drawn in first}) == 1


def sum_of_shards(other_groups: int) -> float:
    """Sum a DTensor on a slice of a mesh. The names of the mesh's groups depend on how many groups were made before."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    groups = [dist.new_group([0, 1, 2, 3]) for _ in range(other_groups)]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    total: Any = DTensor.from_local(torch.ones(3), mesh, [Shard(0)]).sum()
    assert len(groups) == other_groups
    return float(total.full_tensor())


def test_device_meshes_of_earlier_process_groups_are_not_reused(pool: RankPool) -> None:
    """torch caches results of DTensor operations with their meshes, whose groups end with the default group."""
    assert pool.run(sum_of_shards, 4, 5) == [6.0] * 4
    pool.run(dist.get_rank, 3)
    assert pool.run(sum_of_shards, 4, 0) == [6.0] * 4


def test_run_ranks_reuses_one_pool_per_process() -> None:
    assert run_ranks(scaled_sum, 2, 3.0) == [(0, 3.0), (1, 3.0)]
    assert run_ranks(own_process, 2) == run_ranks(own_process, 2)


@pytest.mark.long
def test_pool_on_macos_spawns_processes_and_returns_results(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        context.setattr(sys, "platform", "darwin")
        pool = RankPool()
    with pool:
        assert pool._context.get_start_method() == "spawn"
        assert pool.run(scaled_sum, 2, 2.0) == [(0, 2.0), (1, 2.0)]


# Errors ---------------------------------------------------------------------------------------------------------------


def fail_on(*ranks: int) -> None:
    if dist.get_rank() in ranks:
        raise ValueError("planted")
    if not ranks:
        raise ValueError(f"planted on {dist.get_rank()}")


def test_ranks_error_shows_equal_errors_once_with_their_ranks() -> None:
    with RankPool() as pool:
        with pytest.raises(RanksError, match=r"3 of 4 ranks failed in test_ranks\.fail_on\n\nranks 1-3: ") as error:
            pool.run(fail_on, 4, 1, 2, 3)
        assert str(error.value).count("planted") == 2, "expected once in the quoted code and once in the error"
        assert [*error.value.failures] == [1, 2, 3]
        with pytest.raises(RanksError, match=r"(?s)rank 0: .*planted on 0.*rank 1: .*planted on 1"):
            pool.run(fail_on, 2)
        assert len(pool.run(scaled_sum, 2, 1.0)) == 2, "the pool does not work after an error"
        again = pickle.loads(pickle.dumps(error.value))
        assert (str(again), again.failures) == (str(error.value), error.value.failures)


def test_pickled_ranks_error_keeps_its_message_about_missing_calls() -> None:
    error = RanksError("module.check", 3, {1: "finished the test without this call"}, called=False)
    assert str(error).startswith("1 of 3 ranks did not make the call run(module.check, ...)\n\nrank 1: finished ")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def wait_for_rank_2() -> None:
    dist.all_reduce(torch.ones(1))


def sleep_on(*ranks: int) -> None:
    if dist.get_rank() in ranks:
        doze()


def doze() -> None:
    time.sleep(600)


@pytest.mark.long
def test_timeout_error_shows_the_stack_of_each_late_rank() -> None:
    with RankPool() as pool:
        begin = time.monotonic()
        with pytest.raises(RanksError) as late:
            pool.run(sleep_on, 3, 0, 2, timeout=3.0)
        assert time.monotonic() - begin < PATIENCE
    assert [*late.value.failures] == [0, 2]
    for text in late.value.failures.values():
        assert "did not finish within 3 seconds" in text
        stood = text.partition("its stack was\n")[2].splitlines()
        assert "in doze" in stood[0]
        assert "in sleep_on" in stood[-1], "the stack contains frames of the pool"


def fail_while_others_wait() -> None:
    if dist.get_rank() == 1:
        raise ValueError("planted")
    wait_for_rank_2()


@pytest.mark.long
def test_pool_stops_waiting_for_ranks_blocked_by_a_failed_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_of_ranks, "GRACE", 2.0)
    begin = time.monotonic()
    with RankPool() as pool, pytest.raises(RanksError) as error:
        pool.run(fail_while_others_wait, 3)
    assert time.monotonic() - begin < PATIENCE
    assert "planted" in error.value.failures[1]
    for rank in (0, 2):
        assert "in wait_for_rank_2" in error.value.failures[rank]


def die(how: str) -> None:
    if dist.get_rank() == 1:
        os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("how", "told"), [("exit", "with exit code 3"), ("kill", "by signal SIGKILL")])
def test_error_contains_exit_code_or_signal_of_a_dead_rank_process(how: str, told: str) -> None:
    with RankPool() as pool:
        with pytest.raises(RanksError, match=f"rank 1: the process died {told}"):
            pool.run(die, 2, how)
        assert len(pool.run(scaled_sum, 2, 1.0)) == 2


def returns_a_lock() -> object:
    import threading

    return threading.Lock()


class Local:
    @staticmethod
    def of_a_class() -> int:
        return dist.get_world_size()


def test_pool_rejects_unpicklable_call_or_invalid_size_and_keeps_processes(pool: RankPool) -> None:
    def within() -> None:
        raise NotImplementedError

    before = pool.run(own_process, 2)
    for function, args, told in (
        (
            lambda: 0,
            (),
            r"is a lambda, but other processes find functions by their names\. Define it with def at the top",
        ),
        (
            within,
            (),
            r"is defined within test_pool_rejects_unpicklable_call.*pass the objects that it uses as arguments",
        ),
        (functools.partial(lambda x: x, 1), (), "is a lambda"),
        (scaled_sum, (lambda: 0,), r"the arguments of test_ranks\.scaled_sum can't be sent to other processes"),
    ):
        with pytest.raises(TypeError, match=told):
            pool.run(function, 2, *args)
    for size in (0, -1, True, 2.0):
        with pytest.raises(ValueError, match=f"{size!r} is not a number of ranks"):
            pool.run(scaled_sum, size, 1.0)  # type: ignore[arg-type]
    assert pool.run(own_process, 2) == before, "the pool has started other processes"
    assert pool.run(Local.of_a_class, 2) == [2, 2]


def test_unpicklable_result_raises_ranks_error() -> None:
    with RankPool() as pool, pytest.raises(RanksError, match=r"returned lock, which can't be sent back"):
        pool.run(returns_a_lock, 1)


# Functions of scripts and of test files -------------------------------------------------------------------------------

SCRIPT = """\
import torch
import torch.distributed as dist
from meshstep.testing import run_ranks


def total(scale):
    value = torch.tensor(scale * (dist.get_rank() + 1))
    dist.all_reduce(value)
    return value.item()


if __name__ == "__main__":
    print(run_ranks(total, 3, 2.0))
"""


def run_python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def files() -> Iterator[Path]:
    """A folder with a short path, because the path of a socket in it is limited to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        (Path(folder) / "t").mkdir()
        yield Path(folder)


def with_files_in(folder: Path) -> dict[str, str]:
    return {"TMPDIR": str(folder / "t"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}


@pytest.mark.long
@pytest.mark.parametrize("how", [["script.py"], ["-m", "script"]], ids=["by path", "by name"])
def test_pool_runs_functions_of_scripts_and_leaves_no_temporary_files(
    tmp_path: Path, files: Path, how: list[str]
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_python("-W", "error", *how, cwd=tmp_path, **with_files_in(files))
    assert (done.stdout, without_names(done.stderr)) == ("[12.0, 12.0, 12.0]\n", "")
    assert [*(files / "t").iterdir()] == []


def test_function_of_an_interactive_session_is_rejected(tmp_path: Path) -> None:
    done = forked_python.run("-c", SCRIPT, cwd=tmp_path)
    assert "total is defined in an interactive session, a notebook or by python -c" in done.stderr


def test_script_without_main_guard_gets_error_that_asks_for_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace('if __name__ == "__main__":\n    ', ""))
    done = forked_python.run("script.py", cwd=tmp_path)
    assert 'a script that uses ranks needs if __name__ == "__main__":' in done.stderr


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_functions_of_test_files_run_in_import_modes_prepend_and_importlib(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    test = SCRIPT.partition("if __name__")[0] + "def test(ranks):\n    assert ranks.run(total, 2, 1.0) == [3.0, 3.0]\n"
    (folder / "test_of_a_user.py").write_text(test)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = ("-m", "pytest", "-p", "meshstep.pytest_plugin", f"--import-mode={mode}", "-W", "error")
    done = forked_python.run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


# Ending the processes -------------------------------------------------------------------------------------------------

ENDLESS = """\
import os, time
from meshstep.testing import RankPool


def sleep(folder):
    open(f"{folder}/{os.getpid()}", "w").close()
    time.sleep(600)


if __name__ == "__main__":
    RankPool().run(sleep, 3, "pids")
"""


def is_running(pid: int) -> bool:
    with suppress(OSError):
        os.kill(pid, 0)
        # An ended process stays a zombie until its parent reads its exit status; in a container that may never happen.
        return "Z" not in subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return False


def until(condition: Callable[[], Any]) -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < PATIENCE
        time.sleep(0.05)


def test_ranks_exit_if_the_main_process_is_killed_during_a_call(tmp_path: Path, files: Path) -> None:
    (tmp_path / "script.py").write_text(ENDLESS)
    (tmp_path / "pids").mkdir()
    environment = {**os.environ, **with_files_in(files)}
    process = forked_python.Forked("script.py", cwd=tmp_path, env=environment)
    try:
        until(lambda: len([*(tmp_path / "pids").iterdir()]) == 3)
        workers = [int(path.name) for path in (tmp_path / "pids").iterdir()]
        assert all(map(is_running, workers))
    finally:
        os.kill(process.pid, signal.SIGKILL)  # kills only this process, not its group
    process.wait()
    until(lambda: not any(map(is_running, workers)))
    until(lambda: [*(files / "t").iterdir()] == [])


def test_closed_pool_ends_its_processes_and_can_start_new_ones() -> None:
    pool = RankPool()
    first = [pid for pid, _, _ in pool.run(own_process, 2)]
    pool.close()
    pool.close()
    assert not any(map(is_running, first))
    with pool:
        second = [pid for pid, _, _ in pool.run(own_process, 2)]
    assert not {*first} & {*second}
    assert not any(map(is_running, second))
