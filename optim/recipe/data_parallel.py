"""The kinds of data parallelism that `Booster` sets up, and broadcasts that make replicas equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...amp.fp8_linear import forget_rounded
from ...amp.master_weights import SCALAR_STATE
from ...parallel.interop.local_parameters import local_parameter
from ...parallel.layout.annotation import annotation_of
from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import gather_objects, on_all_ranks
from ...parallel.mesh.call_tracker import track_call
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ..build import check_is_parallel
from ..gradients.buckets import BUCKET_BYTES, layout_kind
from ..norm.param_table import SteppedTensor
from ..norm.plan import NormBucket
from ..parallel_optimizer import ParallelOptimizer
from ..states.chain import TransformChain
from ..states.param_transform import StatePlacement
from ..states.sharded import Sharded
from ..step.update import invalidate_before_updates

invalidate_before_updates(forget_rounded)

DataParallel = Literal["ddp", "zero1", "zero2", "fsdp"]
"""The kinds of data parallelism of `Booster`: DDP, optimizer-state sharding (ZeRO-1, ZeRO-2), or FSDP2 (ZeRO-3)."""


def check_data_parallel(
    mode: DataParallel | None,
    registry: ProcessGroupRegistry,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Raise ValueError if the kind of data parallelism is unknown, or impossible for the mesh, model or optimizer."""
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
            f"data_parallel='fsdp' supports at most two data axes, one for replicas and one for shards, but {topology!r} "
            f"has {len(topology.data_axes)}; use two, declare an alias for all of them with Topology(aliases=...), or give "
            "data_parallel='zero1' or 'zero2'"
        )
    if mode in ("ddp", "fsdp") and model is not None and data_size(topology) > 1:
        _check_no_data_spec(mode, registry, model)
    if mode == "fsdp" and optimizer is not None and optimizer.state and data_size(topology) > 1:
        raise ValueError(
            "data_parallel='fsdp' creates new parameters, but this optimizer already has states of the old parameters; "
            "call boost before the optimizer's first step and load a checkpoint afterwards, or give "
            "data_parallel='zero1' or 'zero2', which keep states"
        )


def _check_no_data_spec(mode: str, registry: ProcessGroupRegistry, model: nn.Module) -> None:
    for name, param in model.named_parameters():
        annotation = annotation_of(param)
        if annotation is None:
            continue
        named = annotation.spec.resolve(registry.topology).named_axes
        if over := [axis for axis in registry.topology.data_axes if axis in named]:
            raise ValueError(
                f"data_parallel={mode!r} assumes that every parameter is replicated over the data axes, but the spec of "
                f"{name}, {annotation.spec}, contains the data axis {over[0]!r} (perhaps in an "
                "alias); give data_parallel=None, 'zero1' or 'zero2', which follow the specs"
            )


def data_alias(topology: Topology) -> str | None:
    """Return the topology's alias for all data axes together; None if it has no such alias."""
    return next((alias for alias, atoms in topology.aliases.items() if atoms == topology.data_axes), None)


def data_size(topology: Topology) -> int:
    """Return the number of ranks along all data axes; 1 if there are none."""
    return topology.size(*topology.data_axes)


def wrap(
    parts: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None,
    registry: ProcessGroupRegistry,
    mode: DataParallel | None,
) -> list[nn.Module]:
    """Apply data parallelism to the modules, and return them: wrapped for "ddp", changed in place for "fsdp".

    For other modes, and with a single data rank, they are returned unchanged. With "ddp", modules without trainable
    parameters are not wrapped. With "fsdp", the new parameters replace the old parameters in the optimizer's param
    groups.
    """
    if data_size(registry.topology) == 1:
        return list(parts)
    if mode == "ddp":
        group = registry.group(*registry.topology.data_axes)
        return [
            DistributedDataParallel(part, process_group=group)
            if any(param.requires_grad for param in part.parameters())
            else part
            for part in parts
        ]
    if mode == "fsdp":
        before = [(part, dict(part.named_parameters())) for part in parts]
        # `fully_shard` can't shard a parameter that several pipeline stages of this rank have
        counts = Counter(param for _, params in before for param in params.values())
        shared = {param for param, count in counts.items() if count > 1}
        for part in parts:
            _shard_fully(part, registry, shared)
        new = {old[name]: param for part, old in before for name, param in part.named_parameters()}
        for group_ in optimizer.param_groups if optimizer is not None else ():
            group_["params"] = [new[param] for param in group_["params"]]
    return list(parts)


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
    """Yield the blocks of a model: the items of its outermost ModuleLists and Sequentials that have submodules."""
    for child in module.children():
        composite = next(child.children(), None) is not None
        if composite and isinstance(module, (nn.ModuleList, nn.Sequential)):
            yield child
        else:
            yield from repeated_blocks(child)


def parts_of_other_dtype(model: nn.Module) -> list[nn.Module]:
    """Return the modules that directly have a parameter of another dtype than most elements of the model.

    They are sharded separately, because `fully_shard` needs one dtype per sharded module.
    """
    sizes: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        sizes[param.dtype] += param.numel()
    usual = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    return [module for module in model.modules() if any(p.dtype != usual for p in module.parameters(recurse=False))]


def optimizer_options(
    parts: Sequence[nn.Module], registry: ProcessGroupRegistry, mode: DataParallel | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of `ParallelOptimizer` that the kind of data parallelism requires."""
    if data_size(registry.topology) == 1 or mode is None:
        return {}
    if mode in ("zero1", "zero2"):
        last = next(axis for axis in reversed(registry.topology.data_axes) if registry.size(axis) > 1)
        axis = data_alias(registry.topology) or last
        given = options.get("states", ())
        placements = [given] if isinstance(given, StatePlacement) else given
        return {"states": (Sharded(axis, mode == "zero2", options.get("compression")), *placements)}
    if mode == "fsdp" or any(isinstance(part, DistributedDataParallel) for part in parts):
        return {"data_parallel": list(parts) if len(parts) > 1 else parts[0]}
    return {}


# Broadcasts that make replicas equal ----------------------------------------------------------------------------------


@torch.no_grad()
def broadcast_weights(model: nn.Module, registry: ProcessGroupRegistry) -> None:
    """Broadcast the parameters and buffers from the ranks with data coordinate 0 to their replicas. Call it on every rank.

        broadcast_weights(model, registry)

    A tensor whose spec names a data axis, such as a shard over this axis, is broadcast over the other data axes only.

    Args:
        model: The model; changed in place. A DTensor is broadcast over the data axes outside its mesh, and over the data
            axes over which its placements replicate it.
        registry: The process groups.

    Raises:
        ValueError: On every rank: replicas have tensors of different names, shapes or dtypes. Nothing is changed.
        TypeError: On every rank: ``model`` is not a module on some rank.

    Collectives: two object all-gathers, and one broadcast per 32 MiB of tensors that are broadcast over the same ranks.
        None with a single data rank.
    Host synchronization: yes, except with a single data rank.
    """
    if data_size(registry.topology) == 1:
        return
    with track_call("broadcast_weights", registry):
        found = on_all_ranks(lambda: _replicated_tensors(model, registry), registry)
        _check_same_tensors(found, registry)
        for ranks, tensors in found.items():
            _share(list(tensors.values()), ranks, registry)
        forget_rounded()  # the cached 8-bit values belong to the overwritten weights


def _replicated_tensors(
    model: nn.Module, registry: ProcessGroupRegistry
) -> dict[tuple[int, ...], dict[str, nn.Parameter | Tensor]]:
    """Return {ranks that hold the same replicas: parameters and buffers by name} for replicas over data axes."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"broadcast_weights: the model is a {type(model).__name__}; give an nn.Module")
    topology, found = registry.topology, dict[tuple[int, ...], dict[str, nn.Parameter | Tensor]]()
    for name, given in (*model.named_parameters(), *model.named_buffers()):
        tensor = local_parameter(given, topology)
        annotation = annotation_of(tensor)
        named = () if annotation is None else annotation.spec.resolve(topology).named_axes
        axes = tuple(axis for axis in topology.data_axes if axis not in named)
        if axes and registry.size(*axes) > 1:
            found.setdefault(registry.ranks(*axes), {})[name] = tensor
    return found


def _check_same_tensors(found: Mapping[tuple[int, ...], Mapping[str, Tensor]], registry: ProcessGroupRegistry) -> None:
    """Raise ValueError on every rank if the ranks of a broadcast have tensors of other names, shapes or dtypes.

    Collectives: an object all-gather of one hash per broadcast; if hashes differ, a second one of the descriptions.
    """
    described = {
        ranks: [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()]
        for ranks, tensors in found.items()
    }
    hashes = {ranks: sha256("\n".join(texts).encode()).hexdigest() for ranks, texts in described.items()}
    reports = gather_objects(hashes, registry)
    if all(
        reports[rank].get(ranks) == value for report in reports for ranks, value in report.items() for rank in ranks
    ):
        return
    by_rank = gather_objects(described, registry)
    for ranks in dict.fromkeys(ranks for report in by_rank for ranks in report):
        first, *others = ranks
        for rank in others:
            pairs = zip_longest(by_rank[first].get(ranks, []), by_rank[rank].get(ranks, []), fillvalue="no such tensor")
            if different := next((pair for pair in pairs if pair[0] != pair[1]), None):
                raise ValueError(
                    f"broadcast_weights: ranks {first} and {rank} have different tensors, first [{different[0]}] on rank "
                    f"{first} and [{different[1]}] on rank {rank}: build the same model on all data ranks"
                )


# `align_replicas` is for replicas that have diverged.
#
# An all-reduce gives bitwise identical gradients to all ranks. But some gradients are computed separately on every
# rank, such as the gradients of a layer norm that is replicated over a tensor axis. They are bitwise identical only if
# all kernels are deterministic. With GPU kernels that add atomically, the last bits of the gradients differ. Adam turns
# a tiny gradient into a full-size update, so the replicas slowly diverge.
# ``torch.use_deterministic_algorithms(True)`` avoids such kernels, but may make training slower. Aligning replicas
# every few hundred steps is cheaper.
#
# All replicas get one rank's values, not an average, so that weights, master weights and moments fit together.


class _BroadcastKind(NamedTuple):
    """A key of tensors that are broadcast together: the ranks that hold replicas of them, and their layout."""

    ranks: tuple[int, ...]
    layout: NormBucket


@torch.no_grad()
def align_replicas(optimizer: ParallelOptimizer[Any]) -> None:
    """Make replicas bitwise equal: broadcast weights and optimizer states from the first rank with a replica.

    Master weights are broadcast too, and the results are written to the model. Call it on every rank between two steps,
    about every few hundred steps. Tensors without replicas, frozen parameters, and the states "step", "mu", "mu_product"
    and "eta" (torch's states with one number per parameter) stay unchanged.

        if step % 200 == 0:
            align_replicas(optimizer)

    Args:
        optimizer: The optimizer.

    Raises:
        ValueError: On every rank: two replicas have states of different names, shapes or dtypes, or ranks step
            different numbers of replicated parameters. Nothing is changed.
        TypeError: On this rank: ``optimizer`` is not a `ParallelOptimizer`.

    Collectives: an object all-gather, one broadcast per 32 MiB of tensors with the same layout, and the collectives by
        which `Sharded` writes weights to the model.
    Host synchronization: yes.
    """
    check_is_parallel(optimizer)
    with track_call("align_replicas", optimizer.registry):
        _align(optimizer.stepped_tensors(), optimizer.transforms, optimizer.registry)


def _align(rows: Sequence[SteppedTensor], chain: TransformChain, registry: ProcessGroupRegistry) -> None:
    found: dict[_BroadcastKind, list[Tensor]] = {}
    descriptions: dict[_BroadcastKind, list[str]] = {}
    for row, state in zip(rows, chain.states(), strict=True):
        ranks = holders_of(row.spec, registry.topology, registry.global_rank)
        if len(ranks) > 1 and row.trained:
            kind = _BroadcastKind(ranks, layout_kind(row.spec, registry.topology))
            named = {"tensor": row.tensor, **{key: state[key] for key in sorted(state) if key not in SCALAR_STATE}}
            found.setdefault(kind, []).extend(named.values())
            what = ", ".join(f"{key} {tuple(t.shape)} {t.dtype}" for key, t in named.items())
            descriptions.setdefault(kind, []).append(f"{row.entry.name}: {what}")
    _agree(descriptions, registry)
    for kind, tensors in sorted(found.items(), key=lambda item: item[0]):
        _share(tensors, kind.ranks, registry)
    chain.write_back()


def holders_of(spec: P, topology: Topology, rank: int) -> tuple[int, ...]:
    """Return the ranks, ascending, that hold the same shard as ``rank`` of a parameter with this layout."""
    tied = {axis: spec.tied_coordinates(axis, topology) for axis, _ in spec.tied}
    peers = topology.peers(rank, *(axis for axis in topology.axes if axis in {*spec.replica_axes(topology), *tied}))
    return tuple(peer for peer in peers if all(topology.coordinate_of(peer, axis) in tied[axis] for axis in tied))


def _agree(descriptions: dict[_BroadcastKind, list[str]], registry: ProcessGroupRegistry) -> None:
    """Raise ValueError on every rank if replicas have different states, or ranks step different numbers of replicas.

    States are compared by name, shape and dtype. Names of parameters are not compared, because a tied parameter may
    have different names on different ranks.

    Texts are "<parameter>: <names, shapes and dtypes of the tensor and its states>", one per stepped tensor with
    replicas.

    Collectives: an object all-gather.
    """
    reports = gather_objects(descriptions, registry)
    for rank, report in enumerate(reports):
        for kind, own in report.items():
            first = kind.ranks[0]
            others = reports[first].get(kind, [])
            for mine, other in zip(own, others, strict=False):
                if mine.partition(": ")[2] != other.partition(": ")[2]:
                    raise ValueError(
                        f"replicas can't be aligned: the optimizer has {mine} on rank {rank}, but {other} on rank {first}; "
                        "perhaps only one of these ranks has made a step. Load a checkpoint, so that both ranks have the "
                        "same optimizer states"
                    )
            if len(own) != len(others):
                raise ValueError(
                    f"replicas can't be aligned: rank {rank} steps {len(own)} tensors with replicas on ranks {kind.ranks}, "
                    f"but rank {first} steps {len(others)}; freeze the same parameters on all these ranks"
                )


def _share(tensors: Sequence[Tensor], ranks: tuple[int, ...], registry: ProcessGroupRegistry) -> None:
    """Broadcast the bytes of the tensors from ``ranks[0]`` to the other ranks, in place, in buckets of `BUCKET_BYTES`."""
    parts: list[Tensor] = []
    copied: list[tuple[Tensor, Tensor]] = []
    nbytes = 0
    for tensor in tensors:
        # `dense` is a copy only if the tensor is not contiguous, or if it is lazily conjugated or negated.
        dense = tensor.detach().contiguous().resolve_conj().resolve_neg()
        for part in dense.view(-1).view(torch.uint8).split(BUCKET_BYTES):
            if parts and nbytes + part.numel() > BUCKET_BYTES:
                _broadcast(parts, copied, ranks, registry)
                parts, copied, nbytes = [], [], 0
            parts.append(part)
            nbytes += part.numel()
        if dense.data_ptr() != tensor.data_ptr():
            copied.append((tensor, dense))
    _broadcast(parts, copied, ranks, registry)


def _broadcast(
    parts: Sequence[Tensor],
    copied: Sequence[tuple[Tensor, Tensor]],
    ranks: tuple[int, ...],
    registry: ProcessGroupRegistry,
) -> None:
    """Broadcast ``parts`` from ``ranks[0]`` to ``ranks`` in one collective, in place.

    ``parts`` are 1-dim uint8 views of tensors, on any devices. ``copied`` has (tensor, contiguous copy) pairs: the
    copies, which received their bytes through ``parts``, are written to the tensors.
    """
    sizes = [part.numel() for part in parts]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=registry.device)
    slots = flat.split(sizes)
    # Indices of ``parts`` by device, for one transfer per device and direction. Parts of offloaded tensors are on the
    # CPU.
    sides: dict[torch.device, list[int]] = {}
    for index, part in enumerate(parts):
        sides.setdefault(part.device, []).append(index)
    for which in sides.values():
        sent = torch.cat([parts[index] for index in which]).to(flat.device)
        torch._foreach_copy_([slots[index] for index in which], sent.split([sizes[index] for index in which]))
    dist.broadcast(flat, ranks[0], group=registry.group_of(ranks))
    for device, which in sides.items():
        received = torch.cat([slots[index] for index in which]).to(device)
        torch._foreach_copy_([parts[index] for index in which], received.split([sizes[index] for index in which]))
    for tensor, dense in copied:
        tensor.copy_(dense)
