"""The same calls where a launcher has started the ranks: ``torchrun --nproc-per-node 4 -m pytest``.

Every process runs the whole program, so each comes to the same calls in the same order. In a call of n ranks the first n
processes compute and the others wait; all get all results, or all the same error. What they tell each other goes through
the launcher's store, not through collectives, because those are what may fail.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar
from unittest import SkipTest

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from ..launch import init_distributed
from ..launch.start import read_environment
from ..mesh.agreement import describe
from ..mesh.call_tracker import format_thread_stack
from ..mesh.text import named_ranks
from .interface import TIMEOUT, Ranks, RanksError, check_size, decoded, encoded, name_of, result_of

# Put aside ------------------------------------------------------------------------------------------------------------

# Another default process group for a while: what torch knows of process groups is put aside, and comes back untouched.

# Tables by group or by tag; an older torch lacks some.
_TABLES = (
    *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state"),
    *("pg_flight_recorder_hooks", "comms"),
)


class ProcessGroups:
    """A default group and all that were made beside it, which are either torch's now, or kept here.

    Args:
        first_name: torch calls default groups by numbers, which must be the same on all members and nobody else's in this
            process: the first number to take.
    """

    def __init__(self, first_name: int) -> None:
        self._kept: dict[str, Any] = {}
        self._count = first_name
        self._default: dist.ProcessGroup | None = None

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Within it, `torch.distributed` has these groups, and those that it had before are out of its reach."""
        before = ProcessGroups(0)
        before._take()
        self._give()
        hook = sys.excepthook  # of which each default group puts one on top
        try:
            yield
        finally:
            sys.excepthook = hook
            self._take()
            before._give()

    def end(self) -> None:
        """Destroy them, without a wait for others' collectives."""
        with self.in_force():
            if dist.is_initialized() and "nccl" in dist.get_backend_config():
                distributed_c10d._abort_process_group()
            elif dist.is_initialized():
                dist.destroy_process_group()

    def _take(self) -> None:
        world: Any = distributed_c10d._world
        for name in _TABLES:
            table = getattr(world, name, None)
            if table is not None:
                self._kept[name] = table.copy()
                table.clear()
        self._count, self._default = world.group_count, world.default_pg
        for name in self._kept["pg_names"].values():
            _distributed_c10d._unregister_process_group(name)
        distributed_c10d._update_default_pg(None)

    def _give(self) -> None:
        world: Any = distributed_c10d._world
        for name, kept in self._kept.items():
            table = getattr(world, name)
            table.clear()
            table.extend(kept) if isinstance(table, list) else table.update(kept)
        for group, name in self._kept.get("pg_names", {}).items():
            _distributed_c10d._register_process_group(name, group)
        world.group_count = self._count
        distributed_c10d._update_default_pg(self._default)


# Launched -------------------------------------------------------------------------------------------------------------

T = TypeVar("T")

LOOKS_EVERY = 0.01  # seconds
_PIECE = 4 << 20  # bytes: the store takes 8 MB at once
_NAMES_OF_A_GROUP = 10**6


def was_launched() -> bool:
    """Whether a launcher has started this process as one of several."""
    try:
        return read_environment(os.environ).world_size > 1
    except RuntimeError:  # in a shell of a batch system, say, whose variables name no rank
        return False


class LaunchedRanks(Ranks):
    """The launched processes as `Ranks`. Over NCCL where each has a CUDA device (see `registry.device`), else over gloo.

    Args:
        timeout: As in `Ranks`.
    """

    def __init__(self, *, timeout: float = TIMEOUT) -> None:
        self.timeout = timeout
        local = int(os.environ.get("LOCAL_WORLD_SIZE", read_environment(os.environ).world_size))
        enough = torch.cuda.is_available() and torch.cuda.device_count() >= local
        self._made_default = not dist.is_initialized()
        self._launch = init_distributed(None if enough else "gloo")
        self._store: Any = PrefixStore("meshstep/ranks", distributed_c10d._get_default_store())
        self._calls = self._stages = 0
        self._groups: ProcessGroups | None = None
        self._of: tuple[int, float] | None = (
            None  # world size and timeout of the groups, also where this rank is in none
        )

    def run(self, function: Callable[..., T], world_size: int, *args: Any, timeout: float | None = None) -> list[T]:
        """As `Ranks.run`, by all launched processes together.

        Raises:
            unittest.SkipTest: There are fewer processes than ranks.
            RanksError, TypeError: As there; and where a process has left the test.
            ValueError: Processes call different functions, or with different arguments.
        """
        check_size(world_size)
        call = encoded(function, args)
        there = self._launch.world_size
        if world_size > there:
            raise SkipTest(f"{name_of(function)} needs {world_size} ranks, and {there} processes were launched")
        timeout = self.timeout if timeout is None else timeout
        self._calls += 1
        self._check_same((name_of(function), world_size, args), timeout)
        self._forget(f"reply/{self._calls - 1}")  # all have read it, or they would not be here
        if self._of != (world_size, timeout):
            self.close()
            self._of = world_size, timeout
        if self._launch.rank < world_size:
            self._reply(function, call)
        replies = self._gather(f"reply/{self._calls}", range(world_size), timeout + 10.0)
        failures = {rank: content for rank, (succeeded, content) in replies.items() if not succeeded}
        if failures:
            self.close()
            raise RanksError(name_of(function), world_size, failures)
        return [pickle.loads(replies[rank][1]) for rank in range(world_size)]

    def agreed(self, outcome: str) -> dict[int, str]:
        """What each process says of the test that it has come to the end of, by rank; "" where all is well. A process
        that waits for this one in `run` learns of it."""
        key = f"end/{self._stages}"
        self._post(key, (outcome, self._calls))
        self._stages += 1
        try:
            said = self._gather(key, range(self._launch.world_size), self.timeout + 20.0)
        except RanksError as error:
            return error.failures
        outcomes, calls = zip(*said.values(), strict=True)
        if any(outcomes) or len({*calls}) > 1:
            self.close()
            self._calls = max(calls)
        return dict(zip(said, outcomes, strict=True))

    def close(self) -> None:
        """End the process groups of calls; the next call makes new ones."""
        if self._groups is not None:
            self._groups.end()
        self._groups = self._of = None

    def leave(self) -> None:
        """At the end of all: end what was made here. The process that has the store stays until the others are done."""
        self.close()
        self._post("leave", None)
        if self._launch.rank == 0:
            with suppress(RanksError):
                self._gather("leave", range(self._launch.world_size), self.timeout)
        if self._made_default and dist.is_initialized():
            dist.destroy_process_group()

    def _reply(self, function: Callable[..., Any], call: bytes) -> None:
        """Call it, and tell all what came of it: once, either when it ends or when its time is over."""
        assert self._of is not None
        key, timeout, once = f"reply/{self._calls}", self._of[1], threading.Lock()
        main = threading.get_ident()

        def reply(succeeded: bool, content: bytes | str) -> None:
            if once.acquire(blocking=False):
                self._post(key, (succeeded, content))

        late = threading.Timer(timeout, lambda: reply(False, _standing(main, timeout)))
        late.daemon = True
        late.start()
        try:
            reply(True, self._called(function, call))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # those of pytest.fail as well
            text = traceback.format_exc()
            self.close()  # before anything else: who waits for this rank in a collective gets an error
            reply(False, text)
        finally:
            late.cancel()

    def _called(self, function: Callable[..., Any], call: bytes) -> bytes:
        assert self._of is not None
        if self._groups is None:
            self._groups = ProcessGroups(_NAMES_OF_A_GROUP * self._calls)
        with self._groups.in_force():
            if not dist.is_initialized():
                self._join(*self._of)
            copy, args = decoded(call)
            torch.manual_seed(0)
            return result_of(copy(*args), function)

    def _join(self, world_size: int, timeout: float) -> None:
        device = self._launch.device
        dist.init_process_group(
            self._launch.backend,
            store=PrefixStore(f"group/{self._calls}", self._store),
            rank=self._launch.rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout / 3),
            device_id=device if device.type == "cuda" else None,
        )

    def _check_same(self, what: tuple[Any, ...], timeout: float) -> None:
        self._post(f"call/{self._calls}", describe(what))
        said = self._gather(f"call/{self._calls}", range(self._launch.world_size), timeout)
        ranks_of: dict[str, list[int]] = {}
        for rank in sorted(said):
            ranks_of.setdefault(said[rank], []).append(rank)
        if len(ranks_of) > 1:
            told = "; ".join(f"{named_ranks(ranks)}: {text}" for text, ranks in ranks_of.items())
            raise ValueError(
                f"the launched processes call different things ({told}): each runs the whole test, and must come to the "
                "same calls with the same arguments. Seed what is random"
            )

    # What is told through the store -----------------------------------------------------------------------------------

    def _post(self, key: str, value: object) -> None:
        data = pickle.dumps(value)
        own = f"{key}/{self._launch.rank}"
        pieces = [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)]
        for number, piece in enumerate(pieces):
            self._store.set(f"{own}/{number}", piece)
        self._store.set(own, str(len(pieces)))

    def _read(self, key: str, rank: int) -> Any:
        pieces = range(int(self._store.get(f"{key}/{rank}")))
        return pickle.loads(b"".join(self._store.get(f"{key}/{rank}/{number}") for number in pieces))

    def _forget(self, key: str) -> None:
        own = f"{key}/{self._launch.rank}"
        if self._store.check([own]):
            for number in range(int(self._store.get(own))):
                self._store.delete_key(f"{own}/{number}")
            self._store.delete_key(own)

    def _gather(self, key: str, ranks: Sequence[int], timeout: float) -> dict[int, Any]:
        """What these ranks have posted, by rank.

        Raises:
            RanksError: One has left the test, or does not come in time.
        """
        deadline, end = time.monotonic() + timeout, f"end/{self._stages}"
        while True:
            # In this order: what a rank posted before it left is there when it is seen to have left.
            gone = [rank for rank in ranks if self._store.check([f"{end}/{rank}"])]
            waiting = [rank for rank in ranks if not self._store.check([f"{key}/{rank}"])]
            if not waiting:
                break
            left = [rank for rank in waiting if rank in gone]
            failures = {rank: f"left the test: {self._read(end, rank)[0] or 'it passed there'}" for rank in left}
            if time.monotonic() > deadline:
                failures |= dict.fromkeys(waiting, f"did not come within {timeout:g} seconds")
            if failures:
                self.close()
                raise RanksError("the test", self._launch.world_size, failures)
            time.sleep(LOOKS_EVERY)
        return {rank: self._read(key, rank) for rank in ranks}


def _standing(thread: int | None, timeout: float) -> str:
    return f"did not come to an end within {timeout:g} seconds; it stood at\n{format_thread_stack(thread)}"
