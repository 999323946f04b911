"""Checks of values that come from a file or a state dict."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from meshstep.parallel.mesh.value_checks import check_like


@pytest.mark.parametrize("like", [1.0, 2, math.nan, torch.tensor(1.0)])
@pytest.mark.parametrize("value", [torch.ones(3), torch.ones(0), torch.full((2,), math.nan), "1", True, 10**400])
def test_check_like_rejects_value_that_is_not_one_number(value: Any, like: Any) -> None:
    with pytest.raises(ValueError, match=r"lr is .*; expected a number in the range of float64 that is not NaN"):
        check_like(value, like, "lr")


@pytest.mark.parametrize("value", [3, 0.5, math.inf, torch.tensor([2.0])])
def test_check_like_accepts_number_and_tensor_with_one_number(value: Any) -> None:
    check_like(value, 1.0, "lr")
    check_like(value, torch.tensor(1.0), "lr")


@pytest.mark.parametrize("value", [math.nan, torch.tensor(math.nan)])
def test_check_like_accepts_nan_only_in_place_of_nan(value: Any) -> None:
    check_like(value, math.nan, "lr")
    with pytest.raises(ValueError, match="lr is"):
        check_like(value, 1.0, "lr")
