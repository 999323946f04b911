"""Run a function on several ranks: real processes that talk over gloo, kept warm between tests.

Starting four processes that import torch costs seconds; a test should cost milliseconds. So the workers are forked once
from a server that has torch loaded, and each `run` only joins them into a fresh default process group. After any
failure the pool is thrown away: a rank that is stuck in a collective can't be trusted with the next test.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

T = TypeVar("T")

# A peer that is gone must be an error soon; a busy 2-core machine must not be one.
GROUP_TIMEOUT = timedelta(seconds=60)
RUN_TIMEOUT = 180.0
# When a rank has failed the others may wait for it until the group timeout: they get a moment, no more.
MOMENT = 5.0

# All that each worker would else import for itself; some of it only on first use, by optimizers and checkpoints: seconds.
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "meshstep.parallel",
    "meshstep.amp",
    "meshstep.optim",
    "hypothesis.strategies",
    "pytest",
    "unittest.mock",
    # Of the examples; whoever has them.
    "sklearn.datasets",
    "torchvision.datasets",
    "tqdm",
]

# Of `World.run_each`: a call comes to an end well within RUN_TIMEOUT.
CASES_A_CALL = 25

# Each group that is left alive keeps three threads, which wake up a hundred times a second: torch caches those of device
# meshes for good. A few hundred of them in each worker would take most of the machine.
MOST_THREADS = 200


class WorldError(AssertionError):
    """At least one rank raised, died or hung; the message has every rank's traceback."""


def _worker(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # What was loaded before the fork lives as long as the worker: to look through it for garbage would also copy its pages.
    gc.freeze()
    _destroy_in_a_thread()
    joined: tuple[int, str] | None = None
    store: Any = None
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        rank, world_size, group, port, log_path, payload = pickle.loads(message)
        with open(log_path, "w") as log:
            faulthandler.dump_traceback_later(RUN_TIMEOUT - 10, file=log)
            try:
                if joined != (rank, group):
                    if dist.is_initialized():
                        dist.destroy_process_group()
                    if store is None:
                        store = dist.TCPStore("localhost", port)  # type: ignore[attr-defined]
                    of_group = dist.PrefixStore(group, store)  # type: ignore[attr-defined]
                    dist.init_process_group(
                        "gloo", store=of_group, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
                    )
                    joined = (rank, group)
                function, args = pickle.loads(payload)
                torch.manual_seed(0)
                reply: tuple[bool, Any] = (True, function(*args))
                data = pickle.dumps(reply)
            except BaseException:
                data = pickle.dumps((False, traceback.format_exc()))
            finally:
                faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(data)


def _destroy_in_a_thread() -> None:
    """To end a group takes up to 10 ms, until gloo's threads know that they are done; meanwhile nobody does anything."""
    import torch.distributed as dist

    ended: SimpleQueue[object] = SimpleQueue()

    def end() -> None:
        while True:
            groups = [ended.get()]
            time.sleep(0.05)  # until whoever destroyed it has let go of it: it ends where the last reference does
            while not ended.empty():
                groups.append(ended.get())
            while groups:
                groups.pop()

    threading.Thread(target=end, name="ends groups", daemon=True).start()
    destroy = dist.destroy_process_group

    def destroyed(group: dist.ProcessGroup | None = None) -> None:
        ended.put(group or dist.group.WORLD)
        destroy(group)

    setattr(dist, "destroy_process_group", destroyed)  # noqa: B010 (mypy)


def _each(function: Callable[..., T], cases: Sequence[tuple[Any, ...]]) -> list[T]:
    """On one rank: the function of each case, as if it were called alone."""
    import torch

    results = []
    for args in cases:
        torch.manual_seed(0)
        try:
            results.append(function(*args))
        except Exception as error:
            raise RuntimeError(f"in the case {', '.join(map(repr, args))}") from error
    return results


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0  # no Linux: no count


class World:
    """A pool of worker processes; `run(n, f, *args)` calls ``f(*args)`` on ranks 0..n-1 and returns their results.

    The function must be importable (module level), its arguments and result picklable. The default process group is
    initialised (gloo, CPU) before the call and re-used while the world size stays the same; groups that the function
    makes are its own to destroy (a registry does so when it is closed). The global seed is 0 on every rank.
    """

    def __init__(self) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._workers: list[tuple[Any, Connection]] = []
        self._dir = tempfile.mkdtemp(prefix="meshstep-world-")
        self._size: int | None = None
        self._groups = 0
        # In this process. One in a file is looked at a hundred times a second: most of what a group costs would be waiting.
        # Of IPv4 alone: of who comes to torch's own from ::ffff:127.0.0.1 a name server is asked, while all others wait.
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        self._store = TCPStore(
            "localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )

    def run(self, world_size: int, function: Callable[..., T], *args: Any) -> list[T]:
        """Results of ``function(*args)`` by rank; raises `WorldError` when a rank raises, dies or hangs."""
        while len(self._workers) < world_size:
            self._start_worker()
        if self._size != world_size:
            self._size = world_size
            self._groups += 1
        payload = pickle.dumps((function, args))
        ranks = range(world_size)
        for rank in ranks:
            message = (rank, world_size, f"group {self._groups}", self._store.port, self._log(rank), payload)
            self._workers[rank][1].send_bytes(pickle.dumps(message))
        replies = self._collect({self._workers[rank][1]: rank for rank in ranks})
        failures = [f"rank {rank}: {replies[rank][1]}" for rank in ranks if not replies[rank][0]]
        if failures:
            self.close()
            raise WorldError("\n".join(failures))
        if max(_threads(process.pid) for process, _ in self._workers) > MOST_THREADS:
            self.close()
        return [replies[rank][1] for rank in ranks]

    def run_each(self, function: Callable[..., T], cases: Sequence[tuple[int, tuple[Any, ...]]]) -> list[list[T]]:
        """For each ``(world_size, args)`` what ``run(world_size, function, *args)`` returns, in the order of the cases.

        Those of one world size run together, a few dozen a call: another size costs a new default group, and each call
        a round trip to all workers. The traceback of a rank that raises names the case.
        """
        results: dict[int, list[T]] = {}
        for size in sorted({size for size, _ in cases}):
            indices = [index for index, (of_case, _) in enumerate(cases) if of_case == size]
            for start in range(0, len(indices), CASES_A_CALL):
                chunk = indices[start : start + CASES_A_CALL]
                by_rank = self.run(size, _each, function, [cases[index][1] for index in chunk])
                results.update(zip(chunk, map(list, zip(*by_rank, strict=True)), strict=True))
        return [results[index] for index in range(len(cases))]

    def _collect(self, pending: dict[Any, int]) -> dict[int, tuple[bool, Any]]:
        replies: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + RUN_TIMEOUT
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                replies.update({rank: (False, f"hangs\n{self._stack(rank)}") for rank in pending.values()})
                break
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    replies[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    replies[rank] = (False, "died")
            if any(not ok for ok, _ in replies.values()):
                deadline = min(deadline, time.monotonic() + MOMENT)
        return replies

    def _log(self, rank: int) -> str:
        return os.path.join(self._dir, f"stack-{rank}")

    def _stack(self, rank: int) -> str:
        try:
            with open(self._log(rank)) as log:
                return log.read()
        except OSError:
            return ""

    def _start_worker(self) -> None:
        parent, child = self._context.Pipe()
        process = self._context.Process(target=_worker, args=(child,), daemon=True)
        process.start()
        child.close()
        self._workers.append((process, parent))

    def close(self) -> None:
        """End the workers; the next `run` starts new ones."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []
        self._size = None
