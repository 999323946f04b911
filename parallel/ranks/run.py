"""`run_ranks`, for a call here and there: the pool is made at the first one and stays until the process ends."""

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
    """A pool; where a launcher has started this process as one of several, those."""
    return LaunchedRanks() if was_launched() else RankPool()


def run_ranks(function: Callable[..., T], world_size: int, *args: Any, timeout: float | None = None) -> list[T]:
    """Results of ``function(*args)`` on ranks 0..world_size-1, by rank; see `Ranks.run`.

        def check() -> int:
            with ProcessGroupRegistry(Topology(tensor=4)) as registry:
                return registry.rank("tensor")

        if __name__ == "__main__":
            assert run_ranks(check, 4) == [0, 1, 2, 3]

    Raises:
        As `Ranks.run`.
    """
    return ranks_of_this_process().run(function, world_size, *args, timeout=timeout)
