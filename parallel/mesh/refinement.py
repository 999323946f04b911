"""The axes that several device meshes of the same ranks have in common: their refinement.

    dense    (data=4, tensor=2)     strides 2, 1     data    = edp x data_1      tensor
    experts  (edp=2, expert=4)      strides 4, 1     edp     expert = data_1 x tensor
                                                     edp=2, data_1=2, tensor=2

Numbers of ranks are read in mixed radix. A dim of size n and stride s is the digits from s to s * n; all these ends,
sorted, are those of the axes, if each divides the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Ranks = tuple[int, ...]


class Dim(NamedTuple):
    """A dim of a device mesh as one rank sees it: its mesh's number, its name, and the ranks along it, in order."""

    mesh: int
    name: str
    ranks: Ranks


def agreed_dims(meshes: Sequence[DeviceMesh]) -> list[list[Dim]]:
    """Of each rank of the world, the dims of the meshes that it is in.

    Raises:
        ValueError: On every rank: a mesh has no dim names.
    Collectives: an object all-gather over the world.
    """
    import torch.distributed as dist  # most that a topology is for needs no torch

    mine: list[Dim] | str = []
    try:
        mine = dims_of(meshes)
    except ValueError as problem:
        mine = str(problem)
    views: list[list[Dim] | str] = [mine] * dist.get_world_size()
    dist.all_gather_object(views, mine)
    for view in views:
        if isinstance(view, str):
            raise ValueError(view)
    return [view for view in views if not isinstance(view, str)]


def dims_of(meshes: Sequence[DeviceMesh]) -> list[Dim]:
    """The dims of the meshes that this rank is in.

    Raises:
        ValueError: A mesh has no dim names.
    """
    found = []
    for number, mesh in enumerate(meshes):
        names, at = mesh.mesh_dim_names, mesh.get_coordinate()
        if names is None:
            raise ValueError(f"{mesh} has no dim names; make it with mesh_dim_names=('data', 'tensor') or the like")
        for index, name in enumerate(names) if at is not None else ():
            found.append(Dim(number, name, ranks_along(mesh, index)))
    return found


def ranks_along(mesh: DeviceMesh, index: int) -> Ranks:
    """The ranks along a dim of a mesh that this rank is in, in order."""
    at = mesh.get_coordinate() or ()
    return tuple(mesh.mesh[tuple(slice(None) if i == index else where for i, where in enumerate(at))].tolist())


def refined(views: Sequence[Sequence[Dim]]) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """The sizes of the axes, slowest first, and the axes of the aliases.

    A dim that is an axis gives it its name, if it is the first; other dims are aliases. An axis that is no dim is named
    after the first one that it is a part of, and its place in that: ``data_1``.

    Args:
        views: Of each rank of the world.
    Raises:
        ValueError: The groups along a dim are not alike, or no grid; or those of several dims don't nest; dims of one name
            differ; or ranks are along no dim.
    """
    world = len(views)
    steps = {dim: _steps(dim, found) for dim, found in _by_dim(views).items()}
    ends = {1: "1", world: f"the world of {world}"}
    for (_, name), found in steps.items():
        for size, stride in found:
            ends.setdefault(stride, f"the stride of {name!r}")
            ends.setdefault(stride * size, f"the span of {name!r} (size {size}, stride {stride})")
    digits = sorted(ends)
    for small, large in pairwise(digits):
        if large % small:
            raise ValueError(
                f"the meshes don't nest: {small}, {ends[small]}, doesn't divide {large}, {ends[large]}, so no axes make up "
                "both; lay them out so that the groups of one are made of whole groups of the other"
            )
    atoms = list(pairwise(digits))[::-1]  # slowest first

    def within(found: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """The numbers of the atoms that steps are made of, in their order."""
        parts = (
            i
            for size, stride in found
            for i, (low, high) in enumerate(atoms)
            if stride <= low and high <= stride * size
        )
        return tuple(parts)

    parts = _by_name({dim: within(found) for dim, found in steps.items()})
    names: dict[int, str] = {}
    for name, numbers in parts.items():
        if len(numbers) == 1:
            names.setdefault(numbers[0], name)
    for name, numbers in parts.items():
        for place, number in enumerate(numbers):
            names.setdefault(number, f"{name}_{place}")
    for number, (low, high) in enumerate(atoms):
        if number not in names:
            raise ValueError(
                f"ranks {tuple(range(0, high, low))} are along no dim of the meshes given, so nothing says what they share:"
                " give the mesh that has them too"
            )
    axes = {names[number]: high // low for number, (low, high) in enumerate(atoms)}
    axes |= {name: 1 for name, numbers in parts.items() if not numbers}
    return axes, {name: tuple(names[i] for i in numbers) for name, numbers in parts.items() if name not in axes}


def _by_dim(views: Sequence[Sequence[Dim]]) -> dict[tuple[int, str], list[Ranks]]:
    """The groups along each dim of each mesh."""
    found: dict[tuple[int, str], list[Ranks]] = {}
    for dims in views:
        for mesh, name, ranks in dims:
            groups = found.setdefault((mesh, name), [])
            if ranks not in groups:
                groups.append(ranks)
    return dict(sorted(found.items(), key=lambda item: item[0][0]))


def _steps(dim: tuple[int, str], groups: Sequence[Ranks]) -> list[tuple[int, int]]:
    """(size, stride) pairs, slowest first, of the one grid that all groups along a dim are."""
    first, (_, name) = groups[0], dim
    for group in groups:
        if [rank - group[0] for rank in group] != [rank - first[0] for rank in first]:
            raise ValueError(
                f"the groups along {name!r} are not alike: ranks {first} and {group}. Axes make groups of one size and "
                "stride for all ranks: uneven ones (a stage with more tensor ranks than another) are no product of axes; "
                "give meshes whose groups are alike"
            )
    steps = steps_of(first)
    if steps is None or any(group[0] // stride % size for group in groups for size, stride in steps):
        raise ValueError(
            f"ranks {first} along {name!r} are no grid: their distances are no product of sizes and strides; "
            "give meshes that init_device_mesh made, or slices of them"
        )
    return steps


def steps_of(ranks: Ranks) -> list[tuple[int, int]] | None:
    """(size, stride) pairs, slowest first, whose grid these ranks are in row-major order; None: there are none."""
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


def _by_name(parts: Mapping[tuple[int, str], tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for (_, name), atoms in parts.items():
        if found.setdefault(name, atoms) != atoms:
            raise ValueError(f"{name!r} names dims of two meshes that hold different ranks; rename one of them")
    return found
