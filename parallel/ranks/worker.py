"""What a worker process of a pool does: join the ranks that it is told to, call a function, send back what it returns.

A worker ends with the process that started it, however that one ends, also in the middle of a call.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .by_value import decoded, result_of


class Task(NamedTuple):
    """A call, for one worker.

    Args:
        group: Name of the default process group; workers stay in it while the name is the same.
        port: Of the store on this machine in which its members meet.
        group_timeout: Of its collectives, in seconds.
        call: As `by_value.encoded` makes it.
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
