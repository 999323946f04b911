"""The interface `Ranks` to call a function on several ranks, its error `RanksError`, and the serialization of calls."""

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
from ..mesh.value_checks import is_whole

T = TypeVar("T")
Own = TypeVar("Own", bound="Ranks")

TIMEOUT = 180.0  # default timeout of a call of `run`, in seconds
CASES_A_CALL = 25  # number of cases that `run_each` passes to one call of `run`, to keep each call below its timeout


class Ranks(ABC):
    """Interface of objects that call a function on several ranks: a `RankPool`, or the processes of a launcher.

        def test_norm(ranks):                                   # the pytest fixture
            assert ranks.run(norm_of_my_model, 4) == [dense_norm] * 4

    Before the function is called on a rank, the default process group is initialized, and torch's global seed is set to
    0. The function must destroy the process groups that it creates, for example by closing its registry. Define the
    function at the top level of a module or script, because other processes find it by its name.

    Attributes:
        timeout: Seconds that a call of `run` without a timeout argument may take.
    """

    timeout: float

    @abstractmethod
    def run(self, function: Callable[..., T], world_size: int, *args: Any, timeout: float | None = None) -> list[T]:
        """Call ``function(*args)`` on ranks 0..world_size-1 and return the results by rank.

        Args:
            function: A function at the top level of a module or script. Use ``functools.partial`` for keyword arguments.
            world_size: Number of ranks.
            args: Arguments of the function, the same on all ranks. Arguments and results must be picklable.
            timeout: Seconds that the call may take. None: ``self.timeout``. The timeout of collectives on the default
                group is a third of this time.
        Returns:
            One result per rank.
        Raises:
            RanksError: A rank raised an error, died, or exceeded the timeout; or its result can't be pickled. The
                message has the traceback of each rank that raised, and the current stack of each rank that did not
                finish.
            TypeError: Other processes can't find the function by its name, or an argument can't be pickled.
            ValueError: ``world_size`` is not a positive integer.
        """

    @abstractmethod
    def close(self) -> None:
        """End the processes or the process groups that are kept between calls. The next `run` starts new ones."""

    def run_each(self, function: Callable[..., T], cases: Sequence[tuple[int, tuple[Any, ...]]]) -> list[list[T]]:
        """Run a function for several cases and return the results in the order of the cases.

        This is faster than one `run` per case: up to 25 cases with the same world size share one `run`. The traceback
        of a failed rank shows the arguments of the case.

        Args:
            function: A function at the top level of a module or script.
            cases: (world_size, args) per case: the number of ranks, and the tuple of arguments of the function.
        Returns:
            Per case, the list of the results by rank.
        Raises:
            RanksError: A rank raised an error, died, or exceeded the timeout of one `run`, ``self.timeout`` seconds.
            TypeError: Other processes can't find the function by its name, or an argument can't be pickled.
            ValueError: A world size is not a positive integer.
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
    """Call ``function(*args)`` on this rank for the ``args`` of each case, with torch's seed 0, and return the results."""
    results = []
    for args in cases:
        torch.manual_seed(0)
        try:
            results.append(function(*args))
        except Exception as error:
            name = getattr(function, "__qualname__", repr(function))  # a functools.partial has no __qualname__
            raise RuntimeError(f"{name} raised {type(error).__name__} for the arguments {args!r}") from error
    return results


def check_size(world_size: int) -> None:
    if not is_whole(world_size, 1):
        raise ValueError(f"{world_size!r} is not a number of ranks; give an integer >= 1: run(function, 4, *arguments)")


# The error of a call on several ranks: the tracebacks of all ranks, without repetitions -------------------------------


class RanksError(AssertionError):
    """Error of a call on ranks: at least one rank raised an error, died, exceeded the timeout, or did not make the call.

        try:
            run_ranks(check, 4)
        except RanksError as error:
            print(error.failures)           # {0: the traceback of rank 0, ...}: the failed ranks only

    Args:
        function: Name of the function that was called.
        world_size: Number of ranks of the call.
        failures: Text per failed rank: a traceback, the stack of a rank that did not finish, or the cause of its death.
        called: False: the ranks in ``failures`` did not make the call. Default: True.

    Attributes:
        failures: Text per failed rank, sorted by rank.
    """

    def __init__(self, function: str, world_size: int, failures: Mapping[int, str], called: bool = True) -> None:
        self.failures = dict(sorted(failures.items()))
        ranks_of: dict[str, list[int]] = {}
        for rank, text in self.failures.items():
            ranks_of.setdefault(text.strip(), []).append(rank)
        # Tracebacks are shown first, because a rank that did not finish usually waited for a rank that raised an error.
        causes_first = sorted(ranks_of.items(), key=lambda item: not item[0].startswith("Traceback"))
        paragraphs = (f"{named_ranks(ranks)}: {text}" for text, ranks in causes_first)
        count = f"{len(failures)} of {world_size} ranks" if world_size > 1 else "the only rank"
        problem = f"failed in {function}" if called else f"did not make the call run({function}, ...)"
        super().__init__("\n\n".join([f"{count} {problem}", *paragraphs]))
        self._arguments = function, world_size, self.failures, called

    def __reduce__(self) -> tuple[type[RanksError], tuple[str, int, dict[int, str], bool]]:
        """Pickle the arguments of the constructor, because pytest-xdist sends errors between processes."""
        return type(self), self._arguments


# Serialization of a call for another process: the function by name, its arguments by value ----------------------------

# The receiving process imports the function's module with the `sys.path` of the caller. If this path does not lead to the
# file of the module in the calling process, the receiving process imports the module from this file. Test files of
# pytest often need this. Functions of the script itself (``__main__``) work too, because `multiprocessing` imports the
# script in each worker. Scripts therefore need ``if __name__ == "__main__":``.


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function for errors: module and qualified name, such as ``test_layers.check_norm``."""
    inner: Any = _unwrap_partial(function)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    return f"{_module_of(inner)}.{name}"


def encoded(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return the call ``function(*args)`` as bytes, which `decoded` reads in another process."""
    _check_importable(function)
    module = sys.modules.get(_module_of(_unwrap_partial(function)))
    home = (module.__name__, getattr(module, "__file__", None)) if module is not None else ("", None)
    try:
        call = pickle.dumps((function, args))
    except Exception as error:  # any type, because arguments may define their own pickling
        raise TypeError(
            f"the arguments of {name_of(function)} can't be sent to other processes ({error}): pass picklable objects, "
            "such as tensors, numbers, strings and dataclasses, and create models and registries in the function"
        ) from error
    return pickle.dumps((sys.path, home, call))


def decoded(message: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function and the arguments of `encoded`, after setting `sys.path` and importing the function's module."""
    path, (module, file), call = pickle.loads(message)
    sys.path[:] = path
    if file is not None and module != "__main__":
        _import(module, file)
    function, args = pickle.loads(call)
    return function, args


def result_of(value: object, function: Callable[..., Any]) -> bytes:
    """Return ``value``, the result of ``function`` on a rank, as pickled bytes."""
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"{name_of(function)} returned {type(value).__name__}, which can't be sent back ({error}): return picklable "
            "objects, such as tensors, numbers, strings and dataclasses"
        ) from error


def _check_importable(function: Callable[..., Any]) -> None:
    inner: Any = _unwrap_partial(function)
    name, module = getattr(inner, "__qualname__", ""), _module_of(inner)
    if "<" in name:
        kind = "a lambda" if name.endswith("<lambda>") else f"defined within {name.partition('.<locals>')[0]}"
        raise TypeError(
            f"{module}.{name} is {kind}, but other processes find functions by their names. Define it with def at the top "
            "level of its module, and pass the objects that it uses as arguments"
        )
    main: Any = sys.modules.get("__main__")
    if module == "__main__" and getattr(main, "__file__", None) is None and getattr(main, "__spec__", None) is None:
        raise TypeError(
            f"{name} is defined in an interactive session, a notebook or by python -c, which other processes can't import: "
            "write the function into a file and import it from there"
        )


def _unwrap_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, partial):
        function = function.func
    return function


def _module_of(function: object) -> str:
    return getattr(function, "__module__", None) or type(function).__module__


def _import(name: str, file: str) -> None:
    """Import the module ``name`` from ``file``, unless it is imported already, or `sys.path` leads to ``file``."""
    if name in sys.modules:
        return
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # raised if the package that contains the module is not on the path
        spec = None
    if spec is not None and spec.origin == file:
        return  # unpickling imports it
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
