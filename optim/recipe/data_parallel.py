"""The kinds of data parallelism of a `Booster`: their requirements on mesh, model and optimizer, and their application."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...amp.fp8_linear import forget_rounded
from ...parallel.layout.annotation import annotation_of
from ...parallel.mesh.call_tracker import in_call
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ..states.chain import Placement
from ..states.sharded import Sharded
from ..step.update import invalidate_before_updates

invalidate_before_updates(forget_rounded)

DataParallel = Literal["ddp", "zero1", "zero2", "fsdp"]
"""The data parallelism that `Booster` sets up: DDP, sharded optimizer states (ZeRO-1, ZeRO-2), or FSDP2 (ZeRO-3)."""


def check_data_parallel(
    mode: DataParallel | None,
    registry: ProcessGroupRegistry,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Raise ValueError if the mode is not possible.

    Args:
        mode: None: the optimizer averages over the data axes, which is always possible.
        registry: The process groups.
        model: None: not checked.
        optimizer: None: not checked.
    """
    topology = registry.topology
    if mode is None:
        return
    if mode not in get_args(DataParallel):
        names = ", ".join(map(repr, get_args(DataParallel)))
        raise ValueError(f"data_parallel={mode!r}: give one of {names}, or None")
    if topology.world_size > 1 and not topology.data_axes:
        raise ValueError(
            f"data_parallel={mode!r} needs a data axis, and {topology!r} has none; give data_parallel=None, name an axis "
            "'data', or give another axis that role: Topology(roles={'name': 'data'}, ...)"
        )
    if mode == "fsdp" and len(topology.data_axes) > 2 and data_alias(topology) is None:
        raise ValueError(
            f"data_parallel='fsdp' needs at most two data axes, one for replicas and one for shards, and {topology!r} has "
            f"{len(topology.data_axes)}; use two, or give 'zero1' or 'zero2'"
        )
    if mode in ("ddp", "fsdp") and model is not None and data_size(registry) > 1:
        _check_no_data_spec(mode, registry, model)
    if mode == "fsdp" and optimizer is not None and optimizer.state and data_size(registry) > 1:
        raise ValueError(
            "data_parallel='fsdp' creates new parameters, and this optimizer already has states of the old ones; call "
            "boost before its first step and load a checkpoint afterwards, or give 'zero1' or 'zero2', which keep states"
        )


def _check_no_data_spec(mode: str, registry: ProcessGroupRegistry, model: nn.Module) -> None:
    for name, param in model.named_parameters():
        annotation = annotation_of(param)
        named = annotation.spec.on(registry.topology).named_axes if annotation is not None else ()
        if over := [axis for axis in registry.topology.data_axes if axis in named]:
            raise ValueError(
                f"data_parallel={mode!r} treats all parameters equally over the data axes, but {name} is declared "
                f"{annotation.spec if annotation else None}, which names {over[0]!r}; give data_parallel=None, 'zero1' or "
                "'zero2', which follow the specs"
            )


def data_alias(topology: Topology) -> str | None:
    """Return the alias of all data axes together; None if there is none."""
    return next((alias for alias, atoms in topology.aliases.items() if atoms == topology.data_axes), None)


def data_size(registry: ProcessGroupRegistry) -> int:
    """Return the number of ranks along all data axes; 1 if there are none."""
    axes = registry.topology.data_axes
    return registry.size(*axes) if axes else 1


@torch.no_grad()
def share_weights(model: nn.Module, registry: ProcessGroupRegistry) -> None:
    """Broadcast the parameters and buffers of data coordinate 0 to all replicas.

        share_weights(model, registry)

    Tensors sharded over a data axis are broadcast over the other data axes only.

    Args:
        model: The model; changed in place.
        registry: The process groups.

    Collectives: one broadcast per tensor over the data axes; none with a single data coordinate.
    """
    if data_size(registry) == 1:
        return
    with in_call(registry, "share_weights"):
        _broadcast((*model.parameters(), *model.buffers()), registry)
        forget_rounded()  # a collective does not increase the tensors' version counters


def _broadcast(tensors: Iterable[Tensor], registry: ProcessGroupRegistry) -> None:
    topology = registry.topology
    for tensor in tensors:
        annotation = annotation_of(tensor)
        named = () if annotation is None else annotation.spec.on(topology).named_axes
        axes = tuple(axis for axis in topology.data_axes if axis not in named)
        if axes and registry.size(*axes) > 1:
            # a copy only if the memory is not contiguous or is negated
            dense = tensor.detach().contiguous().resolve_neg()
            dist.broadcast(dense, registry.ranks(*axes)[0], group=registry.group(*axes))
            if dense.data_ptr() != tensor.data_ptr():
                tensor.copy_(dense)


def wrap(
    parts: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None,
    registry: ProcessGroupRegistry,
    mode: DataParallel | None,
) -> list[nn.Module]:
    """Apply the mode to the model: wrap it for "ddp", change it in place for "fsdp", and return it.

    Args:
        parts: The model, or its stages on this rank.
        optimizer: Receives the new parameters that "fsdp" creates. None: there is none.
        registry: The process groups.
        mode: The mode; for other modes the model is returned unchanged.
    """
    if data_size(registry) == 1:
        return list(parts)
    if mode == "ddp":
        group = registry.group(*registry.topology.data_axes)
        trained = [any(param.requires_grad for param in part.parameters()) for part in parts]
        pairs = zip(parts, trained, strict=True)
        return [
            DistributedDataParallel(part, process_group=group) if is_trained else part for part, is_trained in pairs
        ]
    if mode == "fsdp":
        before = [dict(part.named_parameters()) for part in parts]
        shared = _shared(before)
        for part in parts:
            _shard_fully(part, registry, shared)
        new = {
            old[name]: param for part, old in zip(parts, before, strict=True) for name, param in part.named_parameters()
        }
        for group_ in optimizer.param_groups if optimizer is not None else ():
            group_["params"] = [new[param] for param in group_["params"]]
    return list(parts)


def _shared(parts: Sequence[Mapping[str, nn.Parameter]]) -> set[nn.Parameter]:
    """Return the parameters of several parts, because `fully_shard` can assign a parameter to one module only."""
    counts = Counter(param for params in parts for param in params.values())
    return {param for param, count in counts.items() if count > 1}


def _shard_fully(model: nn.Module, registry: ProcessGroupRegistry, ignored: set[nn.Parameter]) -> None:
    from torch.distributed.fsdp import fully_shard

    from ...parallel.interop.dtensor import keep_specs

    together = data_alias(registry.topology)
    mesh = registry.device_mesh(*([together] if together else registry.topology.data_axes))
    with keep_specs(model):
        for part in (*parts_of_other_dtype(model), *repeated_blocks(model)):
            fully_shard(part, mesh=mesh, ignored_params=ignored)
        fully_shard(model, mesh=mesh, ignored_params=ignored)


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a model's blocks: elements of its outermost ModuleLists and Sequentials that contain other modules."""
    for child in module.children():
        composite = next(child.children(), None) is not None
        if composite and isinstance(module, (nn.ModuleList, nn.Sequential)):
            yield child
        else:
            yield from repeated_blocks(child)


def parts_of_other_dtype(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose direct parameters have another dtype than most.

    `fully_shard` needs one dtype per module.
    """
    sizes: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        sizes[param.dtype] += param.numel()
    usual = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    return [module for module in model.modules() if any(p.dtype != usual for p in module.parameters(recurse=False))]


def optimizer_options(
    parts: Sequence[nn.Module], registry: ProcessGroupRegistry, mode: DataParallel | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of `ParallelOptimizer` for the mode.

    Args:
        parts: The result of `wrap`.
        registry: The process groups.
        mode: The mode.
        options: The user's options.
    """
    if data_size(registry) == 1 or mode is None:
        return {}
    if mode in ("zero1", "zero2"):
        last = next(axis for axis in reversed(registry.topology.data_axes) if registry.size(axis) > 1)
        axis = data_alias(registry.topology) or last
        given = options.get("states", ())
        placements = [given] if isinstance(given, Placement) else given
        return {"states": (Sharded(axis, mode == "zero2", options.get("compression")), *placements)}
    if mode == "fsdp" or any(isinstance(part, DistributedDataParallel) for part in parts):
        return {"data_parallel": list(parts) if len(parts) > 1 else parts[0]}
    return {}
