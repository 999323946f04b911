"""Directories that appear complete or not at all, and that are found out when they are damaged.

    path/meshstep-00000007              complete
    path/meshstep-00000008.5f0c.writing being written, or left behind by a crash
    path/meshstep-00000006.removing     being removed, or left behind by a crash

A checkpoint is written beside the previous one and gets its name by one rename, after everything in it has reached the
disk; only then are previous ones removed. Each has a manifest, ``meshstep.json``, with the size and the checksums of
every file in it, and of itself.
"""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import shutil
import stat
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch

from ...parallel.mesh.agreement import gather_objects, on_all_ranks
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.text import printable
from ...parallel.mesh.value_checks import check_count, check_text, dict_of, fields, items, list_of, wrong
from ..parallel_optimizer import ParallelOptimizer

# Checksums of files, block by block: taken while a file is written, compared while it is read -------------------------

# So nothing is read twice, and who reads a part of a file checks that part.

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


# Directory ------------------------------------------------------------------------------------------------------------

FORMAT = 3
MANIFEST = "meshstep.json"
MAX_MANIFEST = 2**28
"""Bytes of a manifest that are read at most: it has some 12 for each MiB of a checkpoint, so 20 TiB have room."""
_COMPLETE = re.compile(r"meshstep-(\d+)")
# A writer may rename between two entries of one listing, or after it: then a listing has none, though there always is one.
_LISTINGS = 10
_LEFT_BEHIND = re.compile(r"meshstep-\d+(\.\w+)?\.(writing|removing)")


def newest_checkpoint(path: str | os.PathLike[str]) -> Path | None:
    """The directory of the newest complete checkpoint under ``path``; None where there is none.

    It looks at names only, so it says nothing about damage; and a run that goes on saving may remove it at any moment.
    Collectives: none.
    """
    complete = _complete(Path(path))
    return complete[max(complete)] if complete else None


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is the directory of one complete checkpoint, not of a run's."""
    return _COMPLETE.fullmatch(path.name) is not None and (path / MANIFEST).is_file()


def begin(path: Path, known: str | None) -> Path:
    """A new, empty directory to write the next checkpoint under ``path`` in. What crashes left there is removed.

    Args:
        known: The name of the last checkpoint under ``path`` that this run saved or loaded; None where there is none.
    Raises:
        ValueError: The newest one there is another.
        OSError: It can't be made.
    """
    newest = newest_checkpoint(path)
    if newest is not None and newest.name != known:
        raise ValueError(
            f"{newest} is another run's: this one has neither saved nor loaded it, and would remove it. Continue from it "
            "with load_checkpoint, give a path of this run's own, or remove it"
        )
    path.mkdir(parents=True, exist_ok=True)
    for entry in path.iterdir():
        if _LEFT_BEHIND.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
    # A name of its own: two runs that write here at once must not mix their files.
    directory = path / f"meshstep-{max(_complete(path), default=0) + 1:08}.{secrets.token_hex(4)}.writing"
    directory.mkdir()
    _synchronise_directory(path.parent)
    return directory


def publish(directory: Path, files: Mapping[str, FileRecord], about: Mapping[str, Any], keep: int) -> Path:
    """Give what `begin` returned, now filled, the name of a complete checkpoint, and remove the oldest ones.

    Args:
        files: All files in it, synchronised, by name.
        about: What the manifest says besides; JSON.
        keep: How many complete ones stay.
    Returns:
        The complete checkpoint's directory.
    Raises:
        ValueError: A file is not to be seen, or not whole.
        OSError: It can't be written.
    """
    for name, record in files.items():
        file = directory / name
        if not file.is_file() or file.stat().st_size != record.size:
            raise ValueError(
                f"{file} was written by one rank and is not, or not whole, where another looks: give a path in a file "
                "system that all ranks share"
            )
    manifest = {"format": FORMAT, **about, "files": {name: list(record) for name, record in files.items()}}
    with open(directory / MANIFEST, "w") as stream:
        json.dump({"crc32": _crc32_of(manifest), "manifest": manifest}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    _synchronise_directory(directory)
    complete = directory.parent / directory.name.partition(".")[0]
    os.rename(directory, complete)
    _synchronise_directory(complete.parent)
    with suppress(OSError):  # the new one is in place; the next save tries again
        for _, older in sorted(_complete(complete.parent).items())[:-keep]:
            removing = older.with_suffix(".removing")
            os.rename(older, removing)  # so that a crash now leaves nothing half removed under a complete one's name
            shutil.rmtree(removing)
    return complete


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        ValueError: There is none, it is damaged, or of a format that is not this version's.
    """
    file = directory / MANIFEST
    try:
        written = _limited_content(file)
    except FileNotFoundError:
        raise ValueError(f"{directory} has no {MANIFEST}: meshstep did not write it, or it is damaged") from None
    try:
        content = json.loads(written)
        manifest: dict[str, Any] = content["manifest"]
        intact = content["crc32"] == _crc32_of(manifest)
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise ValueError(f"{file} is damaged: it is not what was written; {EARLIER}")
    try:
        fields({"format": check_count})(manifest, "manifest")
        if manifest["format"] == FORMAT:
            _check_manifest(manifest, "manifest")
    except ValueError as problem:
        raise ValueError(f"{file} is damaged, or was planted: {problem}; {EARLIER}") from None
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"{directory} has format {manifest['format']}, this version reads {FORMAT}: use the version that wrote it"
        )
    return manifest


def _limited_content(file: Path) -> bytes:
    """What a manifest holds. Raises ValueError where it is no regular file, or has more than `MAX_MANIFEST` bytes."""
    about = file.stat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError(f"{file} is damaged, or was planted: it is no regular file; {EARLIER}")
    with open(file, "rb") as stream:
        content = stream.read(MAX_MANIFEST + 1) if about.st_size <= MAX_MANIFEST else None
    if content is None or len(content) > MAX_MANIFEST:
        raise ValueError(
            f"{file} is damaged, or was planted: it has {about.st_size} bytes, of at most {MAX_MANIFEST}; {EARLIER}"
        )
    return content


def _check_file_name(value: object, field: str) -> None:
    if not isinstance(value, str) or value in ("", ".", "..") or Path(value).name != value:
        raise wrong(field, value, "the name of a file in the checkpoint's directory")


_check_manifest = fields(
    {
        "precision": check_text,
        "axes": dict_of(check_count),
        "roles": dict_of(check_text),
        "files": dict_of(items(check_count, list_of(check_count)), key=_check_file_name),
    }
)


def _complete(path: Path) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for _ in range(_LISTINGS):
        names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
        named = {int(match[1]): path / name for name in names if (match := _COMPLETE.fullmatch(name))}
        found = {number: entry for number, entry in named.items() if entry.is_dir()}
        if found or not (named or any(map(_LEFT_BEHIND.fullmatch, names))):
            break
    return found


def _crc32_of(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _synchronise_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# The files of a checkpoint that hold no tensors, and their use on all ranks at once -----------------------------------

T = TypeVar("T")
SHARED_FILE = "shared.pt"  # what belongs to all ranks; written by rank 0


def rank_file(rank: int) -> str:
    """The name of the file with what belongs to one rank: the states of its random number generators."""
    return f"rank-{rank}.pt"


def plain_content(file: Path) -> Any:
    """What a file holds that `torch.save` wrote: tensors on the CPU, numbers and strings, in lists, tuples and dicts.

    Raises:
        ValueError: It is something else. Nothing has been executed.
        OSError: It can't be read.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as problem:
        reason = printable((str(problem).splitlines() or [type(problem).__name__])[0])
        # Not from it: a traceback would print torch's text, which quotes the file, as it is.
        raise ValueError(f"{file} is damaged, or was planted: {reason}; {EARLIER}") from None


def files_on_all_ranks(function: Callable[[], T], registry: ProcessGroupRegistry) -> T:
    """As `on_all_ranks`, for what uses files: an OSError on any rank is a RuntimeError on every rank, and errors that quote
    a file have `printable` text.

    Collectives, host reads: as there.
    """

    def run() -> T:
        try:
            return function()
        except OSError as problem:
            raise RuntimeError(printable(f"{type(problem).__name__}: {problem}")) from problem
        except ValueError as problem:
            if str(problem).isprintable():
                raise
            raise ValueError(printable(str(problem))) from None

    return on_all_ranks(run, registry)


def files_on_first_rank(function: Callable[[], T], registry: ProcessGroupRegistry) -> T:
    """What ``function`` returns on rank 0, which alone calls it; its error is raised on every rank.

    Raises:
        As `files_on_all_ranks`.
    Collectives: those of `on_all_ranks`, and of `gather_objects`. Host reads: yes.
    """
    first = registry.global_rank == 0
    found = files_on_all_ranks(lambda: function() if first else None, registry)
    return gather_objects(found, registry)[0]  # type: ignore[return-value]


# Which checkpoint of a path a run has saved or loaded last, so that no run removes those of another -------------------

_last: WeakKeyDictionary[ParallelOptimizer, dict[Path, str]] = WeakKeyDictionary()


def last_known(optimizer: ParallelOptimizer, path: Path) -> str | None:
    """The name of the checkpoint under ``path`` that this optimizer was saved in or loaded from last."""
    return _last.get(optimizer, {}).get(path.resolve())


def remember(optimizer: ParallelOptimizer, checkpoint: Path) -> None:
    """The optimizer was saved in, or loaded from, this directory."""
    _last.setdefault(optimizer, {})[checkpoint.parent.resolve()] = checkpoint.name


def check_is_parallel(optimizer: object) -> None:
    """Raise TypeError for an optimizer of torch in place of the `ParallelOptimizer` that wraps it."""
    if not hasattr(optimizer, "registry"):
        raise TypeError(
            f"the optimizer is a {type(optimizer).__name__}; give the ParallelOptimizer that was made of it, which has the "
            "masters, the pieces and the counts of steps"
        )
