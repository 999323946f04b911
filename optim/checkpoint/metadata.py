"""Read the index of `torch.distributed.checkpoint`, which is a pickle, without executing what somebody put there.

Import it where it is used: it takes a second.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

# Plain containers of numbers and names, and a look-up in a table: to make one does nothing else.
_MADE_OF: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        metadata.Metadata,
        metadata.TensorStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorProperties,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        torch.Size,
    )
}
_MADE_OF["torch.serialization", "_get_layout"] = {"torch.strided": torch.strided}.__getitem__


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _MADE_OF.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of an index")
        return found


def metadata_in(content: bytes, file: object) -> Metadata:
    """The index that ``content`` is.

    Args:
        file: Where it comes from, for the error.
    Raises:
        ValueError: It is something else. Nothing has been executed.
    """
    try:
        found = _Unpickler(io.BytesIO(content)).load()
    except Exception as problem:
        raise ValueError(f"{file} is damaged, or was planted: {problem}") from problem
    if not isinstance(found, Metadata):
        raise ValueError(f"{file} is damaged, or was planted: it holds a {type(found).__name__}, no index")
    return found
