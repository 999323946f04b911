"""Which rank writes which part of what ranks hold: each part once, ranks about equally much.

Import it where it is used: it takes a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ...parallel.layout.regions import Box
from .contents import HeldTensor


def shares(held: Sequence[Mapping[str, HeldTensor]]) -> list[dict[str, list[Box]]]:
    """What each rank writes, by key; `torch.distributed.checkpoint` decides it.

    Args:
        held: What each rank has, by key.
    Raises:
        ValueError: Ranks have different ideas of a tensor's shape or dtype, or its parts leave gaps or overlap.
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
            f"{key}: rank {rank} holds a piece of {another}, rank {known} of {one}; pieces must be of equal sizes, so make "
            "the dims multiples of their axes"
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
