"""Parameters on a device and copies of them in the CPU's memory, between which one copy each way goes over the bus.

    device   gradients --foreach--> flat ----------+        +--> flat --foreach--> parameters
    CPU                                            +--> flat +--> flat
                                              gradients      weights, as the copies are

On a machine without a device there is no flat buffer between, and nobody waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

ALIGNMENT = 64
"""Elements: each parameter begins where a GPU's kernels read several at a time."""


class HostBucket:
    """Some parameters of one dtype and device, and a copy on the CPU of each.

    Args:
        params: At least one.
        grad_dtype: Of their gradients.

    Attributes:
        copies: In the memory formats of the parameters, on which fused kernels rely; pinned where those are on a CUDA
            device.
    Memory on the CPU: that of the parameters and, from the first step on, of their gradients. On the device: a flat copy of
    the bucket's gradients or weights while they travel, none where it has one parameter.
    """

    def __init__(self, params: Sequence[Tensor], grad_dtype: torch.dtype) -> None:
        self.params, self.device, self._grad_dtype = list(params), params[0].device, grad_dtype
        self._pinned = self.device.type == "cuda"  # else copies to and from it wait
        self._strides = [torch.empty_like(param, device="meta").stride() for param in params]
        self._starts, self._numel = list[int](), 0
        for param in params:
            self._starts.append(self._numel)
            self._numel += -(-param.numel() // ALIGNMENT) * ALIGNMENT
        self._weights = self._flat(params[0].dtype)
        # With a version counter of their own each, by which masters see what was written to.
        self.copies: list[Tensor] = [nn.Parameter(view.data) for view in self._views(self._weights)]
        self._gradients: Tensor | None = None
        self._came: list[int] = []  # the parameters whose gradients are on their way
        self._arrived: torch.cuda.Event | None = None
        self.load(range(len(params)))

    def _flat(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self._numel, dtype=dtype, device="cpu", pin_memory=self._pinned)

    def _flat_there(self, host: Tensor) -> Tensor:
        """As large, on the device, for one copy: the only memory that the bucket takes there."""
        return torch.empty_like(host, device=self.device)

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Where each parameter lies in the flat buffer, with its shape and memory format."""
        places = zip(self.params, self._starts, self._strides, strict=True)
        return [flat[start:].as_strided(param.shape, stride) for param, start, stride in places]

    # To the CPU ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, written: Sequence[int]) -> None:
        """Set the copies to the parameters. Host reads: a wait for the device.

        Args:
            written: Those that differ, by which masters will know it.
        """
        self._down(self._weights, list(range(len(self.params))), self.params)
        self.wait()
        torch.autograd.graph.increment_version([self.copies[index] for index in written])

    @torch.no_grad()
    def start(self) -> None:
        """Start to copy the gradients that there are to the CPU. Host reads: none."""
        self._came = [index for index, param in enumerate(self.params) if param.grad is not None]
        if self._came:
            if self._gradients is None:
                self._gradients = self._flat(self._grad_dtype)
            gradients = [param.grad for param in self.params if param.grad is not None]
            self._down(self._gradients, self._came, gradients)

    def finish(self) -> None:
        """Give the copies these gradients. Host reads: a wait for them, and for nothing that the device was told later."""
        if self._gradients is not None and self._came:
            self.wait()
            views = self._views(self._gradients)
            for index in self._came:
                self.copies[index].grad = views[index]

    def _down(self, host: Tensor, which: list[int], tensors: list[Tensor]) -> None:
        """Start to copy tensors that are beside the parameters to their places in ``host``; it is overwritten elsewhere."""
        if self.device.type == "cpu" or len(self.params) == 1:
            self._copy([self._views(host)[index] for index in which], tensors)
        else:
            flat = self._flat_there(host)
            views = self._views(flat)
            torch._foreach_copy_([views[index] for index in which], tensors)
            host.copy_(flat, non_blocking=self._pinned)
        self._mark()

    def _copy(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        if self.device.type == "cpu":
            torch._foreach_copy_(targets, sources)
        else:
            targets[0].copy_(sources[0], non_blocking=self._pinned)

    def _mark(self) -> None:
        if self._pinned:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(self.device))

    def wait(self) -> None:
        """Wait for the last copy, either way."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None

    # To the device ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def send(self) -> None:
        """Start to copy the CPU's weights to the device; `wait` before those are written to again. Host reads: none."""
        if self.device.type == "cpu" or len(self.params) == 1:
            self._copy(self.params, self.copies)
        else:
            flat = self._flat_there(self._weights)
            flat.copy_(self._weights, non_blocking=self._pinned)
            torch._foreach_copy_(self.params, self._views(flat))
        self._mark()
