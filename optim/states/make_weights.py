"""Choose what the optimizer steps: whole parameters, pieces of them, copies on the CPU, in any precision."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...amp.precision import Precision
from ...amp.weights import make_weights
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..step.window import DataParallelSwitch
from .offloaded import OffloadedWeights
from .sharded import ShardedWeights, Sharding
from .stepped_weights import SteppedWeights, origins_of

_ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,  # and AdamW
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def make_stepped_weights(
    optimizer: torch.optim.Optimizer,
    precision: Precision,
    registry: ProcessGroupRegistry,
    *,
    main_grads: bool = True,
    sharding: Sharding | None = None,
    offload: float | None = None,
) -> SteppedWeights:
    """The weights that the optimizer steps; its param groups are changed in place.

    Args:
        main_grads: As for `MasterWeights`; with offload it must be True where the precision has masters.
        sharding: Over which axis optimizer states are sharded; None, or an axis of size 1: they are whole.
        offload: The fraction on the CPU, as for `OffloadedWeights`; None: none.
    Collectives: those of `ShardedWeights`.
    """
    main_grads = main_grads and precision.masters
    if sharding is not None:
        sharding = replace(sharding, main_grads=main_grads)

    def whole() -> SteppedWeights:
        if offload is not None:
            return OffloadedWeights(
                optimizer,
                offload,
                lambda: make_weights(optimizer, precision, registry, main_grads=main_grads),
                main_grads=main_grads,
            )
        origins = origins_of(optimizer.param_groups)
        return SteppedWeights(optimizer, origins, make_weights(optimizer, precision, registry, main_grads=main_grads))

    if sharding is None or registry.size(sharding.axis) == 1:
        return whole()
    return ShardedWeights(optimizer, registry, sharding, whole)


def check_placement(
    optimizer: torch.optim.Optimizer,
    precision: Precision,
    registry: ProcessGroupRegistry,
    *,
    shard_states: str | None,
    shard_gradients: bool,
    offload: float | None,
    averages_data: bool,
    data_parallel: DataParallelSwitch | None,
) -> None:
    """Raise ValueError for settings that don't fit together, with what does.

    Args:
        averages_data: Whether the optimizer itself averages gradients over the data axes.
        data_parallel: torch's, if that is used.
    """
    if offload is not None and not 0 <= offload <= 1:
        raise ValueError(f"offload={offload}: give the fraction of the elements that goes to the CPU, between 0 and 1")
    if offload is not None and data_parallel is not None and data_parallel.is_ddp and precision.masters:
        raise ValueError(
            f"offload with precision={precision.name!r} needs float32 gradients, which DistributedDataParallel does not "
            "make: leave data_parallel out, and the optimizer averages over the data axes itself"
        )
    if shard_states is None:
        if shard_gradients:
            raise ValueError("shard_gradients=True needs shard_states='data' (or another axis) to say over which ranks")
        return
    if shard_states not in registry.topology.axes:
        axes = ", ".join(registry.topology.axes) or "none"
        raise ValueError(f"shard_states={shard_states!r} is no axis of the mesh; its axes are {axes}")
    if data_parallel is not None and not data_parallel.is_ddp:
        raise ValueError("fully_shard shards optimizer states already: leave shard_states out")
    if shard_gradients and shard_states in registry.topology.data_axes and not averages_data:
        raise ValueError(
            "shard_gradients=True needs the optimizer itself to average over the data axes: leave data_parallel and "
            "average_data out, or shard only the states"
        )
    if not (isinstance(optimizer, _ELEMENTWISE) or getattr(optimizer, "elementwise", False)):
        raise ValueError(
            f"shard_states gives {type(optimizer).__name__} 1-dim pieces of parameters, which is right only for optimizers "
            "that treat all elements alike (Adam, SGD, ...); if this one does, set optimizer.elementwise = True"
        )
