"""The files of a checkpoint that hold no tensors, and their use on all ranks at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...parallel.mesh.agreement import gather_objects, on_all_ranks
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.text import printable
from .checksums import EARLIER

T = TypeVar("T")
SHARED_FILE = "shared.pt"  # what belongs to all ranks; written by rank 0


def rank_file(rank: int) -> str:
    """The name of the file with what belongs to one rank: the states of its random number generators."""
    return f"rank-{rank}.pt"


def plain_content(file: Path) -> Any:
    """What a file holds that `torch.save` wrote: tensors on the CPU, numbers and strings, in lists, tuples and dicts.

    Raises:
        ValueError: It is something else. Nothing has been executed.
        OSError: It can't be read.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as problem:
        reason = printable((str(problem).splitlines() or [type(problem).__name__])[0])
        # Not from it: a traceback would print torch's text, which quotes the file, as it is.
        raise ValueError(f"{file} is damaged, or was planted: {reason}; {EARLIER}") from None


def files_on_all_ranks(function: Callable[[], T], registry: ProcessGroupRegistry) -> T:
    """As `on_all_ranks`, for what uses files: an OSError on any rank is a RuntimeError on every rank, and errors that quote
    a file have `printable` text.

    Collectives, host reads: as there.
    """

    def run() -> T:
        try:
            return function()
        except OSError as problem:
            raise RuntimeError(printable(f"{type(problem).__name__}: {problem}")) from problem
        except ValueError as problem:
            if str(problem).isprintable():
                raise
            raise ValueError(printable(str(problem))) from None

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
