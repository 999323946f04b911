"""The process groups of a topology: made when they are first used, shared when they have the same members.

    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        registry.coordinate                # {'data': 1, 'tensor': 0} on rank 2
        registry.ranks("tensor")           # (2, 3)
        dist.all_reduce(x, group=registry.group("tensor"))

Only the groups that are asked for exist, on the ranks that ask. A rank makes its handle of a group alone, without a
word to the others (see `local_group`), so ranks may ask for different groups, in different orders, or not at all, and
nothing waits. The members of a group meet in its first collective, or before that in `meet`.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .call_tracker import answer_questions, in_call
from .process_group_collectives import all_gather_objects
from .topology import Role, Topology

# Make a process group without waiting for its other members -----------------------------------------------------------

# `torch.distributed.new_group` is a meeting: gloo connects all members before it returns, NCCL splits the parent when a
# device is bound to it, and `use_local_synchronization=True` only shrinks the meeting to the members. Meetings need one
# order that everybody keeps, and ranks that first need different groups have none:
#
# * ranks that ask in different orders wait for each other in a circle (torch's documentation warns of it);
# * the name of the group, under which its members meet in the store, is a hash with a counter of the groups that *this
#   rank* made before (seen in torch 2.13 and 2.15). Ranks that are in different groups have different counters, so they
#   wait under different names even when all of them ask in the same order.
#
# Nor would an agreed order be safe, as a ticket per request in the store would give: to keep it, a rank must first make
# groups that others asked for, and one of their members may be waiting for this rank in a collective elsewhere.
#
# So no meeting is held. The caller gives the name, gloo connects lazily (each pair of ranks at its first message), and
# NCCL is told to make its communicator at the first collective: torch 2.15's would else make it with the group. What is
# left of the creation is local: it takes under a millisecond, and ranks may create groups in any order.
#
# Members meet in their first collective on the group, which is a meeting anyway; a member that never comes is an error
# after the group's timeout there. Those first collectives do need an order: over NCCL a rank is in one bootstrap at a
# time, which also takes memory of the GPU. `ProcessGroupRegistry.meet` holds them early, in one order on all ranks.

# What would make the creation a meeting again: gloo's eager full mesh, and the barrier that torch can be told to add.
_LAZY_ENVIRONMENT = {"TORCH_GLOO_LAZY_INIT": "1", "TORCH_DIST_INIT_BARRIER": "0"}


def new_local_group(
    ranks: Sequence[int],
    name: str,
    *,
    timeout: timedelta | None = None,
    backend: str | None = None,
    device: torch.device | None = None,
) -> dist.ProcessGroup:
    """A process group of these global ranks, made by this rank alone.

    Args:
        ranks: Global ranks, ascending, this one among them.
        name: The same on every member, and never used before on this default store.
        timeout: For the group's collectives; the default group's otherwise.
        backend: As in `torch.distributed.new_group`; the default group's otherwise.
        device: Where its tensors will be; it is bound to a CUDA device. torch would take LOCAL_RANK, or the rank modulo the
            number of devices, which Slurm's cyclic placement makes another process's device.

    Collectives: none, and no wait for other ranks. Not thread safe against other threads that make groups.
    """
    timeout = timeout if timeout is not None else _default_timeout()
    bound = device if device is not None and device.type == "cuda" else None
    with _environment(bound), _named(name), _unbound(dist.group.WORLD):
        group = dist.new_group(
            list(ranks),
            timeout=timeout,
            backend=backend,
            pg_options=_nccl_options(backend, timeout),
            use_local_synchronization=True,
            group_desc=f"meshstep: {len(ranks)} ranks, {ranks[0]} to {ranks[-1]}",  # for NCCL's timeout messages
        )
    if not isinstance(group, dist.ProcessGroup) or group.group_name != name:
        raise RuntimeError(
            f"this torch, {torch.__version__}, doesn't let a process group be named ({group!r} instead of {name!r}); take "
            "torch 2.11 or newer"
        )
    if bound is not None and group.bound_device_id is None:  # as torch before 2.15 leaves it
        group.bound_device_id = bound
    return group


def end_local_group(group: dist.ProcessGroup, *, abort: bool = False) -> None:
    """Destroy the group; with ``abort`` NCCL's works are given up, for which it would wait. Other backends don't wait."""
    end = distributed_c10d._abort_process_group if abort and "nccl" in dist.get_backend_config(group) else None
    (end or dist.destroy_process_group)(group)


def cuda_device(world: dist.ProcessGroup | None) -> torch.device:
    """The CUDA device of this process: the one that the default group is bound to, else the current one."""
    bound = None if world is None else world.bound_device_id
    return bound if bound is not None and bound.type == "cuda" else torch.device("cuda", torch.cuda.current_device())


def _nccl_options(backend: str | None, timeout: timedelta | None) -> object | None:
    """What keeps NCCL from making the communicator, which is a meeting, with the group, as torch 2.15 does; None: nothing
    is needed."""
    if "nccl" not in str(backend or dist.get_backend_config()) or not dist.is_nccl_available():
        return None
    options = dist.ProcessGroupNCCL.Options()
    if not hasattr(options, "lazy_init"):
        return None  # an older torch, which always waits for the first collective
    options.lazy_init = True
    if timeout is not None:
        options._timeout = timeout
    return options


def _default_timeout() -> timedelta | None:
    """The default group's as it is now; torch would take the backend's own, minutes. None: it has none (a fake group)."""
    world = dist.group.WORLD
    backends = [] if world is None else [world._get_backend(device) for device in world._device_types]
    options = (getattr(backend, "options", None) for backend in backends)
    return max((found for each in options if (found := getattr(each, "_timeout", None)) is not None), default=None)


@contextmanager
def _environment(device: torch.device | None) -> Iterator[None]:
    # LOCAL_RANK is where NCCL's group looks for its device. As device_id of new_group it would be connected to at once.
    wanted = _LAZY_ENVIRONMENT if device is None else {**_LAZY_ENVIRONMENT, "LOCAL_RANK": str(device.index)}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _named(name: str) -> Iterator[None]:
    # torch has no public way to name a group; this is the one function that decides it. To replace it also leaves
    # torch's own counter alone: were it to advance on some ranks only, the next ordinary new_group would not meet.
    before = distributed_c10d._process_group_name
    setattr(distributed_c10d, "_process_group_name", lambda ranks, use_hashed_name: name)  # noqa: B010 (mypy)
    try:
        yield
    finally:
        setattr(distributed_c10d, "_process_group_name", before)  # noqa: B010


@contextmanager
def _unbound(world: dist.ProcessGroup | None) -> Iterator[None]:
    # With a device bound to the default group, NCCL would split it: a collective over the whole world.
    device = world.bound_device_id if world is not None else None
    if world is None or device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


# Default group --------------------------------------------------------------------------------------------------------

# What a registry is to the default process group: as large as its topology, and one of several, with a name that all
# ranks know.

_fake_registries = itertools.count()


def default_group(topology: Topology) -> dist.ProcessGroup | None:
    """The world; None: one rank, without torch.distributed.

    Raises:
        RuntimeError: `torch.distributed` isn't initialised and the topology has more than one rank.
        ValueError: The topology's size isn't the world's.
    """
    if not dist.is_initialized():
        if topology.world_size == 1:
            return None
        raise RuntimeError(
            f"{topology!r} has {topology.world_size} ranks but torch.distributed isn't initialised; call "
            "meshstep.parallel.launch.init_distributed() first (and start the ranks, for example with torchrun "
            f"--nproc-per-node {topology.world_size})"
        )
    world_size = dist.get_world_size()
    if world_size != topology.world_size:
        raise ValueError(
            f"{topology!r} has {topology.world_size} ranks but the world has {world_size}; the sizes must multiply to "
            f"{world_size}{_suggestion(topology, world_size)}"
        )
    return dist.group.WORLD


def _suggestion(topology: Topology, world_size: int) -> str:
    fitting = []
    for axis, size in zip(topology.axes, topology.sizes, strict=True):
        rest = topology.world_size // size
        if world_size % rest == 0:
            fitting.append(f"{axis}={world_size // rest}")
    if fitting:
        return f": write {' or '.join(fitting)} instead, or start {topology.world_size} ranks"
    return f", or start {topology.world_size} ranks"


def agreed_name(topology: Topology, rank: int) -> str:
    """A name for this rank's next registry that is the same on all ranks.

    Raises:
        ValueError: Another rank's registry of the same number has another topology.
    """
    if is_fake():
        # One process plays one rank of a world that isn't there, on a store that may not even answer.
        return f"meshstep/fake/{next(_fake_registries)}"
    store = distributed_c10d._get_default_store()
    number = store.add(f"meshstep/registries/{rank}", 1)
    name = f"meshstep/registry/{number}"
    first = store.compare_set(name, "", repr(topology)).decode()
    if first != repr(topology):
        raise ValueError(
            f"rank {rank} builds registry number {number} with {topology!r}, another rank built its number {number} "
            f"with {first}; every rank must build the same registries in the same order"
        )
    return name


def is_fake() -> bool:
    """Whether the world is one process that plays one rank."""
    return "fake" in dist.get_backend_config()


# torch's `DeviceMesh` of some axes, on groups that are there ----------------------------------------------------------

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Groups(Protocol):
    """What is needed of a registry."""

    topology: Topology

    @property
    def device(self) -> torch.device: ...
    def ranks(self, *axes: str) -> tuple[int, ...]: ...
    def group(self, *axes: str) -> dist.ProcessGroup: ...


def sub_mesh(registry: Groups, dims: Sequence[tuple[str, ...]]) -> DeviceMesh:
    """The mesh of this rank's sub-grid, each dim of which is some axes together.

    Raises:
        ValueError: Axes are joined in another order than theirs, or there is no such axis.
    """
    from torch.distributed.device_mesh import DeviceMesh

    topology, names = registry.topology, tuple("_".join(dim) for dim in dims)
    ranks = registry.ranks(*(axis for dim in dims for axis in dim))
    by_dim = [topology.atoms(*dim) for dim in dims]
    if [tuple(axis for axis in topology.axes if axis in dim) for dim in by_dim] != by_dim:
        raise ValueError(
            f"a mesh of {dims} joins axes in another order than theirs ({topology.named()}); write them in that order"
        )
    groups = [registry.group(*dim) for dim in dims]
    if len(dims) == 1:
        return DeviceMesh.from_group(groups[0], registry.device.type, mesh_dim_names=names)
    atoms = [axis for dim in by_dim for axis in dim]
    ordered = [axis for axis in topology.axes if axis in atoms]
    grid = torch.tensor(ranks, dtype=torch.int).reshape([topology.size(axis) for axis in ordered])
    # Contiguous because torch reads the mesh's strides as they lie in memory.
    grid = grid.permute([ordered.index(axis) for axis in atoms]).contiguous()
    grid = grid.reshape([topology.size(*dim) for dim in by_dim])
    return DeviceMesh.from_group(groups, registry.device.type, mesh=grid, mesh_dim_names=names)


# The end of a process that still holds a group: gloo's threads must be done before the interpreter is -----------------

# A thread that has run a collective lets go of its tensors afterwards, for which it may need the interpreter; where that
# has ended meanwhile, torch ends the process with "terminate called without an active exception" (SIGABRT), after all
# work was done. Whoever holds no group when it is destroyed is safe, since torch then waits for the threads; but a
# script's registry, optimizer or layers, which hold groups, mostly live as long as the script.

MOMENT = 0.05  # seconds; a thread that waits for the interpreter gets it as soon as nobody has it


@cache
def let_threads_finish() -> None:
    """Give the interpreter away for a `MOMENT` when the process ends. A second call does nothing more."""
    atexit.register(time.sleep, MOMENT)


# Registry -------------------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_alive: WeakSet[ProcessGroupRegistry] = WeakSet()


def check_registry(registry: object) -> None:
    """Raise TypeError for a process group or a `DeviceMesh` of torch in place of a registry."""
    if isinstance(registry, dist.ProcessGroup):
        raise TypeError(
            "the registry is a ProcessGroup of torch, which has no named axes: give "
            "ProcessGroupRegistry(Topology(data=...)), whose axes are all ranks of the job"
        )
    if hasattr(registry, "mesh_dim_names"):
        raise TypeError("the registry is a DeviceMesh of torch: give ProcessGroupRegistry.from_device_mesh(mesh)")


class ProcessGroupRegistry:
    """This rank's place in a topology, and its process groups.

    Every rank of the world constructs its registries in the same order, with the same topologies; construction is
    checked against the other ranks' through the default store, but waits for none of them.

    Args:
        topology: Its world size must be the default process group's. A topology of one rank needs no
            ``torch.distributed`` at all.
        timeout: For collectives on the groups made here; by default that of the default group, which always keeps its own.
        backend: For the groups made here; the default group's otherwise.
        apart: Use no group but those made here: the default group serves as the whole world's else. For collectives in a
            thread of their own.

    Raises:
        RuntimeError: ``torch.distributed`` isn't initialised and the topology has more than one rank.
        ValueError: The topology's size isn't the world size, or another rank built a different one.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        timeout: timedelta | None = None,
        backend: str | None = None,
        apart: bool = False,
    ) -> None:
        self.topology = topology
        self._timeout = timeout
        self._backend = backend
        self._closed = False
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}  # by members: all there are
        self._by_axes: dict[tuple[str, ...], dist.ProcessGroup] = {}  # the same, without listing the members again
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}  # those that are destroyed here
        self._met: set[tuple[int, ...]] = set()
        self._world = default_group(topology)
        self.global_rank = 0 if self._world is None else dist.get_rank()
        self.coordinate = topology.coordinate(self.global_rank)
        self._name = agreed_name(topology, self.global_rank) if topology.world_size > 1 else ""
        if self._world is not None and not apart and backend in (None, dist.get_backend(self._world)):
            self._groups[tuple(range(topology.world_size))] = self._world
        _alive.add(self)
        if self._world is not None and topology.world_size > 1 and not is_fake():
            answer_questions(self._world)
            let_threads_finish()

    @property
    def device(self) -> torch.device:
        """Where tensors must be for this registry's collectives: for NCCL the CUDA device that the default group is bound
        to (`init_distributed` binds it), the current one if it is bound to none; else the CPU."""
        backend = self._backend or (dist.get_backend_config(self._world) if self._world is not None else "")
        return cuda_device(self._world) if "nccl" in backend else torch.device("cpu")

    def size(self, *axes: str) -> int:
        """Number of ranks in this rank's group along ``axes``."""
        self._check_named(axes)
        return self.topology.size(*axes)

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Global ranks of this rank's group along ``axes``, ascending, which is the order in the group."""
        self._check_named(axes)
        return tuple(self.topology.peers(self.global_rank, *axes))

    def rank(self, *axes: str) -> int:
        """This rank's index in its group along ``axes``: row-major over them in the topology's order."""
        self._check_named(axes)
        index, atoms = 0, self.topology.atoms(*axes)
        for axis in self.topology.axes:
            if axis in atoms:
                index = index * self.topology.size(axis) + self.coordinate[axis]
        return index

    def group(self, *axes: str) -> dist.ProcessGroup:
        """This rank's process group along ``axes``; made at the first call, without waiting for anybody.

        Raises:
            ValueError: No axes, or an unknown one.
            RuntimeError: The registry is closed, or a world of one rank has no ``torch.distributed``.
        """
        if axes not in self._by_axes:
            self._by_axes[axes] = self.group_of(self.ranks(*axes))
        return self._by_axes[axes]

    def group_of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The process group of exactly these global ranks, this one among them; one group per membership.

        Raises:
            ValueError: This rank isn't among them, one is outside the world, or one comes twice.
            RuntimeError: As in `group`.
        """
        if self._closed:
            raise RuntimeError(f"rank {self.global_rank} asks a closed registry for a group; make a new registry")
        members = tuple(sorted(ranks))
        if members in self._groups:
            return self._groups[members]
        self._check_members(members)
        if self._world is None:
            raise RuntimeError(
                "the group has size 1 and torch.distributed isn't initialised: no group is needed; check size(...) "
                "before asking, or call torch.distributed.init_process_group first"
            )
        # A digest, because the name is a prefix of keys in the store and the list can be long.
        digest = hashlib.sha1(repr(members).encode(), usedforsecurity=False).hexdigest()[:16]
        group = new_local_group(
            members, f"{self._name}/{digest}", timeout=self._timeout, backend=self._backend, device=self.device
        )
        self._made[members] = self._groups[members] = group
        return group

    def meet(self, *groups: str | tuple[str, ...]) -> None:
        """Let the members of groups meet now: an all-reduce of one element on each that has not met here before.

            registry.meet("tensor", ("row", "col"))

        Over NCCL this makes the communicators, while there is memory for them and in one order on all ranks; else that
        happens in each one's first collective. `ParallelOptimizer` does it there, for its own groups and those of the axes
        that its specs name. With any backend, a rank that can't be reached is an error here, not in the first step.

        Every rank must come, and then none can be left waiting. Only groups that all of their members have asked for meet,
        in the order of their members, which is one order for all groups: whichever is the first of those that have yet to
        meet, each of its members has done with all before it, and comes to no other first.

        Args:
            groups: The axes of groups to make first, the same on every rank. All that have been asked for before meet too.
        Raises:
            ValueError: As in `group`.
            RuntimeError: The registry is closed; a rank did not come within the timeout.
        Collectives: those of `all_gather_objects` over the world, then one all-reduce a group. Host reads: yes.
        """
        named = [(axes,) if isinstance(axes, str) else axes for axes in groups]
        for axes in sorted(named, key=lambda axes: self.ranks(*axes)):
            if self.size(*axes) > 1:
                self.group(*axes)
        if self.topology.world_size == 1:
            return
        with in_call(self, "meet"):
            world = self.group(*self.topology.axes)
            asked = all_gather_objects({*self._groups} - self._met, world, self.device)
            for members in sorted(asked[self.global_rank]):
                if all(members in asked[rank] for rank in members):
                    dist.all_reduce(torch.zeros(1, device=self.device), group=self._groups[members])
                    self._met.add(members)

    def device_mesh(self, *axes: str | tuple[str, ...]) -> DeviceMesh:
        """torch's mesh of this rank's sub-grid, its dims named and ordered as ``axes``, on this registry's groups.

        Several axes as a tuple make one dim together, named as torch names it: ``("edp", "mid")`` makes ``"edp_mid"``. No
        group is made but the one of each dim, and the mesh is usable while the registry is open.

        Raises:
            ValueError, RuntimeError: As in `group`.
        """
        return sub_mesh(self, [(dim,) if isinstance(dim, str) else dim for dim in axes])

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, *, roles: Mapping[str, Role] | None = None) -> ProcessGroupRegistry:
        """The registry with the mesh's dims as axes, on the mesh's own groups (which `close` doesn't destroy).

        Args:
            mesh: A mesh of the whole world, its dims named, ranks row-major (as `init_device_mesh` makes it).
            roles: As in `Topology`, which knows the usual names of a mesh's dims.

        Raises:
            ValueError: The mesh has no dim names, or isn't the whole world in row-major order.
        """
        if mesh.mesh_dim_names is None:
            raise ValueError(f"{mesh} has no dim names; make it with mesh_dim_names=('data', 'tensor') or the like")
        grid = mesh.mesh
        if grid.flatten().tolist() != list(range(dist.get_world_size())):
            raise ValueError(
                f"the mesh holds ranks {grid.tolist()}; a topology is the whole world of {dist.get_world_size()} ranks "
                "in row-major order, as init_device_mesh makes it: pass the root mesh, not a slice of it"
            )
        topology = Topology(roles=roles, **dict(zip(mesh.mesh_dim_names, grid.shape, strict=True)))
        registry = cls(topology)
        registry.adopt(*(mesh.get_group(axis) for axis in topology.axes))
        return registry

    def adopt(self, *groups: dist.ProcessGroup) -> None:
        """Use these groups, whose makers destroy them, for their members, where there is none yet."""
        for group in groups:
            self._groups.setdefault(tuple(dist.get_process_group_ranks(group)), group)

    def close(self, *, abort: bool = False) -> None:
        """Destroy the groups made here, never the default one: in the order of their members, which is one on all ranks. A
        second call does nothing.

        Args:
            abort: Wait for nobody: collectives of NCCL that are under way are given up, where peers may never come to them.
                So does the end of a ``with`` that an error leaves.
        """
        if not self._closed and self._world is dist.group.WORLD:
            for _, group in sorted(self._made.items()):
                end_local_group(group, abort=abort)
        self._closed = True
        self._made, self._groups, self._by_axes = {}, {}, {}

    def __copy__(self) -> ProcessGroupRegistry:
        """Itself: groups are shared, never copied."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled it is its topology: read again, the open registry of that topology in the process, or else a new one."""
        return _of_topology, (self.topology, self._timeout, self._backend)

    def __enter__(self) -> ProcessGroupRegistry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(abort=error is not None)

    def __deepcopy__(self, memo: dict[int, object]) -> ProcessGroupRegistry:
        # A copied layer stays on the same groups: there is one registry, however many modules refer to it.
        return self

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._made)} groups made"
        return f"ProcessGroupRegistry({self.topology!r}, rank {self.global_rank} at {self.coordinate}, {state})"

    def _check_named(self, axes: tuple[str, ...]) -> None:
        if not axes:
            there = self.topology.named()
            raise ValueError(f"name the axes ({there}); the whole world is group(*registry.topology.axes)")
        self.topology.atoms(*axes)

    def _check_members(self, members: tuple[int, ...]) -> None:
        if len(set(members)) != len(members):
            raise ValueError(f"a rank comes twice in {members}; name each rank once")
        outside = [rank for rank in members if not 0 <= rank < self.topology.world_size]
        if outside:
            raise ValueError(
                f"ranks {outside} aren't in the world of {self.topology.world_size} ranks; name some of these"
            )
        if self.global_rank not in members:
            raise ValueError(
                f"rank {self.global_rank} asks for the group of {members}, to which it doesn't belong; "
                "only members ask for a group"
            )


def _of_topology(topology: Topology, timeout: timedelta | None, backend: str | None) -> ProcessGroupRegistry:
    for registry in list(_alive):
        is_current = not registry._closed and registry._world is (dist.group.WORLD if dist.is_initialized() else None)
        if is_current and (registry.topology, registry._timeout, registry._backend) == (topology, timeout, backend):
            return registry
    return ProcessGroupRegistry(topology, timeout=timeout, backend=backend)
