"""`run_ranks`: run a function on ranks, with one pool per process that is created at the first call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from .interface import Ranks
from .launched import LaunchedRanks, was_launched
from .pool import RankPool

T = TypeVar("T")


@cache
def ranks_of_this_process() -> Ranks:
    """Return the ranks of this process: the processes of its launcher if there are several, else a pool."""
    return LaunchedRanks() if was_launched() else RankPool()


def run_ranks(function: Callable[..., T], world_size: int, *args: Any, timeout: float | None = None) -> list[T]:
    """Call ``function(*args)`` on ranks 0..world_size-1 and return the results by rank.

    The first call starts a pool of processes, which stays until this process exits. Under a launcher with several processes
    the function runs in these processes.

        def check() -> int:
            with ProcessGroupRegistry(Topology(tensor=4)) as registry:
                return registry.rank("tensor")

        if __name__ == "__main__":
            assert run_ranks(check, 4) == [0, 1, 2, 3]

    Args:
        function: A function at the top level of a module or script.
        world_size: Number of ranks.
        args: Arguments of the function; they must be picklable.
        timeout: Seconds that the call may take. None: 180.
    Returns:
        One result per rank.
    Raises:
        RanksError, TypeError, ValueError: As in `Ranks.run`.
    """
    return ranks_of_this_process().run(function, world_size, *args, timeout=timeout)
