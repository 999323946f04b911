"""Plan which rank writes which part of the tensors: each part once, with about equal bytes per rank.

Import this module only where it is used, because the import takes a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ...parallel.layout.shard import Box
from .contents import HeldTensor


def plan_shares(held: Sequence[Mapping[str, HeldTensor]]) -> list[dict[str, list[Box]]]:
    """Return the parts that each rank writes, by key, as `torch.distributed.checkpoint` plans them.

    Args:
        held: The rectangles that each rank has, by key.
    Raises:
        ValueError: Ranks disagree on a tensor's shape or dtype, or its parts leave gaps or overlap.
    """
    first: dict[str, tuple[int, HeldTensor]] = {}
    for rank, tensors in enumerate(held):
        for key, tensor in tensors.items():
            _check_equal(key, first.setdefault(key, (rank, tensor)), (rank, tensor))
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    plans, _ = planner.create_global_plan([SavePlan(_items(tensors)) for tensors in held])
    found: list[dict[str, list[Box]]] = []
    for plan in plans:
        share: dict[str, list[Box]] = {}
        for item in plan.items:
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            share.setdefault(item.index.fqn, []).append(Box(tuple(chunk.offsets), tuple(chunk.sizes)))
        found.append(share)
    return found


def _check_equal(key: str, first: tuple[int, HeldTensor], other: tuple[int, HeldTensor]) -> None:
    (known, one), (rank, another) = first, other
    if (one.shape, one.dtype) != (another.shape, another.dtype):
        raise ValueError(
            f"{key}: rank {rank} has a part of {another}, but rank {known} has a part of {one}; all shards must have equal "
            "sizes, so make each sharded dim divisible by the size of its mesh axes"
        )


def _items(tensors: Mapping[str, HeldTensor]) -> list[WriteItem]:
    return [
        WriteItem(
            MetadataIndex(key, box.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
                TensorProperties(dtype=tensor.dtype),
                torch.Size(tensor.shape),
            ),
        )
        for key, tensor in tensors.items()
        for box in tensor.boxes
    ]
