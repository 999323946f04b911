"""The process groups of a topology. A group is created at first use, and axes with the same members share one group.

    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        registry.coordinate                # {'data': 1, 'tensor': 0} on rank 2
        registry.ranks("tensor")           # (2, 3)
        dist.all_reduce(x, group=registry.group("tensor"))

A rank creates its `ProcessGroup` object without communication (see `new_local_group`). Ranks may therefore request
different groups, in different orders, without waiting for each other. The members of a group connect in the first
collective of the group, or earlier in `ProcessGroupRegistry.connect`.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .call_tracker import answer_questions, track_call
from .deprecation import renamed_arguments, renamed_members
from .process_group_collectives import all_gather_objects
from .topology import Role, Topology

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Create a process group without waiting for its other members ---------------------------------------------------------

# `torch.distributed.new_group` synchronizes ranks: gloo connects all members before the function returns, and NCCL
# splits the default group if a device is bound to it. `use_local_synchronization=True` only limits the synchronization
# to the members. This is safe only if all ranks create their groups in one common order. Ranks that need different
# groups have no common order:
#
# * Ranks that create groups in different orders deadlock.
# * Members of a group find each other in the store under the group's name. With `use_local_synchronization=True` this
#   name is a hash that includes the number of groups that *this rank* has at that time. Members that have different
#   numbers of groups wait under different names, even if every rank creates its groups in the same order.
#
# An agreed order, such as a ticket per request in the store, would not be safe either. A rank would first have to create
# groups that other ranks requested, while a member of these groups may wait for this rank in another collective.
#
# Therefore creation does not synchronize. The caller passes the name. gloo connects each pair of ranks at the first
# message between them. The option ``lazy_init`` makes NCCL create its communicator in the first collective. The other
# steps of the creation need no other rank.
#
# Members connect in the first collective of the group. If a member never calls it, the collective fails after the group's
# timeout. The first collectives of several groups must have the same order on all ranks, because over NCCL a rank
# creates one communicator after the other. `ProcessGroupRegistry.connect` runs the first collectives early, in one
# order on all ranks.

# Disables two features that synchronize ranks when a group is created: gloo's connection of all members, and a barrier.
_LAZY_ENVIRONMENT = {"TORCH_GLOO_LAZY_INIT": "1", "TORCH_DIST_INIT_BARRIER": "0"}


def new_local_group(
    ranks: Sequence[int],
    name: str,
    *,
    timeout: timedelta | None = None,
    backend: str | None = None,
    device: torch.device | None = None,
) -> dist.ProcessGroup:
    """Create the `ProcessGroup` object of this rank for a group of ranks, without communication.

    Each member must call this function, at any time. No other thread may create process groups during the call.

    Args:
        ranks: Global ranks of the members, ascending; this rank is one of them.
        name: Name of the group: the same on every member, and never used before in the store of the default group.
        timeout: Timeout of the group's collectives. None: the timeout of the default group.
        backend: Name of the backend. None: the backend of the default group.
        device: Device of the group's tensors; a CUDA device is bound to the group. None: no device is bound, and torch
            chooses NCCL's device by LOCAL_RANK or the global rank.
    Raises:
        RuntimeError: This version of torch ignores the name.
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
            f"torch {torch.__version__} ignored the name of a new process group: expected {name!r}, found {group!r}; "
            "install another version of torch, 2.11 or newer"
        )
    if bound is not None and group.bound_device_id is None:  # torch before 2.15 does not bind the device
        group.bound_device_id = bound
    return group


def end_local_group(group: dist.ProcessGroup, *, abort: bool = False) -> None:
    """Destroy a process group that `new_local_group` returned.

    ``abort=True`` aborts pending NCCL collectives; ``abort=False`` waits for them. Other backends ignore ``abort``.
    """
    end = distributed_c10d._abort_process_group if abort and "nccl" in dist.get_backend_config(group) else None
    (end or dist.destroy_process_group)(group)


def cuda_device(world: dist.ProcessGroup | None) -> torch.device:
    """Return the CUDA device of this process: the device bound to the default group, or else the current device."""
    bound = None if world is None else world.bound_device_id
    return bound if bound is not None and bound.type == "cuda" else torch.device("cuda", torch.cuda.current_device())


def _nccl_options(backend: str | None, timeout: timedelta | None) -> object | None:
    """Return options that make NCCL create the communicator in the first collective; None if they are not needed."""
    if "nccl" not in str(backend or dist.get_backend_config()) or not dist.is_nccl_available():
        return None
    options = dist.ProcessGroupNCCL.Options()
    if not hasattr(options, "lazy_init"):
        return None  # torch without this option creates the communicator in the first collective
    options.lazy_init = True
    if timeout is not None:
        options._timeout = timeout
    return options


def _default_timeout() -> timedelta | None:
    """Return the longest timeout of the default group's backends; None if no backend has a timeout.

    If no timeout is passed, torch gives new groups the default of their backend, instead of the timeout of the default
    group. torch's fake backend has no timeout.
    """
    world = dist.group.WORLD
    backends = [] if world is None else [world._get_backend(device) for device in world._device_types]
    options = (getattr(backend, "options", None) for backend in backends)
    return max((timeout for each in options if (timeout := getattr(each, "_timeout", None)) is not None), default=None)


@contextmanager
def _environment(device: torch.device | None) -> Iterator[None]:
    # torch chooses the NCCL device of a new group by LOCAL_RANK. With device_id=, new_group would connect the members
    # immediately.
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
    # torch has no public way to name a group: `_process_group_name` returns the name. While it is replaced, torch's
    # counter of groups stays unchanged. If the counter increased on some ranks only, the next ordinary `new_group`
    # would deadlock.
    before = distributed_c10d._process_group_name
    setattr(distributed_c10d, "_process_group_name", lambda ranks, use_hashed_name: name)  # noqa: B010 (mypy)
    try:
        yield
    finally:
        setattr(distributed_c10d, "_process_group_name", before)  # noqa: B010


@contextmanager
def _unbound(world: dist.ProcessGroup | None) -> Iterator[None]:
    # If a device is bound to the default group, NCCL creates a group by splitting the default group, which is a
    # collective.
    device = world.bound_device_id if world is not None else None
    if world is None or device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


# Order of NCCL's collectives ------------------------------------------------------------------------------------------

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def order_launches(world: dist.ProcessGroup | None) -> None:
    """Make collectives of several NCCL groups run on the GPU in the order of their launches.

    All ranks launch the collectives in one order. Without this setting, collectives on several streams could still run in
    different orders on different ranks, and deadlock. NCCL 2.26 and newer read the environment variable
    NCCL_LAUNCH_ORDER_IMPLICIT once per process, before the first collective. A value that is already set is kept.
    """
    if LAUNCH_ORDER in os.environ:
        return
    os.environ[LAUNCH_ORDER] = "1"
    if world is not None and world._get_sequence_number_for_group() > 0:  # type: ignore[attr-defined]
        warnings.warn(
            f"NCCL ran collectives before {LAUNCH_ORDER}=1 was set, so collectives of several process groups can run in "
            "different orders on different ranks, and deadlock: call init_distributed() instead of init_process_group(), "
            "or set the variable before the first collective",
            stacklevel=4,
        )


# Default group --------------------------------------------------------------------------------------------------------

# The topology of a registry has as many ranks as the default process group. A job may have several registries. Each
# registry has a name, which is the same on all ranks.

_fake_registries = itertools.count()


def default_group(topology: Topology) -> dist.ProcessGroup | None:
    """Return the default process group, or None for a topology of one rank without ``torch.distributed``.

    Raise RuntimeError if a larger topology has no default group, and ValueError if the numbers of ranks differ.
    """
    if not dist.is_initialized():
        if topology.world_size == 1:
            return None
        raise RuntimeError(
            f"{topology!r} has {topology.world_size} ranks but torch.distributed isn't initialized; call "
            "meshstep.parallel.init_distributed() first (and start the ranks, for example with torchrun "
            f"--nproc-per-node {topology.world_size})"
        )
    world_size = dist.get_world_size()
    if world_size != topology.world_size:
        raise ValueError(
            f"{topology!r} has {topology.world_size} ranks but the world has {world_size}; the product of the sizes must "
            f"be {world_size}{_suggestion(topology, world_size)}"
        )
    return dist.group.WORLD


def _suggestion(topology: Topology, world_size: int) -> str:
    start = f"start {topology.world_size} rank{'s' if topology.world_size > 1 else ''}"
    if not topology.axes:
        return f": write Topology(data={world_size}), for example, or {start}"
    fitting = []
    for axis in topology.axes:
        rest = topology.world_size // topology.size(axis)
        if world_size % rest == 0:
            fitting.append(f"{axis}={world_size // rest}")
    return f": write {' or '.join(fitting)} instead, or {start}" if fitting else f", or {start}"


def agreed_name(topology: Topology, rank: int) -> str:
    """Return the name of the registry that this rank is constructing. The name is the same on all ranks.

    Each rank numbers its registries in the order of construction, and the name contains the number. The first rank that
    constructs a registry with this number writes its topology into the store of the default group. Any other rank with
    another topology raises ValueError. In a fake world, which has only this process, nothing is compared.
    """
    if is_fake():
        # torch's `FakeStore` stores nothing, so ranks cannot agree on a name through it.
        return f"meshstep/fake/{next(_fake_registries)}"
    store = distributed_c10d._get_default_store()
    number = store.add(f"meshstep/registries/{rank}", 1)
    name = f"meshstep/registry/{number}"
    first = store.compare_set(name, "", repr(topology)).decode()
    if first != repr(topology):
        raise ValueError(
            f"rank {rank} constructs its ProcessGroupRegistry number {number} with {topology!r}, but another rank "
            f"constructed its number {number} with {first}; construct the same registries in the same order on every rank"
        )
    return name


def is_fake() -> bool:
    """Return True if the default group uses torch's fake backend, which simulates one rank of a world in one process."""
    return "fake" in dist.get_backend_config()


# Exit of a process with live groups: gloo's threads must finish before the interpreter does ---------------------------

# After a collective, a gloo thread frees the tensors of the collective, which may need the interpreter lock. If the
# interpreter has already exited, torch aborts the process with "terminate called without an active exception" (SIGABRT),
# although all work was done. torch waits for gloo's threads when the last reference to a group is dropped. But the
# registry, optimizer and layers of a script hold references to groups until the script ends.

MOMENT = 0.05  # seconds; in this time a waiting thread gets the interpreter lock


@cache
def let_threads_finish() -> None:
    """Register an exit handler that sleeps for 0.05 seconds, so that gloo's threads get the interpreter lock."""
    atexit.register(time.sleep, MOMENT)


# Registry -------------------------------------------------------------------------------------------------------------

_alive: WeakSet[ProcessGroupRegistry] = WeakSet()


def check_registry(registry: object) -> None:
    """Raise TypeError if ``registry`` is not a `ProcessGroupRegistry`, and has no attribute ``topology`` like one.

    A `Topology` is not rejected here: its missing attributes raise an error that says what to give.
    """
    if isinstance(registry, dist.ProcessGroup):
        raise TypeError(
            "the registry is a ProcessGroup of torch, which has no named axes: give "
            "ProcessGroupRegistry(Topology(data=...)), whose axes include all ranks of the job"
        )
    if hasattr(registry, "mesh_dim_names"):
        raise TypeError("the registry is a DeviceMesh of torch: give ProcessGroupRegistry.from_device_mesh(mesh)")
    if not hasattr(registry, "topology") and not isinstance(registry, Topology):
        raise TypeError(
            f"the registry is a {type(registry).__name__}: give a ProcessGroupRegistry, such as "
            "ProcessGroupRegistry(Topology(data=...))"
        )


@renamed_members(meet="connect")
@renamed_arguments(apart="exclusive_groups")
class ProcessGroupRegistry:
    """This rank's coordinate in a topology, and the process groups of this rank along the axes.

    Every rank of the world must construct its registries in the same order, with the same topologies. If there are
    several processes, the constructor compares the topology with the topology of the first rank that constructed this
    registry. It reads that topology from the store of the default process group, so no rank waits for another.

        registry = ProcessGroupRegistry(Topology(data=2, tensor=4))
        dist.all_reduce(x, group=registry.group("tensor"))

    Args:
        topology: The mesh axes. The topology must have as many ranks as the default process group. A topology of one
            rank does not need ``torch.distributed``.
        timeout: Timeout of collectives on the groups that this registry creates. None: the timeout of the default
            group. The timeout of the default group does not change.
        backend: Backend of the groups that this registry creates. None: the backend of the default group.
        exclusive_groups: True: create a group of all ranks, for example for collectives in another thread. False: use
            the default group as the group of all ranks, if ``backend`` is None or the backend of the default group.
            Default: False.

    Attributes:
        topology: The ``topology`` argument.
        global_rank: Rank of this process in the world.
        coordinate: Coordinate of this rank on every axis.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialized, and the topology has more than one rank.
        ValueError: The topology has another number of ranks than the default process group, or differs from the
            topology of another rank.
    Collectives: none.
    Host synchronization: none.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        timeout: timedelta | None = None,
        backend: str | None = None,
        exclusive_groups: bool = False,
    ) -> None:
        self.topology = topology
        self._timeout = timeout
        self._backend = backend
        self._closed = False
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}  # all groups, by members
        self._by_axes: dict[tuple[str, ...], dist.ProcessGroup] = {}  # cache of `group`, avoids listing the members
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}  # groups that `close` destroys, by members
        self._met: set[tuple[int, ...]] = set()  # members of groups that `connect` has connected
        self._world = default_group(topology)
        self.global_rank = 0 if self._world is None else dist.get_rank()
        self.coordinate = topology.coordinate(self.global_rank)
        self._name = agreed_name(topology, self.global_rank) if topology.world_size > 1 else ""
        if self._world is not None and not exclusive_groups and backend in (None, dist.get_backend(self._world)):
            self._groups[tuple(range(topology.world_size))] = self._world
        _alive.add(self)
        if self._world is not None and topology.world_size > 1 and "nccl" in dist.get_backend_config(self._world):
            order_launches(self._world)
        if self._world is not None and topology.world_size > 1 and not is_fake():
            answer_questions(self._world)
            let_threads_finish()

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors of this registry's collectives.

        Without NCCL this is the CPU. With NCCL it is the CUDA device that is bound to the default group;
        `init_distributed` binds one. If no device is bound, it is the current CUDA device.
        """
        backend = self._backend or (dist.get_backend_config(self._world) if self._world is not None else "")
        return cuda_device(self._world) if "nccl" in backend else torch.device("cpu")

    def size(self, *axes: str) -> int:
        """Return the number of ranks in this rank's group along ``axes``.

        Args:
            axes: Names of axes or aliases, at least one.
        Raises:
            ValueError: There are no axes; a name is unknown; or an axis is named twice, directly or by an alias.
        """
        self._check_named(axes)
        return self.topology.size(*axes)

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Return the global ranks of this rank's group along ``axes``, ascending.

        Args:
            axes: Names of axes or aliases, at least one.
        Raises:
            ValueError: There are no axes; a name is unknown; or an axis is named twice, directly or by an alias.
        """
        self._check_named(axes)
        return tuple(self.topology.peers(self.global_rank, *axes))

    def rank(self, *axes: str) -> int:
        """Return this rank's index in its group along ``axes``.

        The index is row-major over the axes in the order of the topology, whatever the order of the arguments.

        Args:
            axes: Names of axes or aliases, at least one.
        Raises:
            ValueError: There are no axes; a name is unknown; or an axis is named twice, directly or by an alias.
        """
        self._check_named(axes)
        index, atoms = 0, self.topology.expand_aliases(*axes)
        for axis in self.topology.axes:
            if axis in atoms:
                index = index * self.topology.size(axis) + self.coordinate[axis]
        return index

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Return this rank's process group along ``axes``; the first call creates it, without waiting for other ranks.

        Args:
            axes: Names of axes or aliases, at least one.
        Raises:
            ValueError: There are no axes; a name is unknown; or an axis is named twice, directly or by an alias.
            RuntimeError: The registry is closed; this version of torch can't create the group; or the world has one
                rank, and ``torch.distributed`` was not initialized when the registry was constructed.
        Collectives: none.
        """
        if axes not in self._by_axes:
            self._by_axes[axes] = self.group_of(self.ranks(*axes))
        return self._by_axes[axes]

    def create_groups(self, *axes: str) -> None:
        """Create this rank's process group along each axis now, so that `torch.compile` needs no graph break to create it.

        Args:
            axes: Names of axes or aliases. No group is created for an axis of size 1.
        Raises:
            ValueError: A name is unknown.
            RuntimeError: The registry is closed, or this version of torch can't create the group.
        Collectives: none.
        """
        for axis in axes:
            if self.size(axis) > 1:
                self.group(axis)

    def group_of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the process group whose members are exactly ``ranks``; the first call with these members creates it.

        Args:
            ranks: Global ranks in any order; this rank must be one of them.
        Raises:
            ValueError: The registry has no group of these ranks, and ``ranks`` does not contain this rank, contains a
                rank outside the world, or contains a rank twice.
            RuntimeError: The registry is closed; this version of torch can't create the group; or the world has one
                rank, and ``torch.distributed`` was not initialized when the registry was constructed.
        Collectives: none.
        """
        # Without torch._dynamo nothing is compiled, and `torch.compiler.disable` would import it, which is slow.
        if "torch._dynamo" not in sys.modules:
            return self._known_or_new_group(ranks)
        group: dist.ProcessGroup = torch.compiler.disable(self._known_or_new_group)(ranks)
        return group

    def _known_or_new_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        if self._closed:
            raise RuntimeError(
                f"rank {self.global_rank} requests a process group of a closed registry; make a new registry, or close "
                "this ProcessGroupRegistry later"
            )
        members = tuple(sorted(ranks))
        if members in self._groups:
            return self._groups[members]
        self._check_members(members)
        if self._world is None:
            raise RuntimeError(
                "the group has size 1, and torch.distributed wasn't initialized when this registry was constructed, so "
                "there is no process group; call registry.group() only if registry.size(...) > 1, or construct the "
                "registry after init_distributed()"
            )
        # The name has a digest of the members, because it is a prefix of keys in the store, and the list can be long.
        digest = hashlib.sha1(repr(members).encode(), usedforsecurity=False).hexdigest()[:16]
        group = new_local_group(
            members, f"{self._name}/{digest}", timeout=self._timeout, backend=self._backend, device=self.device
        )
        self._made[members] = self._groups[members] = group
        return group

    def connect(self, *groups: str | tuple[str, ...]) -> None:
        """Connect the members of process groups now, by one all-reduce of one element per group.

            registry.connect("tensor", ("row", "col"))

        Without this call a group connects in its first collective. Over NCCL, ``connect`` creates the communicators early,
        while memory is available, and in the same order on all ranks. With any backend, an unreachable rank causes an error
        here instead of in the first step.

        Every rank of the world must call ``connect``. It connects all groups of the registry that every member has
        created, and that no earlier call has connected. All ranks connect the groups in the same order, so they cannot
        deadlock.

        Args:
            groups: Groups to create first, if they do not exist: an axis or alias, or a tuple of axes for a group along
                several axes. Pass the same groups on every rank.
        Raises:
            ValueError: On every rank: a tuple is empty; a name is unknown; or a tuple names an axis twice, directly or by
                an alias.
            RuntimeError: With several ranks: the registry is closed, or another rank did not call ``connect`` within the
                timeout.
        Collectives: over the world one object all-gather, which may take two messages; then one all-reduce per group.
        None with one rank.
        Host synchronization: yes, except with one rank.
        """
        error = None
        try:
            requested = [(axes,) if isinstance(axes, str) else axes for axes in groups]
            for axes in sorted(requested, key=lambda axes: self.ranks(*axes)):
                if self.size(*axes) > 1:
                    self.group(*axes)
        except Exception as caught:  # raised after the gather, in which the other ranks wait
            error = caught
        if self.topology.world_size == 1:
            if error is not None:
                raise error
            return
        with track_call("connect", self):
            world = self.group(*self.topology.axes)
            own = {*self._groups} - self._met if error is None else str(error)
            by_rank: list[Any] = all_gather_objects(own, world, self.device)
            if error is not None:
                raise error
            for rank, found in enumerate(by_rank):
                if isinstance(found, str):
                    raise ValueError(f"rank {rank}: {found}")
            for members in sorted(by_rank[self.global_rank]):
                if all(members in by_rank[rank] for rank in members):
                    dist.all_reduce(torch.zeros(1, device=self.device), group=self._groups[members])
                    self._met.add(members)

    def device_mesh(self, *axes: str | tuple[str, ...]) -> DeviceMesh:
        """Return torch's `DeviceMesh` of this rank's group along ``axes``. It uses the process groups of this registry.

            mesh = registry.device_mesh("data", "tensor")

        The mesh can be used until the registry is closed. The process group of each mesh dim is created if it does
        not exist.

        Args:
            axes: One entry per mesh dim: an axis, or a tuple of axes that form one mesh dim. The name of a mesh dim
                of several axes joins their names: ``("edp", "mid")`` gives ``"edp_mid"``.
        Raises:
            ValueError: There are no axes; a name is unknown; an axis is named twice, directly or by an alias; or the
                axes of a mesh dim are not in the order of the topology.
            RuntimeError: The registry is closed; or the world has one rank, and ``torch.distributed`` was not
                initialized when the registry was constructed.
        """
        from torch.distributed.device_mesh import DeviceMesh

        topology, dims = self.topology, [(dim,) if isinstance(dim, str) else dim for dim in axes]
        names = tuple("_".join(dim) for dim in dims)
        ranks = self.ranks(*(axis for dim in dims for axis in dim))
        by_dim = [topology.expand_aliases(*dim) for dim in dims]
        if [tuple(axis for axis in topology.axes if axis in dim) for dim in by_dim] != by_dim:
            raise ValueError(
                f"a dim of the mesh {dims} has axes in another order than the topology ({topology.named()}); write them in "
                "the topology's order"
            )
        groups = [self.group(*dim) for dim in dims]
        if len(dims) == 1:
            return DeviceMesh.from_group(groups[0], self.device.type, mesh_dim_names=names)
        atoms = [axis for dim in by_dim for axis in dim]
        ordered = [axis for axis in topology.axes if axis in atoms]
        grid = torch.tensor(ranks, dtype=torch.int).reshape([topology.size(axis) for axis in ordered])
        # The grid is made contiguous, because torch uses the strides of the mesh tensor.
        grid = grid.permute([ordered.index(axis) for axis in atoms]).contiguous()
        grid = grid.reshape([topology.size(*dim) for dim in by_dim])
        return DeviceMesh.from_group(groups, self.device.type, mesh=grid, mesh_dim_names=names)

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, *, roles: Mapping[str, Role] | None = None) -> ProcessGroupRegistry:
        """Return a registry whose axes are the mesh dims of ``mesh``.

        The group along an axis is the mesh's process group, or the default group if the axis has all ranks. `close`
        does not destroy these groups.

            mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "tensor"))
            registry = ProcessGroupRegistry.from_device_mesh(mesh)

        Args:
            mesh: A mesh of all ranks of the world in row-major order, with names of mesh dims, as `init_device_mesh`
                returns it.
            roles: Role per mesh dim: ``"pipe"``, ``"data"`` or ``"model"``. None: the default roles of the names of the
                mesh dims.
        Raises:
            ValueError: The mesh has no names of mesh dims, or does not hold all ranks of the world in row-major order;
                ``roles`` has an unknown mesh dim or role; or another rank constructed this registry with another topology.
        Collectives: none.
        Host synchronization: none.
        """
        if mesh.mesh_dim_names is None:
            raise ValueError(
                f"{mesh} has no dim names; create the mesh with names, for example mesh_dim_names=('data', 'tensor')"
            )
        grid = mesh.mesh
        if grid.flatten().tolist() != list(range(dist.get_world_size())):
            raise ValueError(
                f"the mesh holds ranks {grid.tolist()}; a topology needs all {dist.get_world_size()} ranks of the world in "
                "row-major order, as init_device_mesh returns them: pass the root mesh, not a slice of it"
            )
        topology = Topology(roles=roles, **dict(zip(mesh.mesh_dim_names, grid.shape, strict=True)))
        registry = cls(topology)
        registry.adopt(*(mesh.get_group(axis) for axis in topology.axes))
        return registry

    def adopt(self, *groups: dist.ProcessGroup) -> None:
        """Use existing process groups instead of creating groups with the same members.

        If the registry already has a group with the same members, it keeps that group.

        Args:
            groups: Process groups that contain this rank, with ascending members. `close` does not destroy them.
        """
        for group in groups:
            self._groups.setdefault(tuple(dist.get_process_group_ranks(group)), group)

    def close(self, *, abort: bool = False) -> None:
        """Destroy the process groups that this registry created.

        The default group, and groups that were passed to `adopt`, are not destroyed. After this call, `group` raises
        RuntimeError. A second call of ``close`` has no effect. If the default group was destroyed or replaced after this
        registry was constructed, no group is destroyed. All ranks destroy their groups in the same order.

        Args:
            abort: True: abort pending NCCL collectives, because other ranks may never call them. False: wait for them.
                Default: False. A ``with`` block of the registry that ends with an error calls ``close(abort=True)``.
        """
        if not self._closed and self._world is dist.group.WORLD:
            for _, group in sorted(self._made.items()):
                end_local_group(group, abort=abort)
        self._closed = True
        self._made, self._groups, self._by_axes = {}, {}, {}

    def __copy__(self) -> ProcessGroupRegistry:
        """Return this registry itself, because process groups can't be copied."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the topology, the timeout and the backend; process groups and ``exclusive_groups`` are not pickled.

        Unpickling returns an open registry of this process with the same topology, timeout and backend, or else a new one.
        """
        return _of_topology, (self.topology, self._timeout, self._backend)

    def __enter__(self) -> ProcessGroupRegistry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(abort=error is not None)

    def __deepcopy__(self, memo: dict[int, object]) -> ProcessGroupRegistry:
        # A copied layer must use the same process groups as the original.
        return self

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._made)} groups made"
        return f"ProcessGroupRegistry({self.topology!r}, rank {self.global_rank} at {self.coordinate}, {state})"

    def _check_named(self, axes: tuple[str, ...]) -> None:
        if not axes:
            if not self.topology.axes:
                raise ValueError(
                    "no axis is given, and the topology has none; it has one rank, which is alone in each group: use size "
                    "1 and rank 0, or give the topology an axis, such as Topology(data=1)"
                )
            raise ValueError(
                f"no axis is given; name at least one ({self.topology.named()}); for the group of all ranks, pass "
                "*registry.topology.axes; for an empty list of axes, use size 1 and rank 0"
            )
        self.topology.expand_aliases(*axes)

    def _check_members(self, members: tuple[int, ...]) -> None:
        if len(set(members)) != len(members):
            raise ValueError(f"ranks {members} name a rank twice; name each rank once")
        outside = [rank for rank in members if not 0 <= rank < self.topology.world_size]
        if outside:
            raise ValueError(
                f"ranks {outside} aren't in the world of {self.topology.world_size} ranks; name ranks from 0 to "
                f"{self.topology.world_size - 1}"
            )
        if self.global_rank not in members:
            raise ValueError(
                f"rank {self.global_rank} requests the group of ranks {members}, but is not a member; only members may "
                "request a group"
            )


def _of_topology(topology: Topology, timeout: timedelta | None, backend: str | None) -> ProcessGroupRegistry:
    """Return an open registry of this process with these arguments, or else a new one. Unpickling calls this function."""
    for registry in list(_alive):
        is_current = not registry._closed and registry._world is (dist.group.WORLD if dist.is_initialized() else None)
        if is_current and (registry.topology, registry._timeout, registry._backend) == (topology, timeout, backend):
            return registry
    return ProcessGroupRegistry(topology, timeout=timeout, backend=backend)
