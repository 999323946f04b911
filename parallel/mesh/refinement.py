"""The common refinement of device meshes: the fewest axes such that every mesh dim consists of one or more axes.

    mesh     mesh dims              strides     mesh dims as products of the axes edp=2, data_1=2, tensor=2
    dense    (data=4, tensor=2)     2, 1        data = edp x data_1      tensor
    experts  (edp=2, expert=4)      4, 1        edp                      expert = data_1 x tensor

The stride of a mesh dim is the difference between neighbouring ranks along it. A mesh dim of size n and stride s has the
bounds s and s * n. A flattened mesh dim may be a grid with several (size, stride) pairs, and has the bounds of each pair.
The bounds of all mesh dims, 1 and the number of ranks are sorted, and each bound must divide the next
larger one. Each pair of consecutive bounds (low, high) gives an axis of stride low and size high / low.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Ranks = tuple[int, ...]
T = TypeVar("T")


class Dim(NamedTuple):
    """A mesh dim of the device mesh number ``mesh``, and the global ranks of one group along it, in order."""

    mesh: int
    name: str
    ranks: Ranks


def gathered(make: Callable[[], T]) -> list[T]:
    """Call ``make`` on every rank of the world, and return a list of the results, indexed by global rank.

    A ValueError on one rank is raised on every rank. Any other error is a ValueError on the other ranks.

    Collectives: one object all-gather over the world.
    Host synchronization: yes.
    """
    mine: tuple[T] | str
    other_error = None
    try:
        mine = (make(),)
    except ValueError as problem:
        mine = str(problem)
    except Exception as problem:  # any type: without this rank, the other ranks would wait in the gather below
        mine, other_error = f"rank {dist.get_rank()}: {type(problem).__name__}: {problem}", problem
    views: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(views, mine)
    if other_error is not None:
        raise other_error
    for view in views:
        if isinstance(view, str):
            raise ValueError(view)
    return [view for (view,) in views]


def dim_names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or tuple(f"dim_{index}" for index in range(mesh.ndim))


def dims_of(meshes: Sequence[DeviceMesh], need_names: bool = True) -> list[Dim]:
    """Return the mesh dims of all meshes that contain this rank, each with the group of this rank along it.

    If ``need_names`` is False, mesh dims without names are called dim_0, dim_1, ...; else they raise ValueError.
    """
    found = []
    for number, mesh in enumerate(meshes):
        if not hasattr(mesh, "mesh_dim_names"):
            raise TypeError(f"{mesh!r} is not a DeviceMesh of torch; give the result of init_device_mesh")
        if need_names and mesh.mesh_dim_names is None:
            raise ValueError(
                f"{mesh} has no dim names; create the mesh with names, for example mesh_dim_names=('data', 'tensor')"
            )
        for index, name in enumerate(dim_names(mesh)) if mesh.get_coordinate() is not None else ():
            found.append(Dim(number, name, ranks_along(mesh, index)))
    return found


def ranks_along(mesh: DeviceMesh, index: int) -> Ranks:
    """Return the global ranks of this rank's group along mesh dim ``index`` of ``mesh``, which must contain this rank."""
    at = mesh.get_coordinate() or ()
    return tuple(mesh.mesh[tuple(slice(None) if i == index else where for i, where in enumerate(at))].tolist())


def refined(
    views: Sequence[Sequence[Dim]], name_of: Callable[[Ranks], str] | None = None
) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """Return the fewest axes such that every mesh dim of several device meshes consists of one or more axes.

    Return the size per axis, slowest axis first, with mesh dims of size 1 at the end; and per alias its axes, slowest
    first. A mesh dim whose name is not the name of an axis becomes an alias for its axes. `Topology.of_meshes` describes
    the names of the axes.

    ``views`` has the result of `dims_of` per global rank. ``name_of`` names an axis that is part of no mesh dim, from the
    ranks of the axis's first group. None: such an axis is an error.
    """
    world = len(views)
    steps = {dim: _grid_steps(dim, found) for dim, found in _groups_by_dim(views).items()}
    ends = {1: "the smallest stride", world: "the number of ranks"}
    for (_, name), found in steps.items():
        for size, stride in found:
            ends.setdefault(stride, f"the stride of mesh dim {name!r}")
            ends.setdefault(stride * size, f"the span of mesh dim {name!r} (size {size}, stride {stride})")
    digits = sorted(ends)
    for small, large in pairwise(digits):
        if large % small:
            raise ValueError(
                f"the meshes have no common axes: {ends[small]} is {small}, {ends[large]} is {large}, and {small} doesn't "
                f"divide {large}; create the meshes so that each group of one mesh consists of complete groups of the other"
            )
    atoms = list(pairwise(digits))[::-1]  # slowest axis first

    def atoms_of(found: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """Return the indices in ``atoms`` of the axes that form the mesh dim with the (size, stride) pairs ``found``."""
        parts = (
            i
            for size, stride in found
            for i, (low, high) in enumerate(atoms)
            if stride <= low and high <= stride * size
        )
        return tuple(parts)

    parts = _atoms_by_name({dim: atoms_of(found) for dim, found in steps.items()})
    names: dict[int, str] = {}
    for name, numbers in parts.items():
        if len(numbers) == 1:
            names.setdefault(numbers[0], name)
    for name, numbers in parts.items():
        for place, number in enumerate(numbers):
            names.setdefault(number, f"{name}_{place}")
    for number, (low, high) in enumerate(atoms):
        if number not in names:
            ranks = tuple(range(0, high, low))
            if name_of is not None:
                names[number] = name_of(ranks)
                continue
            raise ValueError(
                f"ranks {ranks} differ along no dim of these meshes, so the mesh axis of these ranks has no name; also "
                "pass a mesh with a named dim over these ranks"
            )
    axes = {names[number]: high // low for number, (low, high) in enumerate(atoms)}
    axes |= {name: 1 for name, numbers in parts.items() if not numbers}
    return axes, {name: tuple(names[i] for i in numbers) for name, numbers in parts.items() if name not in axes}


def _groups_by_dim(views: Sequence[Sequence[Dim]]) -> dict[tuple[int, str], list[Ranks]]:
    """Return, per (mesh index, name of a mesh dim), the distinct groups of ranks along it."""
    found: dict[tuple[int, str], list[Ranks]] = {}
    for dims in views:
        for mesh, name, ranks in dims:
            groups = found.setdefault((mesh, name), [])
            if ranks not in groups:
                groups.append(ranks)
    return dict(sorted(found.items(), key=lambda item: item[0][0]))


def _grid_steps(dim: tuple[int, str], groups: Sequence[Ranks]) -> list[tuple[int, int]]:
    """Return the (size, stride) pairs of the grid that a group along a mesh dim forms, slowest pair first.

    If the groups differ in sizes or strides, or are not groups of a row-major mesh, raise ValueError.
    """
    first, (_, name) = groups[0], dim
    for group in groups:
        if [rank - group[0] for rank in group] != [rank - first[0] for rank in first]:
            raise ValueError(
                f"the groups along mesh dim {name!r} have different sizes or strides: ranks {first} and ranks {group}. "
                "Groups along an axis have the same size and strides on all ranks; for example, all stages need the same "
                "number of tensor ranks. Give meshes whose groups have the same size and strides"
            )
    steps = steps_of(first)
    if steps is None:
        bad, reason = first, "the differences of the ranks do not form a grid"
    else:
        begins = [(group, step) for group in groups for step in steps if group[0] // step[1] % step[0]]
        if not begins:
            return steps
        bad, (size, stride) = begins[0]
        reason = f"no group of size {size} and stride {stride} begins at rank {bad[0]}"
    raise ValueError(
        f"ranks {bad} along mesh dim {name!r} can't be a group of a row-major mesh: {reason}; give meshes that "
        "init_device_mesh returns, or slices of such meshes"
    )


def steps_of(ranks: Ranks) -> list[tuple[int, int]] | None:
    """Return the (size, stride) pairs of the grid whose row-major order is ``ranks``, slowest first; None if none fits."""
    offsets = [rank - ranks[0] for rank in ranks]
    steps: list[tuple[int, int]] = []
    done = 1
    while done < len(ranks):
        stride, size = offsets[done], 1
        while size * done < len(ranks) and offsets[size * done] == stride * size:
            size += 1
        steps.insert(0, (size, stride))
        done *= size
    grid = list(map(sum, product(*(range(0, size * stride, stride) for size, stride in steps if stride > 0))))
    return steps if grid == offsets and prod(size for size, _ in steps) == len(ranks) else None


def _atoms_by_name(parts: Mapping[tuple[int, str], tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for (_, name), atoms in parts.items():
        if found.setdefault(name, atoms) != atoms:
            raise ValueError(
                f"two meshes have a dim named {name!r}, but these dims group different ranks; rename one of the two dims"
            )
    return found
