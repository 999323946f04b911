"""Files of reports, one line a report, that a run which goes on goes on with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TextIO, TypeVar

from .report import Report

Self_ = TypeVar("Self_", bound="ReportFile")


class ReportFile:
    """A callback of `Monitor` that adds each report to a file, flushed at once: what was reported outlives the process. A
    context manager, or `close` it.

    Where the file exists, the run goes on in it after the step that the monitor says (`Monitor.load_state_dict`; 0 for a
    new run). Lines of later steps, of a run that was given up, and one that a crash cut off, move to ``<path>.dropped``.

    Args:
        path: Made with the first report, so on global rank 0 only.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None

    def begin(self, step: int) -> None:
        """Drop what is there of later steps."""
        self.close()
        if self.path.exists():
            self._drop(lambda line: (found := self._step(line)) is not None and found <= step)

    def _step(self, line: str) -> int | None:
        """Of a whole line of the file; None: it is none."""
        raise NotImplementedError

    def _drop(self, is_kept: Callable[[str], bool]) -> None:
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        flags = [line.endswith("\n") and is_kept(line) for line in lines]
        if all(flags):
            return
        with open(f"{self.path}.dropped", "a", encoding="utf-8") as dropped:
            dropped.writelines(line.rstrip("\n") + "\n" for line, kept in zip(lines, flags, strict=True) if not kept)
        self._replace(line for line, kept in zip(lines, flags, strict=True) if kept)

    def _replace(self, lines: Iterable[str]) -> None:
        """Other content, at once: a crash leaves the old file or the new one."""
        new = self.path.with_name(self.path.name + ".new")
        with open(new, "w", encoding="utf-8") as file:
            file.writelines(lines)
        os.replace(new, self.path)

    def _write(self, line: str) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (until close)
        self._file.write(line)
        self._file.flush()

    def __call__(self, report: Report) -> None:
        """Write a line."""
        raise NotImplementedError

    def close(self) -> None:
        """A second call does nothing; the next report opens the file again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self: Self_) -> Self_:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
