"""8-bit products on fake CUDA tensors: the layout rules of torch's kernel, and the number of passes over a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from fake_cuda import CUDA, Log, fake_cuda
from meshstep.amp.fp8_linear import (
    E4M3,
    Fp8Matmul,
    Fp8RowMatmul,
    _Fp8Linear,
    _Fp8RowLinear,
    amax_of,
    cache_of,
    cache_rounded,
    quantize,
)
from torch import Tensor, nn

pytestmark = [
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
    pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch built with CUDA for the fake GPU"),
]


class Context:
    """A substitute for the context of an autograd function."""

    needs_input_grad = (True, True, False, False)

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


@contextmanager
def hopper(cuda: str = "13.0", capability: tuple[int, int] = (9, 0)) -> Iterator[Any]:
    with (
        fake_cuda() as logging,
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.object(torch.version, "cuda", cuda),
        mock.patch.object(torch.version, "hip", None),
    ):
        yield logging


def forward_and_backward(
    logging: Any, by_row: bool, rows: int, dtype: torch.dtype
) -> tuple[Log, Log, tuple[Tensor, ...]]:
    """Return the operators of forward and of backward, and output and gradients, of a layer from 48 to 32 features."""
    function: Any = _Fp8RowLinear if by_row else _Fp8Linear
    matmul: Any = Fp8RowMatmul() if by_row else Fp8Matmul()
    x = torch.ones(rows, 48, device=CUDA, dtype=dtype)
    weight, grad = torch.ones(32, 48, device=CUDA, dtype=dtype), torch.ones(rows, 32, device=CUDA, dtype=dtype)
    context = Context()
    with torch.no_grad():
        with logging() as forward:
            output = function.forward(context, x, weight, matmul, None)
        with logging() as backward:
            grads = function.backward.__wrapped__(context, grad)[:2]
    return forward, backward, (output, *grads)


@pytest.mark.parametrize("rows", [16, 21, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(("cuda", "capability"), [("13.0", (9, 0)), ("12.8", (9, 0)), ("13.0", (10, 0))])
def test_fp8_operands_have_the_layout_that_scaled_mm_requires(
    cuda: str, capability: tuple[int, int], by_row: bool, dtype: torch.dtype, rows: int
) -> None:
    """torch checks these rules also on fake tensors: row-major times column-major, dims that are multiples of 16."""
    with hopper(cuda, capability) as logging:
        forward, backward, results = forward_and_backward(logging, by_row, rows, dtype)
        shapes = [(tuple(result.shape), result.dtype) for result in results]
        assert shapes == [((rows, 32), dtype), ((rows, 48), dtype), ((32, 48), torch.float32)]
        products = [log.launches.count("aten._scaled_mm.default") for log in (forward, backward)]
        assert products == [1, 2]
        assert forward.waits == backward.waits == []


@pytest.mark.parametrize(("rows", "copies"), [(16, (0, 3)), (21, (0, 3))])
def test_tensor_scaled_fp8_linear_copies_only_transposed_operands(rows: int, copies: tuple[int, int]) -> None:
    """An operand in the layout of the kernel is not copied. A transposed operand is copied once, including padding."""
    with hopper() as logging:
        forward, backward, _ = forward_and_backward(logging, False, rows, torch.bfloat16)
    assert (copied(forward), copied(backward)) == copies


@pytest.mark.parametrize(("rows", "copies"), [(16, [0, 0]), (21, [0, 2])])
def test_row_scaled_fp8_linear_copies_operands_only_for_padding(rows: int, copies: list[int]) -> None:
    """Rounding writes the transposed rows directly; only padding copies 8-bit values."""
    with hopper() as logging:
        logs = forward_and_backward(logging, True, rows, torch.bfloat16)[:2]
    assert [copied(log) for log in logs] == copies


def copied(log: Log) -> int:
    return sum(name.startswith(("aten.copy_", "aten.clone", "aten.constant_pad", "aten.cat")) for name in log.launches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_quantize_reads_a_tensor_once_for_maximum_and_once_for_rounding(dtype: torch.dtype) -> None:
    with fake_cuda() as logging:
        x = torch.ones(64, 64, device=CUDA, dtype=dtype)
        with logging() as log:
            quantize(x, E4M3, amax_of(x))
    one_number = {"maximum", "neg", "clamp_min", "clamp", "reciprocal", "mul", "_to_copy"}
    passes = [name for name in log.launches if name.split(".")[1] not in one_number or name.endswith(".out")]
    assert passes == ["aten.aminmax.default", "aten.mul.out"]


def test_fp8_weights_are_not_cached_during_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replayed graph would otherwise use the weight of the step in which it was captured."""
    with fake_cuda():
        weight = nn.Parameter(torch.ones(32, 48, device=CUDA))
        cache_rounded(weight)
        assert cache_of(weight) is not None
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert cache_of(weight) is None
