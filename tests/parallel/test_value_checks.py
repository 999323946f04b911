"""Checks of values that come from a file or a state dict."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from meshstep.parallel.mesh.value_checks import check_like


@pytest.mark.parametrize("like", [1.0, 2, math.nan, torch.tensor(1.0)])
@pytest.mark.parametrize("value", [torch.ones(3), torch.ones(0), torch.full((2,), math.nan), "1", True, 10**400])
def test_check_like_rejects_value_that_is_not_one_float64_number(value: Any, like: Any) -> None:
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


ACCEPTED: list[tuple[Any, Any]] = [
    (None, True),
    (False, True),
    ("text", None),
    ([1, "two", None], None),
    ("other", "text"),
    (torch.ones(2, 3), torch.zeros(2, 3)),
    ({"a": 2, "b": 3.0, "new": [1, {"c": "text"}]}, {"a": 1, "b": 1.0}),
    ({1: 0.5, 7: 2.0}, {1: 1.0, 2: 1.0}),
    ({}, {1: 1.0}),
    ({"any": 1}, {}),
    ((1, 2), [3, 4]),
    ([1, [2.0]], [3, [4.0]]),
]
REJECTED: list[tuple[Any, Any, str]] = [
    (1, True, "field is 1; expected True, False or None"),
    ({}, None, "field is {}; expected a number, a string, True, False, None or a list of these"),
    ([1, [math.nan]], None, r"field\[1\]\[0\] is nan"),
    (3, "text", "field is 3; expected "),
    (torch.ones(3, 2), torch.zeros(2, 3), r"expected a tensor of shape \(2, 3\)"),
    ([1.0] * 6, torch.zeros(2, 3), r"expected a tensor of shape \(2, 3\)"),
    ([], {"a": 1}, r"field is \[\]; expected a dict"),
    ({"a": "text"}, {"a": 1}, r"field\['a'\] is 'text'"),
    ({"a": 1, "new": [math.nan]}, {"a": 1}, r"field\['new'\]\[0\] is nan"),
    ({"a": 1, "new": {"c": math.nan}}, {"a": 1}, r"field\['new'\]\['c'\] is nan"),
    ({"a": 1}, {"a": 1, "b": 2, "c": 3}, "field lacks 'b', 'c'; give a dict with these keys"),
    ({"1": 0.5}, {1: 1.0}, "a key of field is '1'"),
    ({7: "text"}, {1: 1.0}, r"field\[7\] is 'text'"),
    ([1, 2, 3], [3, 4], r"expected a list of 2 items"),
    ("ab", [3, 4], r"expected a list of 2 items"),
    ([1, "text"], [3, 4], r"field\[1\] is 'text'"),
]


@pytest.mark.parametrize(("value", "like"), ACCEPTED)
def test_check_like_accepts_values_of_compatible_structure(value: Any, like: Any) -> None:
    check_like(value, like, "field")


@pytest.mark.parametrize(("value", "like", "message"), REJECTED)
def test_check_like_error_names_the_invalid_field(value: Any, like: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_like(value, like, "field")
