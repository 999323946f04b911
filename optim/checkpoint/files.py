"""The files of a checkpoint that hold no tensors, and their use on all ranks at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ...parallel.mesh.agreement import gather_objects, on_all_ranks
from ...parallel.mesh.registry import ProcessGroupRegistry

T = TypeVar("T")
SHARED_FILE = "shared.pt"  # what belongs to all ranks; written by rank 0


def rank_file(rank: int) -> str:
    """The name of the file with what belongs to one rank: the states of its random number generators."""
    return f"rank-{rank}.pt"


def files_on_all_ranks(function: Callable[[], T], registry: ProcessGroupRegistry) -> T:
    """As `on_all_ranks`, for what uses files: an OSError on any rank is a RuntimeError on every rank.

    Collectives, host reads: as there.
    """

    def run() -> T:
        try:
            return function()
        except OSError as problem:
            raise RuntimeError(f"{type(problem).__name__}: {problem}") from problem

    return on_all_ranks(run, registry)


def files_on_first_rank(function: Callable[[], T], registry: ProcessGroupRegistry) -> T:
    """What ``function`` returns on rank 0, which alone calls it; its error is raised on every rank.

    Raises:
        As `files_on_all_ranks`.
    Collectives: those of `on_all_ranks`, and of `gather_objects`. Host reads: yes.
    """
    first = registry.global_rank == 0
    found = files_on_all_ranks(lambda: function() if first else None, registry)
    return gather_objects(found, registry)[0]  # type: ignore[return-value]
