"""Splitting items into runs of bounded total size, and the parameters of param groups into buckets."""

from __future__ import annotations

import pytest
import torch
from meshstep.amp.by_bucket import split_groups, split_runs


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


def test_split_groups_limits_elements_and_devices_of_a_bucket_and_keeps_param_groups() -> None:
    """Tensors of float64 are not split, and are all in the first bucket. Empty tensors have a device too."""
    whole = torch.empty(9, dtype=torch.float64)
    cpu, meta = [torch.empty(size) for size in (2, 3, 1)], [torch.empty(size, device="meta") for size in (0, 7, 1)]

    def buckets(by_device: bool) -> list[list[list[int]]]:
        everything = [whole, *cpu, *meta]
        index = {tensor: number for number, tensor in enumerate(everything)}
        found = split_groups(
            [[*cpu[:2], whole], [cpu[2], *meta]], lambda tensor: tensor is not whole, 5, by_device=by_device
        )
        return [[[index[tensor] for tensor in group] for group in bucket] for bucket in found]

    assert buckets(False) == [[[0, 1, 2], []], [[], [3, 4]], [[], [5]], [[], [6]]]
    assert buckets(True) == [[[0, 1, 2], []], [[], [3]], [[], [4, 5]], [[], [6]]]
    assert split_groups([[], []], lambda _: True, 5) == [[[], []]]
