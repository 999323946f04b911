"""What a test calls: a function on several ranks, wherever these come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Own = TypeVar("Own", bound="Ranks")

TIMEOUT = 180.0  # seconds, of a call
CASES_A_CALL = 25  # of `run_each`: a call comes to an end well within its timeout


class Ranks(ABC):
    """``run(function, n, *args)`` calls ``function(*args)`` on ranks 0..n-1: in a `RankPool`, or in launched processes.

    On each rank the default process group is initialised, and the global seed is 0. Process groups that the function makes
    are its own to end (a registry is closed). The function is found by its name: define it at the top of a module or script
    (see `by_value`).
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
