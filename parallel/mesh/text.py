"""Tables, ranks and names as plain text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """A line for each row: cells as wide as the widest of their column, two spaces between them, none at the end.

        >>> aligned([("axis", "size"), ("data", "8"), ("tensor", "128")], right={1})
        ['axis    size', 'data       8', 'tensor   128']

    Args:
        rows: The header is one of them; all of the same number of cells.
        right: Columns, from 0, whose cells stand at the right of their column; all others stand at the left.
    Raises:
        ValueError: A row has another number of cells than the first.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_padded(row, widths, right)).rstrip() for row in rows]


def _padded(row: Sequence[str], widths: Sequence[int], right: Collection[int]) -> list[str]:
    return [
        cell.rjust(width) if column in right else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


def named_ranks(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 1-3, 5``, of ascending numbers."""
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
    """Return ``text`` with control characters, and others that are not printable, as escapes: ``\\x1b``, ``\\n``.

    For text that comes from a file or from names of parameters: a terminal would obey it.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def some(names: Iterable[str], most: int = 5) -> str:
    """``a, b and 7 more``: the first ``most`` names, and how many are left out; empty of none. Names are `printable`."""
    names = [printable(name) for name in names]
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
