"""Numbers that stand for bits: another bit is another number, wherever it is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from meshstep.optim.norm.replicas import CHUNK, SMALL, TensorHash, to_float_words
from torch import Tensor

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
SIZES = [1, 3, SMALL // 2 + 1, SMALL + 3, CHUNK + 2]


def words(tensors: list[Tensor | None], exact: bool = True) -> Tensor:
    return to_float_words(TensorHash(CPU, exact)(tensors))


def flipped(tensor: Tensor, bit: int) -> Tensor:
    """A copy with one bit turned, counted from the first element's lowest."""
    copy = tensor.clone()
    copy.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    return copy


@given(st.sampled_from(DTYPES), st.sampled_from(SIZES), st.data())
def test_one_flipped_bit_is_another_number(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    """Of any element; also the sign of zero, the last bit of a mantissa and what tells a NaN from another."""
    tensor = torch.zeros(size).to(dtype) if data.draw(st.booleans()) else torch.randn(size).to(dtype)
    if dtype.is_floating_point and data.draw(st.booleans()):
        tensor[-1] = torch.nan
    last = 1 if dtype == torch.bool else 8 * tensor.element_size() * size
    bit = data.draw(st.sampled_from([0, last - 1]) | st.integers(0, last - 1))
    assert not torch.equal(words([tensor]), words([flipped(tensor, bit)]))


def test_what_is_read_beside_a_tensor_does_not_change_its_number() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator).to(dtype) for dtype in DTYPES for size in (0, *SIZES, 7)]
    together = words([*tensors, None])
    assert torch.equal(together, torch.cat([words([tensor]) for tensor in [*tensors, None]]))
    assert len({tuple(row.tolist()) for row in together}) > len(tensors) // 2


def test_elements_that_change_places_are_another_number() -> None:
    tensor = torch.arange(10.0)
    assert not torch.equal(words([tensor]), words([tensor.flip(0)]))


def test_opposite_changes_in_two_copies_do_not_cancel() -> None:
    """In the sum over three copies, of which one is one step higher and one is one step lower in the same word."""
    same, more, less = (torch.tensor([5 + step], dtype=torch.int32) for step in (0, 1, -1))
    low, high = words([more, less]).sum(0) - 2 * words([same])[0]
    assert low != 0
    assert high != 0


def test_a_tensor_that_is_not_contiguous_has_the_number_of_one_that_is() -> None:
    tensor = torch.randn(6, 5)
    assert torch.equal(words([tensor.t()]), words([tensor.t().contiguous()]))


@pytest.mark.parametrize("exact", [True, False])
def test_the_sign_of_zero_and_which_nan_count_only_where_all_bits_do(exact: bool) -> None:
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    for one, other in ((torch.zeros(2), -torch.zeros(2)), (nans[:1], nans[1:])):
        assert torch.equal(words([one], exact), words([other], exact)) is not exact


def test_words_are_integers_whose_sums_over_a_million_ranks_are_exact() -> None:
    numbers = words([torch.randn(3) for _ in range(1000)])
    assert torch.equal(numbers, numbers.round())
    assert numbers.min() >= 0
    assert 2**31 < numbers.max() < 2**32
