"""Plain local parameters in the place of an optimizer's DTensor parameters (FSDP2, torch's tensor parallelism).

The step then knows plain tensors only: lists may mix both kinds (torch's fused optimizers refuse that), nothing issues a
collective of its own, and master weights and checks see what they always see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...parallel.interop.local_parameters import has_dtensors, local_tensor
from ...parallel.mesh.topology import Topology
from ..gradients.in_place import clear_gradients
from ..norm.param_table import ParamPosition
from ..step.update_request import Update, UpdateRequest
from ..step.window import Window
from .chain import Link, Replacements

_SHARED = "_meshstep_shared"  # the mark of a gradient that came from a DTensor


class LocalTensors(Link):
    """Each DTensor is replaced by its local parameter, which has the same memory, name and spec; the optimizer's state is
    local too then. Where there are no DTensors nothing is done, at no cost.

    Args:
        topology: Whose axes the dims of the DTensors' meshes are.
    """

    is_local = True

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._pairs: list[tuple[Any, nn.Parameter]] = []

    @property
    def idle(self) -> bool:  # type: ignore[override]
        return not self._pairs

    def install(self, optimizer: torch.optim.Optimizer, positions: Sequence[ParamPosition]) -> Replacements:
        """Raises ValueError where a layout has no spec."""
        tensors = [at.tensor for at in positions]
        if not has_dtensors(tensors):
            return {}
        from ...parallel.interop.dtensor import DTensor, local_parameter

        new = [(param, local_parameter(param, self._topology)) for param in tensors if isinstance(param, DTensor)]
        self._pairs += new
        return {param: [(piece, 0)] for param, piece in new}

    def move_state(
        self, optimizer: torch.optim.Optimizer, tensor: Tensor, targets: Sequence[tuple[Tensor, int]]
    ) -> None:
        """The local parts of its state."""
        state = optimizer.state.pop(tensor, None)
        for target, _ in targets if state else ():
            optimizer.state[target] = {key: _local(value) for key, value in (state or {}).items()}

    def bring(self, window: Window, averaged: bool) -> Exception | None:
        """Give every local parameter the local tensor of its DTensor's gradient; pending sums are made later.

        Where the DTensor has none, a gradient that somebody gave to what the optimizer holds stays: trainers make states
        before they load them by a step with gradients of zeros.
        """
        from ...parallel.interop.dtensor import local_parameter
        from ...parallel.interop.dtensor_gradients import poison_gradient, share_gradient

        problem = None
        for param, _ in self._pairs:
            piece = local_parameter(param)
            if param.grad is None and piece.grad is not None and not hasattr(piece.grad, _SHARED):
                continue
            try:
                share_gradient(param, piece, to_sum=True)
            except ValueError as error:
                poison_gradient(param, piece)
                problem = error
            if piece.grad is not None:
                setattr(piece.grad, _SHARED, True)
        return problem

    def step(self, request: UpdateRequest, update: Update) -> None:
        """Whoever clears the DTensors' gradients afterwards frees their memory."""
        from ...parallel.interop.dtensor_gradients import return_gradient

        update(request)
        for param, piece in self._pairs:
            return_gradient(param, piece)

    def clear(self, set_to_none: bool) -> None:
        """Clear the DTensors' gradients."""
        clear_gradients([param for param, _ in self._pairs], set_to_none)


def _local(value: object) -> object:
    return local_tensor(value) if isinstance(value, Tensor) else value
