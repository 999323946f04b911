"""`Constants`: a bounded cache of small device tensors."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from meshstep.optim.kernels.device_constants import KEPT, Constants

CPU = torch.device("cpu")


def test_cached_constant_is_created_once_per_key_and_dtype() -> None:
    constants = Constants()
    first = constants("weights", lambda: [0.5, 1.0], torch.float64, CPU)
    assert torch.equal(first, torch.tensor([0.5, 1.0], dtype=torch.float64))
    assert constants("weights", pytest.fail, torch.float64, CPU) is first
    other = constants("weights", lambda: [2, 3], torch.int64, CPU)
    assert (other.dtype, other.tolist()) == (torch.int64, [2, 3])


def test_constants_cache_holds_the_most_recently_used_entries() -> None:
    """The cache is bounded because keys can change in every step."""
    constants = Constants()
    made = []

    def values(key: int) -> list[float]:
        made.append(key)
        return [key]

    for key in range(KEPT):
        constants(key, partial(values, key), torch.float32, CPU)
    constants(0, pytest.fail, torch.float32, CPU)  # still cached, and now the most recently used
    constants(KEPT, partial(values, KEPT), torch.float32, CPU)
    constants(0, pytest.fail, torch.float32, CPU)
    made.clear()
    constants(1, partial(values, 1), torch.float32, CPU)
    assert made == [1]
