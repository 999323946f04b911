"""Directories that appear complete or not at all, and that are found out when they are damaged.

    path/meshstep-00000007              complete
    path/meshstep-00000008.writing      being written, or left behind by a crash
    path/meshstep-00000006.removing     being removed, or left behind by a crash

A checkpoint is written beside the previous one and gets its name by one rename, after everything in it has reached the
disk; only then is the previous one removed. Each has a manifest, ``meshstep.json``, with the size and the checksum of
every file in it, and of itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 1
MANIFEST = "meshstep.json"
_COMPLETE = re.compile(r"meshstep-(\d+)")
_LEFT_BEHIND = re.compile(r"meshstep-\d+\.(writing|removing)")
_BLOCK = 2**22


class FileRecord(NamedTuple):
    """Size in bytes and CRC-32 of a file."""

    size: int
    crc32: int


def newest_checkpoint(path: str | os.PathLike[str]) -> Path | None:
    """The directory of the newest complete checkpoint under ``path``; None where there is none.

    It looks at names only, so it says nothing about damage. Collectives: none.
    """
    complete = _complete(Path(path))
    return complete[max(complete)] if complete else None


def begin(path: Path) -> Path:
    """A new, empty directory to write the next checkpoint under ``path`` in. What crashes left there is removed.

    Raises:
        OSError: It can't be made.
    """
    path.mkdir(parents=True, exist_ok=True)
    for entry in path.iterdir():
        if _LEFT_BEHIND.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
    directory = path / f"meshstep-{max(_complete(path), default=0) + 1:08}.writing"
    directory.mkdir()
    _synchronise_directory(path.parent)
    return directory


def publish(directory: Path, files: Mapping[str, FileRecord], about: Mapping[str, Any]) -> Path:
    """Give what `begin` returned, now filled, the name of a complete checkpoint, and remove the previous ones.

    Args:
        files: All files in it, synchronised, by name.
        about: What the manifest says besides; JSON.
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
        json.dump({"crc32": _crc32_of(manifest), "manifest": manifest}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    _synchronise_directory(directory)
    complete = directory.with_suffix("")
    previous = _complete(directory.parent).values()
    os.rename(directory, complete)
    _synchronise_directory(complete.parent)
    with suppress(OSError):  # the new one is in place; `begin` tries again
        for older in previous:
            removing = older.with_suffix(".removing")
            os.rename(older, removing)  # so that a crash now leaves nothing half removed under a complete one's name
            shutil.rmtree(removing)
    return complete


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        ValueError: There is none, it is damaged, or of a format that is not this version's.
    """
    try:
        content = json.loads((directory / MANIFEST).read_bytes())
        manifest: dict[str, Any] = content["manifest"]
        intact = content["crc32"] == _crc32_of(manifest)
    except FileNotFoundError:
        raise ValueError(f"{directory} has no {MANIFEST}: meshstep did not write it, or it is damaged") from None
    except (ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        raise ValueError(f"{directory / MANIFEST} is damaged: it is not what was written")
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"{directory} has format {manifest['format']}, this version reads {FORMAT}: use the version that wrote it"
        )
    return manifest


def verify(directory: Path, files: Mapping[str, FileRecord]) -> None:
    """Read ``files`` and compare them with their records.

    Raises:
        ValueError: One is missing or is not what was written.
    """
    for name, expected in files.items():
        try:
            found = record_of(directory / name, synchronise=False)
        except OSError as problem:
            raise ValueError(f"{directory / name} is missing or can't be read: {problem}") from problem
        if found != expected:
            what = (
                f"it has {found.size} bytes of {expected.size}" if found.size != expected.size else "bytes were changed"
            )
            raise ValueError(f"{directory / name} is damaged: {what}")


def record_of(file: Path, *, synchronise: bool) -> FileRecord:
    """Size and checksum of a file, which is first brought to the disk if asked. Raises OSError."""
    size = checksum = 0
    with open(file, "rb") as stream:
        if synchronise:
            os.fsync(stream.fileno())
        while block := stream.read(_BLOCK):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return FileRecord(size, checksum)


def _complete(path: Path) -> dict[int, Path]:
    if not path.is_dir():
        return {}
    found = ((_COMPLETE.fullmatch(entry.name), entry) for entry in path.iterdir() if entry.is_dir())
    return {int(match[1]): entry for match, entry in found if match}


def _crc32_of(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _synchronise_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
