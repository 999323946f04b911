"""The parameter transform that replaces DTensors by their local tensors; the first one of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...amp.casting import is_half
from ...parallel.interop.local_parameters import has_dtensors, local_tensor
from ...parallel.mesh.topology import Topology
from ..gradients.in_place import clear_gradients
from ..norm.param_table import ParamPosition
from ..step.update_request import Update, UpdateRequest
from ..step.window import Window
from .param_transform import ParamTransform, Replacements

# Attribute that marks a gradient as the local tensor of a DTensor's gradient. A gradient that other code set lacks it.
_SHARED = "_meshstep_shared"


class LocalTensors(ParamTransform):
    """The transform that replaces each DTensor by its local tensor.

    The local tensor is a parameter with the memory, name and layout of the DTensor. FSDP2 and torch's tensor
    parallelism create DTensor parameters. torch's fused optimizers reject a mixture of DTensors and plain tensors;
    local tensors avoid this. An update then issues no hidden collectives, and later transforms handle plain tensors
    only. The optimizer state becomes local as well. If the optimizer has no DTensors, the transform does nothing.
    """

    is_local = True

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._pairs: list[tuple[Any, nn.Parameter]] = []
        self.idle = True  # until there are DTensors

    def install(self, optimizer: torch.optim.Optimizer, positions: Sequence[ParamPosition]) -> Replacements:
        """Return the local parameters of the DTensors. Raise ValueError for an unsupported layout."""
        tensors = [at.tensor for at in positions]
        if not has_dtensors(tensors):
            return {}
        from ...parallel.interop.dtensor import DTensor, accumulate_like_piece, local_parameter

        new = [(param, local_parameter(param, self._topology)) for param in tensors if isinstance(param, DTensor)]
        for param, piece in new:
            if is_half(param) and param.requires_grad:
                accumulate_like_piece(param, piece)
        known = {id(param) for param, _ in self._pairs}
        self._pairs += [pair for pair in new if id(pair[0]) not in known]
        self.idle = False
        return {param: [(piece, 0)] for param, piece in new}

    def move_state(
        self, optimizer: torch.optim.Optimizer, tensor: Tensor, targets: Sequence[tuple[Tensor, int]]
    ) -> None:
        """Move the state of a DTensor to its local parameter, with the local tensors of state DTensors."""
        if state := optimizer.state.pop(tensor, None):
            for target, _ in targets:
                optimizer.state[target] = {
                    key: local_tensor(value) if isinstance(value, Tensor) else value for key, value in state.items()
                }

    def pull_grads(self, window: Window, averaged: bool) -> Exception | None:
        """Set the gradient of each local parameter to the local tensor of its DTensor's gradient.

        The local gradient may be partial: it must still be summed over ranks. If the DTensor has no gradient, a
        gradient that other code set on the local parameter is kept. For example, some trainers set zero gradients and make
        a step to create optimizer states, before they load states.

        Return the error for a gradient that is not a DTensor or has unsupported placements; its local gradient is
        filled with NaN.
        Collectives: for each parameter, one all-reduce per axis that shards the parameter and over which its gradient
            was partial in the first step.
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
        """Call ``update``, then remove the local gradients, so that clearing the DTensors' gradients frees memory.

        A DTensor without a gradient first gets the gradient of its local parameter.
        """
        from ...parallel.interop.dtensor import return_gradient

        update(request)
        for param, piece in self._pairs:
            return_gradient(param, piece)

    def clear(self, set_to_none: bool) -> None:
        clear_gradients([param for param, _ in self._pairs], set_to_none)
