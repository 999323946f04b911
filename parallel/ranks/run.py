"""Run functions on ranks: in a pool of processes, in the processes of a launcher, or on one rank of a fake world."""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar
from unittest import SkipTest

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from ..launch import init_distributed, read_environment
from ..mesh.agreement import describe
from ..mesh.call_tracker import format_thread_stack
from ..mesh.text import named_ranks
from .interface import TIMEOUT, Ranks, RanksError, check_size, decoded, encoded, name_of, result_of
from .pool import RankPool

T = TypeVar("T")


@cache
def ranks_of_this_process() -> Ranks:
    """Return the `Ranks` of this process: the processes of its launcher if there are several, else a `RankPool`."""
    return LaunchedRanks() if was_launched() else RankPool()


def run_ranks(function: Callable[..., T], world_size: int, *args: Any, timeout: float | None = None) -> list[T]:
    """Call ``function(*args)`` on ranks 0..world_size-1 and return the results by rank.

    The first call starts a pool of processes, which later calls reuse. If a launcher such as torchrun has started several
    processes, the function runs in these processes instead.

        def check() -> int:
            with ProcessGroupRegistry(Topology(tensor=4)) as registry:
                return registry.rank("tensor")

        if __name__ == "__main__":
            assert run_ranks(check, 4) == [0, 1, 2, 3]

    Args:
        function: A function at the top level of a module or script.
        world_size: Number of ranks.
        args: Arguments of the function, the same on all ranks; they must be picklable, as must the results.
        timeout: Seconds that the call may take. None: 180. The timeout of collectives on the default group is a third of
            this time.
    Returns:
        One result per rank.
    Raises:
        RanksError: A rank raised an error, died, or exceeded the timeout. The message has the tracebacks.
        TypeError: Other processes can't find the function by its name, or an argument can't be pickled.
        ValueError: ``world_size`` is not a positive integer; or the processes of a launcher make different calls.
        unittest.SkipTest: A launcher has started several processes, but fewer than ``world_size``.
    """
    return ranks_of_this_process().run(function, world_size, *args, timeout=timeout)


# A fake world ---------------------------------------------------------------------------------------------------------

_worlds = itertools.count(1)
_NAMES_OF_A_WORLD = 10**6  # numbers reserved for the names of the process groups of one fake world


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """Context manager in which this process is one rank of a world of ``size`` ranks, over torch's fake backend.

    Collectives return immediately without communication. Their results have the correct shape, but incorrect values.

        with fake_world(4096, rank=77), ProcessGroupRegistry(Topology(data=64, tensor=64)) as registry:
            print(registry.coordinate)                 # {'data': 1, 'tensor': 13}

    In the block, the fake world replaces the default process group of this process, which is restored afterwards. Fake
    worlds may be nested.

    Args:
        size: Number of ranks.
        rank: Rank of this process. Default: the first rank.
    Raises:
        ValueError: ``rank`` is not in 0..size-1.
    """
    # The import is in the function, because other versions of torch may lack this private module.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} isn't in a world of {size} ranks; give a rank from 0 to {size - 1}")
    groups = ProcessGroups(-_NAMES_OF_A_WORLD * next(_worlds))
    try:
        with groups.activate():
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
            yield
    finally:
        groups.end()


# Process group swap ---------------------------------------------------------------------------------------------------

# To replace the default process group temporarily, torch's tables of process groups are saved, and later restored
# unchanged.

# Names of the tables. Some versions of torch do not have all of these tables.
_TABLES = (
    *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state"),
    *("pg_flight_recorder_hooks", "comms"),
)


class ProcessGroups:
    """A default process group, and all process groups that were created while it was the default group.

    In the block of `activate`, `torch.distributed` uses these groups. At other times this object stores them.
    ``first_name`` is the first of the consecutive numbers with which torch names these groups. The number must be the same
    on all members, and no other group of this process may have a name from the same range of numbers.
    """

    def __init__(self, first_name: int) -> None:
        self._kept: dict[str, Any] = {}
        self._count = first_name
        self._default: dist.ProcessGroup | None = None

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Context manager in which `torch.distributed` uses these groups; afterwards it uses the previous ones."""
        before = ProcessGroups(0)
        before._take()
        self._give()
        hook = sys.excepthook  # saved, because `init_process_group` replaces the hook
        try:
            yield
        finally:
            sys.excepthook = hook
            self._take()
            before._give()

    def end(self) -> None:
        """Destroy the process groups of this object. Pending NCCL collectives are aborted."""
        with self.activate():
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


# Ranks in the processes of a launcher: ``torchrun --nproc-per-node 4 -m pytest`` --------------------------------------

# Every process runs the complete program, and must make the same calls in the same order. In a call on n ranks the
# first n processes run the function, and other processes wait. Then all processes return the results of all ranks, or
# all processes raise a RanksError. Processes exchange results through the store of the default process group instead of
# by collectives, because a tested function may make collectives fail.

POLL_INTERVAL = 0.01  # time between two checks of the store, in seconds
_PIECE = 4 << 20  # largest value to write into the store, in bytes; torch's TCPStore accepts 8 MB
_NAMES_OF_A_GROUP = 10**6  # numbers reserved for the names of the process groups of one default group


def was_launched() -> bool:
    try:
        return read_environment(os.environ).world_size > 1
    except RuntimeError:  # the variables of a launcher are incomplete, for example in a shell of a batch system
        return False


class LaunchedRanks(Ranks):
    """The processes of a launcher as `Ranks`, over NCCL if this machine has a CUDA device per process, else over gloo.

    The number of devices is compared with ``LOCAL_WORLD_SIZE``, or without this variable with the number of all
    processes. If a default process group exists when this object is constructed, its backend is used instead.
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
        # World size and timeout of the current process groups, also in processes that are not members.
        self._of: tuple[int, float] | None = None

    def run(self, function: Callable[..., T], world_size: int, *args: Any, timeout: float | None = None) -> list[T]:
        """Call ``function(*args)`` on ranks 0..world_size-1 and return the results by rank, in every process.

        All launched processes must make this call with the same arguments, also processes whose rank is ``world_size``
        or larger. Arguments and errors are those of `Ranks.run`.

        Raises:
            unittest.SkipTest: There are fewer processes than ranks.
            RanksError: Also if a process did not respond, or has finished the test without making this call.
            ValueError: Also if the function, ``world_size`` or an argument differs between processes.
        """
        check_size(world_size)
        call = encoded(function, args)
        processes = self._launch.world_size
        if world_size > processes:
            raise SkipTest(f"{name_of(function)} needs {world_size} ranks, and {processes} processes were launched")
        timeout = self.timeout if timeout is None else timeout
        self._calls += 1
        self._check_same((name_of(function), world_size, args), timeout)
        self._forget(f"reply/{self._calls - 1}")  # all processes have read the reply to the previous call
        if self._of != (world_size, timeout):
            self.close()
            self._of = world_size, timeout
        if self._launch.rank < world_size:
            self._reply(function, call)
        reply = f"reply/{self._calls}"
        replies = self._gather(reply, range(world_size), timeout + 10.0, name_of(function), called=True)
        failures = {rank: content for rank, (succeeded, content) in replies.items() if not succeeded}
        if failures:
            self.close()
            raise RanksError(name_of(function), world_size, failures)
        return [pickle.loads(replies[rank][1]) for rank in range(world_size)]

    def gather_outcomes(self, outcome: str) -> dict[int, str]:
        """Exchange the outcomes of a finished test between all processes, and return the outcome per rank.

        An outcome is the failure text of a process, or empty if the test passed there. If some processes do not respond
        in time, only these ranks are returned, each with a failure text. If another process still waits in `run` for
        this process, `run` raises RanksError there before its timeout.
        """
        key = f"end/{self._stages}"
        self._post(key, (outcome, self._calls))
        self._stages += 1
        try:
            by_rank = self._gather(key, range(self._launch.world_size), self.timeout + 20.0)
        except RanksError as error:
            return error.failures
        outcomes = {rank: found for rank, (found, _) in by_rank.items()}
        calls = {number for _, number in by_rank.values()}
        if any(outcomes.values()) or len(calls) > 1:
            self.close()
            self._calls = max(calls)
        return outcomes

    def close(self) -> None:
        """Destroy the process groups that `run` created. The next `run` creates new process groups."""
        if self._groups is not None:
            self._groups.end()
        self._groups = self._of = None

    def leave(self) -> None:
        """Destroy all process groups that this object created. Call this method in all processes, after all tests.

        Rank 0 may serve the store. It therefore waits until all ranks have called this method, or until the timeout,
        before it destroys the default process group.
        """
        self.close()
        self._post("leave", None)
        if self._launch.rank == 0:
            with suppress(RanksError):
                self._gather("leave", range(self._launch.world_size), self.timeout)
        if self._made_default and dist.is_initialized():
            dist.destroy_process_group()

    def _reply(self, function: Callable[..., Any], call: bytes) -> None:
        """Call the function, and write one reply into the store: its result, its traceback, or, at the timeout, its stack.

        A KeyboardInterrupt or SystemExit is raised without a reply.
        """
        assert self._of is not None
        key, timeout, once = f"reply/{self._calls}", self._of[1], threading.Lock()
        main = threading.get_ident()

        def reply(succeeded: bool, content: bytes | str) -> None:
            if once.acquire(blocking=False):
                self._post(key, (succeeded, content))

        timer = threading.Timer(timeout, lambda: reply(False, _describe_stack(main, timeout)))
        timer.daemon = True
        timer.start()
        try:
            reply(True, self._call(function, call))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # also the error of `pytest.fail`, which is not an Exception
            text = traceback.format_exc()
            self.close()  # before the reply, so that ranks that wait for this rank in a collective get an error
            reply(False, text)
        finally:
            timer.cancel()

    def _call(self, function: Callable[..., Any], call: bytes) -> bytes:
        assert self._of is not None
        if self._groups is None:
            self._groups = ProcessGroups(_NAMES_OF_A_GROUP * self._calls)
        with self._groups.activate():
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
        calls = self._gather(f"call/{self._calls}", range(self._launch.world_size), timeout, what[0])
        ranks_of: dict[str, list[int]] = {}
        for rank in sorted(calls):
            ranks_of.setdefault(calls[rank], []).append(rank)
        if len(ranks_of) > 1:
            mismatches = "; ".join(f"{named_ranks(ranks)}: {text}" for text, ranks in ranks_of.items())
            raise ValueError(
                f"the launched processes make different calls ({mismatches}): each process runs the complete test, and "
                "must make the same calls with the same arguments. Seed all random arguments"
            )

    # Exchange through the store ---------------------------------------------------------------------------------------

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

    def _gather(
        self, key: str, ranks: Sequence[int], timeout: float, function: str = "", called: bool = False
    ) -> dict[int, Any]:
        """Wait for the values that ``ranks`` write into the store under ``key``, and return them by rank.

        Raise RanksError if a rank has finished the test without writing a value, or did not write one within ``timeout``
        seconds. With ``called``, all ranks have made the call of `run`, and write their results.
        """
        deadline, end = time.monotonic() + timeout, f"end/{self._stages}"
        while True:
            # `gone` is read before `waiting`, because a rank writes its value before it finishes the test.
            gone = [rank for rank in ranks if self._store.check([f"{end}/{rank}"])]
            waiting = [rank for rank in ranks if not self._store.check([f"{key}/{rank}"])]
            if not waiting:
                break
            left = [rank for rank in waiting if rank in gone]
            finished = f"finished the test without {'completing ' if called else ''}this call"
            outcomes = {rank: self._read(end, rank)[0] for rank in left}
            failures = {
                rank: f"{finished}: {outcome}" if outcome else f"{finished} (the test passed there)"
                for rank, outcome in outcomes.items()
            }
            if time.monotonic() > deadline:
                failures |= dict.fromkeys(waiting, f"did not respond within {timeout:g} seconds")
            if failures:
                self.close()
                raise RanksError(function, len(ranks), failures, called)
            time.sleep(POLL_INTERVAL)
        return {rank: self._read(key, rank) for rank in ranks}


def _describe_stack(thread: int | None, timeout: float) -> str:
    return f"did not finish within {timeout:g} seconds; its stack was\n{format_thread_stack(thread)}"
