"""Which call of this library each rank is in, for the error of a rank that waited for others in vain.

    with in_call(registry, "step"):
        ...                                # a collective fails: RuntimeError, which says where all ranks are

Within a call nothing is told to anybody: its name and number stay in this process. A rank whose collective failed asks, in
the store of the default process group; a thread of every process looks there once a second, and answers. So also ranks
answer that are in no collective, or in code that is not ours. One that is stopped, or gone, does not.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import wraps
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .text import named_ranks
from .topology import Topology

LOOKS_EVERY = 1.0  # seconds
PATIENCE = 4.0  # with answers, in seconds
_QUESTIONS, _ANSWER = "meshstep/calls/questions", "meshstep/calls/answer"  # a count, and what a rank says
_IN_VAIN = "waited in vain"
_GLOO_SAYS = ("gloo/transport", "Application timeout caused pair closure")  # the latter after a timeout before
_SAME_CALLS = "Every rank must make the same calls in the same order"

F = TypeVar("F", bound=Callable[..., Any])


class Call(NamedTuple):
    """A call of the public interface: its name, and which one of that name it is on this rank, from 1."""

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name} (its {_ordinal(self.number)})"


class Caller(Protocol):
    """A registry: what calls are counted by."""

    topology: Topology
    global_rank: int
    calls: Counter[str]


_running: dict[int, Call] = {}  # by thread; a call within another one is a part of it
_last: dict[int, tuple[Call, type[BaseException] | None]] = {}  # by thread: the one that ended last, and its error


class in_call:
    """Around what a public call does: a failure of the transport in it becomes an error that says where all ranks are.

    Raises:
        RuntimeError: From the transport's own error: a timeout, or a lost connection. It takes up to `PATIENCE` seconds.
    Collectives: none. Host reads: none.
    """

    __slots__ = ("_call", "_registry", "_thread")

    def __init__(self, registry: Caller, name: str) -> None:
        self._registry, self._thread = registry, threading.get_ident()
        self._call: Call | None = None
        if registry.topology.world_size > 1 and self._thread not in _running:
            registry.calls[name] += 1
            self._call = Call(name, registry.calls[name])

    def __enter__(self) -> None:
        if self._call is not None:
            _running[self._thread] = self._call

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._call is None:
            return
        try:
            if error is not None and is_transport_error(error):
                rank, world_size = self._registry.global_rank, self._registry.topology.world_size
                raise RuntimeError(_explained(self._call, rank, world_size, error)) from error
        finally:
            _last[self._thread] = self._call, kind
            del _running[self._thread]


def public_call(method: F) -> F:
    """A method of an object with a ``registry`` as a call of its name."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with in_call(self.registry, method.__name__):
            return method(self, *args, **kwargs)

    return cast(F, call)


def public_constructor(init: F) -> F:
    """A constructor whose second argument is a ``registry`` as a call of its class's name."""

    @wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        registry: Any = kwargs.get("registry", args[1] if len(args) > 1 else None)
        with in_call(registry, type(self).__name__) if hasattr(registry, "calls") else nullcontext():
            return init(self, *args, **kwargs)

    return cast(F, call)


def current_call() -> str | None:
    """The name of the call that this thread is in."""
    call = _running.get(threading.get_ident())
    return None if call is None else call.name


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


def _explained(call: Call, rank: int, world_size: int, error: BaseException) -> str:
    waited = f"rank {rank} {_IN_VAIN} in {call}"
    first_line, _, _ = str(error).partition("\n")
    said = f"torch says: {first_line}"
    answers = _ask(rank)
    if answers is None:
        return f"{waited}, and where the others are is not known: the job's store does not answer either. {said}"
    others: dict[str, list[int]] = {}
    for other in range(world_size):
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


def _ask(rank: int) -> dict[int, str] | None:
    """What the other ranks say that they do, of those that answer; None: nobody can be asked."""
    answering = _answering
    if answering is None or not answering.is_of_now():
        return None
    found: list[dict[int, str]] = []

    def ask() -> None:
        with suppress(RuntimeError):  # the store's server has ended
            found.append(answering.ask(rank))

    # In a thread, because a store whose process is stopped would keep us for ever.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE + LOOKS_EVERY)
    return found[0] if found else None


def _doing() -> str:
    """What this process does now."""
    main = threading.main_thread().ident or 0
    calls = _running.copy()
    call = calls.pop(main, None)
    if call is not None:
        doing = f"in {call}"
    else:
        last, error = _last.get(main, (None, None))
        ended = "returned" if error is None else f"raised {error.__name__}"
        before = "" if last is None else f" (its last, {last}, {ended})"
        doing = f"in no call of meshstep{before}, but {_place(sys._current_frames().get(main))}"
    return ", and in a thread ".join([doing, *(f"in {other}" for other in calls.values())])


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


# The answers ----------------------------------------------------------------------------------------------------------


class _Answering:
    """The thread of this process that answers the questions of other ranks, as long as the default group is this one."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # A connection of its own: others may wait on theirs.
        self._store = distributed_c10d._get_default_store().clone()
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
        with suppress(RuntimeError):  # the store's server has ended
            while not self._stop.wait(LOOKS_EVERY) and self.is_of_now():
                if self._store.check([_QUESTIONS]):
                    question = self._store.add(_QUESTIONS, 0)
                    if question > answered:
                        self._store.set(f"{_ANSWER}/{self.rank}", json.dumps((question, _doing())))
                        answered = question

    def ask(self, rank: int) -> dict[int, str]:
        """What other ranks do, of those that answer. Raises RuntimeError where the store's server has ended."""
        waiting, found = set(range(self.world_size)) - {rank}, dict[int, str]()
        question, until = self._store.add(_QUESTIONS, 1), time.monotonic() + PATIENCE
        while waiting and time.monotonic() < until:
            for other in sorted(waiting):
                if self._store.check([f"{_ANSWER}/{other}"]):
                    answered, doing = json.loads(self._store.get(f"{_ANSWER}/{other}"))
                    if answered >= question:
                        found[other] = doing
            waiting -= found.keys()
            time.sleep(LOOKS_EVERY / 20 if waiting else 0)
        return found


_answering: _Answering | None = None


def answer_questions(world: dist.ProcessGroup) -> None:
    """From now on, answer other ranks that ask what this one does; once for each default group."""
    global _answering
    if _answering is None or not _answering.is_of_now():
        _answering = _Answering(world)


@atexit.register
def _end() -> None:
    if _answering is not None:
        _answering.stop()
