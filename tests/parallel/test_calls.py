"""Ranks that make different calls, or calls in different orders: their errors, and the reports of the calls of all
ranks.
"""

from __future__ import annotations

import gc
import json
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_python import Forked
from free_ports import free_port
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import (
    P,
    ProcessGroupRegistry,
    Topology,
    all_gather_to,
    copy_to,
    declare,
    gather_objects,
    reduce_from,
    vocab_parallel_cross_entropy,
)
from meshstep.parallel.mesh import call_tracker as answers_module
from meshstep.parallel.mesh import call_tracker as calls_module
from meshstep.parallel.mesh.call_tracker import track_call
from meshstep.parallel.mesh.process_group_collectives import all_gather_flat
from out_of_step import Run, set_timeout
from world import World

Call = Callable[[], object]
Ended = dict[str, "Future[Any]"]
SAME = "Every rank must make the same calls in the same order"


def error_of(call: Call) -> tuple[str, str, float]:
    began = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        return str(error), str(error.__cause__), time.monotonic() - began
    return "", "", time.monotonic() - began


def at_once(calls: Mapping[str, tuple[Any, ...]]) -> Ended:
    """Run functions with their arguments in parallel, because most of them wait for a timeout.

    Return the results by name.
    """
    with ThreadPoolExecutor(len(calls)) as threads:
        started = {name: threads.submit(*call) for name, call in calls.items()}
        wait(started.values())
    return started


@pytest.fixture(scope="module")
def waited(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Results by name of calls that time out. Each call has its own rank processes, so that all calls wait in parallel."""
    folder = tmp_path_factory.mktemp
    calls: dict[str, tuple[Any, ...]] = {
        **{name: (2, alone, name, folder("alone")) for name in ("step", "save_checkpoint", "clip_grad_by_norm")},
        "in other orders": (3, in_other_orders, folder("orders")),
        **{f"{name} of a model": (2, in_a_model, name, folder("model")) for name in IN_A_MODEL},
        "late": (2, late, folder("late")),
        "other collectives": (2, in_one_call_with_other_collectives),
        "again": (2, again),
        "in a thread": (2, while_a_checkpoint_is_written, folder("thread")),
    }
    worlds = {name: World() for name in calls}
    try:
        for name, (size, *_) in calls.items():
            worlds[name].run(size, os.getpid)  # start the processes of one world after the other
        return at_once({name: (worlds[name].run, *call) for name, call in calls.items()})
    finally:
        for own in worlds.values():
            own.close()


def in_a_model(name: str, path: Path) -> tuple[str, str, float]:
    """Call a collective of a model on rank 0, in forward or backward, while rank 1 runs other code.

    Return the result of `error_of`.
    """
    mark = path / "mark"
    with ProcessGroupRegistry(Topology(tensor=2), exclusive_groups=True) as registry:
        gather_objects(None, registry)
        set_timeout(registry.group("tensor"), 2.0)
        tensor = torch.full((2, 4), 3.0, requires_grad=True)
        calls: dict[str, Call] = {
            "reduce_from": lambda: reduce_from(tensor, registry, "tensor"),
            "copy_to": copy_to(tensor, registry, "tensor").sum().backward,
            "all_gather_to": lambda: all_gather_to(tensor, registry, "tensor", dim=0),
            "cross_entropy": lambda: vocab_parallel_cross_entropy(tensor, torch.tensor([0, 5]), registry),
        }
        found = error_of(calls[name] if registry.global_rank == 0 else partial(in_code_of_its_own, mark))
    mark.touch()
    return found


IN_A_MODEL = ("reduce_from", "copy_to", "all_gather_to", "cross_entropy")


def in_code_of_its_own(mark: Path) -> None:
    """Wait until another rank has created the file ``mark``."""
    while not mark.exists():
        time.sleep(0.1)


def alone(name: str, path: Path) -> tuple[str, str, float]:
    run, mark = Run(2, 2.0), path / "mark"
    with run.registry:
        calls: dict[str, Call] = {
            "step": run.optimizer.step,
            "save_checkpoint": partial(run.save, path / "checkpoints"),
            "clip_grad_by_norm": partial(run.optimizer.clip_grad_by_norm, 1.0),
        }
        run.optimizer.zero_grad()
        found = error_of(calls[name] if run.rank == 0 else partial(in_code_of_its_own, mark))
    mark.touch()
    return found


@pytest.mark.default_cases(99)  # all cases: unlike other tests of this file, these start no process
@pytest.mark.parametrize(("name", "number"), [("step", 3), ("save_checkpoint", 1), ("clip_grad_by_norm", 1)])
def test_timeout_error_names_the_call_and_the_lines_that_other_ranks_execute(
    name: str, number: str, waited: Ended
) -> None:
    (error, cause, seconds), (other, *_) = waited[name].result()
    assert error.startswith(
        f"rank 0 got no reply in call {number} of {name}; rank 1: in no call of meshstep since call 2 of step returned, "
        "but at test_calls.py:"
    )
    assert f" in in_code_of_its_own. {SAME}, and no rank may stop before the others. torch reports: " in error
    assert cause
    assert cause in error
    assert seconds >= 2.0, "raised before the timeout"
    assert other == ""


@pytest.mark.default_cases(99)  # all cases: unlike other tests of this file, these start no process
@pytest.mark.parametrize("name", IN_A_MODEL)
def test_timeout_error_of_model_collective_shows_code_that_other_rank_executes(name: str, waited: Ended) -> None:
    (error, cause, _), (other, *_) = waited[f"{name} of a model"].result()
    assert error.startswith(f"rank 0 got no reply in call 1 of {name}; rank 1: in no call of meshstep since call ")
    assert f" in in_code_of_its_own. {SAME}, and no rank may stop before the others. torch reports: {cause}" in error
    assert other == ""


def in_other_orders(path: Path) -> tuple[str, str, float]:
    run = Run(3, 2.0)
    run.optimizer.zero_grad()
    calls: list[Call] = [run.optimizer.step, partial(run.save, path)]
    with run.registry:
        return error_of(calls[run.rank > 0])


def test_timeout_error_names_calls_of_all_ranks_if_they_differ(waited: Ended) -> None:
    calls = ["call 3 of step", *["call 1 of save_checkpoint"] * 2]
    for rank, (error, *_) in enumerate(waited["in other orders"].result()):
        assert error.startswith(f"rank {rank} got no reply in {calls[rank]}; rank")
        assert f". {SAME}, and no rank may stop before the others. torch reports: " in error
        for other in {0, 1, 2} - {rank}:
            # On a busy machine another rank may already have given up; then it reports its error instead.
            call = re.escape(calls[other])
            said = rf"{other}: in ({call}|no call of meshstep since {call} raised RuntimeError, but at)"
            assert re.search(said, error.replace("ranks 1-2: in call 1 of save", f"rank {other}: in call 1 of save"))


def test_save_checkpoint_on_one_rank_and_load_on_another_raises_before_timeout(world: World, tmp_path: Path) -> None:
    for error, _, seconds in world.run(2, saving_and_loading, tmp_path):
        assert error == (f"ranks are in different calls: rank 0 in save_checkpoint, rank 1 in load_checkpoint. {SAME}")
        assert seconds < 60.0, "waited for the timeout"


def saving_and_loading(path: Path) -> tuple[str, str, float]:
    run = Run(2, 60.0)
    with run.registry:
        return error_of(partial(run.save if run.rank == 0 else run.load, path))


def late(path: Path) -> tuple[str, str, float]:
    run, mark = Run(2, 2.0), path / "mark"
    run.optimizer.zero_grad()
    with run.registry:
        if run.rank == 1:
            in_code_of_its_own(mark)
        found = error_of(run.optimizer.step)
        mark.touch()
        if run.rank == 0:
            in_code_of_its_own(path / "end")  # a rank replies only while it has its process groups
        (path / "end").touch()
        return found


def test_error_of_late_rank_reports_the_error_of_the_other_rank(waited: Ended) -> None:
    (first, *_), (second, *_) = waited["late"].result()
    assert "rank 1: in no call of meshstep since call 2 of step returned, but at test_calls.py:" in first
    assert "rank 0: in no call of meshstep since call 3 of step raised RuntimeError, but at" in second
    assert "All ranks made the same call" in second


def in_one_call_with_other_collectives() -> tuple[str, str, float]:
    registry = ProcessGroupRegistry(Topology(data=2), exclusive_groups=True)
    group = registry.group("data")

    def meet() -> None:
        with track_call("step", registry):
            if registry.global_rank:
                dist.all_reduce(torch.ones(1), group=group)
            else:
                all_gather_flat(torch.ones(2), torch.ones(1), group)

    with registry:
        gather_objects(None, registry)
        set_timeout(group, 2.0)
        return error_of(meet)


def test_timeout_error_does_not_blame_call_order_if_calls_are_equal(waited: Ended) -> None:
    for rank, (error, cause, _) in enumerate(waited["other collectives"].result()):
        assert re.fullmatch(
            rf"rank {rank} got no reply in call 1 of step; rank {1 - rank}: "
            # The first rank to get a reply may have left the call before the other rank requests one.
            r"in (call 1 of step|no call of meshstep since call 1 of step raised RuntimeError, but at .*)\. "
            "All ranks made the same call, so a connection was lost, or a rank took longer than the timeout. "
            f"torch reports: {re.escape(cause)}",
            error,
        )


def again() -> list[str]:
    run = Run(2, 2.0)
    run.optimizer.zero_grad()
    with run.registry:
        if run.rank == 0:
            return [error_of(run.optimizer.step)[0] for _ in range(2)]
        return [error_of(partial(gather_objects, None, run.registry))[0] for _ in range(2)]


def test_both_errors_of_two_failed_calls_show_calls_of_other_ranks(waited: Ended) -> None:
    for rank, (first, second) in enumerate(waited["again"].result()):
        name = "gather_objects" if rank else "step"
        for error, number in ((first, 1), (second, 2)):
            which = {"step": {1: 3, 2: 4}, "gather_objects": {1: 1, 2: 2}}[name][number]
            assert error.startswith(f"rank {rank} got no reply in call {which} of {name}; rank {1 - rank}: in ")


def with_an_error_of_its_own() -> str:
    registry = ProcessGroupRegistry(Topology(data=2), exclusive_groups=True)
    with registry, pytest.raises(RuntimeError) as caught, track_call("step", registry):
        raise RuntimeError("too large")
    return str(caught.value)


def test_track_call_leaves_non_distributed_errors_unchanged(world: World) -> None:
    assert world.run(2, with_an_error_of_its_own) == ["too large"] * 2


def while_a_checkpoint_is_written(path: Path) -> tuple[str, str, float]:
    run, mark = Run(2, 2.0), path / "mark"

    def write() -> None:
        with track_call("writing", run.registry):
            in_code_of_its_own(mark)

    thread = threading.Thread(target=write)
    run.optimizer.zero_grad()
    with run.registry:
        if run.rank:
            thread.start()
            in_code_of_its_own(mark)
            thread.join()
            return "", "", 0.0
        found = error_of(run.optimizer.step)
        mark.touch()
        return found


def test_timeout_error_names_calls_in_threads(waited: Ended) -> None:
    (error, *_), _ = waited["in a thread"].result()
    assert "since call 2 of step returned, but at test_calls.py:" in error
    assert " in in_code_of_its_own, and in a thread in call 1 of writing. " in error


# Activity report of one process ---------------------------------------------------------------------------------------


class Calling:
    """An object with tracked calls, on rank 0 of a registry that has no second process."""

    class Registry:
        topology, global_rank = Topology(data=2), 0

    def __init__(self) -> None:
        self.registry = self.Registry()

    def backward(self, then: Call) -> object:
        with track_call("backward", self.registry):
            return then()

    def step(self, then: Call) -> object:
        with track_call("step", self.registry):
            return then()

    def window(self, then: Call) -> object:
        with track_call("window", self.registry):
            return then()


@pytest.fixture
def calling(monkeypatch: pytest.MonkeyPatch) -> Calling:
    """A `Calling` in a process that has made no calls."""
    monkeypatch.setattr(calls_module, "_answering", None)
    monkeypatch.setattr(calls_module.Answering, "__init__", lambda *_: None)
    calls_module.answer_questions(None)  # type: ignore[arg-type]
    return Calling()


def said() -> str:
    """Return the activity report, made in another thread as for a request of another rank."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(calls_module._describe_activity).result()


def raising(error: BaseException) -> Call:
    def call() -> None:
        raise error

    return call


@pytest.mark.default_cases(99)  # all cases: unlike other tests of this file, these start no process
@pytest.mark.parametrize("outer", ["window", "backward"])
@pytest.mark.parametrize("inner", ["step", "window"])
def test_nested_call_is_reported_as_its_outer_call(calling: Calling, outer: str, inner: str) -> None:
    """Examples are a backward in a window, and an optimizer step in a backward hook."""
    if outer == inner:
        outer = "step"
    first, second = getattr(calling, outer), getattr(calling, inner)
    assert first(lambda: second(said)) == f"in call 1 of {outer}"
    assert f"since call 1 of {outer} returned, but at test_calls.py:" in said()
    with pytest.raises(RuntimeError, match=rf"^rank 0 got no reply in call 2 of {outer}; the calls of other ranks are"):
        first(lambda: second(raising(dist.DistError("timed out"))))
    assert f"since call 2 of {outer} raised RuntimeError, but at" in said()


@pytest.mark.default_cases(99)  # all cases: unlike other tests of this file, these start no process
@pytest.mark.parametrize("error", [ValueError("of its own"), KeyboardInterrupt(), SystemExit(1)])
@pytest.mark.parametrize("name", ["step", "window"])
def test_activity_report_contains_the_outcome_of_the_last_call(
    calling: Calling, name: str, error: BaseException
) -> None:
    with pytest.raises(type(error)) as caught:
        getattr(calling, name)(raising(error))
    assert caught.value is error
    assert error.__cause__ is error.__context__ is None
    assert f"since call 1 of {name} raised {type(error).__name__}, but at" in said()
    calling.step(said)
    assert " since call " in said()
    assert " of step returned, but at" in said()


def test_activity_report_ignores_finished_calls_of_other_threads(calling: Calling) -> None:
    calling.step(said)
    thread = threading.Thread(target=calling.window, args=(said,))
    thread.start()
    thread.join()
    assert "since call 1 of step returned, but at" in said()


def test_call_number_counts_calls_per_thread(calling: Calling) -> None:
    """For example, several optimizers may step in several threads."""
    calling.step(said)
    for before in (3, 0):

        def step(before: int = before) -> str:
            for _ in range(before):
                calling.step(lambda: None)
            return str(calling.step(said))

        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(step).result()
        assert found.endswith(f", and in a thread in call {before + 1} of step")
    assert calling.step(said) == "in call 2 of step"


def test_call_records_of_finished_threads_are_removed(calling: Calling) -> None:
    for _ in range(3):
        thread = threading.Thread(target=calling.step, args=(lambda: None,))
        thread.start()
        thread.join()
    del thread
    gc.collect()
    assert {calls.thread for ref in calls_module._by_thread.valuerefs() if (calls := ref()) is not None} == {
        threading.get_ident()
    }


def test_timeout_error_omits_native_stack_trace_of_torch(calling: Calling) -> None:
    torchs = dist.DistError(
        "wait timeout after 2000ms\nException raised from recv at TCPStore.cpp:1 (most recent call first):\n"
        "frame #0: c10::Error::Error() + 0xb0 (0x7f in libc10.so)\nframe #1: <unknown function>\n"
    )
    with pytest.raises(RuntimeError) as caught:
        calling.step(raising(torchs))
    assert str(caught.value).endswith("torch reports: wait timeout after 2000ms")
    assert caught.value.__cause__ is torchs
    assert str(torchs) == "wait timeout after 2000ms"


class EndingStore:
    """A store whose server ends after the reply of one rank has arrived."""

    def add(self, key: str, amount: int) -> int:
        return 1

    def check(self, keys: list[str]) -> bool:
        if keys == ["meshstep/calls/answer/1"]:
            return True
        raise dist.DistNetworkError("failed to recv, got 0 bytes")

    def get(self, key: str) -> str:
        return json.dumps((1, "in call 1 of save_checkpoint"))


def test_timeout_error_lists_calls_of_ranks_that_replied_before_store_closed(
    calling: Calling, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering: Any = object.__new__(answers_module.Answering)
    answering.world_size, answering._store, answering.is_of_now = 3, EndingStore(), lambda: True
    answering._server, answering.stop = SimpleNamespace(check=lambda: None), lambda: None
    monkeypatch.setattr(answers_module, "_answering", answering)
    monkeypatch.setattr(Calling.Registry, "topology", Topology(data=3))
    with pytest.raises(RuntimeError) as caught:
        calling.step(raising(dist.DistError("timed out")))
    assert str(caught.value) == (
        "rank 0 got no reply in call 1 of step; rank 1: in call 1 of save_checkpoint; rank 2: no response (the process "
        f"has exited or is stopped). {SAME}, and no rank may stop before the others. torch reports: timed out"
    )


def test_tracked_call_may_end_in_another_thread(calling: Calling) -> None:
    call = track_call("window", calling.registry)
    call.__enter__()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(call.__exit__, None, None, None).result()
    assert "since call 1 of window returned, but at" in said()


def test_activity_report_keeps_no_reference_to_inspected_frames(calling: Calling) -> None:
    class Held:
        pass

    def looked_at() -> weakref.ref[Held]:
        held = Held()
        calling.step(said)
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        assert looked_at()() is None
    finally:
        gc.enable()


class Own(ParallelOptimizer[Any]):
    """A user's optimizer, whose step raises the error of a failed gloo collective."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Application timeout caused pair closure")


def with_an_own_step() -> str:
    with ProcessGroupRegistry(Topology(data=2), exclusive_groups=True) as registry:
        weight = torch.nn.Parameter(torch.ones(2))
        declare(torch.nn.ParameterList([weight]), {"*": P()})
        optimizer = Own(torch.optim.SGD([weight], lr=0.1), registry)
        found = error_of(optimizer.step)[0]
        gather_objects(None, registry)  # a rank that ends its process group before the other's request would not reply
        return found


def test_error_without_reply_names_a_step_that_a_subclass_overrides(world: World) -> None:
    for rank, error in enumerate(world.run(2, with_an_own_step)):
        assert re.match(rf"rank {rank} got no reply in call \d+ of step; ", error)


# Processes that end, or are stopped ----------------------------------------------------------------------------------


PROGRAM = Path(__file__).parent.parent / "harness" / "out_of_step.py"


def printed(*fates: str) -> list[str]:
    return [out for out, _ in printed_and_logged(*fates)]


def printed_and_logged(*fates: str) -> list[tuple[str, str]]:
    """Start one process of out_of_step.py per item of ``fates``, and return stdout and stderr of those with "step".

    An item says what the rank does after two training steps: "step", "evaluate" or the name of a signal. Rank 0 hosts the
    store.
    """
    port = free_port()
    processes: list[Forked] = []
    for rank in range(len(fates)):
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": len(fates),
            "MASTER_PORT": port,
            "MASTER_ADDR": "localhost",
        }
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
        processes.append(Forked(str(PROGRAM), *fates, env=environment))
    try:
        stepping = [process for process, fate in zip(processes, fates, strict=True) if fate == "step"]
        return [process.communicate(timeout=120) for process in stepping]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def ended() -> Ended:
    """Outputs of the ranks that step, for three cases in which another process is killed or stopped."""
    return at_once(
        {
            "killed": (printed, "step", "evaluate", "SIGKILL"),
            "stopped": (printed, "SIGSTOP", "step", "step"),
            "server killed": (printed_and_logged, "SIGKILL", "step", "step"),
        }
    )


@pytest.mark.long
def test_timeout_error_reports_no_response_of_killed_process(ended: Ended) -> None:
    (error,) = ended["killed"].result()
    assert error.startswith(
        "rank 0 got no reply in call 3 of step; rank 1: in no call of meshstep since call 2 of step "
    )
    assert " in evaluate; rank 2: no response (the process has exited or is stopped). " in error


@pytest.mark.long
def test_timeout_error_is_raised_if_the_store_process_is_stopped(ended: Ended) -> None:
    for rank, error in enumerate(ended["stopped"].result(), 1):
        assert error.startswith(
            f"rank {rank} got no reply in call 3 of step; the calls of other ranks are unknown, because the job's store "
            "does not respond. Look for an earlier error of another rank. torch reports: "
        )


@pytest.mark.long
def test_ranks_log_no_stack_trace_after_the_store_server_dies(ended: Ended) -> None:
    for rank, (error, logged) in enumerate(ended["server killed"].result(), 1):
        assert error.startswith(f"rank {rank} got no reply in call 3 of step; the calls of other ranks are unknown, ")
        assert "frame #" not in logged
        assert "recvValue failed" not in logged


def test_activity_request_to_rank_that_never_responds_ends_after_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "RESPONSE_TIMEOUT", 0.2)
    monkeypatch.setattr(calls_module, "POLL_INTERVAL", 0.05)
    answering = object.__new__(calls_module.Answering)
    answering.world_size, answering._store = 3, dist.HashStore()  # type: ignore[attr-defined]
    answering._server = SimpleNamespace(check=lambda: None)  # type: ignore[assignment]
    answering._store.set(f"{calls_module._ANSWER}/2", json.dumps((1, "in a test")))
    found: dict[int, str] = {}
    thread = threading.Thread(target=answering.ask, args=(0, found), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert found == {2: "in a test"}
