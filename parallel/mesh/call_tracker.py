"""Which call of this library each rank is in, for the error of a rank that waited for others in vain.

    with track_call("save_checkpoint", registry):
        ...                                # a collective fails: RuntimeError, which says where all ranks are

Within a call nothing is told to anybody: its name and number stay in this process. A rank whose collective failed asks the
others (`answers`), and those answer too that are in no collective, or in code that is not ours. One that is stopped, or
gone, does not.
"""

from __future__ import annotations

import atexit
import json
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext, suppress
from functools import wraps
from itertools import takewhile
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar, cast
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from .text import named_ranks, printable
from .topology import Topology

# What each rank does, asked by one that the others did not meet: in the store of the default process group ------------

# A thread of every process looks there once a second, and answers.

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


# Calls ----------------------------------------------------------------------------------------------------------------

_IN_VAIN = "waited in vain"
_GLOO_SAYS = ("gloo/transport", "Application timeout caused pair closure")  # the latter after a timeout before
_CPP_TRACE = ("Exception raised from ", "frame #", "C++ CapturedTraceback:")
_SAME_CALLS = "Every rank must make the same calls in the same order"

F = TypeVar("F", bound=Callable[..., Any])


class Call(NamedTuple):
    """A call of the public interface: its name, and its number among the calls of that name in its thread, from 1."""

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name} (its {_ordinal(self.number)})"


class Caller(Protocol):
    """A registry: among which ranks a call is made."""

    topology: Topology
    global_rank: int


class _ThreadCalls:
    """The calls of one thread: counts by name since the default group exists, the current outermost call, and the last one
    that ended, with the type of its error."""

    __slots__ = ("__weakref__", "counts", "current", "last", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.current: track_call | None = None
        self.start_over()

    def start_over(self) -> None:
        self.counts: dict[str, int] = {}
        self.last: tuple[str, int, type[BaseException] | None] | None = None


class _Own(threading.local):
    """The calls of the current thread."""

    def __init__(self) -> None:
        self.calls = _by_thread[threading.get_ident()] = _ThreadCalls()


_by_thread: WeakValueDictionary[int, _ThreadCalls] = WeakValueDictionary()
_own = _Own()


class track_call:
    """Context of a public call: an error of the transport in it becomes one that names the call of every rank. Within
    another call of the same thread it does nothing.

    Args:
        name: The name of the call.
        registry: The ranks among which it is made.
    Raises:
        RuntimeError: From the transport's own error: a timeout, or a lost connection. It takes seconds.
    Collectives: none. Host reads: none.
    """

    __slots__ = ("_calls", "_name", "_number", "_registry")

    def __init__(self, name: str, registry: Caller) -> None:
        self._name, self._registry = name, registry

    def __enter__(self) -> None:
        calls = _own.calls
        if calls.current is not None:
            self._calls: _ThreadCalls | None = None
            return
        self._number = calls.counts[self._name] = calls.counts.get(self._name, 0) + 1
        self._calls, calls.current = calls, self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        calls = self._calls  # of the thread that entered: a generator may end in another one
        if calls is None:
            return
        try:
            if error is not None and self._registry.topology.world_size > 1 and is_transport_error(error):
                kind = RuntimeError
                raise RuntimeError(_explained(self.call, self._registry, error)) from _shortened(error)
        finally:
            calls.current, calls.last = None, (self._name, self._number, kind)

    @property
    def call(self) -> Call:
        """Its name and number."""
        return Call(self._name, self._number)


def in_call(registry: Caller, name: str) -> track_call:
    """Return ``track_call(name, registry)``."""
    return track_call(name, registry)


def public_call(method: F) -> F:
    """A method of an object with a ``registry`` as a call of its name."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with track_call(method.__name__, self.registry):
            return method(self, *args, **kwargs)

    return cast(F, call)


def public_constructor(init: F) -> F:
    """A constructor whose second argument is a ``registry`` as a call of its class's name."""

    @wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        registry: Any = kwargs.get("registry", args[1] if len(args) > 1 else None)
        with track_call(type(self).__name__, registry) if hasattr(registry, "global_rank") else nullcontext():
            return init(self, *args, **kwargs)

    return cast(F, call)


def current_call() -> str | None:
    """The name of the call that this thread is in."""
    current = _own.calls.current
    return None if current is None else current.call.name


def check_same_call(calls: Sequence[str | None]) -> None:
    """Raise RuntimeError unless all ranks are in a call of the same name; ``calls`` by rank."""
    if len({*calls}) > 1:
        where: dict[str | None, list[int]] = {}
        for rank, call in enumerate(calls):
            where.setdefault(call, []).append(rank)
        told = ", ".join(f"{named_ranks(ranks)} in {call}" for call, ranks in where.items())
        raise RuntimeError(f"ranks meet in different calls: {told}. {_SAME_CALLS}")


def is_transport_error(error: BaseException | None) -> bool:
    """Whether a collective failed, or the store, not what ranks computed: gloo's errors are plain RuntimeErrors."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return type(error) is RuntimeError and _IN_VAIN not in text and any(said in text for said in _GLOO_SAYS)


# The error ------------------------------------------------------------------------------------------------------------


def _explained(call: Call, registry: Caller, error: BaseException) -> str:
    rank = registry.global_rank
    waited = f"rank {rank} {_IN_VAIN} in {call}"
    said = f"torch says: {printable(str(error).partition(chr(10))[0])}"
    answers = answers_of_others(rank)
    if answers is None:
        return f"{waited}, and where the others are is not known: the job's store does not answer either. {said}"
    others: dict[str, list[int]] = {}
    for other in range(registry.topology.world_size):
        if other != rank:
            doing = answers.get(other, "no answer (the process has ended, or is stopped)")
            others.setdefault(doing, []).append(other)
    told = "; ".join(f"{named_ranks(of)}: {doing}" for doing, of in others.items())
    given_up = f"(its last, {call}, raised RuntimeError)"
    if all(doing == f"in {call}" or given_up in doing for doing in others):
        why = "All came to the same call: a connection was lost, or one of them took longer than the timeout"
    else:
        why = f"{_SAME_CALLS}, and none may stop before the others"
    return f"{waited}; {told}. {why}. {said}"


def _shortened(error: BaseException) -> BaseException:
    """Cut torch's C++ stack trace off the text of ``error``, in place, and return it."""
    lines = str(error).splitlines()
    kept = list(takewhile(lambda line: not line.startswith(_CPP_TRACE), lines))
    if len(kept) < len(lines):
        error.args = ("\n".join(kept),)
    return error


def _doing() -> str:
    """What this process does now."""
    main = threading.main_thread().ident or 0
    threads = {calls.thread: calls for ref in _by_thread.valuerefs() if (calls := ref()) is not None}
    current = {thread: calls.current.call for thread, calls in threads.items() if calls.current is not None}
    call, last = current.pop(main, None), threads[main].last if main in threads else None
    if call is not None:
        doing = f"in {call}"
    else:
        before = ""
        if last is not None:
            name, number, error = last
            ended = "returned" if error is None else f"raised {error.__name__}"
            before = f" (its last, {Call(name, number)}, {ended})"
        doing = f"in no call of meshstep{before}, but {_place(sys._current_frames().get(main))}"
    return ", and in a thread ".join([doing, *(f"in {other}" for other in current.values())])


def _place(frame: FrameType | None) -> str:
    """Where the user's own code is."""
    while frame is not None and frame.f_back is not None and _is_library(frame):
        frame = frame.f_back
    if frame is None:
        return "ending"
    return f"at {Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_library(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package in ("torch", "meshstep") or package in sys.stdlib_module_names


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def answer_questions(world: dist.ProcessGroup) -> None:
    """From now on, answer other ranks that ask what this one does; once for each default group, which counts anew."""
    if start_answering(world, _doing):
        for ref in _by_thread.valuerefs():
            if (calls := ref()) is not None:
                calls.start_over()
