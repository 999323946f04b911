"""Copies of CUDA tensors in host memory, for which the host waits only when it reads them."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor in host memory. The copy of a CUDA tensor is asynchronous: only `wait` blocks the host.

    Args:
        source: The tensor. A CUDA tensor is copied in the current stream of its device, so you may overwrite it in this
            stream at once.
        buffer: The memory for the copy, with the shape and dtype of ``source``; pinned if ``source`` is a CUDA tensor.
            None (default): new memory. A CPU tensor is then not copied.

    Attributes:
        buffer: The memory with the copy. Before `wait`, the copy may not have arrived.
        arrived: The event that is recorded after the copy; None if ``source`` is not a CUDA tensor.
    """

    def __init__(self, source: Tensor, buffer: Tensor | None = None) -> None:
        if buffer is None and source.is_cuda:
            buffer = torch.empty_like(source, device="cpu", pin_memory=True)
        self.buffer = source.to("cpu") if buffer is None else buffer.copy_(source, non_blocking=True)
        self.arrived: torch.cuda.Event | None = None
        if source.is_cuda:
            self.arrived = torch.cuda.Event()
            # The device of ``source`` may not be the current device.
            self.arrived.record(torch.cuda.current_stream(source.device))

    def wait(self) -> Tensor:
        """Return the copy. Host synchronization: waits until the copy has arrived; none if `arrived` is None."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.buffer
