"""The suite's pool of ranks: `meshstep.testing.RankPool` with the modules that tests use preloaded."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from queue import SimpleQueue
from typing import Any, TypeVar

from meshstep.parallel.ranks.interface import RanksError
from meshstep.parallel.ranks.pool import PRELOAD as OF_EVERY_POOL
from meshstep.parallel.ranks.pool import RankPool

T = TypeVar("T")

# The server process imports these modules once. If each worker imported them, some on first use, it would take seconds.
OF_TESTS = ("torch.distributed.checkpoint", "hypothesis.strategies", "pytest", "unittest.mock")
OF_EXAMPLES = ("sklearn.datasets", "torchvision.datasets", "tqdm")  # imported if installed
PRELOAD = [*OF_EVERY_POOL, *OF_TESTS, *OF_EXAMPLES]
WorldError = RanksError


class World:
    """A pool whose calls begin with the number of ranks: ``world.run(4, f, *args)``."""

    def __init__(self) -> None:
        self.ranks = RankPool(preload=(*OF_TESTS, *OF_EXAMPLES), initializer=destroy_in_a_thread)

    def run(self, world_size: int, function: Callable[..., T], *args: Any) -> list[T]:
        """Run a function on ranks, as `Ranks.run` does."""
        return self.ranks.run(function, world_size, *args)

    def run_each(self, function: Callable[..., T], cases: Sequence[tuple[int, tuple[Any, ...]]]) -> list[list[T]]:
        """Run a function on ranks for each case, as `Ranks.run_each` does."""
        return self.ranks.run_each(function, cases)

    def close(self) -> None:
        """End all worker processes, as `Ranks.close` does."""
        self.ranks.close()


def forkserver() -> ForkServerContext:
    """Return the context that forks processes from the same server process as the ranks of a `World`; started on first
    use."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def printed_by(function: Callable[..., object], *args: Any) -> str:
    """Return the stdout of ``function`` on this rank."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        function(*args)
    return printed.getvalue()


def destroy_in_a_thread() -> None:
    """Make `dist.destroy_process_group` free process groups in another thread. Ending gloo's threads takes up to 10 ms,
    for which the caller need not wait."""
    import torch.distributed as dist

    ended: SimpleQueue[object] = SimpleQueue()

    def end() -> None:
        while True:
            groups = [ended.get()]
            time.sleep(0.05)  # wait until the caller has dropped its reference: the group ends with the last reference
            while not ended.empty():
                groups.append(ended.get())
            while groups:
                groups.pop()

    threading.Thread(target=end, name="ends groups", daemon=True).start()
    destroy = dist.destroy_process_group

    def destroyed(group: dist.ProcessGroup | None = None) -> None:
        ended.put(group or dist.group.WORLD)
        destroy(group)

    setattr(dist, "destroy_process_group", destroyed)  # noqa: B010 (mypy)
