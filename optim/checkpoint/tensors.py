"""Write and read logical tensors with `torch.distributed.checkpoint`: each rank its own parts, nothing is gathered.

Of parts that several ranks hold one rank writes each, so that what they write is about equal. Readers take what they
need from the files of whoever wrote it, so the layouts need have nothing in common.

Import it where it is used: it takes a second.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ...parallel.mesh.registry import ProcessGroupRegistry
from .logical_tensor import LogicalTensor, Stored
from .planners import PartsLoadPlanner, PartsSavePlanner


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
            planner=PartsSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
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
            planner=PartsLoadPlanner(),
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
