"""The parameter transform that replaces an optimizer's DTensor parameters by their local tensors.

FSDP2 and torch's tensor parallelism create DTensor parameters. With local tensors an optimizer may mix
both kinds of parameters, which torch's fused optimizers reject otherwise. An update then issues no hidden collectives, and
later transforms handle plain tensors only.
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

_SHARED = "_meshstep_shared"  # attribute of gradients that came from a DTensor


class LocalTensors(Link):
    """The transform that replaces each DTensor by its local parameter, with the same memory, name and spec.

    The optimizer state becomes local as well. Without DTensors it does nothing.

    Args:
        topology: Its axes correspond to the dims of the DTensors' device meshes.
    """

    is_local = True

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._pairs: list[tuple[Any, nn.Parameter]] = []

    @property
    def idle(self) -> bool:  # type: ignore[override]
        return not self._pairs

    def install(self, optimizer: torch.optim.Optimizer, positions: Sequence[ParamPosition]) -> Replacements:
        """Replace the DTensors. Raises ValueError if a DTensor's layout has no spec."""
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
        """Move the local tensors of the state."""
        state = optimizer.state.pop(tensor, None)
        for target, _ in targets if state else ():
            optimizer.state[target] = {key: _local(value) for key, value in (state or {}).items()}

    def bring(self, window: Window, averaged: bool) -> Exception | None:
        """Give every local parameter the local tensor of its DTensor's gradient; partial gradients are reduced later.

        If the DTensor has no gradient, a gradient that was set on the local parameter stays: trainers create states before
        loading them by a step with zero gradients.
        """
        from ...parallel.interop.dtensor import local_parameter, poison_gradient, share_gradient

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
        """Call ``update`` and give the DTensors their gradients back, so that clearing these frees the memory."""
        from ...parallel.interop.dtensor import return_gradient

        update(request)
        for param, piece in self._pairs:
            return_gradient(param, piece)

    def clear(self, set_to_none: bool) -> None:
        """Clear the DTensors' gradients."""
        clear_gradients([param for param, _ in self._pairs], set_to_none)


def _local(value: object) -> object:
    return local_tensor(value) if isinstance(value, Tensor) else value
