"""Format tables, ranks and lists of names as plain text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return one line per row, with aligned columns that are separated by two spaces.

        >>> aligned([("axis", "size"), ("data", "8"), ("tensor", "128")], right={1})
        ['axis    size', 'data       8', 'tensor   128']

    Args:
        rows: Cells of each row, the header included. All rows have the same number of cells.
        right: Indices, from 0, of right-aligned columns. By default all columns are left-aligned.
    Raises:
        ValueError: The numbers of cells differ between rows.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_padded(row, widths, right)).rstrip() for row in rows]


def _padded(row: Sequence[str], widths: Sequence[int], right: Collection[int]) -> list[str]:
    return [
        cell.rjust(width) if column in right else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


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
    """Return ``text`` with every character that is not printable as an escape: ``\\x1b``, ``\\n``.

    Use it for text from a file and for parameter names: a terminal would execute control characters in them.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def some(names: Iterable[str], most: int = 5) -> str:
    """Return a text such as ``"a, b and 7 more"``: the first names, made `printable`, and the number of omitted ones.

    Args:
        names: No names at all give an empty text.
        most: Largest number of names to show.
    """
    names = [printable(name) for name in names]
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
