"""What tests of DTensor parameters share: registries whose meshes torch doesn't mix up, and a watch on operations."""

from __future__ import annotations

from typing import Any

import torch
from meshstep.parallel import ProcessGroupRegistry, Topology
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

Axes = tuple[tuple[str, int], ...]


def registry_of(axes: Axes) -> ProcessGroupRegistry:
    """A registry whose meshes are new to DTensor: it would go on with an equal one of a registry that was closed."""
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    return ProcessGroupRegistry(Topology(roles=None, **dict(axes)))


def local(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor; a plain tensor itself."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


class LocalOperations(TorchDispatchMode):
    """Notes the names of collectives, and raises on an operation of DTensor's own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert DTensor not in types, f"{func} of DTensors"
        namespace, name = func._schema.name.split("::")
        if "c10d" in namespace:
            self.collectives.append(name)
        return func(*args, **(kwargs or {}))
