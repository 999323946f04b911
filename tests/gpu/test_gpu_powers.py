"""The sum of |g|^p of one gradient, from one element to 2^28, compared with float64."""

from __future__ import annotations

from math import inf

import pytest
import torch
from meshstep.optim.norm.powers import local_powers
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LARGEST = 2**28


def expected_power(gradient: Tensor, p: float) -> float:
    """Compute the sum in float64 in parts, to save memory."""
    parts = [part.double().abs() for part in gradient.reshape(-1).split(2**24)]
    return max(float(x.max()) for x in parts) if p == inf else sum(float(x.pow(p).sum()) for x in parts)


def assert_right(gradient: Tensor, p: float) -> None:
    found = float(local_powers([gradient], p)[0])
    assert found == pytest.approx(expected_power(gradient, p), rel=1e-6)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [0, 1, 5, 10, 13, 16, 20, 24, 26, 28])
def test_power_sum_is_accurate_for_up_to_2_to_the_28_elements(
    device: torch.device, exponent: int, dtype: torch.dtype, p: float
) -> None:
    numel = 2**exponent + (exponent % 3 if exponent < 28 else 0)
    if device.type == "cpu" and exponent > 16:
        pytest.skip("too large for the CPU")
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 16 * numel + 2**31:
        pytest.skip(f"{numel} elements need more memory than this GPU has")
    generator = torch.Generator(device).manual_seed(exponent)
    assert_right(torch.randn(numel, device=device, generator=generator).to(dtype), p)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_power_sum_is_accurate_on_unaligned_memory(
    device: torch.device, offset: int, dtype: torch.dtype, p: float
) -> None:
    whole = torch.randn(100_003, device=device).to(dtype)
    assert_right(whole[offset:], p)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, inf])
def test_power_sum_is_accurate_for_channels_last_and_transposed_tensors(device: torch.device, p: float) -> None:
    gradient = torch.randn(8, 16, 15, 17, device=device).to(memory_format=torch.channels_last)
    assert_right(gradient, p)
    assert_right(torch.randn(100, 300, device=device).t(), p)


@pytest.mark.parametrize("value", [1e30, 1e-30])
def test_power_sum_of_large_and_small_values_neither_overflows_nor_underflows(
    device: torch.device, value: float
) -> None:
    assert_right(torch.full((100_000,), value, device=device), 2.0)


@pytest.mark.parametrize("bad", [inf, -inf, torch.nan])
def test_power_sum_propagates_non_finite_values(device: torch.device, bad: float) -> None:
    for p in (1.0, 2.0, 3.0, inf):
        gradients = [torch.ones(70_000, device=device) for _ in range(3)]
        gradients[1][69_999] = bad
        first, broken, last = local_powers(gradients, p).isfinite().tolist()
        assert (first, broken, last) == (True, False, True)
