"""The sums of powers that a rank takes of its own gradients."""

from __future__ import annotations

from math import inf

import pytest
import torch


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, inf])
@pytest.mark.parametrize("shape", [(3_000_001,), (1025, 1030), (5, 7)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_local_powers_equal_the_reference(p: float, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from meshstep.optim.norm.powers import local_powers, reference_powers

    grads = [(torch.randn(shape, generator=torch.Generator().manual_seed(3)) + 0.3).to(dtype)]
    grads += [grads[0].reshape(shape).t() if len(shape) == 2 else grads[0], torch.zeros(0, 4, dtype=dtype)]
    torch.testing.assert_close(local_powers(grads, p), reference_powers(grads, p), rtol=2e-7, atol=0.0)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, inf])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("numel", [3, 2000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_measuring_changes_no_gradient(p: float, count: int, numel: int, dtype: torch.dtype) -> None:
    from meshstep.optim.norm.powers import local_powers

    grads = [torch.full((numel,), -3.0, dtype=dtype) for _ in range(count)]
    local_powers(grads, p)
    assert all(bool((grad == -3.0).all()) for grad in grads)
