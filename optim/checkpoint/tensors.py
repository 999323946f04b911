"""Write and read logical tensors with `torch.distributed.checkpoint`: each rank its own parts, nothing is gathered.

Of parts that several ranks hold one rank writes each, so that what they write is about equal. Readers take what they
need from the files of whoever wrote it, so the layouts need have nothing in common. Checksums are taken and compared on
the way.

Import it where it is used: it takes a second.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

from ...parallel.mesh.registry import ProcessGroupRegistry
from .checksums import CheckedStream, FileRecord, SummingStream
from .logical_tensor import LogicalTensor, Stored
from .metadata import metadata_in
from .planners import PartsLoadPlanner, PartsSavePlanner
from .raw_tensors import RawTensor


class _SummedFiles(FileSystem):
    """Files, of which it keeps the records, by name."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            with SummingStream(cast(io.BufferedWriter, stream)) as summing:
                yield summing
            # The index gets its name when it is complete.
            self.records[Path(path).name.removesuffix(".tmp")] = summing.record


class _Writer(FileSystemWriter):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.files = self.fs = _SummedFiles()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # without a path: that would be no plain data


class _CheckedFiles(FileSystem):
    """The files of a checkpoint, which must be what its manifest says."""

    def __init__(self, directory: Path, files: Mapping[str, FileRecord]) -> None:
        self.directory, self.files = directory, files

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        file = Path(path)
        if file.parent != self.directory or file.name not in self.files:
            raise ValueError(
                f"{self.directory} is damaged, or was planted: its index names {file}, which is none of its files"
            )
        with open(file, "rb") as stream:
            yield CheckedStream(stream, file, self.files[file.name])


class Reader(FileSystemReader):
    """Reads tensors of one checkpoint.

    Args:
        files: The records of all its files.
    """

    def __init__(self, directory: Path, files: Mapping[str, FileRecord]) -> None:
        super().__init__(directory)
        self.directory = directory
        self.fs = _CheckedFiles(directory, files)
        self._index: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """The index; ValueError where it is none. It is read once."""
        if self._index is None:
            file = self.directory / ".metadata"
            with self.fs.create_stream(file, "rb") as stream:
                self._index = metadata_in(stream.read(), file)
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan names."""
        index = self.read_metadata()
        places: dict[str, list[tuple[int, int, ReadItem]]] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            places.setdefault(place.relative_path, []).append((place.offset, place.length, item))
        for name, items in places.items():
            with self.fs.create_stream(self.directory / name, "rb") as stream:
                for offset, length, item in sorted(items, key=lambda of: of[0]):
                    shape, dtype = _chunk(index, item.storage_index)
                    raw = RawTensor(cast(CheckedStream, stream), offset, length, shape, dtype)
                    raw.read(item.storage_offsets, planner.resolve_tensor(item))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def stored(self) -> dict[str, Stored]:
        """Shapes and dtypes of all tensors, by key. No collective; reads one file."""
        return {
            key: Stored(tuple(found.size), found.properties.dtype)
            for key, found in self.read_metadata().state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }


def _chunk(index: Metadata, which: MetadataIndex) -> tuple[torch.Size, torch.dtype]:
    """Shape and dtype of a part of a tensor, as it is stored."""
    tensor = index.state_dict_metadata[which.fqn]
    assert isinstance(tensor, TensorStorageMetadata)
    (shape,) = {chunk.sizes for chunk in tensor.chunks if chunk.offsets == which.offset}
    return shape, tensor.properties.dtype


def write_tensors(
    directory: Path, tensors: Mapping[str, LogicalTensor], registry: ProcessGroupRegistry
) -> dict[str, FileRecord]:
    """Write this rank's parts of ``tensors``, by key, into files of its own in ``directory``, and bring them to the disk.

    Returns:
        The records of the files that this rank has written.
    Raises:
        ValueError: On every rank, when ranks have different ideas of a tensor's full shape or dtype, or the parts leave
            gaps or overlap.
        RuntimeError: On every rank, when one of them could not write.
    Collectives: gathers and broadcasts of Python objects over the world.
    """
    writer = _Writer(directory)
    with _errors(f"writing {directory}"), _single_process_is_meant(registry):
        save(
            dict(tensors),
            storage_writer=writer,
            planner=PartsSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            **_where(registry),
        )
    return writer.files.records


def read_tensors(reader: Reader, tensors: Mapping[str, LogicalTensor], registry: ProcessGroupRegistry) -> None:
    """Fill the parts of ``tensors``, which are on the CPU, from what `write_tensors` wrote.

    Raises:
        ValueError: On every rank, when one of them finds a file that is not what was written.
        RuntimeError: On every rank, when one of them could not read.
    Collectives: gathers and broadcasts of Python objects over the world.
    """
    with _errors(f"reading {reader.directory}"), _single_process_is_meant(registry):
        load(dict(tensors), storage_reader=reader, planner=PartsLoadPlanner(), **_where(registry))


def _where(registry: ProcessGroupRegistry) -> dict[str, Any]:
    axes = registry.topology.axes
    return {"no_dist": True} if registry.topology.world_size == 1 else {"process_group": registry.group(*axes)}


@contextmanager
def _single_process_is_meant(registry: ProcessGroupRegistry) -> Iterator[None]:
    if registry.topology.world_size > 1:
        yield
        return
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
