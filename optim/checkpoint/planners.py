"""How `torch.distributed.checkpoint` plans for `LogicalTensor`: which rectangles there are, and where each is in memory.

Import it where it is used: it takes a second.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ...parallel.layout.pieces import Shape
from .logical_tensor import LogicalTensor


class PartsSavePlanner(DefaultSavePlanner):
    """Plans parts of `LogicalTensor`; who writes what of replicas is torch's decision."""

    state_dict: dict[str, LogicalTensor]

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                _write_item(key, tensor, offsets, part)
                for key, tensor in self.state_dict.items()
                for offsets, part in tensor.parts.items()
            ]
        )
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        known: dict[str, tuple[torch.Size, torch.dtype]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                assert item.tensor_data is not None
                found = (item.tensor_data.size, item.tensor_data.properties.dtype)
                if known.setdefault(item.index.fqn, found) != found:
                    first = known[item.index.fqn]
                    raise ValueError(
                        f"{item.index.fqn}: rank {rank} holds a piece of {_shown(*found)}, a rank before it of "
                        f"{_shown(*first)}; pieces must be of equal sizes, so make the dims multiples of their axes"
                    )
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return _part(self.state_dict, index).contiguous()  # who reads it relies on that


class PartsLoadPlanner(LoadPlanner):
    """Plans parts of `LogicalTensor`."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.tensors: dict[str, LogicalTensor] = state_dict
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, tensor in self.tensors.items():
            stored = self.metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            chunks = [ChunkStorageMetadata(torch.Size(offsets), part.size()) for offsets, part in tensor.parts.items()]
            needed = create_read_items_for_chunk_list(key, stored, chunks)
            if sum(prod(item.lengths) for item in needed) != sum(prod(chunk.sizes) for chunk in chunks):
                raise ValueError(f"{key} is stored only in part")
            items += needed
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("only tensors are stored here")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = _part(self.tensors, read_item.dest_index)
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, offset, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def _write_item(key: str, tensor: LogicalTensor, offsets: Shape, part: Tensor) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), part.size())
    data = TensorWriteData(chunk, TensorProperties(dtype=part.dtype), torch.Size(tensor.shape))
    return WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data)


def _part(tensors: Mapping[str, LogicalTensor], index: MetadataIndex) -> Tensor:
    assert index.offset is not None
    return tensors[index.fqn].parts[tuple(index.offset)].detach()


def _shown(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"a tensor of shape {tuple(shape)}, {str(dtype)[6:]}"
