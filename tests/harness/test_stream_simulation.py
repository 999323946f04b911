"""The simulation reports planted accesses that no event orders, and reports none of the ordered accesses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stream_simulation import DeviceTensor, Simulation, simulated_cuda
from torch import Tensor

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="needs a torch built with CUDA for the fake GPU"
)

Case = Callable[[Tensor, Tensor], object]
"""A function of a tensor on cuda:1 and of a pinned tensor; cuda:0 is the current device."""


def recorded(stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream or torch.cuda.current_stream("cuda:1"))
    return event


def download(tensor: Tensor, pinned: Tensor) -> torch.cuda.Event:
    pinned.copy_(tensor, non_blocking=True)
    return recorded()


def upload(tensor: Tensor, pinned: Tensor) -> torch.cuda.Event:
    tensor.copy_(pinned, non_blocking=True)
    return recorded()


def read_after_event(tensor: Tensor, pinned: Tensor) -> None:
    download(tensor, pinned).synchronize()
    assert pinned.tolist() == [1.0, 2.0, 3.0]


def read_after_scalar(tensor: Tensor, pinned: Tensor) -> None:
    download(tensor, pinned)
    float(tensor[0])
    pinned.add(1)


def read_after_blocking_copy(tensor: Tensor, pinned: Tensor) -> None:
    pinned.copy_(tensor)
    pinned.add(1)


def read_of_other_element(tensor: Tensor, pinned: Tensor) -> None:
    pinned[:2].copy_(tensor[:2], non_blocking=True)
    float(pinned[2])


def write_after_upload(tensor: Tensor, pinned: Tensor) -> None:
    upload(tensor, pinned).synchronize()
    pinned.fill_(0)


def read_after_upload(tensor: Tensor, pinned: Tensor) -> None:
    upload(tensor, pinned)
    pinned.add(1)


def upload_after_download(tensor: Tensor, pinned: Tensor) -> None:
    download(tensor, pinned)
    upload(tensor, pinned)
    assert tensor.tolist() == [1.0, 2.0, 3.0]


def side_stream_after_wait(tensor: Tensor, pinned: Tensor) -> None:
    side = torch.cuda.Stream("cuda:1")
    side.wait_stream(torch.cuda.current_stream("cuda:1"))
    with torch.cuda.stream(side):
        tensor.add_(1)
    torch.cuda.current_stream("cuda:1").wait_event(recorded(side))
    tensor.mul_(2)


def copy_to_other_device(tensor: Tensor, pinned: Tensor) -> None:
    other = tensor.to("cuda:0")
    tensor.fill_(0)
    assert other.tolist() == [1.0, 2.0, 3.0]


def temporary(tensor: Tensor, pinned: Tensor) -> None:
    copy = tensor.to("cpu", non_blocking=True)
    recorded().synchronize()
    assert copy.tolist() == [1.0, 2.0, 3.0]


def read_on_side_stream(tensor: Tensor, pinned: Tensor, end: Callable[[Tensor, Any], object]) -> None:
    """Read a temporary tensor on a side stream, call ``end`` with both, free the tensor and run another operation."""
    made, side = tensor + 1, torch.cuda.Stream("cuda:1")
    side.wait_stream(torch.cuda.current_stream("cuda:1"))
    with torch.cuda.stream(side):
        made.sum()
    end(made, side)
    del made
    tensor.add_(1)


def freed_after_record_stream(tensor: Tensor, pinned: Tensor) -> None:
    read_on_side_stream(tensor, pinned, lambda made, side: made.record_stream(side))


def freed_after_wait(tensor: Tensor, pinned: Tensor) -> None:
    read_on_side_stream(
        tensor, pinned, lambda made, side: torch.cuda.current_stream("cuda:1").wait_event(recorded(side))
    )


ORDERED: tuple[Case, ...] = (
    read_after_event,
    read_after_scalar,
    read_after_blocking_copy,
    read_of_other_element,
    write_after_upload,
    read_after_upload,
    upload_after_download,
    side_stream_after_wait,
    copy_to_other_device,
    temporary,
    freed_after_record_stream,
    freed_after_wait,
)


def read_at_once(tensor: Tensor, pinned: Tensor) -> None:
    download(tensor, pinned)
    pinned.add(1)


def read_list_at_once(tensor: Tensor, pinned: Tensor) -> None:
    download(tensor, pinned)
    pinned.tolist()


def read_after_event_of_current_device(tensor: Tensor, pinned: Tensor) -> None:
    pinned.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    pinned.add(1)


def read_after_earlier_event(tensor: Tensor, pinned: Tensor) -> None:
    event = recorded()
    download(tensor, pinned)
    event.synchronize()
    pinned.add(1)


def read_after_query(tensor: Tensor, pinned: Tensor) -> None:
    assert not download(tensor, pinned).query()
    pinned.add(1)


def write_at_once(tensor: Tensor, pinned: Tensor) -> None:
    upload(tensor, pinned)
    pinned.fill_(0)


def temporary_at_once(tensor: Tensor, pinned: Tensor) -> None:
    tensor.to("cpu", non_blocking=True).add(1)


def download_on_other_stream(tensor: Tensor, pinned: Tensor) -> None:
    download(tensor, pinned)
    with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
        pinned.copy_(torch.zeros(3, device="cuda:1"), non_blocking=True)


def side_stream_without_wait(tensor: Tensor, pinned: Tensor) -> None:
    tensor.fill_(1)
    with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
        tensor.add(1)


def result_of_side_stream(tensor: Tensor, pinned: Tensor) -> None:
    with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
        made = torch.ones(3, device="cuda:1")
    tensor.add_(made)


def freed_without_record_stream(tensor: Tensor, pinned: Tensor) -> None:
    read_on_side_stream(tensor, pinned, lambda made, side: None)


UNORDERED: dict[Case, str] = {
    read_at_once: "the host reads pinned memory",
    read_list_at_once: "the host reads pinned memory",
    read_after_event_of_current_device: "the host reads pinned memory",
    read_after_earlier_event: "the host reads pinned memory",
    read_after_query: "the host reads pinned memory",
    write_at_once: "the host writes pinned memory",
    temporary_at_once: "the host reads pinned memory",
    download_on_other_stream: "stream 2 of cuda:1 writes pinned memory",
    result_of_side_stream: "stream 1 of cuda:1 reads device memory",
    freed_without_record_stream: "memory of stream 1 of cuda:1 was freed before stream 2 of cuda:1 has finished",
    side_stream_without_wait: "stream 2 of cuda:1 reads device memory",
}


def run(case: Case) -> Simulation:
    with simulated_cuda() as simulation:
        tensor, pinned = torch.tensor([1.0, 2.0, 3.0], device="cuda:1"), torch.zeros(3, pin_memory=True)
        assert isinstance(tensor, DeviceTensor)
        case(tensor, pinned)
    return simulation


@pytest.mark.parametrize("case", ORDERED, ids=lambda case: case.__name__)
def test_simulation_reports_no_finding_for_ordered_access(case: Case) -> None:
    assert run(case).findings == []


@pytest.mark.parametrize("case", UNORDERED, ids=lambda case: case.__name__)
def test_simulation_reports_unordered_access_as_finding(case: Case) -> None:
    findings = run(case).findings
    assert findings
    assert findings[0].startswith(UNORDERED[case])


def test_simulated_copy_to_pinned_memory_is_visible_only_after_its_event() -> None:
    with simulated_cuda():
        tensor, pinned = torch.tensor([1.0, 2.0, 3.0], device="cuda:1"), torch.zeros(3, pin_memory=True)
        elements = pinned.numpy()
        event = download(tensor, pinned)
        assert all(element != element for element in elements)
        event.synchronize()
        assert elements.tolist() == [1.0, 2.0, 3.0]


def test_simulation_reports_host_write_to_pinned_memory_during_upload() -> None:
    with simulated_cuda() as simulation:
        tensor, pinned = torch.tensor([1.0, 2.0, 3.0], device="cuda:1"), torch.zeros(3, pin_memory=True)
        elements = pinned.numpy()
        event = upload(tensor, pinned)
        elements[0] = 7
        event.synchronize()
    (finding,) = simulation.findings
    assert finding.startswith("the host has written pinned memory while a copy may read it")


def test_simulated_operator_on_tensors_of_two_devices_raises() -> None:
    with simulated_cuda(), pytest.raises(RuntimeError, match=r"tensors on several devices: \['cuda:0', 'cuda:1'\]"):
        torch.ones(2, device="cuda:0").add_(torch.ones(2, device="cuda:1"))


def test_simulated_device_and_stream_are_restored_after_context() -> None:
    with simulated_cuda():
        default = torch.cuda.current_stream()
        with torch.cuda.device(1):
            assert torch.zeros(1, device="cuda").device == torch.device("cuda", 1)
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                assert torch.cuda.current_stream() is side
        assert torch.cuda.current_stream() is default
        assert torch.cuda.current_device() == 0
