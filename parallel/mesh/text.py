"""Format tables, ranks, lists of names and topologies as plain text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .topology import Topology


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return one line per row, with aligned columns that are separated by two spaces.

        >>> aligned([("axis", "size"), ("data", "8"), ("tensor", "128")], right={1})
        ['axis    size', 'data       8', 'tensor   128']

    ``right`` has the indices of right-aligned columns.
    """
    columns = []
    for number, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.rjust(width) if number in right else cell.ljust(width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ``"rank 1"`` or ``"ranks 1-3, 5"`` for ascending rank numbers."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return f"ranks {', '.join('-'.join(map(str, run)) for run in runs)}"


def printable(text: str) -> str:
    """Replace every unprintable character of ``text`` by an escape such as ``\\x1b`` or ``\\n``, and return the result.

    Use it for text from a file and for parameter names: a terminal would execute control characters in them.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def some(names: Iterable[str], most: int = 5) -> str:
    """Return a text such as ``"a, b and 7 more"``: the first ``most`` names, and the number of omitted names.

    Unprintable characters are replaced by escapes, as in `printable`.
    """
    names = [printable(name) for name in names]
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


# The grid of ranks of a topology --------------------------------------------------------------------------------------

#     data 0           data 1
#           col 0 1          col 0 1
#     row 0     0 1    row 0     4 5
#     row 1     2 3    row 1     6 7
#
# The two fastest axes span a block, and there is one block per coordinate on the slower axes. Axes of size 1 are not
# shown. Only some coordinates of long axes are shown. The text therefore has at most about 200 lines, even for a million
# ranks.

_WIDTH = 100
# Largest number of blocks, rows of a block, ranks of a group, and groups that the text shows.
_BLOCKS, _ROWS, _MEMBERS, _GROUPS = 16, 8, 8, 12
_ELIDED = "..."  # ASCII, for terminals without Unicode


def render(topology: Topology, rank: int | None) -> str:
    place = topology.coordinate(rank) if rank is not None else {}
    ranks = f"{topology.world_size:,} rank{'s' if topology.world_size > 1 else ''}"
    lines = [f"{topology!r}: {ranks}", "", *_grid(topology, rank, place)]
    if topology.axes:
        lines += ["", *_groups(topology, rank)]
    for axis in topology.expert_axes_without_role:
        lines += [
            "",
            f"{axis} has no role, so it counts as a model axis: gradients of replicas are not averaged over it.",
            f'If its ranks see different samples, write roles={{"{axis}": "data"}}; if the same samples, "model".',
        ]
    return "\n".join(line.rstrip() for line in lines)


def _grid(topology: Topology, rank: int | None, place: dict[str, int]) -> list[str]:
    """Return the lines of all blocks of the grid of ranks.

    If there are more than `_BLOCKS` blocks, only some are shown: the first two, the last, and the block with ``rank``.
    Otherwise blocks that differ only along the third-fastest axis are side by side, as far as they fit into the width.
    """
    axes = _grid_axes(topology)
    slow, fast = axes[:-2], axes[-2:]
    block_size = topology.size(*fast)
    count = topology.world_size // block_size
    keep = None if rank is None else rank // block_size
    blocks = []
    for index in _elide(count, _BLOCKS, keep, head=2):
        if index is None:
            blocks.append([_ELIDED])
            continue
        first = topology.coordinate(index * block_size)
        blocks.append(_block(topology, {axis: first[axis] for axis in slow}, rank, place))
    side_by_side = topology.size(slow[-1]) if slow and count <= _BLOCKS else 1
    return _flow(blocks, side_by_side)


def _grid_axes(topology: Topology) -> tuple[str, ...]:
    return tuple(axis for axis in topology.axes if topology.size(axis) > 1)


def _block(topology: Topology, where: dict[str, int], rank: int | None, place: dict[str, int]) -> list[str]:
    """Return the lines of one block of the grid: the ranks at the coordinate ``where`` of the slower axes.

    The row and column of the marked ``rank``, whose coordinate is ``place``, are always shown.
    """
    axes = _grid_axes(topology)
    column_axis = axes[-1] if axes else "rank"
    row_axis = axes[-2] if len(axes) > 1 else None
    most = 72 // (len(str(topology.world_size - 1)) + 2)
    columns = _elide(topology.size(*axes[-1:]), min(16, most), place.get(column_axis))
    rows = _elide(topology.size(row_axis), _ROWS, place.get(row_axis)) if row_axis else [0]
    lines: list[tuple[str, list[str]]] = []  # (label, cells)
    for row in rows:
        fixed = dict.fromkeys(topology.axes, 0) | where | ({row_axis: row} if row_axis and row is not None else {})
        cells = []
        for column in columns:
            if row is None or column is None:
                cells.append(_ELIDED)
                continue
            here = topology.rank(**fixed | ({column_axis: column} if axes else {}))
            cells.append(f"[{here}]" if here == rank else str(here))
        lines.append((f"{row_axis} {_ELIDED if row is None else row} " if row_axis else "", cells))
    label_width = max(len(label) for label, _ in lines) + len(column_axis)
    lines.insert(0, (f"{column_axis:>{label_width}}", [_ELIDED if at is None else str(at) for at in columns]))
    if rank is not None:  # aligns the other numbers with the marked rank, which is in brackets
        lines = [(label, [cell if cell.endswith("]") else cell + " " for cell in cells]) for label, cells in lines]
    width = max(len(cell) for _, cells in lines for cell in cells)
    title = [", ".join(f"{axis} {value}" for axis, value in where.items())] if where else []
    return title + [f"{label:{label_width}} {' '.join(f'{c:>{width}}' for c in cells)}" for label, cells in lines]


def _groups(topology: Topology, rank: int | None) -> list[str]:
    """Return the lines of the table of groups: a header, one line per axis, and one line per set of axes that has an alias.

    Further lines are for all data axes, all model axes, and all pipeline and model axes together.
    """
    sets: dict[tuple[str, ...], str] = {(axis,): axis for axis in topology.axes}
    for alias, atoms in topology.aliases.items():
        if len(atoms) > 1:
            sets[atoms] = f"{alias} = {sets.get(atoms, ' x '.join(atoms))}"
    together = [axes for axes in (topology.data_axes, topology.model_axes) if len(axes) > 1]
    if topology.pipe_axes and topology.model_axes:
        together.append(tuple(axis for axis in topology.axes if axis not in topology.data_axes))
    title = "ranks of each group" if rank is None else f"ranks of the group of rank {rank}"
    table = [("axes", "role", "size", "groups", title)]
    for alias, atoms in topology.aliases.items():
        if len(atoms) == 1:
            sets[atoms] += f" = {alias}"
    for axes in dict.fromkeys([*sets, *together]):
        size = topology.size(*axes)
        count = topology.world_size // size
        roles = "+".join(dict.fromkeys(topology.role(axis) for axis in axes))
        if rank is None:
            text = " | ".join(_members(group) for group in islice(topology.groups(*axes), _GROUPS))
            text += f" | {_ELIDED}" if count > _GROUPS else ""
        else:
            text = _members(topology.peers(rank, *axes), rank)
        table.append((sets.get(axes, " x ".join(axes)), roles, f"{size:,}", f"{count:,}", text))
    heads = aligned([row[:-1] for row in table], right=(2, 3))
    return [
        f"{head}  {_shorten(text, max(_WIDTH - len(head) - 2, 40))}"
        for head, (*_, text) in zip(heads, table, strict=True)
    ]


def _members(group: Sequence[int], rank: int | None = None) -> str:
    shown = _elide(len(group), _MEMBERS, None if rank is None else group.index(rank))
    return " ".join(_ELIDED if index is None else str(group[index]) for index in shown)


def _elide(size: int, limit: int, keep: int | None, head: int | None = None) -> list[int | None]:
    """Return the indices 0..size-1. If ``size`` exceeds ``limit``, return only some indices, with None for each gap.

    The first ``head`` indices (None: ``limit - 3``), the last index and ``keep`` are always included.
    """
    if size <= limit:
        return list(range(size))
    shown = {*range(head or limit - 3), size - 1, *(() if keep is None else (keep,))}
    indices: list[int | None] = []
    before = -1
    for index in sorted(shown):
        if index != before + 1:
            indices.append(None)
        indices.append(index)
        before = index
    return indices


def _shorten(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    return f"{text[: width - len(_ELIDED)].rpartition(' ')[0].rstrip(' |.')} {_ELIDED}"


def _flow(blocks: Sequence[Sequence[str]], side_by_side: int) -> list[str]:
    """Return the lines of all blocks, with ``side_by_side`` blocks in a row, or fewer if the page is too narrow."""
    gap = "    "
    width = max(len(line) for block in blocks for line in block)
    side_by_side = max(1, min(side_by_side, (_WIDTH + len(gap)) // (width + len(gap))))
    lines: list[str] = []
    for start in range(0, len(blocks), side_by_side):
        row = blocks[start : start + side_by_side]
        lines += [""] if lines else []
        lines += [gap.join(f"{text:{width}}" for text in texts) for texts in zip(*row, strict=True)]
    return lines


# Attributes in which torch.compile, activation checkpointing, FSDP and Lightning Fabric store a wrapped module.
_WRAPPED = re.compile(r"(?:^|\.)(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|_forward_module)(?=\.|$)")


def without_wrappers(name: str) -> str:
    """Return a module or parameter name without the components that wrapper modules add, such as ``_orig_mod``.

    >>> without_wrappers("_orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    return _WRAPPED.sub("", name).removeprefix(".")
