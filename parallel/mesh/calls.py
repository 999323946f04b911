"""Which call of this library each rank is in, for the error of a rank that waited for others in vain.

    with in_call(registry, "save_checkpoint"):
        ...                                # a collective fails: RuntimeError, which says where all ranks are

Within a call nothing is told to anybody: its name and number stay in this process. A rank whose collective failed asks the
others (`answers`), and those answer too that are in no collective, or in code that is not ours. One that is stopped, or
gone, does not.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch.distributed as dist

from .answers import answers_of_others, start_answering
from .text import named_ranks
from .topology import Topology

_IN_VAIN = "waited in vain"
_GLOO_SAYS = ("gloo/transport", "Application timeout caused pair closure")  # the latter after a timeout before
_SAME_CALLS = "Every rank must make the same calls in the same order"

F = TypeVar("F", bound=Callable[..., Any])


class Call(NamedTuple):
    """A call of the public interface: its name, and which one of that name it is in this process, from 1."""

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name} (its {_ordinal(self.number)})"


class Caller(Protocol):
    """A registry: among which ranks a call is made."""

    topology: Topology
    global_rank: int


begun: dict[str, int] = {}
"""How often calls of each name have begun since the default group is there; which stands last ended, or began, last."""
_begun_in_threads: dict[str, int] = {}  # others than the main one, which nobody asks for its last call
_running: dict[int, Call] = {}  # by thread: the outermost call, if it says that it runs
_seen_on_the_stack: dict[int, str] = {}  # by id of their code: the functions that don't
_raised: tuple[Call, str] | None = None  # the main thread's last one that ended with an error, and its type


class in_call:
    """Around what a public call does: a failure of the transport in it becomes an error that says where all ranks are.
    Within another call it is a part of that.

    Raises:
        RuntimeError: From the transport's own error: a timeout, or a lost connection. It takes seconds.
    Collectives: none. Host reads: none.
    """

    __slots__ = ("_call", "_registry", "_thread")

    def __init__(self, registry: Caller, name: str) -> None:
        self._registry, self._thread = registry, threading.get_ident()
        self._call: Call | None = None
        if registry.topology.world_size > 1 and _call_of(self._thread, sys._getframe()) is None:
            counts = _counts_of(self._thread)
            counts[name] = counts.pop(name, 0) + 1
            self._call = Call(name, counts[name])

    def __enter__(self) -> None:
        if self._call is not None:
            _running[self._thread] = self._call

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._call is not None:
            try:
                _end_with(error, self._registry, self._call, self._thread)
            finally:
                del _running[self._thread]


def seen_on_the_stack(method: F) -> F:
    """A method of an object with a ``registry`` as a call of its name, for what is called in each step: nothing stands
    around it, and whoever asks where this rank is finds it on the stack, with its ``number``:

        @seen_on_the_stack
        def step(self):
            number = begun["step"] = begun.pop("step", 0) + 1
            try:
                ...
            except BaseException as error:
                explain(error, self.registry, "step", number)
                raise
    """
    _seen_on_the_stack[id(method.__code__)] = method.__name__
    return method


def explain(error: BaseException, registry: Caller, name: str, number: int) -> None:
    """The end of such a call, with an error, unless it is a part of another one. Raises RuntimeError: as `in_call`."""
    thread = threading.get_ident()
    if _call_of(thread, sys._getframe()) == (name, number):
        _end_with(error, registry, Call(name, number), thread)


def _end_with(error: BaseException | None, registry: Caller, call: Call, thread: int) -> None:
    """Note how a call has ended; if with the transport's error, raise one that says where all ranks are."""
    global _raised
    counts, given_up = _counts_of(thread), registry.topology.world_size > 1 and is_transport_error(error)
    counts[call.name] = counts.pop(call.name, call.number)  # what it called has begun after it
    if error is not None and counts is begun:
        _raised = call, (RuntimeError if given_up else type(error)).__name__
    if given_up:
        raise RuntimeError(_explained(call, registry.global_rank, registry.topology.world_size, error)) from error


def _counts_of(thread: int) -> dict[str, int]:
    return begun if thread == threading.main_thread().ident else _begun_in_threads


def _call_of(thread: int, frame: FrameType | None) -> Call | None:
    """The outermost call that a thread is in, which runs this frame."""
    if (found := _running.get(thread)) is not None:
        return found
    while frame is not None:
        name = _seen_on_the_stack.get(id(frame.f_code))
        if name is not None and "number" in frame.f_locals:  # else it has not begun
            found = Call(name, frame.f_locals["number"])
        frame = frame.f_back
    return found


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
        with in_call(registry, type(self).__name__) if hasattr(registry, "global_rank") else nullcontext():
            return init(self, *args, **kwargs)

    return cast(F, call)


def current_call() -> str | None:
    """The name of the call that this thread is in."""
    call = _call_of(threading.get_ident(), sys._getframe())
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


def _explained(call: Call, rank: int, world_size: int, error: BaseException | None) -> str:
    waited = f"rank {rank} {_IN_VAIN} in {call}"
    first_line, _, _ = str(error).partition("\n")
    said = f"torch says: {first_line}"
    answers = answers_of_others(rank)
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


def _doing() -> str:
    """What this process does now."""
    main, frames, counts = threading.main_thread().ident or 0, sys._current_frames(), begun.copy()
    del frames[threading.get_ident()]  # it has this frame, which has it
    calls = {thread: call for thread, frame in frames.items() if (call := _call_of(thread, frame)) is not None}
    call = calls.pop(main, None)
    if call is not None:
        doing = f"in {call}"
    else:
        last = next((Call(name, counts[name]) for name in reversed(counts)), None)
        ended = f"raised {_raised[1]}" if _raised is not None and _raised[0] == last else "returned"
        before = "" if last is None else f" (its last, {last}, {ended})"
        doing = f"in no call of meshstep{before}, but {_place(frames.get(main))}"
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


def answer_questions(world: dist.ProcessGroup) -> None:
    """From now on, answer other ranks that ask what this one does; once for each default group, which counts anew."""
    global _raised
    if start_answering(world, _doing):
        begun.clear()
        _raised = None
