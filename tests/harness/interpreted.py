"""Processes that run Triton kernels in Triton's interpreter, on CPU tensors.

Triton reads the variable TRITON_INTERPRET when it is imported, and torch's compiler imports Triton in most processes.
So these processes are forked from a server of their own, and not from the server of other pools.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

from meshstep.optim import use_kernels
from meshstep.parallel.ranks.pool import RankPool
from world import PRELOAD

if TYPE_CHECKING:
    from meshstep.optim.kernels.triton import Triton

T = TypeVar("T")
INTERPRETER = {"TRITON_INTERPRET": "1"}


def why_no_triton() -> str:
    """Return the reason why Triton kernels cannot run here; empty if they can."""
    return "" if find_spec("triton") else "needs the package triton, which this torch came without"


class Interpreted:
    """A pool of processes that use Triton kernels, in Triton's interpreter."""

    def __init__(self) -> None:
        self.ranks = RankPool(initializer=_choose)
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload([*PRELOAD, "meshstep.optim.kernels.triton"])

    def run(self, world_size: int, function: Callable[..., T], *args: Any) -> list[T]:
        # The first call starts the server, which keeps the environment.
        connect = mock.patch.object(forkserver, "connect_to_new_process", self._server.connect_to_new_process)
        with mock.patch.dict(os.environ, INTERPRETER), connect:
            return self.ranks.run(function, world_size, *args)

    def __call__(self, function: Callable[..., T], *args: Any) -> T:
        return self.run(1, function, *args)[0]


@contextmanager
def interpreted_pool() -> Iterator[Interpreted]:
    pool = Interpreted()
    try:
        yield pool
    finally:
        pool.ranks.close()


def _choose() -> None:
    warnings.simplefilter("error")
    use_kernels("triton")


@cache
def kernels() -> Triton:
    from meshstep.optim.kernels.triton import Triton

    found = Triton()
    assert found.interpreted
    return found
