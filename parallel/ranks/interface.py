"""What a test calls: a function on several ranks, wherever these come from."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch

from ..mesh.text import named_ranks

T = TypeVar("T")
Own = TypeVar("Own", bound="Ranks")

TIMEOUT = 180.0  # seconds, of a call
CASES_A_CALL = 25  # of `run_each`: a call comes to an end well within its timeout


class Ranks(ABC):
    """``run(function, n, *args)`` calls ``function(*args)`` on ranks 0..n-1: in a `RankPool`, or in launched processes.

    On each rank the default process group is initialised, and the global seed is 0. Process groups that the function makes
    are its own to end (a registry is closed). The function is found by its name: define it at the top of a module or script
    (see `encoded`).
    """

    timeout: float

    @abstractmethod
    def run(self, function: Callable[..., T], world_size: int, *args: Any, timeout: float | None = None) -> list[T]:
        """Results of ``function(*args)`` by rank.

        Args:
            function: Found by its name in the workers; ``functools.partial`` of one brings keyword arguments.
            world_size: Number of ranks.
            args: Pickled, once for all ranks. So are the results.
            timeout: Seconds, instead of ``self.timeout``. A third of it is that of the default group's collectives.
        Raises:
            RanksError: A rank raised, died, or did not come to an end in time: the message has the traceback of each rank
                that failed, and where each other one stood.
            TypeError: The function can't be found by its name, or an argument can't be pickled.
            ValueError: The world size is no positive number.
        """

    @abstractmethod
    def close(self) -> None:
        """End what is kept from call to call; the next call makes it anew. A second call does nothing."""

    def run_each(self, function: Callable[..., T], cases: Sequence[tuple[int, tuple[Any, ...]]]) -> list[list[T]]:
        """For each ``(world_size, args)`` what ``run(function, world_size, *args)`` returns, in the order of the cases.

        Those of one world size run together, a few dozen a call: another size costs a new default group, and each call a
        round trip to all workers. The traceback of a rank that raises names the case.
        """
        results: dict[int, list[T]] = {}
        for size in sorted({size for size, _ in cases}):
            indices = [index for index, (of_case, _) in enumerate(cases) if of_case == size]
            for start in range(0, len(indices), CASES_A_CALL):
                chunk = indices[start : start + CASES_A_CALL]
                by_rank = self.run(each, size, function, [cases[index][1] for index in chunk])
                results.update(zip(chunk, map(list, zip(*by_rank, strict=True)), strict=True))
        return [results[index] for index in range(len(cases))]

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def each(function: Callable[..., T], cases: Sequence[tuple[Any, ...]]) -> list[T]:
    """On one rank: the function of each case, as if it were called alone."""
    results = []
    for args in cases:
        torch.manual_seed(0)
        try:
            results.append(function(*args))
        except Exception as error:
            raise RuntimeError(f"in the case {', '.join(map(repr, args))}") from error
    return results


def check_size(world_size: int) -> None:
    """Raise ValueError unless it is a number of ranks."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"{world_size!r} is no number of ranks; give 1 or more: run(function, 4, *arguments)")


# What a call on several ranks raises: the tracebacks of all ranks together, each text once ----------------------------


class RanksError(AssertionError):
    """At least one rank raised, died or did not come to an end.

    Args:
        function: What the ranks called, by name.
        world_size: How many were to call it.
        failures: By rank, what was wrong there: a traceback, or where the rank stood.
    """

    def __init__(self, function: str, world_size: int, failures: Mapping[int, str]) -> None:
        self.failures = dict(sorted(failures.items()))
        ranks_of: dict[str, list[int]] = {}
        for rank, text in self.failures.items():
            ranks_of.setdefault(text.strip(), []).append(rank)
        # First those that raised: where others stood is what followed from it.
        causes_first = sorted(ranks_of.items(), key=lambda item: not item[0].startswith("Traceback"))
        told = (f"{named_ranks(ranks)}: {text}" for text, ranks in causes_first)
        count = f"{len(failures)} of {world_size} ranks" if world_size > 1 else "the only rank"
        super().__init__("\n\n".join([f"{count} failed in {function}", *told]))
        self._arguments = function, world_size, self.failures

    def __reduce__(self) -> tuple[type[RanksError], tuple[str, int, dict[int, str]]]:
        """Processes that share tests (pytest-xdist) send errors to each other."""
        return type(self), self._arguments


# A call on its way to another process: the function by its name, its arguments by value -------------------------------

# A process that gets it imports the function's module, from the caller's `sys.path`, or from the module's file where that
# is not the one on the path: pytest's test files, and those that are imported under a name of their own. Functions of the
# script itself (``__main__``) are found too: `multiprocessing` imports the script in each worker, hence the usual ``if
# __name__ == "__main__":``.


def name_of(function: Callable[..., Any]) -> str:
    """What errors call a function: ``test_layers.check_norm``."""
    whole: Any = _unwrapped(function)
    name = getattr(whole, "__qualname__", type(whole).__qualname__)
    return f"{_module_of(whole)}.{name}"


def encoded(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The call, for `decoded` in another process.

    Raises:
        TypeError: The function can't be found by its name there, or an argument can't be pickled.
    """
    _check_importable(function)
    module = sys.modules.get(_module_of(_unwrapped(function)))
    home = (module.__name__, getattr(module, "__file__", None)) if module is not None else ("", None)
    try:
        call = pickle.dumps((function, args))
    except Exception as error:  # what an argument's own pickling raises
        raise TypeError(
            f"the arguments of {name_of(function)} can't be sent to other processes ({error}): pass what pickle takes, "
            "tensors, numbers, strings, dataclasses, and make models and registries in the function"
        ) from error
    return pickle.dumps((sys.path, home, call))


def decoded(message: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and its arguments, in the process that runs it."""
    path, (module, file), call = pickle.loads(message)
    sys.path[:] = path
    if file is not None and module != "__main__":
        _import(module, file)
    function, args = pickle.loads(call)
    return function, args


def result_of(value: object, function: Callable[..., Any]) -> bytes:
    """What a rank returned, to be read with `pickle`.

    Raises:
        TypeError: It can't be pickled.
    """
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"{name_of(function)} returned {type(value).__name__}, which can't be sent back ({error}): return what pickle "
            "takes, tensors, numbers, strings, dataclasses"
        ) from error


def _check_importable(function: Callable[..., Any]) -> None:
    whole: Any = _unwrapped(function)
    name, module = getattr(whole, "__qualname__", ""), _module_of(whole)
    if "<" in name:
        what = "a lambda" if name.endswith("<lambda>") else f"defined within {name.partition('.<locals>')[0]}"
        raise TypeError(
            f"{module}.{name} is {what}: other processes find functions by their names. Define it with def at the top of "
            "its module, and pass what it uses as arguments"
        )
    main: Any = sys.modules.get("__main__")
    if module == "__main__" and getattr(main, "__file__", None) is None and getattr(main, "__spec__", None) is None:
        raise TypeError(
            f"{name} is defined in an interactive session, a notebook or by python -c, which other processes can't import: "
            "write it into a file and import it from there"
        )


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, partial):
        function = function.func
    return function


def _module_of(function: object) -> str:
    return getattr(function, "__module__", None) or type(function).__module__


def _import(name: str, file: str) -> None:
    """Make sure that ``name`` is the module of this file."""
    if name in sys.modules:
        return
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # of a package that isn't on the path
        spec = None
    if spec is not None and spec.origin == file:
        return  # pickle imports it
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
