"""Run all ranks of a world as threads of one process, over a backend that records collectives and sends nothing.

All calls to the backend are recorded, from the library or from torch itself: groups created, collectives, groups
destroyed. Gathered objects are really exchanged, because ranks must agree on them. Tensors are not
exchanged: a collective returns the rank's own tensors in place of those of other ranks. This suffices if no later
collective depends on the values of tensors.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from gathered_objects import objects_gathered_by
from meshstep.parallel.mesh import registry as local_group
from meshstep.parallel.mesh import registry as registry_module
from torch import Tensor
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld
from torch.utils._pytree import tree_leaves

BACKEND = "recording"
PATIENCE = 20.0  # timeout in seconds of a rank that waits for the objects of other ranks
_GATHERS = ("allgather", "all_gather_single", "_allgather_base")
_SCATTERS = ("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base")
_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "alltoall", "all_to_all_single"),
    *("gather", "scatter", *_GATHERS, *_SCATTERS),
)
Kind = Literal["make", "collective", "destroy"]


class Event(NamedTuple):
    """A rank's call to a backend.

    ``group`` is the group's name, the same on all members; ``what`` is the collective and its numbers of elements,
    which must be equal on all members.
    """

    kind: Kind
    group: str
    members: tuple[int, ...]
    what: str = ""


Program = list[Event]


@dataclass
class _Exchange:
    arrived: threading.Condition = field(default_factory=threading.Condition)
    said: dict[tuple[str, int], dict[int, Any]] = field(default_factory=dict)
    failed: bool = False

    def gather(self, key: tuple[str, int], rank: int, value: Any, size: int) -> list[Any]:
        with self.arrived:
            said = self.said.setdefault(key, {})
            said[rank] = value
            self.arrived.notify_all()
            if not self.arrived.wait_for(lambda: self.failed or len(said) == size, PATIENCE) or self.failed:
                raise RuntimeError(f"rank {rank} got objects of the ranks {sorted(said)} only, not of all {size} ranks")
            return [said[other] for other in range(size)]


class _OfThread(threading.local):
    program: Program
    exchange: _Exchange


_thread = _OfThread()
_one_at_a_time = threading.Lock()  # creating a group temporarily changes torch and the process environment


class _Group(dist.ProcessGroup):
    def __init__(self, rank: int, size: int, name: str, members: tuple[int, ...]) -> None:
        construct: Callable[..., None] = super().__init__  # torch 2.14 declares only the constructor with a store
        construct(rank, size)
        self.own_rank, self.own_size, self.of, self.members, self.gathers = rank, size, name, members, 0

    def note(self, kind: Kind, what: str = "") -> None:
        _thread.program.append(Event(kind, self.of, self.members, what))

    def rank(self) -> int:
        return self.own_rank

    def size(self) -> int:
        return self.own_size

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.of

    def getBackendName(self) -> str:
        return BACKEND

    def shutdown(self) -> None:
        self.note("destroy")


class _Work(dist.Work):
    """The handle of a collective that is already complete."""

    def wait(self, *_: object) -> bool:
        return True


def _recorded(name: str) -> Callable[..., Any]:
    def collective(self: _Group, *args: Any, **_: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        self.note("collective", f"{name} of {[tensor.numel() for tensor in tensors]}")
        if name in _GATHERS:
            *parts, own = tensors
            for part in parts:
                part.view(-1, own.numel()).copy_(own.flatten().expand(part.numel() // own.numel(), -1))
        elif name in _SCATTERS:
            own, *parts = tensors
            own.copy_(parts[0].flatten()[: own.numel()].view_as(own))
        return _Work()

    return collective


for _name in _COLLECTIVES:
    setattr(_Group, _name, _recorded(_name))


def _make(options: Any, _: object) -> _Group:
    members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    group = _Group(options.group_rank, options.group_size, options.group_id, members)
    group.note("make")
    return group


def _gather_objects(value: Any, group: Any, _: torch.device) -> list[Any]:
    """Gather objects between threads; replaces `parallel.mesh.process_group_collectives.all_gather_objects`."""
    group.gathers += 1
    group.note("collective", "objects")
    found: list[Any] = _thread.exchange.gather((group.of, group.gathers), group.own_rank, value, group.own_size)
    return found


def _gather_objects_as_torch(values: list[Any], value: Any, group: Any = None) -> None:
    """Gather objects between threads; replaces `torch.distributed.all_gather_object`."""
    found: Any = dist.group.WORLD if group is None else group
    found.note("collective", "sizes")
    values[:] = _gather_objects(value, found, torch.device("cpu"))


@contextmanager
def _threads_are_ranks() -> Iterator[None]:
    make_group = local_group.new_local_group

    def make_alone(*args: Any, **kwargs: Any) -> dist.ProcessGroup:
        with _one_at_a_time:
            return make_group(*args, **kwargs)

    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu"])
    world: Any = ThreadLocalWorld()
    if not hasattr(world, "comms"):
        world.comms = []  # torch 2.11 iterates over this attribute, but does not set it
    hook, interval = sys.excepthook, sys.getswitchinterval()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(distributed_c10d, "_world", world))
        stack.enter_context(mock.patch.object(dist, "all_gather_object", _gather_objects_as_torch))
        stack.enter_context(objects_gathered_by(_gather_objects))
        stack.enter_context(mock.patch.object(registry_module, "new_local_group", make_alone))
        stack.enter_context(mock.patch.object(registry_module, "answer_questions"))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        _distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
        sys.setswitchinterval(0.05)  # seconds: let a thread run until it waits, because switching gains nothing
        try:
            yield
        finally:
            sys.setswitchinterval(interval)
            _distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
            sys.excepthook = hook  # each rank has wrapped the hook


def programs_of(world_size: int, run: Callable[[], object]) -> list[Program]:
    """Run ``run()`` on each rank, with a new default process group, and return the recorded programs by rank.

    If ``run`` raised on some rank, raise AssertionError with the first error, which is the cause.
    """
    store, exchange = _distributed_c10d.HashStore(), _Exchange()
    programs: list[Program] = [[] for _ in range(world_size)]
    errors: list[BaseException] = []

    def rank_of(rank: int) -> None:
        _thread.program, _thread.exchange = programs[rank], exchange
        try:
            with _one_at_a_time:
                dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size)
            run()
            dist.destroy_process_group()
        except BaseException as error:
            errors.append(error)
            with exchange.arrived:
                exchange.failed = True
                exchange.arrived.notify_all()

    with _threads_are_ranks():
        threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise AssertionError(f"a rank raised {errors[0]!r}") from errors[0]
    return programs


def of_kind(programs: Sequence[Program], *kinds: Kind) -> list[Program]:
    return [[event for event in program if event.kind in kinds] for program in programs]
