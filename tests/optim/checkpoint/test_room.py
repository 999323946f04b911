"""What is read from a checkpoint has room in large pages: to touch small ones takes as long as to read the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from meshstep.optim.checkpoint.room import room
from torch import Tensor

SMAPS = Path("/proc/self/smaps")


def flags_at(tensor: Tensor) -> list[str]:
    """What the kernel has been told of the memory in a tensor's middle."""
    middle, found = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in SMAPS.read_text().splitlines():
        field, *values = line.split()
        if field.endswith(":"):
            if found and field == "VmFlags:":
                return values
        else:
            start, end = (int(address, 16) for address in field.split("-"))
            found = start <= middle < end
    raise AssertionError("it is nowhere")


@pytest.mark.skipif(not SMAPS.exists(), reason="large pages are asked for on Linux only")
def test_a_large_tensor_is_in_large_pages() -> None:
    assert "hg" in flags_at(room((3, 2**20), torch.float32))
    assert "hg" not in flags_at(torch.empty(3, 2**20))


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 2**20), (2, 0, 4)])
def test_it_is_a_tensor_like_any_other(shape: tuple[int, ...]) -> None:
    found = room(shape, torch.float64)
    assert (found.shape, found.dtype, found.device.type) == (shape, torch.float64, "cpu")
    assert torch.equal(found.fill_(2.0), torch.full(shape, 2.0, dtype=torch.float64))
