"""What each rank does, asked by one that the others did not meet: in the store of the default process group.

A thread of every process looks there once a second, and answers.
"""

from __future__ import annotations

import atexit
import json
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

LOOKS_EVERY = 1.0  # seconds
PATIENCE = 4.0  # with answers, in seconds
_QUESTIONS, _ANSWER = "meshstep/calls/questions", "meshstep/calls/answer"  # a count, and what a rank says


class Answering:
    """The thread of this process that answers the questions of other ranks, as long as the default group is this one.

    Args:
        world: The group.
        doing: The answer.
    """

    def __init__(self, world: dist.ProcessGroup, doing: Callable[[], str]) -> None:
        self._doing, self.rank, self.world_size = doing, dist.get_rank(), dist.get_world_size()
        # A connection of its own: others may wait on theirs.
        self._store = distributed_c10d._get_default_store().clone()
        self._server = _Server(self._store)
        self._world, self._stop = weakref.ref(world), threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshstep-calls", daemon=True)
        self._thread.start()

    def is_of_now(self) -> bool:
        """Whether the default group is still the same."""
        return dist.is_initialized() and self._world() is dist.group.WORLD

    def stop(self) -> None:
        """End the thread, which must not be in the middle of something when the interpreter ends."""
        self._stop.set()
        self._thread.join(2 * LOOKS_EVERY)

    def _run(self) -> None:
        answered = 0
        with closing(self._server), suppress(RuntimeError):  # the store's server has ended
            while not self._stop.wait(LOOKS_EVERY) and self.is_of_now():
                self._server.check()
                if self._store.check([_QUESTIONS]):
                    question = self._store.add(_QUESTIONS, 0)
                    if question > answered:
                        self._store.set(f"{_ANSWER}/{self.rank}", json.dumps((question, self._doing())))
                        answered = question

    def ask(self, rank: int, found: dict[int, str]) -> None:
        """Put the answers of other ranks into ``found``, each as it arrives. Raises RuntimeError where the store's server
        has ended: those that arrived before are there."""
        waiting = set(range(self.world_size)) - {rank}
        time.sleep(LOOKS_EVERY / 5)  # a process that ends closes its connections one after another
        self._server.check()
        question, until = self._store.add(_QUESTIONS, 1), time.monotonic() + PATIENCE
        while waiting and time.monotonic() < until:
            for other in sorted(waiting):
                self._server.check()
                if self._store.check([f"{_ANSWER}/{other}"]):
                    answered, doing = json.loads(self._store.get(f"{_ANSWER}/{other}"))
                    if answered >= question:
                        found[other] = doing
            waiting -= found.keys()
            time.sleep(LOOKS_EVERY / 20 if waiting else 0)


class _Server:
    """The process that serves a store: whether it has ended, asked over a connection of our own, which nothing is sent
    over. Where the store itself finds out, torch logs some 20 lines of a C++ stack trace."""

    def __init__(self, store: Any) -> None:
        self._socket: socket.socket | None = None
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if isinstance(store, TCPStore):
            with suppress(OSError):
                self._socket = socket.create_connection((store.host, store.port), timeout=PATIENCE)
                self._socket.setblocking(False)

    def close(self) -> None:
        """Close the connection; `check` raises from then on."""
        if self._socket is not None:
            self._socket.close()

    def check(self) -> None:
        """Raise RuntimeError where it has ended."""
        try:
            ended = self._socket is not None and not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            ended = True
        if ended:
            raise RuntimeError("the process that serves the job's store has ended: start the job again")


_answering: Answering | None = None


def start_answering(world: dist.ProcessGroup, doing: Callable[[], str]) -> bool:
    """Answer others from now on. Returns False where the answers in this default group have begun before."""
    global _answering
    if _answering is not None and _answering.is_of_now():
        return False
    _answering = Answering(world, doing)
    return True


def answers_of_others(rank: int) -> dict[int, str] | None:
    """What the other ranks say that they do, of those that answer; None: the store gives no answer at all."""
    answering = _answering
    if answering is None or not answering.is_of_now():
        return None
    found, ended = dict[int, str](), threading.Event()

    def ask() -> None:
        with suppress(RuntimeError):  # the store's server has ended
            answering.ask(rank, found)
            ended.set()

    # In a thread, because a store whose process is stopped would keep us for ever.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE + LOOKS_EVERY)
    return found.copy() if found or ended.is_set() else None


@atexit.register
def _end() -> None:
    if _answering is not None:
        _answering.stop()
