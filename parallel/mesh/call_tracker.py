"""Track which public function of this library each rank is in, and report it for all ranks when a collective fails.

    with track_call("save_checkpoint", registry):
        ...                                # if a collective fails, the RuntimeError lists the call of every rank

Tracking needs no communication: each thread stores the name and the number of its own call. When a collective fails on
a rank, the rank requests the current calls of the other ranks through the store of the default process group. In every
process a background thread responds, even while the process runs code outside this library. Stopped and dead processes
do not respond.
"""

from __future__ import annotations

import atexit
import json
import socket
import sys
import threading
import time
import traceback
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

# Requests and responses between ranks, through the store of the default process group ---------------------------------

# A thread of every process checks the store for requests once per second. The store has the number of requests under the
# key `_QUESTIONS`, and the response of each rank under `_ANSWER` and the rank.

POLL_INTERVAL = 1.0  # seconds
RESPONSE_TIMEOUT = 4.0  # seconds
_QUESTIONS, _ANSWER = "meshstep/calls/questions", "meshstep/calls/answer"  # store keys


class Answering:
    """Background thread that tells other ranks the current call of this process when they request it.

    The thread ends when the default process group is replaced or destroyed, when `stop` is called, or when the process
    that serves the store has exited.
    """

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # The clone has a separate connection to the store, because another thread may be waiting on the default connection.
        self._store = distributed_c10d._get_default_store().clone()
        self._server = _Server(self._store)
        self._world, self._stop = weakref.ref(world), threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshstep-calls", daemon=True)
        self._thread.start()

    def is_of_now(self) -> bool:
        """Return True if the default process group is still the group that was passed to the constructor."""
        return dist.is_initialized() and self._world() is dist.group.WORLD

    def stop(self) -> None:
        """Stop the thread and wait up to two seconds for its end; the thread must not run while the interpreter exits."""
        self._stop.set()
        self._thread.join(2 * POLL_INTERVAL)

    def _run(self) -> None:
        answered = 0
        with closing(self._server), suppress(RuntimeError):  # raised if the process that serves the store has exited
            while not self._stop.wait(POLL_INTERVAL) and self.is_of_now():
                self._server.check()
                if self._store.check([_QUESTIONS]):
                    question = self._store.add(_QUESTIONS, 0)
                    if question > answered:
                        self._store.set(f"{_ANSWER}/{self.rank}", json.dumps((question, _describe_activity())))
                        answered = question

    def ask(self, rank: int, found: dict[int, str]) -> None:
        """Request the calls of all ranks except ``rank``, and store each response in ``found`` when it arrives.

        Ranks that do not respond within four seconds are missing in ``found``. Raise RuntimeError if the process that
        serves the store has exited; earlier responses are in ``found``.
        """
        waiting = set(range(self.world_size)) - {rank}
        # An exiting process closes its connections one by one. The wait lets it close the connection that `check`
        # reads.
        time.sleep(POLL_INTERVAL / 5)
        self._server.check()
        question, until = self._store.add(_QUESTIONS, 1), time.monotonic() + RESPONSE_TIMEOUT
        while waiting and time.monotonic() < until:
            for other in sorted(waiting):
                self._server.check()
                if self._store.check([f"{_ANSWER}/{other}"]):
                    answered, doing = json.loads(self._store.get(f"{_ANSWER}/{other}"))
                    if answered >= question:
                        found[other] = doing
            waiting -= found.keys()
            time.sleep(POLL_INTERVAL / 20 if waiting else 0)


class _Server:
    """Monitor that detects the exit of the process that serves a store, over a separate idle connection.

    Only a TCPStore to which a connection is possible is monitored; for other stores `check` never raises. Without the
    monitor, the client of the store would detect the exit, and torch would log a long C++ stack trace.
    """

    def __init__(self, store: Any) -> None:
        self._socket: socket.socket | None = None
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if isinstance(store, TCPStore):
            with suppress(OSError):
                self._socket = socket.create_connection((store.host, store.port), timeout=RESPONSE_TIMEOUT)
                self._socket.setblocking(False)

    def close(self) -> None:
        """Close the connection. Do not call `check` afterwards."""
        if self._socket is not None:
            self._socket.close()

    def check(self) -> None:
        """Raise RuntimeError if the process that serves the store has exited."""
        try:
            is_closed = self._socket is not None and not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            is_closed = True
        if is_closed:
            raise RuntimeError("the process that serves the job's store has exited; start the job again")


_answering: Answering | None = None


def answer_questions(world: dist.ProcessGroup) -> None:
    """Start the background thread that tells other ranks the current calls of this process, and restart their numbering.

    Further calls for the same default process group have no effect.
    """
    global _answering
    if _answering is not None and _answering.is_of_now():
        return
    _answering = Answering(world)
    for ref in _by_thread.valuerefs():
        if (calls := ref()) is not None:
            calls.start_over()


def request_answers(rank: int) -> dict[int, str] | None:
    """Request the current calls of all ranks except ``rank``, and wait up to five seconds for the responses.

    Return the responses by global rank, without ranks that did not respond. None: the store stopped responding before the
    first response, or `answer_questions` was not called for the current default process group.
    """
    answering = _answering
    if answering is None or not answering.is_of_now():
        return None
    found, done = dict[int, str](), threading.Event()

    def ask() -> None:
        with suppress(RuntimeError):  # raised if the process that serves the store has exited
            answering.ask(rank, found)
            done.set()

    # The request runs in a thread, because it blocks if the process that serves the store is stopped.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(RESPONSE_TIMEOUT + POLL_INTERVAL)
    return found.copy() if found or done.is_set() else None


@atexit.register
def _end() -> None:
    if _answering is not None:
        _answering.stop()


# Tracked calls --------------------------------------------------------------------------------------------------------

_NO_REPLY = "got no reply"
# gloo raises the second text in collectives that follow a collective which timed out.
_GLOO_ERRORS = ("gloo/transport", "Application timeout caused pair closure")
_CPP_TRACE = ("Exception raised from ", "frame #", "C++ CapturedTraceback:")
_SAME_CALLS = "Every rank must make the same calls in the same order"

F = TypeVar("F", bound=Callable[..., Any])


class Call(NamedTuple):
    """Name and number of a call of a public function, method or constructor.

    ``number`` is 1 for the first call of this name in its thread. Calls inside other tracked calls are not counted. The
    numbers restart when the first registry of a new default process group is constructed.
    """

    name: str
    number: int

    def __str__(self) -> str:
        return f"call {self.number} of {self.name}"


class Caller(Protocol):
    """The attributes of a `ProcessGroupRegistry` that `track_call` reads."""

    topology: Topology
    global_rank: int


class _ThreadCalls:
    """The tracked calls of one thread. Calls inside other tracked calls are not tracked.

    ``last`` is the name, number and error type of the last finished call. The error type is None if the call returned.
    """

    __slots__ = ("__weakref__", "counts", "current", "last", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.current: track_call | None = None
        self.start_over()

    def start_over(self) -> None:
        self.counts: dict[str, int] = {}
        self.last: tuple[str, int, type[BaseException] | None] | None = None


class _CurrentThread(threading.local):
    """Thread-local object whose attribute ``calls`` has the tracked calls of the current thread."""

    def __init__(self) -> None:
        self.calls = _by_thread[threading.get_ident()] = _ThreadCalls()


_by_thread: WeakValueDictionary[int, _ThreadCalls] = WeakValueDictionary()
_current_thread = _CurrentThread()


class track_call:
    """Context manager around a public call: if a collective fails in the block, the error lists the call of every rank.

    All ranks of the registry's topology are expected to make the call. Inside another `track_call` block of the same thread
    the block has no effect.

    Raises:
        RuntimeError: A collective or the store failed in the block. Before raising, this rank waits up to five seconds
            for the responses of the other ranks. With one rank the original error is raised instead.
    """

    __slots__ = ("_calls", "_name", "_number", "_registry")

    def __init__(self, name: str, registry: Caller) -> None:
        self._name, self._registry = name, registry

    def __enter__(self) -> None:
        calls = _current_thread.calls
        if calls.current is not None:
            self._calls: _ThreadCalls | None = None
            return
        self._number = calls.counts[self._name] = calls.counts.get(self._name, 0) + 1
        self._calls, calls.current = calls, self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # `self._calls` is used, because the block may end in another thread, in which a generator with the block is closed.
        calls = self._calls
        if calls is None:
            return
        try:
            if error is not None and self._registry.topology.world_size > 1 and is_transport_error(error):
                kind = RuntimeError
                raise RuntimeError(_explain(self.call, self._registry, error)) from _strip_cpp_trace(error)
        finally:
            calls.current, calls.last = None, (self._name, self._number, kind)

    @property
    def call(self) -> Call:
        return Call(self._name, self._number)


def public_call(method: F) -> F:
    """Decorate a method, so that each call runs in ``track_call(method.__name__, self.registry)``."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with track_call(method.__name__, self.registry):
            return method(self, *args, **kwargs)

    return cast(F, call)


def public_constructor(init: F) -> F:
    """Decorate ``__init__``, so that it runs in a `track_call` block with the name of the constructed class.

    The registry is the second positional argument after ``self``, or the keyword argument ``registry``.
    """

    @wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        registry: Any = kwargs.get("registry", args[1] if len(args) > 1 else None)
        with track_call(type(self).__name__, registry) if hasattr(registry, "global_rank") else nullcontext():
            return init(self, *args, **kwargs)

    return cast(F, call)


def current_call() -> str | None:
    """Return the name of the outermost `track_call` block that this thread is in; None if it is in no block."""
    current = _current_thread.calls.current
    return None if current is None else current._name


def check_same_call(calls: Sequence[str | None]) -> None:
    """Raise RuntimeError unless the `current_call` of all ranks, in ``calls``, is the same."""
    if len({*calls}) > 1:
        where: dict[str | None, list[int]] = {}
        for rank, call in enumerate(calls):
            where.setdefault(call, []).append(rank)
        mismatches = ", ".join(
            f"{named_ranks(ranks)} in {call or 'no call of meshstep'}" for call, ranks in where.items()
        )
        raise RuntimeError(f"ranks are in different calls: {mismatches}. {_SAME_CALLS}")


def is_transport_error(error: BaseException | None) -> bool:
    """Return True if ``error`` is a failure of a collective or of torch's store, and not an error of `track_call`.

    Failures of gloo are plain RuntimeErrors, so they are detected by their text.
    """
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return type(error) is RuntimeError and _NO_REPLY not in text and any(part in text for part in _GLOO_ERRORS)


# The text of the error when a collective fails ------------------------------------------------------------------------


def _explain(call: Call, registry: Caller, error: BaseException) -> str:
    rank = registry.global_rank
    failure = f"rank {rank} {_NO_REPLY} in {call}"
    reason = f"torch reports: {printable(str(error).partition(chr(10))[0])}"
    answers = request_answers(rank)
    if answers is None:
        return (
            f"{failure}; the calls of other ranks are unknown, because the job's store does not respond. Look for an "
            f"earlier error of another rank. {reason}"
        )
    others: dict[str, list[int]] = {}
    for other in range(registry.topology.world_size):
        if other != rank:
            doing = answers.get(other, "no response (the process has exited or is stopped)")
            others.setdefault(doing, []).append(other)
    listed = "; ".join(f"{named_ranks(ranks)}: {doing}" for doing, ranks in others.items())
    failed_there = f"since {call} raised RuntimeError,"
    if all(doing == f"in {call}" or failed_there in doing for doing in others):
        advice = "All ranks made the same call, so a connection was lost, or a rank took longer than the timeout"
    else:
        advice = f"{_SAME_CALLS}, and no rank may stop before the others"
    return f"{failure}; {listed}. {advice}. {reason}"


def _strip_cpp_trace(error: BaseException) -> BaseException:
    """Remove torch's C++ stack trace from the text of ``error`` in place, and return ``error``."""
    lines = str(error).splitlines()
    kept = list(takewhile(lambda line: not line.startswith(_CPP_TRACE), lines))
    if len(kept) < len(lines):
        error.args = ("\n".join(kept),)
    return error


def _describe_activity() -> str:
    """Return a text with the current tracked call of each thread that is in such a call.

    If the main thread is in no call, the text has its last call and its current line in user code.
    """
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
            outcome = "returned" if error is None else f"raised {error.__name__}"
            before = f" since {Call(name, number)} {outcome}"
        doing = f"in no call of meshstep{before}, but {_locate_user_code(sys._current_frames().get(main))}"
    return ", and in a thread ".join([doing, *(f"in {other}" for other in current.values())])


def _locate_user_code(frame: FrameType | None) -> str:
    """Return file, line and function of the innermost frame outside torch, meshstep and the standard library."""
    while frame is not None and frame.f_back is not None and _is_library(frame):
        frame = frame.f_back
    if frame is None:
        return "ending"
    return f"at {Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_library(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package in ("torch", "meshstep") or package in sys.stdlib_module_names


# Information from stack frames ----------------------------------------------------------------------------------------


# Use the first two functions only if another library calls a method of this library, and the result must depend on the
# calling function, which no argument identifies. Only this module and deprecation.py read stack frames.


def calling_module() -> str:
    """Return the module name of the caller's caller: if f calls g, and g calls `calling_module`, the module of f."""
    return str(sys._getframe(2).f_globals.get("__name__"))


def receiver_of_caller(method: Callable[..., object]) -> Any:
    """Return the ``self`` argument of ``method`` if ``method`` is the caller's caller; else None.

    The local variables of other functions are not read, because reading them could keep them alive.
    """
    frame = sys._getframe(2)
    return frame.f_locals["self"] if frame.f_code is getattr(method, "__code__", None) else None


def format_thread_stack(thread: int | None) -> str:
    """Return the stack of the thread with identifier ``thread`` as text; "an unknown place" if the thread has ended."""
    frame = sys._current_frames().get(thread or 0)
    return "an unknown place" if frame is None else "".join(traceback.format_stack(frame))
