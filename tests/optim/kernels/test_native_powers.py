"""Norm powers by the compiled loops: accuracy, bitwise equality of loop variants and numbers of threads, fallbacks."""

from __future__ import annotations

import os
import signal
import time
from itertools import product
from math import inf

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, some_values
from kernel_formulas import reference_powers
from loops import loops, using, variants_here, with_threads, with_variant
from meshstep.optim import use_kernels
from meshstep.optim.kernels.choice import Kernels
from meshstep.optim.kernels.native import MEAN_OF, torchs_threads
from meshstep.optim.norm.powers import local_powers, means_by_loops, powers_by_loops
from properties import number_of_cases
from torch import Tensor

VARIANTS = variants_here()
KERNELS: tuple[Kernels, ...] = ("auto", "torch")


@settings(max_examples=number_of_cases(80))
@given(
    shape=st.sampled_from(
        [(), (0,), (1,), (7,), (63,), (64,), (65,), (1023,), (5, 0, 3), (40, 41), (16384,), (16385,), (70001,)]
    ),
    dtype=st.sampled_from(DTYPES),
    p=st.sampled_from([1.0, 2.0, inf]),
    variant=st.sampled_from(VARIANTS),
    offset=st.integers(0, 3),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
    seed=st.integers(0, 2**31),
)
@example((70001,), torch.float16, 2.0, "plain", 1, 1.0, 3)
def test_native_loop_power_sums_match_reference_within_1e_minus_14(
    shape: tuple[int, ...], dtype: torch.dtype, p: float, variant: str, offset: int, scale: float, seed: int
) -> None:
    """Shapes, dtypes, alignments and scales are drawn. Powers must not underflow at 1e-30, or overflow at 1e30."""
    values = some_values(shape, dtype, scale, seed)
    shifted = torch.zeros(values.numel() + offset, dtype=dtype)[offset:].view(shape).copy_(values)
    strided = values.new_zeros((*shape, 2))[..., 0].copy_(values)
    turned = shifted.t() if len(shape) == 2 else shifted
    with with_variant(variant):
        found = powers_by_loops(loops(), [shifted, turned, strided], p)
    assert found is not None
    torch.testing.assert_close(found, reference_powers([values] * 3, p), rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float64])
@pytest.mark.parametrize("p", [1, 2])
def test_native_loop_chunk_means_are_bitwise_identical_for_all_loop_variants_and_splits(
    dtype: torch.dtype, p: int
) -> None:
    """The means are within 1e-14 of means in float64, and NaN or infinity affects only the mean of its chunk."""
    values = some_values((40_003,), dtype, 1.0, 5)
    values[17], values[40_001] = torch.nan, torch.inf
    padded = torch.cat([values.double(), torch.zeros(-len(values) % MEAN_OF)])
    expected = (padded.abs() if p == 1 else padded.square()).view(-1, MEAN_OF).mean(1)
    found = []
    for variant, cuts in product(VARIANTS, [(40_003,), (8, 1016, 8 * 3001, 14_971), (16_384, 16_384, 7_235)]):
        with with_variant(variant):
            found.append(means_by_loops(loops(), [part.clone() for part in values.split(cuts)], p))
    first = found[0]
    assert first is not None
    torch.testing.assert_close(first, expected, rtol=1e-14, atol=0.0, equal_nan=True)
    assert not first.isfinite().all()
    for other in found[1:]:
        assert other is not None
        assert torch.equal(first.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [1.0, 2.0, inf])
def test_nonfinite_element_affects_only_power_sum_of_its_tensor(dtype: torch.dtype, p: float) -> None:
    for variant in VARIANTS:
        for bad in (torch.nan, torch.inf, -torch.inf):
            for numel, at in ((1, 0), (37, 36), (40000, 12345), (40000, 39999)):
                values = torch.ones(numel, dtype=dtype)
                values[at] = bad
                with with_variant(variant):
                    found = powers_by_loops(
                        loops(), [torch.ones(5, dtype=dtype), values, torch.ones(3, dtype=dtype)], p
                    )
                assert found is not None
                assert found.isfinite().tolist() == [True, False, True]
                assert bool(found[1].isnan()) == (bad != bad)


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [1.0, 2.0, inf])
def test_native_loop_power_sums_are_bitwise_identical_for_all_loop_variants_and_threads(
    dtype: torch.dtype, p: float
) -> None:
    tensors = [some_values((numel,), dtype, 1.0, numel) for numel in (3, 1_000_003, 17, 300_001)]
    # No value of these tensors is near the dtype's maximum, so another order of additions changes some of their sums.
    tensors += [torch.randn(numel).to(dtype) for numel in range(16_000, 16_100)]
    found = set[tuple[float, ...]]()
    for variant, threads, torchs in product(VARIANTS, (1, 2, 5), (True, False)):
        with with_threads(threads, torchs), with_variant(variant):
            powers = powers_by_loops(loops(), tensors, p)
        assert powers is not None
        found.add(tuple(powers.tolist()))
    assert len(found) == 1
    assert torchs_threads() is not None  # otherwise the loops never use torch's threads


def test_native_loop_power_sums_do_not_hang_in_forked_process() -> None:
    """A forked child has no threads of torch, so it would hang if it waited for them."""
    values = torch.ones(1_000_003)
    with with_threads(2, True):
        powers_by_loops(loops(), [values], 2.0)
        child = os.fork()
        if child == 0:
            found = powers_by_loops(loops(), [values], 2.0)
            os._exit(0 if found is not None and found.item() == 1_000_003 else 1)
        deadline = time.monotonic() + 60
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert ended == (child, 0)


def test_sum_of_hundred_million_squares_is_accurate_to_14_digits() -> None:
    values = torch.arange(1.0, 129.0, dtype=torch.bfloat16).repeat(10**8 // 128)  # exact in bfloat16; exact sum known
    found = powers_by_loops(loops(), [values], 2.0)
    assert found is not None
    exact = sum(k * k for k in range(1, 129)) * (10**8 // 128)
    assert found.item() == pytest.approx(exact, rel=1e-14)
    assert torch.linalg.vector_norm(values.float()).double().square().item() != pytest.approx(exact, rel=1e-7)


def test_native_loops_leave_tensor_subclasses_and_norm_order_3_to_torch() -> None:
    class Other(Tensor):
        pass

    plain = torch.ones(4)
    assert powers_by_loops(loops(), [plain, plain.as_subclass(Other)], 2.0) is None
    assert powers_by_loops(loops(), [plain], 3.0) is None
    assert local_powers([plain.as_subclass(Other)], 2.0).tolist() == [4.0]


def test_torch_kernels_can_be_selected_for_power_sums() -> None:
    """torch sums float32 values in float32, so a larger error shows that its kernels ran."""
    values = [torch.randn(100_000, generator=torch.Generator().manual_seed(1))]
    exact, off = reference_powers(values, 2.0), list[float]()
    for kernels in KERNELS:
        with using(kernels):
            off.append(float((local_powers(values, 2.0) / exact - 1).abs()))
    assert off[0] < 1e-14 < off[1] < 2e-7


def test_use_kernels_rejects_unknown_name() -> None:
    with pytest.raises(ValueError, match="kernels='cuda': give 'auto', 'torch' or 'triton'"):
        use_kernels("cuda")  # type: ignore[arg-type]
