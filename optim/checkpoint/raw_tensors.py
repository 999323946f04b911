"""Where the bytes of a tensor are in what `torch.save` wrote, so that they can be read to where they belong: no pickle is
opened, and nothing is copied twice."""

from __future__ import annotations

import ctypes
import io
import os
import struct
import zipfile
from collections.abc import Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from .checksums import CheckedStream

_LOCAL_HEADER = struct.Struct("<26xHH")  # at the end the lengths of name and extra field, which the data follow


class _Slice(io.RawIOBase):
    """A part of a stream, as a file."""

    def __init__(self, stream: CheckedStream, offset: int, length: int) -> None:
        self._stream, self._offset, self._length, self._at = stream, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence] + offset
        if at < 0:
            raise OSError(f"{at} is before the beginning")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        self._stream.seek(self._offset + self._at)
        count = self._stream.readinto(memoryview(buffer)[: max(0, self._length - self._at)])
        self._at += count
        return count


class RawTensor:
    """A contiguous tensor that `torch.save` wrote, alone, somewhere in a file.

    Args:
        offset, length: Of what was written, in the file.
    Raises:
        ValueError: There is no such tensor.
    """

    def __init__(
        self, stream: CheckedStream, offset: int, length: int, shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        self.stream, self.shape, self.dtype = stream, tuple(shape), dtype
        try:
            with zipfile.ZipFile(cast(io.BufferedReader, _Slice(stream, offset, length))) as archive:
                (entry,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
        except (zipfile.BadZipFile, ValueError) as problem:
            raise ValueError(f"no tensor is at {offset}: {problem}") from problem
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != self._nbytes(self.shape):
            raise ValueError(f"what is at {offset} has {entry.file_size} bytes, a tensor of {self.shape} has others")
        stream.seek(offset + entry.header_offset)
        name, extra = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
        self._start = offset + entry.header_offset + _LOCAL_HEADER.size + name + extra

    def read(self, offsets: Sequence[int], target: Tensor) -> None:
        """Fill ``target``, on the CPU, with the elements from ``offsets`` on."""
        in_one_run = target.shape[1:] == self.shape[1:]  # whole rows
        if in_one_run and target.is_contiguous():
            self._fill(target, offsets[0] * self._nbytes(self.shape[1:]) if self.shape else 0)
            return
        whole = torch.empty(self.shape, dtype=self.dtype)
        self._fill(whole, 0)
        for dim, (offset, size) in enumerate(zip(offsets, target.shape, strict=True)):
            whole = whole.narrow(dim, offset, size)
        target.copy_(whole)

    def _nbytes(self, shape: Sequence[int]) -> int:
        return prod(shape) * self.dtype.itemsize

    def _fill(self, target: Tensor, start: int) -> None:
        if target.nbytes:
            self.stream.seek(self._start + start)
            self.stream.readinto((ctypes.c_char * target.nbytes).from_address(target.data_ptr()))
