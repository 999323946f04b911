"""`use_kernels("auto")` on a GPU: Triton kernels that work there, otherwise torch's, with the reason in the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from loops import using
from meshstep.optim.kernels import choice
from meshstep.optim.kernels.device_constants import Tables
from torch import Tensor

GPU = torch.device("cuda", 0)


class Kernels:
    """Stands for the Triton kernels. ``powers`` returns a value or raises an error."""

    version, interpreted = "3.6", False

    def __init__(self, powers: Any) -> None:
        self._powers = powers

    def powers(self, tensors: list[Tensor], norm_type: float) -> Any:
        if isinstance(self._powers, Exception):
            raise self._powers
        return self._powers

    def runs_on(self, device: torch.device) -> bool:
        return device.type == "cuda"


RIGHT = torch.tensor([45.0], dtype=torch.float64)


@contextmanager
def gpu(
    powers: Any, capability: tuple[int, int] = (9, 0), hip: str | None = None, available: bool = True
) -> Iterator[Any]:
    """Simulate a GPU on which the Triton kernels have the given result."""
    kernels, full = Kernels(powers), torch.full
    choice._usable.cache_clear()
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=available),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.object(torch.version, "hip", hip),
        mock.patch.object(torch, "full", lambda shape, value, device: full(shape, value)),
        mock.patch.object(choice, "_loaded", return_value=kernels),
        using("auto"),
    ):
        yield kernels
    choice._usable.cache_clear()


def test_auto_uses_working_triton_kernels_on_gpu_only() -> None:
    with gpu(RIGHT) as kernels:
        assert choice.triton_on(GPU) is kernels
        assert choice.triton_on(torch.device("cpu")) is None
        assert choice.kernels_on_gpu() == "triton"
        with using("torch"):
            assert choice.triton_on(GPU) is None
            assert choice.kernels_on_gpu() == "torch"


@pytest.mark.parametrize(
    ("powers", "options", "level", "reason"),
    [
        (RIGHT, {"capability": (7, 5)}, logging.INFO, "compute capability 8.0 or higher"),
        (RIGHT, {"hip": "7.1"}, logging.INFO, "an NVIDIA GPU"),
        (ImportError("no triton"), {}, logging.INFO, "triton can't be imported: no triton"),
        (RuntimeError("no C compiler"), {}, logging.WARNING, "RuntimeError: no C compiler"),
        (torch.tensor([44.0]), {}, logging.WARNING, "a sum of squares was wrong"),
        (None, {}, logging.WARNING, "a sum of squares was wrong"),
    ],
)
def test_auto_falls_back_to_torch_kernels_and_logs_the_reason(
    powers: Any, options: dict[str, Any], level: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "meshstep"), gpu(powers, **options):
        assert choice.triton_on(GPU) is None
        assert choice.kernels_on_gpu() == "torch"
    (record,) = [record for record in caplog.records if "GPU kernels: torch's" in record.getMessage()]
    assert record.levelno == level
    assert reason in record.getMessage()


def test_auto_tries_no_kernel_without_a_gpu() -> None:
    with gpu(AssertionError("a kernel was run"), available=False):
        assert choice.triton_on(GPU) is None


def test_auto_tries_no_kernel_in_a_capture() -> None:
    with gpu(RIGHT) as kernels:
        with mock.patch.object(choice, "is_captured", return_value=True):
            assert choice.triton_on(GPU) is None
        assert choice.triton_on(GPU) is kernels
        with mock.patch.object(choice, "is_captured", return_value=True):
            assert choice.triton_on(GPU) is kernels


def test_tables_of_captured_graphs_get_separate_pinned_memory_until_it_is_used_up() -> None:
    tables = Tables()
    tables._for_graphs = torch.zeros(7, dtype=torch.int64)
    first = tables._pinned_for_a_graph(torch.tensor([[1, 2], [3, 4]]))
    second = tables._pinned_for_a_graph(torch.tensor([0.5, 1.5], dtype=torch.float64))
    assert first.tolist() == [[1, 2], [3, 4]]
    assert second.tolist() == [0.5, 1.5]
    with pytest.raises(RuntimeError, match="make one step without a graph before each capture"):
        tables._pinned_for_a_graph(torch.tensor([1, 2]))
    assert len({first.untyped_storage().data_ptr(), second.untyped_storage().data_ptr()}) == 1
    assert first.data_ptr() + 4 * 8 == second.data_ptr()
