"""Flat gradient buckets and their slices per rank."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from meshstep.optim.gradients.buckets import ALIGNMENT, flat_buckets


@given(
    numels=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    slices=st.integers(1, 7),
    bucket_numel=st.integers(1, 500),
)
def test_slices_of_flat_buckets_cover_every_element_once(numels: list[int], slices: int, bucket_numel: int) -> None:
    indices = [3 * i for i in range(len(numels))]
    buckets = flat_buckets(dict(zip(indices, numels, strict=True)), slices, bucket_numel)
    assert sorted(index for bucket in buckets for index in bucket.indices) == indices
    assert [bucket.indices[-1] for bucket in buckets] == sorted((b.indices[-1] for b in buckets), reverse=True)
    for bucket in buckets:
        assert sum(bucket.numels) <= bucket_numel or len(bucket.indices) == 1
        seen = [torch.zeros(numel, dtype=torch.int) for numel in bucket.numels]
        for index in range(slices):
            segments = bucket.segments(index)
            assert len({segment.param_index for segment in segments}) == len(segments)
            for segment in segments:
                seen[segment.param_index][segment.start : segment.start + segment.numel] += 1
                there = index * bucket.slice_numel + segment.offset
                assert there == bucket.spans[segment.param_index][0] + segment.start
                assert segment.offset + segment.numel <= bucket.slice_numel
                assert segment.start % ALIGNMENT == segment.offset % ALIGNMENT == 0
        assert all(bool((count == 1).all()) for count in seen)
        assert bucket.padded_numel - sum(bucket.numels) < ALIGNMENT * (slices + len(bucket.numels))
