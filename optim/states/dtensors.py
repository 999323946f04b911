"""Plain local parameters in the place of an optimizer's DTensor parameters (FSDP2, torch's tensor parallelism).

The step then knows plain tensors only: lists may mix both kinds (torch's fused optimizers refuse that), nothing issues a
collective of its own, and master weights and checks see what they always see.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...parallel.interop.local import has_dtensors
from ...parallel.mesh.topology import Topology


def check_update(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the update of a whole matrix isn't made of those of its pieces, and DTensors are stepped so."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if isinstance(optimizer, (torch.optim.Muon, torch.optim.Adafactor)) and has_dtensors(params):
        raise ValueError(
            f"{type(optimizer).__name__} computes with whole matrices, but DTensor parameters are stepped piece by piece; "
            "take an optimizer that treats every element alike (AdamW, SGD, ...)"
        )


class DTensorParameters:
    """The DTensor parameters of an optimizer, and the plain ones that it steps for them.

    Each is replaced in the param groups by its local parameter, which has the same memory, name and spec; the optimizer's
    state is local too then. Where there are no DTensors nothing is done, at no cost.

    Args:
        optimizer: Its param groups and state are changed in place; it may have stepped already.
        topology: Whose axes the dims of the DTensors' meshes are.
    Raises:
        ValueError: A layout has no spec.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, topology: Topology) -> None:
        self._topology = topology
        self._pairs: list[tuple[Any, nn.Parameter]] = []
        for group in optimizer.param_groups:
            group["params"] = self.localized(group["params"])
        for param, piece in self._pairs:
            if param in optimizer.state:
                state = optimizer.state.pop(param)
                optimizer.state[piece] = {key: _local(value) for key, value in state.items()}

    def localized(self, params: Iterable[Any]) -> list[Any]:
        """Parameters, or (name, parameter) pairs, with local ones in the place of DTensors."""
        new = []
        for item in params:
            param = item[1] if isinstance(item, tuple) else item
            if has_dtensors((param,)):
                from ...parallel.interop.dtensor import local_parameter

                piece = local_parameter(param, self._topology)
                self._pairs.append((param, piece))
                item = (item[0], piece) if isinstance(item, tuple) else piece
            new.append(item)
        return new

    def share_gradients(self) -> None:
        """Give every local parameter the local tensor of its DTensor's gradient; the caller then makes pending sums.

        Raises:
            ValueError: A gradient is laid out otherwise than its parameter and what was declared of it.
        """
        if self._pairs:
            from ...parallel.interop.dtensor import local_parameter, share_gradient

            for param, _ in self._pairs:
                share_gradient(param, local_parameter(param), to_sum=True)

    def return_gradients(self) -> None:
        """The step is over: whoever clears the DTensors' gradients frees their memory."""
        if self._pairs:
            from ...parallel.interop.dtensor import return_gradient

            for param, piece in self._pairs:
                return_gradient(param, piece)

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the DTensors' gradients; the local parameters' are the optimizer's to clear."""
        for param, _ in self._pairs:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()


def _local(value: object) -> object:
    if isinstance(value, Tensor) and has_dtensors((value,)):
        return value.to_local()  # type: ignore[attr-defined]
    return value
