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

import hashlib
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from .at_exit import let_threads_finish
from .calls import answer_questions, in_call
from .default_group import agreed_name, default_group, is_fake
from .local_group import cuda_device, end_local_group, new_local_group
from .objects import all_gather_objects
from .roles import Role
from .sub_mesh import sub_mesh
from .topology import Topology

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
