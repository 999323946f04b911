"""Write and read logical tensors with `torch.distributed.checkpoint`: each rank its own parts, nothing is gathered.

Of parts that several ranks hold one rank writes each, so that what they write is about equal. Readers take what they
need from the files of whoever wrote it, so the layouts need have nothing in common.

Import it where it is used: it takes a second.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
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
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ...parallel.layout.pieces import Shape
from ...parallel.mesh.registry import ProcessGroupRegistry
from .logical_tensor import LogicalTensor, Stored


def write_tensors(directory: Path, tensors: Mapping[str, LogicalTensor], registry: ProcessGroupRegistry) -> None:
    """Write this rank's parts of ``tensors``, by key, into files of its own in ``directory``.

    Raises:
        ValueError: On every rank, when ranks have different ideas of a tensor's full shape or dtype, or the parts leave
            gaps or overlap.
        RuntimeError: On every rank, when one of them could not write.
    Collectives: gathers and broadcasts of Python objects over the world.
    """
    with _errors(f"writing {directory}"), _single_process_is_meant():
        save(
            dict(tensors),
            # checkpoint_directory synchronises files when it reads them back
            storage_writer=FileSystemWriter(directory, sync_files=False),
            planner=_PartsSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            **_where(registry),
        )


def read_tensors(directory: Path, tensors: Mapping[str, LogicalTensor], registry: ProcessGroupRegistry) -> None:
    """Fill the parts of ``tensors``, which are on the CPU, from what `write_tensors` wrote.

    Raises:
        ValueError: On every rank, when one of them finds a file that is not what was written.
    Collectives: gathers and broadcasts of Python objects over the world.
    """
    with _errors(f"reading {directory}"), _single_process_is_meant():
        load(
            dict(tensors),
            storage_reader=FileSystemReader(directory),
            planner=_PartsLoadPlanner(),
            **_where(registry),
        )


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """Shapes and dtypes of all tensors in ``directory``, by key. No collective; reads one file."""
    stored = FileSystemReader(directory).read_metadata().state_dict_metadata
    return {
        key: Stored(tuple(found.size), found.properties.dtype)
        for key, found in stored.items()
        if isinstance(found, TensorStorageMetadata)
    }


class _PartsSavePlanner(DefaultSavePlanner):
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
        return _part(self.state_dict, index)


class _PartsLoadPlanner(LoadPlanner):
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


def _where(registry: ProcessGroupRegistry) -> dict[str, Any]:
    axes = registry.topology.axes
    return {"no_dist": True} if registry.topology.world_size == 1 else {"process_group": registry.group(*axes)}


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


@contextmanager
def _errors(doing: str) -> Iterator[None]:
    """torch raises what is no `Exception`, with a traceback for each rank; say in a line what happened where."""
    try:
        yield
    except CheckpointException as problem:
        rank, (error, _) = min(problem.failures.items())
        kind = RuntimeError if isinstance(error, OSError) else ValueError
        raise kind(f"{doing} failed on rank {rank}: {error or type(error).__name__}") from error


def _shown(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"a tensor of shape {tuple(shape)}, {str(dtype)[6:]}"
