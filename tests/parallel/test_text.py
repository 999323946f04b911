"""Alignment of text tables, and shortening of long lists of names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshstep.parallel.mesh.text import aligned, printable, some, without_wrappers

CELLS = st.text("abc", min_size=1, max_size=5)


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=5), st.sets(st.integers(0, 2)))
def test_text_table_aligns_cells_left_or_right_in_their_column(rows: list[tuple[str, ...]], right: set[int]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for line, row in zip(aligned(rows, right), rows, strict=True):
        at = 0
        for column, width in enumerate(widths):
            found = line[at : at + width]
            assert found.strip() == row[column]
            assert found == row[column].rjust(width) if column in right else found.startswith(row[column])
            at += width + 2
        assert line == line.rstrip()


def test_table_without_rows_is_empty_and_rows_of_different_length_raise() -> None:
    assert aligned([]) == []
    with pytest.raises(ValueError, match="shorter"):
        aligned([("a", "b"), ("a",)])


@given(st.lists(CELLS, max_size=8), st.integers(1, 8))
def test_shortened_list_counts_omitted_names(names: list[str], most: int) -> None:
    shown, _, more = some(names, most).partition(" and ")
    assert shown == ", ".join(names[:most])
    assert more == (f"{len(names) - most} more" if len(names) > most else "")


def test_shortened_list_shows_five_names_by_default() -> None:
    assert some("abcde") == "a, b, c, d, e"
    assert some("abcdef") == "a, b, c, d, e and 1 more"


@pytest.mark.long
@given(st.text(max_size=30))
def test_printable_text_has_no_control_characters(text: str) -> None:
    assert printable(text).isprintable()
    assert (printable(text) == text) == text.isprintable()
    assert some([text]) == printable(text)


def test_printable_text_shows_control_characters_as_escapes() -> None:
    found = printable("a\x1b[31m\n\u202e\udc80\x9b ü[/]")
    assert found == r"a\x1b[31m\n\u202e\udc80\x9b ü[/]"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_orig_mod", ""),
        ("_orig_mod.head.weight", "head.weight"),
        ("layers.0._checkpoint_wrapped_module._orig_mod.up.weight", "layers.0.up.weight"),
        ("_forward_module.my_orig_mod.weight", "my_orig_mod.weight"),
        ("head.weight", "head.weight"),
    ],
)
def test_without_wrappers_removes_only_whole_wrapper_parts_of_names(name: str, expected: str) -> None:
    assert without_wrappers(name) == expected
