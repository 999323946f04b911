"""Masters and optimizer states of some parameters in the CPU's memory, which is larger; their step runs there.

    device   parameter, gradient ----------+                        +--> parameter
    CPU                                    +--> step of the copy ---+

The parameters stay on the device, where gradients are completed, measured and clipped as always. A step copies the
gradients of the offloaded ones to the CPU, steps both sides, each by its own fused kernel, and copies the new weights back
in the parameters' dtype: 6 bytes an element go over the bus in modes with masters, 8 in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...amp.casting import is_half
from ...amp.master_weights import use_main_grad_
from ...parallel.layout.annotation import copy_annotation
from ..gradients.in_place import clear_gradients
from .link import AnyWindow, Binding, Link, Placement, Position
from .pieces import Held, StandIns


@dataclass(frozen=True)
class Offloaded(Placement):
    """Keep and step the masters and optimizer states of some parameters on the CPU.

    Memory on the device for each offloaded element: that of the parameter and its gradient; 8 bytes of AdamW's state less,
    and 4 of master. On a machine without a device the copies lie beside the parameters and everything else is the same.
    What only a GPU shows: the memory it has left, the time of the copies (from and to pinned memory), and that the step
    waits for it: the CPU must have the gradients, and know whether to skip. So a step with offload can't be captured
    in a CUDA graph. And where two ranks hold copies of a parameter beside different others (pipeline stages with a tied
    embedding, owned parameters), one may step it on the CPU and one on the device, whose kernels may round differently;
    a fraction of 1.0 avoids that.

    Args:
        fraction: At least this fraction of the elements, counted over parameters that require gradients, is offloaded: as
            many whole parameters stay on the device, the largest first, as fit into the rest.
    Collectives: none. Host reads: one wait a step where the parameters are on a device.
    """

    position: ClassVar[Position] = Position.DEVICE
    fraction: float = 1.0

    def check(self, binding: Binding) -> None:
        if not 0 <= self.fraction <= 1:
            raise ValueError(
                f"Offloaded({self.fraction}): give the fraction of the elements that goes to the CPU, between 0 and 1"
            )
        precision, switch = binding.precision, binding.data_parallel
        if switch is not None and switch.is_ddp and precision.masters:
            raise ValueError(
                f"Offloaded with precision={precision.name!r} needs float32 gradients, which DistributedDataParallel does "
                "not make: leave data_parallel out, and the optimizer averages over the data axes itself"
            )

    def link(self, binding: Binding) -> Link:
        return Copies(self.fraction, binding.main_grads)


class Copies(Link):
    """Puts copies on the CPU in the place of some of an optimizer's parameters.

    Args:
        fraction: As for `Offloaded`.
        main_grads: Half-precision parameters have float32 gradients.
    """

    differs = True

    def __init__(self, fraction: float, main_grads: bool) -> None:
        self.fraction, self.main_grads = fraction, main_grads
        self._optimizer: torch.optim.Optimizer | None = None
        self.copies: dict[Tensor, Tensor] = {}  # on the CPU, of the parameters that are offloaded
        self._buffers: dict[Tensor, Tensor] = {}  # on the CPU, for their gradients
        self._seen: dict[Tensor, tuple[int, int]] = {}

    def holds_back(self, tensor: Tensor) -> bool:
        return tensor in self.copies

    def not_captured(self) -> str | None:
        return "Offloaded waits for the GPU and steps on the CPU" if self.copies else None

    @torch.no_grad()
    def install(self, optimizer: torch.optim.Optimizer, held: Sequence[Held], tensors: Sequence[Tensor]) -> StandIns:
        trained = [tensor for tensor in tensors if tensor.requires_grad]
        new: dict[Tensor, list[tuple[Tensor, int]]] = {}
        for index in offloaded([tensor.numel() for tensor in trained], self.fraction):
            tensor = trained[index]
            self.copies[tensor] = nn.Parameter(_beside(tensor))
            copy_annotation(tensor, self.copies[tensor])
            if self.main_grads and is_half(tensor):
                use_main_grad_(tensor)
            new[tensor] = [(self.copies[tensor], 0)]
        self._note_versions()
        return new

    # The step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def bring(self, window: AnyWindow, averaged: bool) -> None:
        """Nothing for offloaded parameters, but to notice weights that somebody else has changed. Host reads: none."""
        self._refresh()

    def _refresh(self) -> None:
        """See what was written to the parameters since the last step."""
        for param, copy in self.copies.items():
            if self._seen[param] != (param.data_ptr(), param._version):
                copy.copy_(param)  # in modes with masters they compare, and refuse other values
        self._note_versions()

    @torch.no_grad()
    def step(self, update: Callable[[], object]) -> None:
        """Copy the gradients to the CPU, step both sides, and copy the weights back. Host reads: a wait for the device."""
        for param, copy in self.copies.items():
            copy.grad = self._fetch(param)
        self._wait()
        update()
        clear_gradients(list(self.copies.values()), set_to_none=True)
        self.publish()

    def _fetch(self, param: Tensor) -> Tensor | None:
        """The gradient on the CPU, when the device gets there."""
        if param.grad is None:
            return None
        buffer = self._buffers.get(param)
        if buffer is None:
            # In the memory format of the parameter, on which fused kernels rely.
            buffer = torch.empty_like(param, dtype=param.grad.dtype, device="cpu", pin_memory=param.is_cuda)
            self._buffers[param] = buffer
        # A view, because masters mark the gradients that they have seen.
        return buffer.copy_(param.grad, non_blocking=True).view_as(buffer)

    def _wait(self) -> None:
        for device in {param.device for param in self.copies if param.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the weights of the CPU to the device."""
        for param, copy in self.copies.items():
            param.copy_(copy, non_blocking=True)
        self._note_versions()

    def _note_versions(self) -> None:
        self._seen = {param: (param.data_ptr(), param._version) for param in self.copies}

    def clear(self, set_to_none: bool) -> None:
        """Clear the gradients on both sides."""
        clear_gradients([*self.copies, *self.copies.values()], set_to_none)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The model may have been loaded before; masters, if there are any, then have the last word."""
        self._wait()  # the copies may still be on their way to the device
        self._refresh()


def offloaded(numels: Sequence[int], fraction: float) -> list[int]:
    """Which of parameters with so many elements are offloaded: all but the largest that fit into the rest of the sum."""
    room = (1 - fraction) * sum(numels)
    chosen = []
    for index in sorted(range(len(numels)), key=lambda i: (-numels[i], i)):
        if numels[index] <= room:
            room -= numels[index]
        else:
            chosen.append(index)
    return sorted(chosen)


def reference_offloaded_step(
    params: Sequence[Tensor], gradients: Sequence[Tensor | None], optimizer: torch.optim.Optimizer
) -> None:
    """The same, plain: ``optimizer`` is over CPU copies of ``params``; whole tensors go there and back."""
    copies = [param for group in optimizer.param_groups for param in group["params"]]
    for copy, gradient in zip(copies, gradients, strict=True):
        copy.grad = None if gradient is None else gradient.to("cpu", copy.dtype)
    optimizer.step()
    for param, copy in zip(params, copies, strict=True):
        param.data.copy_(copy)


def _beside(tensor: Tensor) -> Tensor:
    """A copy in the CPU's memory, pinned if the tensor is on a CUDA device."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor.detach())
