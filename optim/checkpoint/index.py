"""Where the tensors of a checkpoint are: in which file each part begins. JSON, so that to read it executes nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...parallel.layout.pieces import Box, Shape
from ...parallel.mesh.text import printable
from .checksums import EARLIER, FileRecord

INDEX_FILE = "index.json"


class Place(NamedTuple):
    """A part of a tensor: its elements in row-major order, from byte ``start`` of a file on."""

    box: Box
    file: str
    start: int


@dataclass(frozen=True)
class Stored:
    """What is known of a stored tensor without reading it."""

    shape: Shape
    dtype: torch.dtype
    places: list[Place] = field(compare=False, default_factory=list)


def index_to_json(index: Mapping[str, Stored]) -> str:
    """What `index_of_json` reads."""
    tensors = {
        key: [
            stored.shape,
            str(stored.dtype)[6:],
            [[box.offsets, box.sizes, file, start] for box, file, start in stored.places],
        ]
        for key, stored in index.items()
    }
    return json.dumps({"byteorder": sys.byteorder, "tensors": tensors})


def index_of_json(content: bytes, files: Mapping[str, FileRecord], where: Path) -> dict[str, Stored]:
    """The index that ``content`` is.

    Args:
        files: The records of all files of the checkpoint.
        where: Where it comes from, for the error.
    Raises:
        ValueError: It is something else, or names a place that is not in these files.
    """
    try:
        index = json.loads(content)
        if index["byteorder"] != sys.byteorder:
            raise ValueError(
                f"its tensors are {index['byteorder']}-endian, this machine is {sys.byteorder}-endian; load it on one like "
                "that"
            )
        found = {key: _stored(value, files) for key, value in index["tensors"].items()}
        _check_filled(found, files)
        return found
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise ValueError(f"{where} is damaged, or was planted: {printable(str(problem))}; {EARLIER}") from None


def _stored(value: Sequence[Any], files: Mapping[str, FileRecord]) -> Stored:
    shape, name, places = value
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    stored = Stored(_sizes(shape), dtype)
    for offsets, sizes, file, start in places:
        box = Box(_sizes(offsets), _sizes(sizes))
        inside = len(box.offsets) == len(box.sizes) == len(stored.shape) and all(
            offset + size <= length for offset, size, length in zip(box.offsets, box.sizes, stored.shape, strict=True)
        )
        if not inside:
            raise ValueError(f"{offsets}, {sizes} is no part of a tensor of shape {shape}")
        if file not in files:
            raise ValueError(f"it names {file}, which is none of its files")
        (begin,) = _sizes([start])
        if begin + prod(box.sizes) * dtype.itemsize > files[file].size:
            raise ValueError(f"{file} ends before what it says begins at {start}")
        stored.places.append(Place(box, file, begin))
    return stored


def _check_filled(index: Mapping[str, Stored], files: Mapping[str, FileRecord]) -> None:
    taken: dict[str, int] = {}
    for stored in index.values():
        for place in stored.places:
            taken[place.file] = taken.get(place.file, 0) + prod(place.box.sizes) * stored.dtype.itemsize
    for file, size in taken.items():
        if size != files[file].size:
            raise ValueError(f"it says that {file} holds {size} bytes of tensors, but it has {files[file].size}")
    for key, stored in index.items():
        boxes = [place.box for place in stored.places if prod(place.box.sizes)]
        if sum(prod(box.sizes) for box in boxes) != prod(stored.shape) or _overlap(boxes):
            raise ValueError(f"the parts of {key} leave gaps or overlap")


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether two of the boxes, which have the same number of dims, have elements in common."""
    if len(boxes) < 2:
        return False
    if not boxes[0].offsets:
        return True
    # Along the dim in which most of them begin at different places, few have to be compared with each other.
    dim = max(range(len(boxes[0].offsets)), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    reached: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        reached = [before for before in reached if before.offsets[dim] + before.sizes[dim] > box.offsets[dim]]
        if any(box.overlaps(before) for before in reached):
            return True
        reached.append(box)
    return False


def _sizes(value: Sequence[Any]) -> Shape:
    if not all(type(size) is int and size >= 0 for size in value):
        raise ValueError(f"{value} are no sizes")
    return tuple(value)
