"""Norm powers by the Triton kernels in the interpreter: accuracy, addresses, fallbacks."""

from __future__ import annotations

from math import inf
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import Interpreted, kernels, why_no_triton
from kernel_cases import DTYPES, some_values
from kernel_formulas import reference_powers
from meshstep.optim.norm.powers import local_powers
from properties import number_of_cases
from torch import Tensor

pytestmark = pytest.mark.skipif(bool(why_no_triton()), reason=why_no_triton())
P = [1.0, 2.0, 3.0, inf]


def powers(tensors: list[Tensor], p: float) -> Tensor:
    found = kernels().powers(tensors, p)
    assert found is not None
    return found


def powers_of_views(values: Tensor, offset: int, p: float) -> Tensor:
    """Return powers of the same values in a tensor at ``offset``, in its transpose if it is a matrix, and in a strided
    tensor."""
    shifted = torch.zeros(values.numel() + offset, dtype=values.dtype)[offset:].view(values.shape).copy_(values)
    strided = values.new_zeros((*values.shape, 2))[..., 0].copy_(values)
    turned = shifted.t() if values.dim() == 2 else shifted
    return powers([shifted, turned, strided], p)


@pytest.mark.long
@settings(max_examples=number_of_cases(15))
@given(
    shape=st.sampled_from([(), (0,), (1,), (7,), (1023,), (1025,), (5, 0, 3), (40, 41), (16384,), (16385,), (33000,)]),
    dtype=st.sampled_from(DTYPES),
    p=st.sampled_from(P),
    offset=st.integers(0, 3),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
    seed=st.integers(0, 2**31),
)
def test_triton_power_sums_match_reference_within_1e_minus_14(
    interpreted: Interpreted, shape: tuple[int, ...], dtype: torch.dtype, p: float, offset: int, scale: float, seed: int
) -> None:
    values = some_values(shape, dtype, scale, seed)
    found = interpreted(powers_of_views, values, offset, p)
    torch.testing.assert_close(found, reference_powers([values] * 3, p), rtol=1e-14, atol=0.0)


def are_finite(dtype: torch.dtype, p: float) -> list[tuple[list[bool], bool]]:
    """Return which of three powers are finite if the second tensor has a non-finite value, and whether its power
    is NaN exactly if the value is NaN."""
    found = []
    for bad in (torch.nan, torch.inf, -torch.inf):
        for numel, at in ((1, 0), (37, 36), (20000, 12345), (20000, 19999)):
            values = torch.ones(numel, dtype=dtype)
            values[at] = bad
            three = powers([torch.ones(5, dtype=dtype), values, torch.ones(3, dtype=dtype)], p)
            found.append((three.isfinite().tolist(), bool(three[1].isnan()) == (bad != bad)))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", P)
def test_nonfinite_element_affects_only_triton_power_sum_of_its_tensor(
    interpreted: Interpreted, dtype: torch.dtype, p: float
) -> None:
    assert set(map(repr, interpreted(are_finite, dtype, p))) == {"([True, False, True], True)"}


def same_bits() -> list[list[float]]:
    """Return powers of the same values alone, among other tensors, and at other addresses."""
    values = some_values((40_000,), torch.float32, 1.0, 3)
    found = []
    for offset in range(4):
        moved = torch.zeros(40_000 + offset)[offset:].copy_(values)
        others = [torch.ones(7), moved, torch.ones(20_000)][: 2 + offset % 2]
        found.append([float(powers([moved], p)[0]) for p in P])
        found.append([float(powers(others, p)[1]) for p in P])
    return found


def test_triton_power_sum_does_not_depend_on_address_or_other_tensors(interpreted: Interpreted) -> None:
    found = interpreted(same_bits)
    assert found == found[:1] * len(found)


def left_to_others() -> None:
    class Other(Tensor):
        pass

    plain = torch.ones(4)
    assert kernels().powers([plain, plain.as_subclass(Other)], 2.0) is None
    assert kernels().powers([plain, plain.double()], 2.0) is None
    assert kernels().powers([plain], 2.5) is None
    assert kernels().powers([plain.to(torch.float8_e5m2)], 2.0) is None
    assert local_powers([plain], 2.5).tolist() == [4.0]
    assert local_powers([plain.as_subclass(Other)], 2.0).tolist() == [4.0]


def test_power_sums_of_unsupported_tensors_or_norm_types_fall_back_from_triton_to_torch(
    interpreted: Interpreted,
) -> None:
    interpreted(left_to_others)


def by_the_norm(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values = [some_values((n,), dtype, 1.0, n) for n in (3, 0, 20_000)]
    launched = [0]
    powers = type(kernels()).powers

    def counted(own: Any, tensors: Any, norm_type: float) -> Any:
        launched[0] += 1
        return powers(own, tensors, norm_type)

    with mock.patch.object(type(kernels()), "powers", counted):
        found = local_powers(values, 2.0)
    assert launched == [1]
    return found, reference_powers(values, 2.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_local_powers_use_triton_kernels_if_selected(interpreted: Interpreted, dtype: torch.dtype) -> None:
    found, expected = interpreted(by_the_norm, dtype)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0.0)
