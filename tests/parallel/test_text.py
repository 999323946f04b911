"""Columns of a text table stand under each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshstep.parallel.mesh.text import aligned

CELLS = st.text("abc", min_size=1, max_size=5)


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=5), st.sets(st.integers(0, 2)))
def test_every_cell_is_at_its_side_of_its_column(rows: list[tuple[str, ...]], right: set[int]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for line, row in zip(aligned(rows, right), rows, strict=True):
        at = 0
        for column, width in enumerate(widths):
            found = line[at : at + width]
            assert found.strip() == row[column]
            assert found == row[column].rjust(width) if column in right else found.startswith(row[column])
            at += width + 2
        assert line == line.rstrip()


def test_no_rows_make_no_lines_and_uneven_rows_no_table() -> None:
    assert aligned([]) == []
    with pytest.raises(ValueError, match="shorter"):
        aligned([("a", "b"), ("a",)])
