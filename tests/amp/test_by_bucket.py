"""Splitting a list of items into runs of bounded total size."""

from __future__ import annotations

import pytest
from meshstep.amp.by_bucket import split_runs


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([2, 3, 4], [[2, 3], [4]]),
        ([1, 1, 1, 1, 1, 1], [[1, 1, 1, 1, 1], [1]]),
        ([4, 2, 3, 1, 5], [[4], [2, 3], [1], [5]]),
        ([1, 7, 1, 1], [[1], [7], [1, 1]]),
        ([0, 5, 0, 1], [[0, 5, 0], [1]]),
    ],
)
def test_split_runs_limits_each_run_to_five_elements_or_one_larger_item(
    sizes: list[int], expected: list[list[int]]
) -> None:
    assert [*split_runs(sizes, lambda size: size, 5)] == expected
