"""Sums of powers of a rank's gradients, and the range of global norms that are computed from them."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
from fake_cuda import fake_cuda
from kernel_formulas import reference_powers
from meshstep.optim import global_norm
from meshstep.optim.norm.measure import Reduction
from meshstep.optim.norm.powers import _powers_at_once, flattened, local_powers
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from world import World


@pytest.mark.default_cases(24)
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 12.0, 60.0, inf])
@pytest.mark.parametrize("shape", [(3_000_001,), (1025, 1030), (5, 7)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_local_powers_match_float64_reference(p: float, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    grads = [(torch.randn(shape, generator=torch.Generator().manual_seed(3)) + 0.3).to(dtype)]
    grads += [grads[0].reshape(shape).t() if len(shape) == 2 else grads[0], torch.zeros(0, 4, dtype=dtype)]
    rtol = 2e-7 if p == 2 and dtype == torch.float32 else 1e-12
    torch.testing.assert_close(local_powers(grads, p), reference_powers(grads, p), rtol=rtol, atol=0.0)


@pytest.mark.parametrize("p", [2.0, 12.0, inf])
def test_powers_of_no_gradients_are_empty(p: float) -> None:
    for powers in (local_powers, reference_powers):
        assert torch.equal(powers([], p), torch.zeros(0, dtype=torch.float64))


@pytest.mark.parametrize("dims", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 2, 0)])
def test_permuted_dense_tensor_is_flattened_without_copy(dims: tuple[int, ...]) -> None:
    stored = torch.arange(24.0).view(2, 3, 4)
    flat = flattened(stored.permute(dims))
    assert flat.data_ptr() == stored.data_ptr()
    assert torch.equal(flat, torch.arange(24.0))


def test_strided_tensor_is_flattened_in_row_major_order() -> None:
    assert torch.equal(flattened(torch.arange(12.0).view(3, 4)[:, ::2]), torch.tensor([0.0, 2, 4, 6, 8, 10]))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_batched_power_sums_for_gpu_equal_float64_reference_on_cpu(p: float, dtype: torch.dtype) -> None:
    """The GPU operators run on the CPU, with empty gradients and a value near the smallest normal number of the dtype."""
    grads = [
        torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype) for shape in ((7,), (0, 3), (5, 4))
    ]
    grads += [torch.zeros(0, dtype=dtype), torch.tensor(torch.finfo(dtype).tiny * 3, dtype=dtype).view(1)]
    found = _powers_at_once(grads, p, torch.float64)
    torch.testing.assert_close(found, reference_powers(grads, p), rtol=1e-12, atol=0.0)
    for bad in (torch.nan, -torch.inf):
        grads[2][1, 1] = bad
        assert _powers_at_once(grads, p, torch.float64).isfinite().tolist() == [True, True, False, True, True]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch built with CUDA for the fake GPU")
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 20.0, inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gpu_power_sums_are_accumulated_in_float64(p: float, dtype: torch.dtype) -> None:
    """Operators that sum powers return float64, so sums have the same range on a GPU as on the CPU."""
    sums = list[torch.dtype]()

    class Sums(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.overloadpacket.__name__ in ("_foreach_norm", "linalg_vector_norm", "sum", "amax", "dot"):
                sums.extend(tensor.dtype for tensor in tree_leaves(result))
            return result

    with fake_cuda():
        grads = [torch.ones(shape, device="cuda", dtype=dtype) for shape in ((300, 500), (7,), (0, 2))]
        with Sums():  # type: ignore[no-untyped-call]
            assert local_powers(grads, p).dtype == torch.float64
    assert set(sums) == {torch.float64}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch built with CUDA for the fake GPU")
def test_norm_of_gradients_on_two_devices_is_on_device_of_first() -> None:
    with fake_cuda(), ProcessGroupRegistry(Topology(data=1)) as registry:
        for first, second in (("cuda", "cpu"), ("cpu", "cuda")):
            params = [nn.Parameter(torch.zeros(4, device=device)) for device in (first, second)]
            for param in params:
                param.grad = torch.ones_like(param)
                annotate(param, P())
            assert global_norm(params, registry).total_norm.device.type == first


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, inf])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("numel", [3, 2000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_local_powers_leave_gradients_unchanged(p: float, count: int, numel: int, dtype: torch.dtype) -> None:
    grads = [torch.full((numel,), -3.0, dtype=dtype) for _ in range(count)]
    local_powers(grads, p)
    assert all(bool((grad == -3.0).all()) for grad in grads)


RANGES = (1e-44, 1e-30, 1e-24, 1e-19, 2e19, 1e30, 3e38)


def norm_of(size: float, pieces: int, p: float, reduction: Reduction) -> tuple[float, float]:
    with ProcessGroupRegistry(Topology(tensor=pieces)) as registry:
        weight = nn.Parameter(torch.zeros(2048 // pieces))
        annotate(weight, P("tensor"), "weight")
        weight.grad = torch.full_like(weight, size)
        stats = global_norm([weight], registry, p, reduction=reduction)
        return float(stats.total_norm), float(stats.found_inf)


@pytest.mark.parametrize("reduction", ["packed", "per_group"])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 12.0, 60.0, inf])
def test_norm_of_finite_gradients_neither_overflows_nor_underflows(
    world: World, p: float, reduction: Reduction
) -> None:
    sizes = RANGES if p != 3.0 else RANGES[1:]
    for pieces in (1, 2, 4):
        found = world.run_each(norm_of, [(pieces, (size, pieces, p, reduction)) for size in sizes])
        for size, ranks in zip(sizes, found, strict=True):
            exact = float(torch.tensor(size).double()) * (1.0 if p == inf else 2048 ** (1 / p))
            for norm, skipped in ranks:
                assert norm == pytest.approx(exact, rel=1e-7 if p == 2 else 1e-11)
                assert skipped == 0


def test_norm_of_order_1_over_million_elements_is_accurate_to_1e_minus_12() -> None:
    gradient = torch.full((1_000_003,), 0.1)
    exact = float(torch.tensor(0.1).double()) * 1_000_003
    assert float(local_powers([gradient], 1.0)) == pytest.approx(exact, rel=1e-12)
