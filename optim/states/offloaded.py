"""Masters and optimizer states of some parameters in the CPU's memory, which is larger; their step runs there.

    device   parameter, gradient ----------+                        +--> parameter
    CPU                                    +--> step of the copy ---+

The parameters stay on the device, where gradients are completed, measured and clipped as always. A step copies the
gradients of the offloaded ones to the CPU, steps both sides, each by its own fused kernel, and copies the new weights back
in the parameters' dtype: 6 bytes an element go over the bus in modes with masters, 8 in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...amp.casting import is_half
from ...amp.weights import Weights
from ...parallel.layout.annotation import copy_annotation
from .stepped_weights import SteppedWeights, move_state, origins_of, params_of, replaced


class OffloadedWeights(SteppedWeights):
    """Puts copies on the CPU in the place of some of an optimizer's parameters.

    Memory on the device for each offloaded element: that of the parameter and its gradient; 8 bytes of AdamW's state less,
    and 4 of master. On a machine without a device the copies lie beside the parameters and everything else is the same.
    What only a GPU shows: the memory it has left, the time of the copies (from and to pinned memory), and that the step
    waits for it: the CPU must have the gradients, and know whether to skip. So a step with offload can't be captured
    in a CUDA graph. And where two ranks hold copies of a parameter beside different others (pipeline stages with a tied
    embedding, owned parameters), one may step it on the CPU and one on the device, whose kernels may round differently;
    ``offload=1.0`` or None avoids that.

    Args:
        optimizer: It may have stepped already. Its param groups and state are changed in place.
        fraction: At least this fraction of the elements, counted over parameters that require gradients, is offloaded: as
            many whole parameters stay on the device, the largest first, as fit into the rest.
        make_inner: Makes the precision mode's weights, from the optimizer that holds the copies.
        main_grads: Half-precision parameters have float32 gradients.
    Collectives: none. Host reads: one wait a step where the parameters are on a device.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        fraction: float,
        make_inner: Callable[[], Weights],
        *,
        main_grads: bool = False,
    ) -> None:
        self.fraction, self.main_grads = fraction, main_grads
        self._copies: dict[Tensor, Tensor] = {}  # on the CPU, of the parameters that are offloaded
        self._buffers: dict[Tensor, Tensor] = {}  # on the CPU, for their gradients
        self._seen: dict[Tensor, tuple[int, int]] = {}
        origins = origins_of(optimizer.param_groups)
        copies = self._make_copies(params_of(optimizer.param_groups))
        for param, copy in copies.items():
            move_state(optimizer, param, [(copy, 0)])
        for group in optimizer.param_groups:
            group.update(_with_copies(group, copies))
        super().__init__(optimizer, origins, make_inner())

    @torch.no_grad()
    def _make_copies(self, params: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        trained = [param for param in params if param.requires_grad]
        chosen = offloaded([param.numel() for param in trained], self.fraction)
        copies: dict[Tensor, Tensor] = {}
        for param in (trained[index] for index in chosen):
            copies[param] = nn.Parameter(_beside(param))
            copy_annotation(param, copies[param])
            if self.main_grads and is_half(param):
                gradient, param.grad = param.grad, None
                param.grad_dtype = torch.float32
                param.grad = None if gradient is None else gradient.float()
        self._copies |= copies
        self._note_versions()
        return copies

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, of which the fraction is offloaded."""
        origins = origins_of([param_group], len(self._origins))
        copies = self._make_copies([origin.param for origin in origins])
        self.inner.add_param_group({**param_group, **_with_copies(param_group, copies)})
        self._origins += origins

    # The step --------------------------------------------------------------------------------------------------------

    def measured(self) -> list[Tensor]:
        """As everywhere; for offloaded parameters these themselves, whose gradients are on the device."""
        pairs = zip(self._origins, super().measured(), strict=True)
        return [origin.param if origin.param in self._copies else inner for origin, inner in pairs]

    def compared(self) -> list[Tensor]:
        """The parameters themselves: two ranks that hold copies of one may differ in what they offload."""
        return [origin.param for origin in self._origins]

    @torch.no_grad()
    def collect(self, averaged: bool = True) -> None:
        """Nothing for offloaded parameters, but to notice weights that somebody else has changed. Host reads: none."""
        self._refresh()
        self.inner.collect()

    @torch.no_grad()
    def _refresh(self) -> None:
        """See what was written to the parameters since the last step."""
        for param, copy in self._copies.items():
            if self._seen[param] != (param.data_ptr(), param._version):
                copy.copy_(param)  # in modes with masters they compare, and refuse other values
        self._note_versions()

    @torch.no_grad()
    def step(self, update: Callable[[], object]) -> None:
        """Copy the gradients to the CPU, step both sides, and copy the weights back. Host reads: a wait for the device."""
        stepped = params_of(self.optimizer.param_groups)
        sides = [(o.param, s) for o, s in zip(self._origins, stepped, strict=True) if o.param in self._copies]
        for param, _ in sides:
            self._copies[param].grad = self._fetch(param)
        self._wait()
        for param, inner in sides:
            inner.grad = self._copies[param].grad  # where the precision has masters it is they who are stepped
        self.inner.step(update)
        for param, inner in sides:
            self._copies[param].grad = inner.grad = None
        self.synchronize()

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
        for device in {param.device for param in self._copies if param.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Copy the weights of the CPU to the device."""
        for param, copy in self._copies.items():
            param.copy_(copy, non_blocking=True)
        self._note_versions()

    def _note_versions(self) -> None:
        self._seen = {param: (param.data_ptr(), param._version) for param in self._copies}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.inner.zero_grad(set_to_none)
        for param in self._copies:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As everywhere."""
        self._wait()  # the copies may still be on their way to the device
        self._refresh()  # the model may have been loaded before; masters, if there are any, then have the last word
        super().load_state_dict(state)


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


def _beside(tensor: Tensor) -> Tensor:
    """A copy in the CPU's memory, pinned if the tensor is on a CUDA device."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor.detach())


def _with_copies(group: Mapping[str, Any], copies: Mapping[Tensor, Tensor]) -> dict[str, Any]:
    return replaced(group, lambda param: [copies.get(param, param)])
