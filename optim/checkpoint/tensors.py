"""Write sharded tensors to files and read them, in any layout and without gathering full tensors on a rank.

A part is a rectangular region of a full tensor that a rank holds. If several ranks hold the same part, one of them
writes it, so that all ranks write about equally many bytes. Each rank writes its share of the parts into one file, one
after the other, in the machine's byte order. An index has the byte order, and the file and position of each part. A
rank reads the parts that it needs from the files of all ranks, so the layout may differ between writing and reading.
Checksums are computed while a file is written, and compared while it is read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...parallel.layout.shard import Box, Shape, narrowed
from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.text import printable
from .contents import HeldTensor, SavedTensor, bytes_of, on_host
from .directory import EARLIER, CheckedFile, FileRecord, SummingStream, files_on_all_ranks, write_summed

# Index ----------------------------------------------------------------------------------------------------------------

# The index has the file and the byte offset of each part of each tensor. It is JSON, so that reading it executes no
# code.

INDEX_FILE = "index.json"


class FilePlace(NamedTuple):
    """The location of a part of a tensor: the elements of ``box``, row-major, in ``file`` from byte ``start`` on."""

    box: Box
    file: str
    start: int


@dataclass(frozen=True)
class Stored:
    """The index entry of a full tensor: shape, dtype and the locations of its parts. ``==`` ignores the locations."""

    shape: Shape
    dtype: torch.dtype
    places: list[FilePlace] = field(compare=False, default_factory=list)


def index_to_json(index: Mapping[str, Stored]) -> str:
    """Return the JSON text of an index (entries by key of the tensor), which `index_of_json` reads."""
    tensors = {
        key: [
            stored.shape,
            str(stored.dtype)[6:],
            [[box.offsets, box.sizes, file, start] for box, file, start in stored.places],
        ]
        for key, stored in index.items()
    }
    return json.dumps({"byteorder": sys.byteorder, "tensors": tensors})


def index_of_json(content: bytes | bytearray, files: Mapping[str, FileRecord], where: Path) -> dict[str, Stored]:
    """Parse and check an index, and return its entries by key of the tensor.

    Raise ValueError, with the path ``where``, if ``content`` is not an index, or refers to bytes that are not in
    ``files``; if the parts do not fill their file, or do not cover each element of a tensor exactly once; or if the
    byte order of the tensors is not this machine's.
    """
    try:
        index = json.loads(content)
        byteorder = index["byteorder"]
        if byteorder not in ("big", "little"):
            raise ValueError(f"its byte order is {byteorder!r}, neither 'big' nor 'little'")
        found = {key: _stored(value, files) for key, value in index["tensors"].items()}
        _check_filled(found, files)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise ValueError(f"{where} is damaged, or was tampered with: {printable(str(problem))}; {EARLIER}") from None
    if byteorder != sys.byteorder:
        raise ValueError(
            f"the tensors of the checkpoint with index {where} are {byteorder}-endian, but this machine is "
            f"{sys.byteorder}-endian; load the checkpoint on a {byteorder}-endian machine"
        )
    return found


def _stored(value: Sequence[Any], files: Mapping[str, FileRecord]) -> Stored:
    shape, name, places = value
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is not a dtype")
    stored = Stored(_integers(shape, "a shape"), dtype)
    for offsets, sizes, file, start in places:
        box = Box(_integers(offsets, "offsets"), _integers(sizes, "sizes"))
        inside = len(box.offsets) == len(box.sizes) == len(stored.shape) and all(
            offset + size <= length for (offset, size), length in zip(box.spans(), stored.shape, strict=True)
        )
        if not inside:
            raise ValueError(f"offsets {offsets} with sizes {sizes} are not a part of a tensor of shape {shape}")
        if file not in files:
            raise ValueError(f"the index refers to {file}, which is not in the checkpoint")
        (begin,) = _integers([start], "the position of a tensor in a file")
        if begin + prod(box.sizes) * dtype.itemsize > files[file].size:
            raise ValueError(f"{file} is too short for the tensor that begins at byte {start}")
        stored.places.append(FilePlace(box, file, begin))
    return stored


def _check_filled(index: Mapping[str, Stored], files: Mapping[str, FileRecord]) -> None:
    taken: dict[str, int] = {}
    for stored in index.values():
        for place in stored.places:
            taken[place.file] = taken.get(place.file, 0) + prod(place.box.sizes) * stored.dtype.itemsize
    for file, size in taken.items():
        if size != files[file].size:
            raise ValueError(
                f"the index has {size} bytes of tensors in {file}, but the file has {files[file].size} bytes"
            )
    for key, stored in index.items():
        boxes = [place.box for place in stored.places if prod(place.box.sizes)]
        if sum(prod(box.sizes) for box in boxes) != prod(stored.shape) or _overlap(boxes):
            raise ValueError(f"the parts of {key} leave gaps or overlap")


def _overlap(boxes: Sequence[Box]) -> bool:
    """Return True if any two of ``boxes`` overlap. The boxes must have the same number of dims, and not be empty."""
    if len(boxes) < 2:
        return False
    if not boxes[0].offsets:
        return True
    # Sort along the dim with the most distinct offsets, so that each box must be compared with few other boxes.
    dim = max(range(len(boxes[0].offsets)), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    reached: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        reached = [before for before in reached if before.offsets[dim] + before.sizes[dim] > box.offsets[dim]]
        if any(box.overlaps(before) for before in reached):
            return True
        reached.append(box)
    return False


def _integers(value: Sequence[Any], meaning: str) -> Shape:
    if not all(type(number) is int and number >= 0 for number in value):
        raise ValueError(f"{value} is given as {meaning}, which must consist of integers >= 0")
    return tuple(value)


# Tensors --------------------------------------------------------------------------------------------------------------


def tensor_file(rank: int) -> str:
    """Return the name of the file with the tensor parts that one rank wrote."""
    return f"tensors-{rank}.bin"


def is_tensor_file(name: str) -> bool:
    return name.startswith("tensors-")


def write_tensors(
    directory: Path, tensors: Mapping[str, SavedTensor], registry: ProcessGroupRegistry
) -> dict[str, FileRecord]:
    """Write this rank's share of the tensors into a file, and synchronize the file to disk. Every rank must call it.

    Each part is written by one of the ranks that hold it. Rank 0 also writes the index. Return the records of the files
    that this rank has written, by name. Errors are raised on every rank.

    Collectives: gathers of Python objects over all ranks.
    Host synchronization: yes, the written parts are copied to the host.
    """
    held = {key: HeldTensor(tensor.shape, tensor.dtype, tuple(tensor.parts)) for key, tensor in tensors.items()}
    by_rank = gather_objects(held, registry)
    share_of = plan_shares(by_rank)  # equal arguments give the same result, or the same error, on every rank
    rank = registry.global_rank

    def write() -> dict[str, FileRecord]:
        name = tensor_file(rank)
        found = {name: write_summed(directory / name, lambda stream: _write(tensors, share_of[rank], stream))}
        if rank == 0:
            index = index_to_json(_index(by_rank, share_of)).encode()
            found[INDEX_FILE] = write_summed(directory / INDEX_FILE, lambda stream: stream.write(index))
        return found

    return files_on_all_ranks(write, registry)


def plan_shares(held: Sequence[Mapping[str, HeldTensor]]) -> list[dict[str, list[Box]]]:
    """Assign each part of a tensor to one of the ranks that hold it, with about equally many bytes per rank.

    ``held`` has one mapping per rank. Return, per rank, the boxes of the parts that it must write, by key of the
    tensor. Raise ValueError if ranks disagree on a tensor's full shape or dtype, or if the parts of all ranks leave
    gaps or overlap.
    """
    # imported here, because the import takes a second
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    first: dict[str, tuple[int, HeldTensor]] = {}
    plans = []
    for rank, tensors in enumerate(held):
        items = []
        for key, tensor in tensors.items():
            _check_equal(key, first.setdefault(key, (rank, tensor)), (rank, tensor))
            properties, shape = TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape)
            for box in tensor.boxes:
                chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                data = TensorWriteData(chunk, properties, shape)
                items.append(WriteItem(MetadataIndex(key, box.offsets), WriteItemType.SHARD, tensor_data=data))
        plans.append(SavePlan(items))
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    found: list[dict[str, list[Box]]] = []
    for plan in planner.create_global_plan(plans)[0]:
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
        need = (
            "equal sizes: make each sharded dim divisible by the product of the sizes of its mesh axes, or declare the "
            "full shape with annotate(..., full_shape=...)"
        )
        if one.shape == another.shape:
            need = "one dtype: give the tensor the same dtype on all ranks"
        raise ValueError(
            f"the tensor {key}: rank {rank} has a part of {another}, but rank {known} has a part of {one}; all shards must "
            f"have {need}"
        )


def _index(
    held: Sequence[Mapping[str, HeldTensor]], share_of: Sequence[Mapping[str, Sequence[Box]]]
) -> dict[str, Stored]:
    """Return the index of the tensor files of all ranks. ``share_of`` has each rank's boxes in the order of its file."""
    index = {key: Stored(tensor.shape, tensor.dtype) for tensors in held for key, tensor in tensors.items()}
    for rank, share in enumerate(share_of):
        start = 0
        for key, boxes in share.items():
            for box in boxes:
                index[key].places.append(FilePlace(box, tensor_file(rank), start))
                start += prod(box.sizes) * index[key].dtype.itemsize
    return index


def _write(tensors: Mapping[str, SavedTensor], share: Mapping[str, Sequence[Box]], stream: SummingStream) -> None:
    for key, boxes in share.items():
        for box in boxes:
            part = on_host(tensors[key].parts[box])
            stream.write(bytes_of(part))


class Reader:
    """Reads tensors of one checkpoint. ``files`` has the record (size and checksums) of each file in the directory."""

    def __init__(self, directory: Path, files: Mapping[str, FileRecord]) -> None:
        self.directory, self.files = directory, files

    @cached_property
    def index(self) -> dict[str, Stored]:
        """Return the index entries by key of the tensor. The file is read on the first access."""
        if INDEX_FILE not in self.files:
            raise ValueError(f"{self.directory} is damaged, or was tampered with: it has no {INDEX_FILE}; {EARLIER}")
        file, record = self.directory / INDEX_FILE, self.files[INDEX_FILE]
        content = bytearray(record.size)
        with open(file, "rb") as stream:
            CheckedFile(stream, file, record).read_into(content, 0)
        return index_of_json(content, self.files, file)

    def read(self, tensors: Mapping[str, SavedTensor]) -> None:
        """Fill CPU tensors from the checkpoint. Their parts may have other sizes than the parts in the files."""
        wanted = [
            (place, self.index[key].dtype, box, part)
            for key, tensor in tensors.items()
            for box, part in tensor.parts.items()
            for place in _places(key, self.index[key], box)
        ]
        with ExitStack() as opened:
            open_files: dict[str, CheckedFile] = {}
            for place, dtype, box, part in sorted(wanted, key=lambda item: (item[0].file, item[0].start)):
                if place.file not in open_files:
                    file = self.directory / place.file
                    stream = opened.enter_context(open(file, "rb"))
                    open_files[place.file] = CheckedFile(stream, file, self.files[place.file])
                _read(open_files[place.file], place, dtype, box, part)


def _places(key: str, stored: Stored, box: Box) -> list[FilePlace]:
    """Return the stored parts of a tensor that overlap with ``box``; raise ValueError if they do not cover it."""
    found = [place for place in stored.places if box.overlaps(place.box)]
    if sum(prod(box.common(place.box).sizes) for place in found) != prod(box.sizes):
        raise ValueError(f"the checkpoint is damaged: it has only a part of {key}; {EARLIER}")
    return found


def _read(file: CheckedFile, place: FilePlace, dtype: torch.dtype, box: Box, part: Tensor) -> None:
    """Read the elements that the CPU tensor ``part``, of the region ``box``, has in common with a part in a file."""
    common = box.common(place.box)
    target = narrowed(part.detach(), common, box.offsets)
    # Rows of the part in the file are contiguous. Read full rows, then select the columns that ``part`` needs.
    row = place.box.sizes[1:]
    before = common.offsets[0] - place.box.offsets[0] if common.offsets else 0
    direct = common.sizes[1:] == row and target.is_contiguous()
    rows = target if direct else torch.empty(common.sizes[:1] + row, dtype=dtype)
    file.read_into(bytes_of(rows), place.start + before * prod(row) * dtype.itemsize)
    if not direct:
        target.copy_(narrowed(rows, common, (common.offsets[0], *place.box.offsets[1:])))
