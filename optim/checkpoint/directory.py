"""Checkpoint directories, which become complete atomically. Damage is detected when they are read.

    path/meshstep-00000007                  complete
    path/meshstep-00000008.5f0c91ab.writing being written, or left by a crash
    path/meshstep-00000006.removing         being removed, or left by a crash

A checkpoint is written into a directory with a temporary name. When all of its files are on disk, the directory is
renamed to its final name, which makes the checkpoint complete. Then older checkpoints are removed. Each checkpoint has
a manifest, ``meshstep.json``. It contains the size and the checksums of each other file, and a checksum of its own
content.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch

from ...parallel.mesh.agreement import gather_objects, on_all_ranks
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.text import printable
from ...parallel.mesh.value_checks import check_count, check_text, dict_of, fields, items, list_of, wrong
from ..parallel_optimizer import ParallelOptimizer

# Checksums per block of a file: computed while a file is written, and compared while it is read -----------------------

# Writing a file needs no second pass for its checksums. Reading a part of a file checks only the blocks of this part.

BLOCK = 2**20
EARLIER = "load an earlier checkpoint, if there is one (save with keep=2 to keep the previous one)"
_KEPT = 4  # number of cached blocks per open file; consecutive reads often need parts of the same block


class FileRecord(NamedTuple):
    """The size of a file in bytes, and the CRC-32 of each of its blocks of `BLOCK` bytes; the last block may be shorter."""

    size: int
    crc32: tuple[int, ...]

    @classmethod
    def of_json(cls, value: tuple[int, list[int]]) -> FileRecord:
        """Return the record from its form in a manifest; raise ValueError unless it has one checksum per block."""
        size, checksums = value
        if len(checksums) != -(-size // BLOCK):
            raise ValueError(f"{value!r:.80} is no file record; it must be a size with one checksum per block")
        return cls(size, tuple(checksums))


class SummingStream:
    """Stream that passes written bytes on to a file, and computes the file's block checksums. `torch.save` accepts it."""

    def __init__(self, stream: io.BufferedWriter) -> None:
        self._stream, self._size, self._sums = stream, 0, list[int]()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._stream.write(view)
        for part in _split_at_blocks(view, self._size):
            if self._size % BLOCK == 0:
                self._sums.append(0)
            self._sums[-1] = zlib.crc32(part, self._sums[-1])
            self._size += len(part)
        return len(view)

    def flush(self) -> None:
        self._stream.flush()

    @property
    def record(self) -> FileRecord:
        """Return the size and the checksums of the bytes written so far."""
        return FileRecord(self._size, tuple(self._sums))


class CheckedFile:
    """Reads a file, and raises ValueError if a block does not match its checksum in the file's record."""

    def __init__(self, stream: io.BufferedReader, file: Path, record: FileRecord) -> None:
        self._stream, self._file, self._record = stream, file, record
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()

    def read_into(self, buffer: Any, start: int) -> None:
        """Fill ``buffer`` with the bytes of the file from byte ``start`` on. The file's record must include them."""
        for part in _split_at_blocks(memoryview(buffer).cast("B"), start):
            index, first = divmod(start, BLOCK)
            if len(part) == BLOCK:
                self._fetch(index, part)
            else:
                part[:] = self._block(index)[first : first + len(part)]
            start += len(part)

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
            raise ValueError(f"{self._file} is damaged: its content does not match its checksum; {EARLIER}")


def write_summed(file: Path, write: Callable[[SummingStream], object]) -> FileRecord:
    """Write a file, synchronize it to disk, and return its record. Raise OSError if it can't be written."""
    with open(file, "wb") as stream:
        summing = SummingStream(stream)
        write(summing)
        stream.flush()
        os.fsync(stream.fileno())
    return summing.record


def record_of(file: Path) -> FileRecord:
    """Read a file, and return its size and checksums. Raise OSError if it can't be read."""
    with open(file, "rb") as stream:
        sums = [(len(block), zlib.crc32(block)) for block in iter(lambda: stream.read(BLOCK), b"")]
    return FileRecord(sum(size for size, _ in sums), tuple(checksum for _, checksum in sums))


def verify(file: Path, expected: FileRecord, *, contents: bool) -> None:
    """Raise ValueError unless ``file`` matches its record; without ``contents``, only its size is compared."""
    try:
        size = file.stat().st_size
        changed = contents and size == expected.size and record_of(file) != expected
    except OSError as problem:
        raise ValueError(f"{file} is missing or can't be read: {problem}; {EARLIER}") from problem
    if size != expected.size:
        raise ValueError(f"{file} is damaged: it has {size} bytes instead of {expected.size}; {EARLIER}")
    if changed:
        raise ValueError(f"{file} is damaged: its content does not match its checksum; {EARLIER}")


def _split_at_blocks(view: memoryview, start: int) -> list[memoryview]:
    """Split ``view``, which has the bytes of a file from byte ``start`` on, at the block boundaries of the file."""
    first = min(len(view), -start % BLOCK)
    parts = [view[:first]] if first else []
    return parts + [view[at : at + BLOCK] for at in range(first, len(view), BLOCK)]


# Directories of checkpoints, and their manifests ----------------------------------------------------------------------

FORMAT = 3
MANIFEST = "meshstep.json"
MAX_MANIFEST = 2**28
"""Maximum size of a manifest in bytes. A manifest has about 12 bytes per MiB, so checkpoints may have 20 TiB."""
_COMPLETE = re.compile(r"meshstep-(\d+)")
# Number of attempts to list a directory. A listing may miss a checkpoint directory that is renamed during the listing.
_LISTINGS = 10
_LEFT_BEHIND = re.compile(r"meshstep-\d+(\.\w+)?\.(writing|removing)")


def newest_checkpoint(path: str | os.PathLike[str]) -> Path | None:
    """Return the directory of the newest complete checkpoint under ``path``; None if there is none.

        if newest_checkpoint("checkpoints") is not None:
            extra = load_checkpoint("checkpoints", model, optimizer)

    Only file names are read, so damage is not detected. A running job that saves under ``path`` may remove the
    checkpoint at any moment.

    Args:
        path: The directory that was passed to `save_checkpoint`. If it does not exist, the result is None.
    Raises:
        OSError: The directory can't be listed.
    Collectives: none.
    """
    complete = _complete(Path(path))
    return complete[max(complete)] if complete else None


def is_checkpoint(path: Path) -> bool:
    """Return True if ``path`` is the directory of one complete checkpoint: named meshstep-<number>, with a manifest."""
    return _COMPLETE.fullmatch(path.name) is not None and (path / MANIFEST).is_file()


def begin(path: Path, known: str | None) -> Path:
    """Create and return the temporary directory for the next checkpoint under ``path``.

    All temporary directories under ``path`` are removed. Usually a crash left them; another run that is saving there loses
    its directory.

    ``known`` is the name of the last checkpoint under ``path`` that the optimizer saved or loaded; None: no checkpoint.
    Raise ValueError if the newest complete checkpoint there is another one.
    """
    newest = newest_checkpoint(path)
    if newest is not None and newest.name != known:
        raise ValueError(
            f"{newest} is the newest checkpoint under {path}, but the last one that this optimizer saved or loaded there "
            f"is {known or 'none'}; saving could remove another run's checkpoint. To continue that run, load {newest.name} "
            f"with load_checkpoint before the first step; else give a path that only this run uses, or remove {newest.name}"
        )
    path.mkdir(parents=True, exist_ok=True)
    for entry in path.iterdir():
        if _LEFT_BEHIND.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
    # With the random suffix, two runs that write under this path at the same time use different directories.
    directory = path / f"meshstep-{max(_complete(path), default=0) + 1:08}.{secrets.token_hex(4)}.writing"
    directory.mkdir()
    _synchronise_directory(path.parent)
    return directory


def publish(directory: Path, files: Mapping[str, FileRecord], about: Mapping[str, Any], keep: int) -> Path:
    """Write the manifest, rename the directory from `begin` to its final name, and remove the oldest checkpoints.

    ``directory`` is from `begin`, and has all files of the checkpoint, synchronized to disk. ``about`` has other
    entries of the manifest, as JSON values. ``keep`` counts the complete checkpoints to keep, including this one.
    """
    for name, record in files.items():
        file = directory / name
        if not file.is_file() or file.stat().st_size != record.size:
            raise ValueError(
                f"{file} was written by one rank, but is missing or incomplete on another rank: give a path in a file "
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
    with suppress(OSError):  # the new checkpoint is complete; the next save removes older ones
        for _, older in sorted(_complete(complete.parent).items())[:-keep]:
            removing = older.with_suffix(".removing")
            # Without the rename, a crash during the removal would leave a partial directory that looks complete.
            os.rename(older, removing)
            shutil.rmtree(removing)
    return complete


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read and check the manifest of a checkpoint; raise ValueError if it is missing, damaged or of another format."""
    file = directory / MANIFEST
    try:
        written = _read_limited(file)
    except FileNotFoundError:
        raise ValueError(
            f"{directory} has no {MANIFEST}, so it is either a damaged checkpoint or not a checkpoint; give a directory "
            "that save_checkpoint wrote"
        ) from None
    try:
        content = json.loads(written)
        manifest: dict[str, Any] = content["manifest"]
        intact = content["crc32"] == _crc32_of(manifest)
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise ValueError(f"{file} is damaged: it is not a manifest with the checksum of its content; {EARLIER}")
    try:
        fields({"format": check_count})(manifest, "manifest")
        if manifest["format"] == FORMAT:
            _check_manifest(manifest, "manifest")
    except ValueError as problem:
        raise ValueError(f"{file} is damaged, or was tampered with: {problem}; {EARLIER}") from None
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"{directory} has format {manifest['format']}, but this version reads {FORMAT}: use the meshstep version that "
            "wrote it"
        )
    return manifest


def _read_limited(file: Path) -> bytes:
    """Return the bytes of a manifest; raise ValueError unless it is a regular file of at most `MAX_MANIFEST` bytes."""
    about = file.stat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError(f"{file} is damaged, or was tampered with: it is not a regular file; {EARLIER}")
    with open(file, "rb") as stream:
        content = stream.read(MAX_MANIFEST + 1) if about.st_size <= MAX_MANIFEST else None
    if content is None or len(content) > MAX_MANIFEST:
        raise ValueError(
            f"{file} is damaged, or was tampered with: it has {about.st_size} bytes, the limit is {MAX_MANIFEST}; {EARLIER}"
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


# Files without tensors, and file access on all ranks ------------------------------------------------------------------

T = TypeVar("T")
SHARED_FILE = "shared.pt"  # data for all ranks, without tensors of the model; written by rank 0


def rank_file(rank: int) -> str:
    """Return the name of the file with the states of one rank's random number generators."""
    return f"rank-{rank}.pt"


def plain_content(file: Path) -> Any:
    """Return the content of a file that `torch.save` wrote: numbers, strings and tensors, in lists, tuples and dicts.

    The tensors are loaded to the CPU. The file is loaded with ``weights_only=True``, so that no code in it is executed.
    Raise ValueError if it is damaged, or has types that ``weights_only=True`` does not allow.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as problem:
        reason = printable((str(problem).splitlines() or [type(problem).__name__])[0])
        # "from None", because the traceback of torch's error would print unescaped text from the file.
        raise ValueError(f"{file} is damaged, or was tampered with: {reason}; {EARLIER}") from None


def files_on_all_ranks(function: Callable[[], T], registry: ProcessGroupRegistry) -> T:
    """Call ``function``, which uses files, and return its result on this rank. Every rank must call it.

    An error on any rank is raised on every rank, as in `on_all_ranks`. An OSError becomes a RuntimeError. Control
    characters in the texts of OSError and ValueError are escaped, because the text may come from a file.

    Collectives: an object all-gather over all ranks; none with one rank.
    Host synchronization: yes, except with one rank.
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
    """Call ``function``, which uses files, on rank 0, and return its result on every rank. Every rank must call it.

    An error on rank 0 is raised on every rank. An OSError becomes a RuntimeError.

    Collectives: two object all-gathers over all ranks; none with one rank.
    Host synchronization: yes, except with one rank.
    """
    first = registry.global_rank == 0
    found = files_on_all_ranks(lambda: function() if first else None, registry)
    return cast("T", gather_objects(found, registry)[0])


# The last checkpoint that an optimizer saved or loaded, per path -------------------------------------------------------

# `begin` compares it with the newest checkpoint, so that a run does not remove checkpoints of another run.

_last: WeakKeyDictionary[ParallelOptimizer, dict[Path, str]] = WeakKeyDictionary()


def last_known(optimizer: ParallelOptimizer, path: Path) -> str | None:
    """Return the name of the last checkpoint under ``path`` that ``optimizer`` was saved to or loaded from, or None."""
    return _last.get(optimizer, {}).get(path.resolve())


def remember(optimizer: ParallelOptimizer, checkpoint: Path) -> None:
    """Record that ``optimizer`` was saved to or loaded from the directory ``checkpoint``."""
    _last.setdefault(optimizer, {})[checkpoint.parent.resolve()] = checkpoint.name


def path_on_all_ranks(path: str | os.PathLike[str], registry: ProcessGroupRegistry) -> Path:
    """Return ``path`` as a `Path`. If it is no path on at least one rank, raise TypeError on every rank.

    Collectives: an object all-gather over all ranks; none with one rank.
    Host synchronization: yes, except with one rank.
    """

    def convert() -> Path:
        try:
            return Path(path)
        except TypeError:
            raise TypeError(
                f"path is {path!r}; give the directory of the checkpoints, a str or an os.PathLike"
            ) from None

    return on_all_ranks(convert, registry)
