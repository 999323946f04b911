"""A pool of worker processes that are ranks: they talk over gloo and stay warm between calls.

    def norm_of_sum(scale: float) -> float:
        value = torch.tensor(scale * dist.get_rank())
        dist.all_reduce(value)
        return value.item()

    if __name__ == "__main__":
        with RankPool() as ranks:
            print(ranks.run(norm_of_sum, 4, 2.0))      # [12.0, 12.0, 12.0, 12.0]

To start a process that imports torch takes seconds, a call of the pool milliseconds. On Linux workers are forked from a
server that has torch loaded (``forkserver``), elsewhere each is started on its own (``spawn``). They meet in a store of the
pool, whose port the system chooses; nothing is written to disk. After any failure the workers are replaced: a rank that is
stuck in a collective can't be trusted with the next call.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.util import get_temp_dir
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from .interface import TIMEOUT, Ranks, RanksError, check_size, decoded, encoded, name_of, result_of

# Worker ---------------------------------------------------------------------------------------------------------------

# What a worker process of a pool does: join the ranks that it is told to, call a function, send back what it returns.
#
# A worker ends with the process that started it, however that one ends, also in the middle of a call.


class Task(NamedTuple):
    """A call, for one worker.

    Args:
        group: Name of the default process group; workers stay in it while the name is the same.
        port: Of the store on this machine in which its members meet.
        group_timeout: Of its collectives, in seconds.
        call: As `encoded` makes it.
    """

    rank: int
    world_size: int
    group: str
    port: int
    group_timeout: float
    call: bytes


class Reply(NamedTuple):
    """Of one rank: what it returned, pickled, or why it failed."""

    succeeded: bool
    content: Any


def serve(tasks: Connection, stack: Connection, initializer: Callable[[], object] | None, folder: str | None) -> None:
    """Do tasks until there is nobody to give one.

    Args:
        tasks: Brings each `Task`, pickled, and takes its `Reply`.
        stack: Takes where the process stands, whenever it gets the signal ``SIGUSR1``, also while nothing of Python runs.
        initializer: Called once, before the first task.
        folder: Where the parent has temporary files, which it can't remove if it is killed.
    """
    _end_with_parent(folder)
    faulthandler.register(signal.SIGUSR1, file=stack.fileno(), all_threads=True)
    torch.set_num_threads(1)
    _stay_on_this_machine()
    gc.freeze()  # what was loaded before the fork lives as long as the worker; to look through it would copy its pages
    membership = _Membership()
    while True:
        try:
            task = Task(*pickle.loads(tasks.recv_bytes()))
        except EOFError:
            return
        try:
            if initializer is not None:
                initializer()
                initializer = None
            membership.join(task)
            reply = Reply(True, _called(task.call))
        except BaseException:
            reply = Reply(False, traceback.format_exc())
        tasks.send_bytes(pickle.dumps(tuple(reply)))


def _called(call: bytes) -> bytes:
    """Named as where a rank stands is told from it: what is above it is the pool's own."""
    function, args = decoded(call)
    torch.manual_seed(0)
    return result_of(function(*args), function)


class _Membership:
    """The default process group that this worker is in."""

    def __init__(self) -> None:
        self._joined: tuple[int, str] | None = None
        self._store: Any = None

    def join(self, task: Task) -> None:
        if self._joined == (task.rank, task.group):
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        self._joined = None
        if self._store is None:
            self._store = dist.TCPStore("localhost", task.port)  # type: ignore[attr-defined]
        store = dist.PrefixStore(task.group, self._store)  # type: ignore[attr-defined]
        timeout = timedelta(seconds=task.group_timeout)
        dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.world_size, timeout=timeout)
        self._joined = (task.rank, task.group)


def _end_with_parent(folder: str | None) -> None:
    parent = multiprocessing.parent_process()

    def end() -> None:
        if parent is not None:
            wait([parent.sentinel])
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)

    threading.Thread(target=end, name="ends with its parent", daemon=True).start()


def _stay_on_this_machine() -> None:
    """gloo would look up the host's name, which leads nowhere on some laptops and in some containers."""
    with suppress(OSError):
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        if loopback in (name for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


# Pool -----------------------------------------------------------------------------------------------------------------

T = TypeVar("T")

GRACE = 5.0  # seconds for the others after one has failed: they may wait for it until their group's timeout

# What each worker would else import for itself, some of it only when an optimizer is made.
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "meshstep.parallel.ranks.pool", "meshstep.optim")

# A group that is left alive keeps three threads, which wake up a hundred times a second: torch caches those of device
# meshes for good. A few hundred of them in each worker would take most of the machine.
MOST_THREADS = 200


class _Worker(NamedTuple):
    process: Any
    tasks: Connection
    stack: Connection


class RankPool(Ranks):
    """Ranks in worker processes, over gloo on this machine's CPU; torch computes with one thread on each.

    Workers are started when they are first needed, with the environment and the folder of that moment. The default group
    stays while world size and timeout do.

    Args:
        timeout: Seconds that a call may take. A third of it is the timeout of the default group's collectives.
        preload: Modules that are worth loading once, before workers are forked.
        initializer: Called once in each worker, before its first call.
    """

    def __init__(
        self,
        *,
        timeout: float = TIMEOUT,
        preload: Sequence[str] = (),
        initializer: Callable[[], object] | None = None,
    ) -> None:
        self.timeout = timeout
        self._context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        self._preload = [
            *PRELOAD,
            *preload,
            *(name for name in ("pytest", "hypothesis.strategies") if name in sys.modules),
        ]
        self._initializer = initializer
        self._workers: list[_Worker] = []
        self._group: tuple[int, float] | None = None
        self._groups = 0
        self._store: TCPStore | None = None

    def run(self, function: Callable[..., T], world_size: int, *args: Any, timeout: float | None = None) -> list[T]:
        """As `Ranks.run`. After an error the workers are replaced."""
        check_size(world_size)
        call = encoded(function, args)
        timeout = self.timeout if timeout is None else timeout
        try:
            failures, replies = self._exchange(call, world_size, timeout)
        except BaseException:  # Ctrl-C as well: nobody knows what the workers are doing
            self.close()
            raise
        if failures:
            self.close()
            raise RanksError(name_of(function), world_size, failures)
        if max(_threads(worker.process.pid) for worker in self._workers) > MOST_THREADS:
            self.close()
        return [pickle.loads(replies[rank]) for rank in range(world_size)]

    def close(self) -> None:
        """End the workers; the next call starts new ones. A second call does nothing."""
        for worker in self._workers:
            worker.tasks.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.stack.close()
        self._workers = []
        self._group = None

    def _exchange(self, call: bytes, world_size: int, timeout: float) -> tuple[dict[int, str], dict[int, bytes]]:
        """Failures and results, by rank."""
        if self._store is None:
            # In this process. One in a file is looked at a hundred times a second: most of a group's cost is waiting.
            # Of IPv4 alone: torch asks a name server who comes from ::ffff:127.0.0.1, while all others wait.
            with socket.create_server(("127.0.0.1", 0)) as listening:
                port = listening.getsockname()[1]
                self._store = TCPStore(
                    "localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
                )
        while len(self._workers) < world_size:
            self._start_worker()
        if self._group != (world_size, timeout):
            self._group = world_size, timeout
            self._groups += 1
        for rank in range(world_size):
            task = Task(rank, world_size, f"group {self._groups}", self._store.port, timeout / 3, call)
            with suppress(OSError):  # it has died: found when it is asked for its reply
                self._workers[rank].tasks.send_bytes(pickle.dumps(tuple(task)))
        return self._collect(world_size, timeout)

    def _collect(self, world_size: int, timeout: float) -> tuple[dict[int, str], dict[int, bytes]]:
        pending: dict[Any, int] = {self._workers[rank].tasks: rank for rank in range(world_size)}
        failures: dict[int, str] = {}
        replies: dict[int, bytes] = {}
        deadline, late = time.monotonic() + timeout, f"did not come to an end within {timeout:g} seconds"
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return {**failures, **self._where(pending.values(), late)}, replies
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    reply = Reply(*pickle.loads(connection.recv_bytes()))  # type: ignore[union-attr]
                except (EOFError, OSError):
                    reply = Reply(False, self._death_of(rank))
                if reply.succeeded:
                    replies[rank] = reply.content
                else:
                    failures[rank] = reply.content
                    if time.monotonic() + GRACE < deadline:
                        deadline, late = (
                            time.monotonic() + GRACE,
                            f"was not done {GRACE:g} seconds after another failed",
                        )
        return failures, replies

    def _where(self, ranks: Any, what: str) -> dict[int, str]:
        """By rank, where it stands."""
        ranks = list(ranks)
        for rank in ranks:
            with suppress(OSError):
                os.kill(self._workers[rank].process.pid, signal.SIGUSR1)
        return {rank: f"{what}; it stood at\n{_main_thread(_read(self._workers[rank].stack))}" for rank in ranks}

    def _death_of(self, rank: int) -> str:
        process = self._workers[rank].process
        process.join(GRACE)
        code = process.exitcode
        how = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        return (
            f"the process died {how}, and left no traceback. If each does so at its start: a script that uses ranks needs "
            'if __name__ == "__main__":, because workers import it'
        )

    def _start_worker(self) -> None:
        folder = None
        if isinstance(self._context, ForkServerContext):
            self._context.set_forkserver_preload(self._preload)
            folder = get_temp_dir()  # with the server's socket
        tasks, of_worker = self._context.Pipe()
        stack, into_stack = self._context.Pipe(duplex=False)
        arguments = (of_worker, into_stack, self._initializer, folder)
        process = self._context.Process(target=serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
        process.start()
        of_worker.close()
        into_stack.close()
        self._workers.append(_Worker(process, tasks, stack))


def _read(stack: Connection) -> str:
    """What a worker writes of where it stands, until it writes no more."""
    parts: list[bytes] = []
    while wait([stack], timeout=0.3 if parts else 3.0):
        parts.append(os.read(stack.fileno(), 1 << 16))
        if not parts[-1]:
            break
    return b"".join(parts).decode(errors="replace")


def _main_thread(stacks: str) -> str:
    """The part of the main thread that is not the pool's own, the most recent call first."""
    blocks = [block for block in stacks.split("\n\n") if "in serve\n" in f"{block}\n"]
    if not blocks:
        return stacks.strip() or "(the process did not answer)"
    lines = blocks[0].splitlines()[1:]
    own = next((at for at, line in enumerate(lines) if re.search(r"in (_called|serve)$", line)), len(lines))
    return "\n".join(lines[:own] or lines)


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0  # no Linux: no count
