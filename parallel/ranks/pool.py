"""A pool of worker processes. Each worker is a rank; workers communicate over gloo, and stay alive between calls.

    def norm_of_sum(scale: float) -> float:
        value = torch.tensor(scale * dist.get_rank())
        dist.all_reduce(value)
        return value.item()

    if __name__ == "__main__":
        with RankPool() as ranks:
            print(ranks.run(norm_of_sum, 4, 2.0))      # [12.0, 12.0, 12.0, 12.0]

Starting a process that imports torch takes seconds; a call of the pool takes milliseconds. On Linux, workers are forked
from a server process that has loaded torch (``forkserver``). On other systems each worker is started separately
(``spawn``). Workers connect through a store of the pool, on a port that the operating system chooses. After a failed
call all workers are replaced, because a rank may still wait in a collective.
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
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.util import get_temp_dir
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from .interface import TIMEOUT, Ranks, RanksError, check_size, decoded, encoded, name_of, result_of

# Worker ---------------------------------------------------------------------------------------------------------------

# A worker process receives tasks. For each task it joins a process group, calls a function and sends back the result. A
# worker exits when the process of the pool exits for any reason, also during a call.


class Task(NamedTuple):
    """A call for one worker, which keeps its process group if rank and ``group`` are the same as in its previous task."""

    rank: int
    world_size: int
    group: str
    port: int
    group_timeout: float
    call: bytes


class Reply(NamedTuple):
    """The reply of one rank to a `Task`: the pickled result if the function succeeded, else the text of the failure."""

    succeeded: bool
    content: Any


def serve(tasks: Connection, stack: Connection, initializer: Callable[[], object] | None, folder: str | None) -> None:
    """Run the main loop of a worker: receive tasks, call their functions and send replies, until the connection is closed.

    The stacks of all threads are written to ``stack`` at each signal ``SIGUSR1``, even while C++ code runs. ``initializer``
    is called once, before the function of the first task. If the parent process exits, its temporary ``folder`` is removed.
    """
    _end_with_parent(folder)
    faulthandler.register(signal.SIGUSR1, file=stack.fileno(), all_threads=True)
    torch.set_num_threads(1)
    _stay_on_this_machine()
    gc.freeze()  # the garbage collector skips objects from before the fork; scanning them would copy their memory pages
    membership = _Membership()
    while True:
        try:
            task = Task(*tasks.recv())
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
        tasks.send(tuple(reply))


def _called(call: bytes) -> bytes:
    # `_main_thread` removes the frames of the pool from a stack; it finds them by the name of this function.
    function, args = decoded(call)
    torch.manual_seed(0)
    return result_of(function(*args), function)


class _Membership:
    """The default process group that this worker has joined. `join` replaces it if a task needs another group."""

    def __init__(self) -> None:
        self._joined: tuple[int, str] | None = None
        self._store: Any = None

    def join(self, task: Task) -> None:
        if self._joined == (task.rank, task.group):
            return
        if dist.is_initialized():
            dist.destroy_process_group()
            _forget_device_meshes()
        self._joined = None
        if self._store is None:
            self._store = TCPStore("localhost", task.port)
        store = PrefixStore(task.group, self._store)
        timeout = timedelta(seconds=task.group_timeout)
        dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.world_size, timeout=timeout)
        self._joined = (task.rank, task.group)


def _forget_device_meshes() -> None:
    """Clear torch's cache of DTensor operations, because its entries hold device meshes of destroyed process groups.

    torch would use such an entry for a later mesh with the same ranks and names, because the two meshes compare equal.
    """
    # torch has no public function that clears the cache, and the import of torch.distributed.tensor.debug is slow.
    dtensor: Any = sys.modules.get("torch.distributed.tensor")
    if dtensor is not None:
        dtensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


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
    """Make gloo use the loopback interface by default, because resolving the host name fails on some machines."""
    with suppress(OSError):
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        if loopback in (name for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


# Pool -----------------------------------------------------------------------------------------------------------------

T = TypeVar("T")

GRACE = 5.0  # seconds that the pool waits for other ranks after one rank has failed

# Modules that the server process loads once, before it forks workers. Otherwise each worker would import them.
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "meshstep.parallel.ranks.pool", "meshstep.optim")

# A process group has threads that wake up many times per second, and torch does not free the groups of device meshes.
# Hundreds of groups in each worker would take most of the machine's time. If a worker has more threads than this
# number, the pool replaces all workers.
MOST_THREADS = 200


class _Worker(NamedTuple):
    process: Any
    tasks: Connection
    stack: Connection


class RankPool(Ranks):
    """Ranks in worker processes on this machine, over gloo on the CPU, with one torch thread per worker.

        with RankPool() as ranks:
            norms = ranks.run(norm_of_my_model, 4)

    The first call that needs a worker starts it. The worker has the working directory and the environment variables that
    this process has at that time. But on Linux, all workers of all pools have the environment variables that this process
    had when it started the first worker. A call with the same world size and timeout as the previous call uses the same
    default process group, unless the workers were replaced.

    Args:
        timeout: Seconds that a call may take. The timeout of collectives on the default group is a third of this time.
            Default: 180.
        preload: Names of further modules to load once, before workers are forked. It has an effect only on Linux, and
            only in the first pool of this process that starts a worker, because later pools use the same server process.
            torch and this library are always loaded, and pytest and Hypothesis if this process has imported them.
            Default: no further modules.
        initializer: Function without arguments that each worker calls once, before its first task. None: no call.
    """

    def __init__(
        self,
        *,
        timeout: float = TIMEOUT,
        preload: Sequence[str] = (),
        initializer: Callable[[], object] | None = None,
    ) -> None:
        self.timeout = timeout
        self._context: ForkServerContext | SpawnContext = (
            multiprocessing.get_context("forkserver")
            if sys.platform == "linux"
            else multiprocessing.get_context("spawn")
        )
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
        """Call ``function(*args)`` on ranks 0..world_size-1 and return the results by rank.

        Arguments and errors are those of `Ranks.run`. After a RanksError or an interruption, or if a worker has more
        than 200 threads after the call, all workers are replaced.
        """
        check_size(world_size)
        call = encoded(function, args)
        timeout = self.timeout if timeout is None else timeout
        try:
            failures, replies = self._exchange(call, world_size, timeout)
        except BaseException:  # also KeyboardInterrupt, because the workers may still run the function
            self.close()
            raise
        if failures:
            self.close()
            raise RanksError(name_of(function), world_size, failures)
        if max(_threads(worker.process.pid) for worker in self._workers) > MOST_THREADS:
            self.close()
        return [pickle.loads(replies[rank]) for rank in range(world_size)]

    def close(self) -> None:
        """Stop all workers; the next `run` starts new ones. A second call has no effect."""
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
        """Send the call to ``world_size`` workers, and return the failure texts and the pickled results by rank."""
        if self._store is None:
            # The store is a TCP store, because a file store polls, which slows the creation of groups. The socket is IPv4
            # only, because torch would ask a name server for ::ffff:127.0.0.1 while ranks wait.
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
            with suppress(OSError):  # a dead worker is detected when its reply is read
                self._workers[rank].tasks.send(tuple(task))
        return self._collect(world_size, timeout)

    def _collect(self, world_size: int, timeout: float) -> tuple[dict[int, str], dict[int, bytes]]:
        pending: dict[Any, int] = {self._workers[rank].tasks: rank for rank in range(world_size)}
        failures: dict[int, str] = {}
        replies: dict[int, bytes] = {}
        deadline, late = time.monotonic() + timeout, f"did not finish within {timeout:g} seconds"
        while pending:
            ready: list[Any] = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return {**failures, **self._where(pending.values(), late)}, replies
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    reply = Reply(*connection.recv())
                except (EOFError, OSError):
                    reply = Reply(False, self._death_of(rank))
                if reply.succeeded:
                    replies[rank] = reply.content
                else:
                    failures[rank] = reply.content
                    if time.monotonic() + GRACE < deadline:
                        deadline, late = (
                            time.monotonic() + GRACE,
                            f"did not finish within {GRACE:g} seconds after another rank failed",
                        )
        return failures, replies

    def _where(self, ranks: Any, what: str) -> dict[int, str]:
        """Return a text per rank in ``ranks``: ``what`` (a problem), then the current stack of the rank's main thread."""
        ranks = list(ranks)
        for rank in ranks:
            with suppress(OSError):
                os.kill(self._workers[rank].process.pid, signal.SIGUSR1)
        return {rank: f"{what}; its stack was\n{_main_thread(_read(self._workers[rank].stack))}" for rank in ranks}

    def _death_of(self, rank: int) -> str:
        process = self._workers[rank].process
        process.join(GRACE)
        code = process.exitcode
        how = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        return (
            f"the process died {how}, without a traceback. If every process dies at its start: a script that uses ranks "
            'needs if __name__ == "__main__":, because workers import the script'
        )

    def _start_worker(self) -> None:
        folder = None
        if isinstance(self._context, ForkServerContext):
            self._context.set_forkserver_preload(self._preload)
            folder = get_temp_dir()  # contains the socket of the server process
        tasks, of_worker = self._context.Pipe()
        stack, into_stack = self._context.Pipe(duplex=False)
        arguments = (of_worker, into_stack, self._initializer, folder)
        process = self._context.Process(target=serve, args=arguments, daemon=True)
        process.start()
        of_worker.close()
        into_stack.close()
        self._workers.append(_Worker(process, tasks, stack))


def _read(stack: Connection) -> str:
    """Return the text that a worker writes to ``stack``: wait 3 seconds for the first part, and 0.3 for each more."""
    parts: list[bytes] = []
    while wait([stack], timeout=0.3 if parts else 3.0):
        parts.append(os.read(stack.fileno(), 1 << 16))
        if not parts[-1]:
            break
    return b"".join(parts).decode(errors="replace")


def _main_thread(stacks: str) -> str:
    """Return the frames of the main thread without the frames of the pool, latest call first.

    If ``stacks``, the stacks of all threads of a worker, does not have the main thread, return all stacks.
    """
    blocks = [block for block in stacks.split("\n\n") if "in serve\n" in f"{block}\n"]
    if not blocks:
        return stacks.strip() or "(the process did not respond)"
    lines = blocks[0].splitlines()[1:]
    own = next((at for at, line in enumerate(lines) if re.search(r"in (_called|serve)$", line)), len(lines))
    return "\n".join(lines[:own] or lines)


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0  # not on Linux
