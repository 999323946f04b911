"""Hashes of tensors' bits (`TensorHash`)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from meshstep.optim.norm.replicas import CHUNK, SMALL, TensorHash, splitmix64_finalizer, to_float_words
from torch import Tensor

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
SIZES = [1, 3, SMALL // 2 + 1, SMALL + 3, CHUNK + 2]


def words(tensors: list[Tensor | None], exact: bool = True) -> Tensor:
    return to_float_words(TensorHash(CPU, exact)(tensors))


def flipped(tensor: Tensor, bit: int) -> Tensor:
    copy = tensor.clone()
    copy.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    return copy


@given(st.sampled_from(DTYPES), st.sampled_from(SIZES), st.data())
def test_flipped_bit_changes_exact_tensor_hash(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    """Any bit may be flipped; the lowest bit of the first element and the highest bit of the last element are drawn more
    often. Of a bool tensor, only the lowest bit of the first element is flipped. The tensor may be all zeros, so that
    the sign of a zero may change, or end in NaN."""
    tensor = torch.zeros(size).to(dtype) if data.draw(st.booleans()) else torch.randn(size).to(dtype)
    if dtype.is_floating_point and data.draw(st.booleans()):
        tensor[-1] = torch.nan
    last = 1 if dtype == torch.bool else 8 * tensor.element_size() * size
    bit = data.draw(st.sampled_from([0, last - 1]) | st.integers(0, last - 1))
    assert not torch.equal(words([tensor]), words([flipped(tensor, bit)]))


def test_tensor_hash_does_not_depend_on_other_tensors_in_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator).to(dtype) for dtype in DTYPES for size in (0, *SIZES, 7)]
    together = words([*tensors, None])
    assert torch.equal(together, torch.cat([words([tensor]) for tensor in [*tensors, None]]))
    assert len({tuple(row.tolist()) for row in together}) > len(tensors) // 2


def test_reordered_elements_change_tensor_hash() -> None:
    tensor = torch.arange(10.0)
    assert not torch.equal(words([tensor]), words([tensor.flip(0)]))


def test_opposite_changes_in_two_replicas_do_not_cancel_in_hash_sum() -> None:
    """One replica is higher by 1, and another one is lower by 1.

    The sum of their hashes must differ from twice the hash of the unchanged value.
    """
    same, more, less = (torch.tensor([5 + step], dtype=torch.int32) for step in (0, 1, -1))
    low, high = words([more, less]).sum(0) - 2 * words([same])[0]
    assert low != 0
    assert high != 0


def test_tensor_hash_does_not_depend_on_strides() -> None:
    tensor = torch.randn(6, 5)
    assert torch.equal(words([tensor.t()]), words([tensor.t().contiguous()]))


@pytest.mark.parametrize("exact", [True, False])
def test_sign_of_zero_and_nan_payload_affect_exact_hash_only(exact: bool) -> None:
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    for one, other in ((torch.zeros(2), -torch.zeros(2)), (nans[:1], nans[1:])):
        assert torch.equal(words([one], exact), words([other], exact)) is not exact


def test_splitmix64_finalizer_returns_published_outputs_of_splitmix64() -> None:
    """With seed 0, SplitMix64 applies the finalizer to multiples of a constant."""
    multiples = [number * 0x9E3779B97F4A7C15 % 2**64 for number in (1, 2, 3)]
    wanted = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    signed = [number - 2**64 if number >= 2**63 else number for number in multiples]
    assert [number % 2**64 for number in splitmix64_finalizer(torch.tensor(signed)).tolist()] == wanted


def test_hash_words_are_integers_below_2_to_the_32() -> None:
    numbers = words([torch.randn(3) for _ in range(1000)])
    assert torch.equal(numbers, numbers.round())
    assert numbers.min() >= 0
    assert 2**31 < numbers.max() < 2**32


@pytest.mark.parametrize("exact", [True, False])
def test_hash_distinguishes_tiny_values(exact: bool) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        one, other = (torch.tensor([value, 0.0], dtype=dtype) for value in (1e-30, 2e-30))
        assert not torch.equal(words([one], exact), words([other], exact))
