"""Reports as rows of a table."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeVar

from .labels import TOTAL
from .monitor import Report

# Files of reports, one line a report, that a run which goes on goes on with -------------------------------------------

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


# Csv file -------------------------------------------------------------------------------------------------------------


class CsvFile(ReportFile):
    """As `ReportFile`: a header, then one row a report with all of `Report.scalars`; a cell is empty where a report lacks
    the figure. Where a report has figures that none had before, such as the first measured step, the file is written anew
    with more columns, at once."""

    _columns: list[str] | None = None

    def begin(self, step: int) -> None:
        super().begin(step)
        self._columns = None

    def __call__(self, report: Report) -> None:
        cells: dict[str, float] = {"step": report.step, **report.scalars()}
        if self._columns is None:
            self._columns = self._header()
        if new := [name for name in cells if name not in self._columns]:
            self._columns += new
            self._widen(self._columns)
        self._write(_row([_cell(cells, name) for name in self._columns]))

    def _step(self, line: str) -> int | None:
        cell = line.partition(",")[0].strip()
        return 0 if cell == "step" else int(cell) if cell.isdigit() else None

    def _header(self) -> list[str]:
        if not self.path.exists():
            return []
        with open(self.path, encoding="utf-8", newline="") as file:
            return next(csv.reader(file), [])

    def _widen(self, columns: Sequence[str]) -> None:
        rows: list[list[str]] = []
        if self.path.exists():
            with open(self.path, encoding="utf-8", newline="") as file:
                rows = [row for row in csv.reader(file) if row][1:]
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._replace([_row(columns), *(_row([*row, *[""] * (len(columns) - len(row))]) for row in rows)])


def _cell(cells: Mapping[str, float], name: str) -> str:
    return repr(cells[name]) if name in cells else ""


def _row(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


# Reports as JSON, one object a line -----------------------------------------------------------------------------------


class JsonLines(ReportFile):
    """As `ReportFile`: ``{"step": 20, "loss": 0.25, "grad_norm/total": 1.5, ...}``, all of `Report.scalars`.

    JSON has no NaN and no infinity: these are the strings ``"nan"``, ``"inf"`` and ``"-inf"``, which ``float`` reads.
    """

    def __call__(self, report: Report) -> None:
        line: dict[str, Any] = {"step": report.step}
        if report.measured_step is not None:
            line["measured_step"] = report.measured_step
        line |= {name: value if isfinite(value) else str(value) for name, value in report.scalars().items()}
        self._write(json.dumps(line, allow_nan=False) + "\n")

    def _step(self, line: str) -> int | None:
        found = _read(line)
        return None if found is None else int(found["step"])


def read_json_lines(path: str | PathLike[str]) -> list[dict[str, float]]:
    """The reports of a file, in its order; a last line that was cut off is left out.

    Raises:
        ValueError: Another line is none of `JsonLines`.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    reports = []
    for number, line in enumerate(lines, 1):
        figures = _figures(_read(line))
        if figures is not None:
            reports.append(figures)
        elif number < len(lines) or line.endswith("\n"):
            raise ValueError(f"line {number} of {path} is no report: give a file that JsonLines has written")
    return reports


def _read(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None


def _figures(report: dict[str, Any] | None) -> dict[str, float] | None:
    """The numbers of a report; None where one is none."""
    try:
        return None if report is None else {name: float(value) for name, value in report.items()}
    except (TypeError, ValueError, OverflowError):
        return None


# Reports as curves of TensorBoard -------------------------------------------------------------------------------------


class TensorBoardWriter:
    """A callback of `Monitor` that writes each report's numbers to TensorBoard. A context manager, or `close` it.

    Args:
        log_dir: Of the run; the file in it is made with the first report, so on global rank 0 only.
    Raises:
        ImportError: The package tensorboard is not installed.
    """

    def __init__(self, log_dir: str | PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"TensorBoardWriter needs the package tensorboard ({error}); pip install 'meshstep[tensorboard]'"
            ) from error
        self._make: Callable[[str], Any] = SummaryWriter
        self.log_dir = str(log_dir)
        self._writer: Any = None

    def __call__(self, report: Report) -> None:
        """Write one point of each curve."""
        if self._writer is None:
            self._writer = self._make(self.log_dir)
        for name, value in report.scalars().items():
            self._writer.add_scalar(name, value, report.step)

    def close(self) -> None:
        """Write what is pending. A second call does nothing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> TensorBoardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# Reports as a run of Weights & Biases ---------------------------------------------------------------------------------


class WeightsAndBiases:
    """A callback of `Monitor` that logs each report's numbers. A context manager, or `close` it.

    A run that goes on is told so by its own options, ``id="...", resume="must"``: the service ignores steps that it has
    already, and with ``resume_from="<id>?_step=100"`` it forgets later ones.

    Args:
        **options: Of ``wandb.init``, which is called with the first report, so on global rank 0 only: ``project="...",
            mode="offline"``.
    Raises:
        ImportError: The package wandb is not installed.
    """

    def __init__(self, **options: Any) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError(
                f"WeightsAndBiases needs the package wandb ({error}); pip install 'meshstep[wandb]'"
            ) from error
        self._wandb: Any = wandb
        self.options = options
        self._run: Any = None

    def __call__(self, report: Report) -> None:
        """Log one point of each curve."""
        if self._run is None:
            self._run = self._wandb.init(**self.options)
        self._run.log(report.scalars(), step=report.step)

    def close(self, exit_code: int = 0) -> None:
        """Send what is pending. A second call does nothing."""
        if self._run is not None:
            self._run.finish(exit_code=exit_code)
            self._run = None

    def __enter__(self) -> WeightsAndBiases:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(exit_code=0 if kind is None else 1)


# Reports in the terminal: a table that stays where it is, or a line each where there is no terminal -------------------

BARS = "▁▂▃▄▅▆▇█"
HISTORY = 24  # reports of which the course is drawn
FIRST = ("loss", "grad_norm")


class Terminal:
    """A callback of `Monitor`: a live table where ``file`` is a terminal that shows Unicode and the package rich is
    installed, else one plain line per report. A context manager, or `close` it. The extra ``meshstep[terminal]`` brings
    rich.

    Names are shown as text: markup and control characters in them have no effect.

    Args:
        file: None: ``sys.stdout`` as it is with the first report.
        rows: Figures that are shown at most: loss and norm first, then others of the whole model, then singular values.
    """

    def __init__(self, file: TextIO | None = None, rows: int = 24) -> None:
        self.file, self.rows = file, rows
        self._live: Any = None
        self._started = False
        self._courses: dict[str, deque[float]] = {}

    def __call__(self, report: Report) -> None:
        """Show it."""
        if not self._started:
            self._start(self.file or sys.stdout)
        if self._live is None:
            print(f"step {report.step}: {report}", file=self.file or sys.stdout, flush=True)
            return
        for name, value in report.scalars().items():
            self._courses.setdefault(name, deque(maxlen=HISTORY)).append(value)
        self._live.update(self._table(report), refresh=True)

    def _start(self, file: TextIO) -> None:
        self._started = True
        if not file.isatty() or not _can_write(file, BARS):
            return
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError:
            return
        self._live = Live(console=Console(file=file), auto_refresh=False)
        self._live.start()

    def _table(self, report: Report) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"step {report.step:,}", title_justify="left", caption_justify="left", show_edge=False)
        table.add_column("figure", no_wrap=True, overflow="ellipsis")
        table.add_column("now", justify="right", no_wrap=True)
        table.add_column("course", no_wrap=True)
        names = sorted(self._courses, key=_place)
        for name in names[: self.rows]:
            course = self._courses[name]
            table.add_row(Text(name), f"{course[-1]:.4g}", drawn(course))  # a str would be read as markup
        if len(names) > self.rows:
            table.caption = f"and {len(names) - self.rows} more"
        return table

    def close(self) -> None:
        """Leave the table as it is. A second call does nothing."""
        if self._live is not None:
            self._live.stop()
        self._live, self._started = None, False

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _can_write(file: TextIO, text: str) -> bool:
    try:
        text.encode(file.encoding or "utf-8")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def _place(name: str) -> int:
    """Those that are looked at first, then those of the whole model, then what somebody has asked for by itself."""
    kind, _, label = name.partition("/")
    if kind in FIRST and label in ("", TOTAL):
        return FIRST.index(kind)
    return len(FIRST) + (0 if label in ("", TOTAL) else 1 if kind == "spectral_norm" else 2)


def drawn(values: deque[float]) -> str:
    """The course of values in one row of characters, from their least to their largest; ``!`` where one is not finite."""
    finite = [value for value in values if isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    if low == high:
        low = min(low, 0.0)  # what is always 1 is not what is always 0
    span = high - low or 1.0
    return "".join(
        BARS[min(int((value - low) / span * len(BARS)), len(BARS) - 1)] if isfinite(value) else "!" for value in values
    )
