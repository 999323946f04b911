"""On a GPU, `use_kernels("auto")` selects Triton kernels if they work, else torch's kernels, and logs the reason.

Also pinned memory for the pointer tables of captured steps.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from loops import using
from meshstep.optim.kernels import choice, device_constants
from meshstep.optim.kernels.device_constants import Tables
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

GPU = torch.device("cuda", 0)


class Kernels:
    """Stand-in for the Triton kernels, whose ``powers`` returns a value or raises an error."""

    version = "3.6"

    def __init__(self, powers: Any, device: str = "cuda") -> None:
        self._powers, self._device = powers, device

    def powers(self, tensors: list[Tensor], norm_type: float) -> Any:
        if isinstance(self._powers, Exception):
            raise self._powers
        return self._powers

    def runs_on(self, device: torch.device) -> bool:
        return device.type == self._device


RIGHT = torch.tensor([45.0], dtype=torch.float64)


@contextmanager
def gpu(
    powers: Any,
    capability: tuple[int, int] = (9, 0),
    hip: str | None = None,
    available: bool = True,
    runs_on: str = "cuda",
) -> Iterator[Any]:
    """Simulate a GPU whose Triton kernel of powers returns ``powers``, or raises it if it is an exception.

    Assert that each call that switches off torch's sync debug mode is followed by one that restores the mode 2.
    """
    kernels, full = Kernels(powers, runs_on), torch.full
    choice._tried.clear()
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=available),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.object(torch.cuda, "get_sync_debug_mode", return_value=2),
        mock.patch.object(torch.cuda, "set_sync_debug_mode") as set_mode,
        mock.patch.object(torch.version, "hip", hip),
        mock.patch.object(torch, "full", lambda shape, value, device: full(shape, value)),
        mock.patch.object(choice, "_loaded", return_value=kernels),
        using("auto"),
    ):
        yield kernels
        assert [*map(mock.call, (0, 2))] * (set_mode.call_count // 2) == set_mode.call_args_list
    choice._tried.clear()


def test_auto_kernels_use_working_triton_on_gpu_only() -> None:
    with gpu(RIGHT) as kernels:
        assert choice.triton_on(GPU) is kernels
        assert choice.triton_on(torch.device("cpu")) is None
        assert choice.kernels_on_gpu(GPU) == "triton"
        with using("torch"):
            assert choice.triton_on(GPU) is None
            assert choice.kernels_on_gpu(GPU) == "torch"


@pytest.mark.parametrize(
    ("powers", "options", "level", "reason"),
    [
        (RIGHT, {"capability": (7, 5)}, logging.INFO, "compute capability 8.0 or higher"),
        (RIGHT, {"hip": "7.1"}, logging.INFO, "an NVIDIA GPU"),
        (AssertionError("a kernel was run"), {"runs_on": "cpu"}, logging.INFO, "TRITON_INTERPRET=1 is set"),
        (ImportError("no triton"), {}, logging.INFO, "triton can't be imported: no triton"),
        (RuntimeError("no C compiler"), {}, logging.WARNING, "RuntimeError: no C compiler"),
        (torch.tensor([44.0]), {}, logging.WARNING, "a sum of squares was wrong"),
        (None, {}, logging.WARNING, "a sum of squares was wrong"),
    ],
)
def test_auto_kernels_fall_back_to_torch_and_log_reason(
    powers: Any, options: dict[str, Any], level: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "meshstep"), gpu(powers, **options):
        assert choice.triton_on(GPU) is None
        assert choice.kernels_on_gpu(GPU) == "torch"
    (record,) = [record for record in caplog.records if "GPU kernels: torch's" in record.getMessage()]
    assert record.levelno == level
    assert reason in record.getMessage()


def test_auto_kernels_run_no_trial_kernel_without_gpu() -> None:
    with gpu(AssertionError("a kernel was run"), available=False):
        assert choice.triton_on(GPU) is None


def test_auto_kernels_run_no_trial_kernel_in_graph_capture() -> None:
    with gpu(RIGHT) as kernels:
        with mock.patch.object(choice, "is_captured", return_value=True):
            assert choice.triton_on(GPU) is None
        assert choice.triton_on(GPU) is kernels
        with mock.patch.object(choice, "is_captured", return_value=True):
            assert choice.triton_on(GPU) is kernels


def test_auto_kernels_are_chosen_per_device_and_not_in_fake_tensor_mode() -> None:
    with gpu(RIGHT) as kernels:
        with FakeTensorMode(), mock.patch.object(torch, "full", lambda shape, value, device: torch.ones(shape)):
            assert choice.triton_on(GPU) is None
        assert choice.triton_on(GPU) is kernels
        with mock.patch.object(torch.cuda, "get_device_capability", return_value=(7, 0)):
            assert choice.triton_on(torch.device("cuda", 1)) is None
        assert choice.triton_on(GPU) is kernels


def test_eager_step_reserves_pinned_memory_for_pointer_tables_of_four_captured_steps() -> None:
    """The largest table comes last, as in a step that only measures."""
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return empty(*args, **kwargs)

    tables, made = Tables(), 0
    with (
        mock.patch.object(Tables, "_brought", lambda _, table, device: table.clone()),
        mock.patch.object(device_constants, "_stream", return_value=0),
        mock.patch.object(torch, "empty", unpinned),
    ):
        for _ in range(2):
            first = tables.of(array("q", range(5)), GPU)
            cut = tables.chunks_of(array("q", [900, 70]), 10, GPU)
            made = first.numel() + cut.numels.numel() + cut.chunks.numel() + cut.first.numel()
            assert tables._for_graphs is not None
            assert len(tables._for_graphs) == 4 * made
            tables._for_graphs = tables._for_graphs[: made - 1]  # as if captures had used the rest
    assert made == 5 + 2 + 2 * 97 + 3


def test_captured_pointer_tables_use_separate_parts_of_pinned_memory_until_exhausted() -> None:
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
