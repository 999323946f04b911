"""Triton kernels on a GPU: power sums, and steps compared with torch.

On the CPU they run in the interpreter of Triton, which must be enabled before triton is imported:
``TRITON_INTERPRET=1 python -m tests.gpu -k triton -m cpu``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import inf
from typing import Any

import pytest
import torch
from interpreted import why_no_triton
from kernel_formulas import reference_powers
from loops import using
from meshstep.optim import ParallelOptimizer
from meshstep.optim.kernels.choice import Kernels, triton_on
from meshstep.optim.norm.powers import local_powers
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from on_gpu import nobody_waits
from torch import Tensor, nn

KERNELS: tuple[Kernels, ...] = ("triton", "torch")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _by_triton(device: torch.device) -> Iterator[None]:
    if reason := why_no_triton():
        pytest.skip(reason)
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip(
            "set TRITON_INTERPRET=1 to use Triton's interpreter on the CPU; tests/optim makes these comparisons with it"
        )
    with using("triton"):
        assert triton_on(device) is not None
        yield


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_power_sums_match_reference_powers_to_1e_minus_14(
    device: torch.device, dtype: torch.dtype, p: float
) -> None:
    """Use many sizes (on a GPU up to 2^26 elements), unaligned addresses and transposed tensors."""
    sizes = [0, 1, 7, 1023, 1025, 16384, 16385, 33_000, *([2**26 + 3] if device.type == "cuda" else [])]
    tensors = [torch.randn(size + 1, device=device).to(dtype)[size % 2 :][:size] for size in sizes]
    tensors += [torch.randn(40, 41, device=device).to(dtype).t(), torch.full((70_000,), 6e-8, device=device).to(dtype)]
    with nobody_waits(device):
        found = local_powers(tensors, p)
    expected = reference_powers(tensors, p)
    torch.testing.assert_close(found, expected.to(device), rtol=1e-14, atol=0.0)
    assert torch.equal(local_powers(tensors, p), found), "the order of summation must not change between calls"


@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_power_sums_do_not_depend_on_addresses(device: torch.device, dtype: torch.dtype) -> None:
    values = torch.randn(40_000, device=device).to(dtype)
    moved = [values.new_zeros(40_008)[offset:][:40_000].copy_(values) for offset in range(9)]
    for p in (1.0, 2.0, 3.0, inf):
        assert len(set(local_powers(moved, p).tolist())) == 1


@pytest.mark.parametrize("p", [1.0, 2.0, inf])
def test_triton_power_sums_propagate_non_finite_values(device: torch.device, p: float) -> None:
    for bad in (inf, -inf, torch.nan):
        gradients = [torch.ones(20_000, device=device) for _ in range(3)]
        gradients[1][19_999] = bad
        assert local_powers(gradients, p).isfinite().tolist() == [True, False, True]


MAKE: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=True),
    "Adam, amsgrad, maximize": lambda params: torch.optim.Adam(
        params, lr=0.01, amsgrad=True, maximize=True, fused=True
    ),
    "Adam, tensor rate": lambda params: torch.optim.Adam(
        params, lr=torch.tensor(0.01, device=params[0].device), weight_decay=0.1, fused=True
    ),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, lr_decay=0.1, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "SGD, Nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, fused=True),
}


def has_fused_adagrad(device: torch.device) -> bool:
    """Return whether torch can step a fused Adagrad on the device; torch 2.11 cannot on a GPU."""
    weight = nn.Parameter(torch.ones(2, device=device))
    weight.grad = torch.ones_like(weight)
    try:
        torch.optim.Adagrad([weight], fused=True).step()
    except RuntimeError:
        return False
    return True


class Run:
    """Steps with planted gradients."""

    def __init__(self, name: str, device: torch.device, precision: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        self.device, dtype = device, torch.bfloat16 if precision == "bf16" else torch.float32
        shapes = [(300, 70), (7,), (), (0, 3), (20_001,)]
        self.model = nn.ParameterList(
            [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]
        )
        declare(self.model, {"*": P()})
        registry = ProcessGroupRegistry(Topology())
        self.optimizer = ParallelOptimizer(MAKE[name](list(self.model)), registry, max_norm=0.7, precision=precision)

    def step(self, number: int, bad: bool = False) -> None:
        generator = torch.Generator().manual_seed(100 + number)
        for param in self.model:
            param.grad = torch.randn(param.shape, generator=generator).to(self.device)
        if bad:
            self.model[1].grad[3] = torch.nan
        with nobody_waits(self.device) if number > 1 else nobody_waits(torch.device("cpu")):
            self.optimizer.step()

    def everything(self) -> list[Tensor]:
        stepped = [param for group in self.optimizer.optimizer.param_groups for param in group["params"]]
        states = [state[key] for state in self.optimizer.optimizer.state.values() for key in sorted(state)]
        return [tensor.detach().clone() for tensor in (*self.model, *stepped, *states)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MAKE)
def test_triton_steps_match_torch_and_skipped_step_changes_nothing(
    device: torch.device, name: str, precision: str
) -> None:
    """Steps match within rounding, and bfloat16 weights are the rounded masters.

    From the third step on, no step synchronizes with the host.
    """
    if name == "Adagrad" and device.type == "cuda" and not has_fused_adagrad(device):
        pytest.skip("this torch has no fused Adagrad for a GPU")
    found = []
    for kernels in KERNELS:
        with using(kernels):
            run = Run(name, device, precision)
            for number in range(4):
                run.step(number)
            before = run.everything()
            run.step(4, bad=True)
            assert all(torch.equal(a, b) for a, b in zip(run.everything(), before, strict=True))
            run.step(5)
            found.append(run.everything())
    count = len(run.model)
    for weights, masters in ((kept[:count], kept[count : 2 * count]) for kept in found):
        assert all(
            torch.equal(weight, master.to(weight.dtype)) for weight, master in zip(weights, masters, strict=True)
        )
    for a, b in zip(found[0][count:], found[1][count:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
