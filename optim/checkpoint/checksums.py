"""Checksums of files, block by block: taken while a file is written, compared while it is read.

So nothing is read twice, and who reads a part of a file checks that part.
"""

from __future__ import annotations

import io
import os
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

BLOCK = 2**20
EARLIER = "load an earlier checkpoint, of which save_checkpoint(..., keep=2) leaves one"
_KEPT = 4  # blocks: who reads a zip file jumps between its end and its beginning


class FileRecord(NamedTuple):
    """Size in bytes of a file, and the CRC-32 of each of its blocks of `BLOCK` bytes, the last of which may be shorter."""

    size: int
    crc32: tuple[int, ...]

    @classmethod
    def of_json(cls, value: Sequence[object]) -> FileRecord:
        """From what JSON makes of one. Raises ValueError, TypeError where it can't be one."""
        size, checksums = value
        if (
            not isinstance(size, int)
            or size < 0
            or not isinstance(checksums, list)
            or len(checksums) != -(-size // BLOCK)
        ):
            raise ValueError(f"{value!r:.80} is no size with the checksums of its blocks")
        return cls(size, tuple(checksums))


class SummingStream(io.RawIOBase):
    """Writes to another stream and sums up; nothing can be written twice."""

    def __init__(self, stream: io.BufferedWriter) -> None:
        self._stream, self._size, self._sums = stream, 0, list[int]()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._stream.write(view)
        for part in _cut(view, self._size):
            if self._size % BLOCK == 0:
                self._sums.append(0)
            self._sums[-1] = zlib.crc32(part, self._sums[-1])
            self._size += len(part)
        return len(view)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        if not self._stream.closed:  # when this is forgotten, after it
            self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def record(self) -> FileRecord:
        """Of what has been written so far."""
        return FileRecord(self._size, tuple(self._sums))


class CheckedStream(io.RawIOBase):
    """Reads a file; ValueError where a block that is read is not what was written."""

    def __init__(self, stream: io.BufferedReader, file: Path, record: FileRecord) -> None:
        self._stream, self._file, self._record, self._at = stream, file, record, 0
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._record.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, as far as the file goes."""
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._record.size - self._at)]
        for part in _cut(view, self._at):
            index, start = divmod(self._at, BLOCK)
            if len(part) == BLOCK:
                self._fetch(index, part)
            else:
                part[:] = self._block(index)[start : start + len(part)]
            self._at += len(part)
        return len(view)

    def _block(self, index: int) -> memoryview:
        if index not in self._blocks:
            full = len(self._blocks) == _KEPT
            room = self._blocks.popitem(last=False)[1].obj if full else bytearray(BLOCK)
            size = min(BLOCK, self._record.size - index * BLOCK)
            block = memoryview(room)[:size]
            self._fetch(index, block)
            self._blocks[index] = block
        return self._blocks[index]

    def _fetch(self, index: int, block: memoryview) -> None:
        self._stream.seek(index * BLOCK)
        count = self._stream.readinto(block)
        if count != len(block) or zlib.crc32(block) != self._record.crc32[index]:
            raise ValueError(f"{self._file} is damaged: bytes were changed; {EARLIER}")


def write_summed(file: Path, write: Callable[[SummingStream], object]) -> FileRecord:
    """Make a file of what ``write`` writes, and bring it to the disk. Raises OSError."""
    with open(file, "wb") as stream:
        summing = SummingStream(stream)
        write(summing)
        stream.flush()
        os.fsync(stream.fileno())
    return summing.record


def record_of(file: Path) -> FileRecord:
    """Size and checksums of a file. Raises OSError."""
    with open(file, "rb") as stream:
        sums = [(len(block), zlib.crc32(block)) for block in iter(lambda: stream.read(BLOCK), b"")]
    return FileRecord(sum(size for size, _ in sums), tuple(checksum for _, checksum in sums))


def verify(directory: Path, files: Mapping[str, FileRecord], *, contents: bool) -> None:
    """Compare files with their records.

    Args:
        contents: Read them too; else only their sizes are looked at.
    Raises:
        ValueError: One is missing or is not what was written.
    """
    for name, expected in files.items():
        file = directory / name
        try:
            size = file.stat().st_size
            changed = contents and size == expected.size and record_of(file) != expected
        except OSError as problem:
            raise ValueError(f"{file} is missing or can't be read: {problem}; {EARLIER}") from problem
        if size != expected.size:
            raise ValueError(f"{file} is damaged: it has {size} bytes of {expected.size}; {EARLIER}")
        if changed:
            raise ValueError(f"{file} is damaged: bytes were changed; {EARLIER}")


def _cut(view: memoryview, start: int) -> list[memoryview]:
    """``view``, which begins at ``start`` in a file, in parts that lie within one block each."""
    first = min(len(view), -start % BLOCK)
    parts = [view[:first]] if first else []
    return parts + [view[at : at + BLOCK] for at in range(first, len(view), BLOCK)]
