"""Directories that appear complete or not at all, and that are found out when they are damaged.

    path/meshstep-00000007              complete
    path/meshstep-00000008.5f0c.writing being written, or left behind by a crash
    path/meshstep-00000006.removing     being removed, or left behind by a crash

A checkpoint is written beside the previous one and gets its name by one rename, after everything in it has reached the
disk; only then are previous ones removed. Each has a manifest, ``meshstep.json``, with the size and the checksums of
every file in it, and of itself.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...parallel.mesh.plain_values import check_count, check_text, dict_of, fields, items, list_of, wrong
from .checksums import EARLIER, FileRecord

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
