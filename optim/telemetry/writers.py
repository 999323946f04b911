"""Callbacks of `Monitor` that write reports to files, dashboards and the terminal."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeVar

from .monitor import Report
from .telemetry import TOTAL

Self_ = TypeVar("Self_", bound="ClosedAtExit")


class ClosedAtExit:
    """Base class of context managers that call `close` at the end of the ``with`` block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self: Self_) -> Self_:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# Files with one line per report; a resumed run appends to them --------------------------------------------------------


class ReportFile(ClosedAtExit):
    """Base class of `Monitor` callbacks that append each report as a line to a file.

    Each line is flushed at once, so that no report is lost if the process ends. Use it as a context manager, or call
    `close`.

    If the file exists before the first report, lines of steps after the monitor's current step are moved to
    ``<path>.dropped``, because they come from an abandoned run. Lines that are not complete reports are moved
    too. The current step comes from `Monitor.load_state_dict`. In a new run it is 0, and all lines except a CSV header
    are moved.

    The first report creates the file, so it exists on global rank 0 only.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None

    def begin(self, step: int) -> None:
        """Close the file, and move damaged lines and lines of steps after ``step`` to ``<path>.dropped``."""
        self.close()
        if self.path.exists():
            self._drop(lambda line: (found := self._step(line)) is not None and found <= step)

    def _step(self, line: str) -> int | None:
        """Return the step of the report in ``line``, or 0 for a header; None if the line is neither."""
        raise NotImplementedError

    def _drop(self, is_kept: Callable[[str], bool]) -> None:
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept, others = list[str](), list[str]()
        for line in lines:
            (kept if line.endswith("\n") and is_kept(line) else others).append(line)
        if not others:
            return
        with open(f"{self.path}.dropped", "a", encoding="utf-8") as dropped:
            dropped.writelines(line.rstrip("\n") + "\n" for line in others)
        self._replace(kept)

    def _replace(self, lines: Iterable[str]) -> None:
        """Replace the file's content by ``lines``, atomically: a crash leaves either the old file or the new one."""
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
        """Write a line for ``report``."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the file; the next report opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


# CSV ------------------------------------------------------------------------------------------------------------------


class CsvFile(ReportFile):
    """`Monitor` callback that writes a CSV file: a header, then one row per report.

    The columns are the step and all numbers of `Report.scalars`. A cell is empty if the report does not have the
    number. If a report has new numbers, such as the first numbers that `Telemetry` measured, the file is rewritten with
    more columns.

        monitor = Monitor(registry, CsvFile("run.csv"))

    Args:
        path: Path of the file. The first report creates it, on global rank 0 only. If it exists, a resumed run appends
            to it, after moving lines of later steps to ``<path>.dropped``.
    """

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
        self._write(_row([repr(cells[name]) if name in cells else "" for name in self._columns]))

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


def _row(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


# JSON lines -----------------------------------------------------------------------------------------------------------


class JsonLines(ReportFile):
    """`Monitor` callback that writes one JSON object per report.

    The object has ``step``, ``measured_step`` if it is not None, and all of `Report.scalars`.

        monitor = Monitor(registry, JsonLines("run.jsonl"))

    A line is ``{"step": 20, "loss": 0.25, "grad_norm/total": 1.5, ...}``. JSON has no NaN or infinity; they are written
    as the strings ``"nan"``, ``"inf"`` and ``"-inf"``, which ``float`` accepts.

    Args:
        path: Path of the file. The first report creates it, on global rank 0 only. If it exists, a resumed run appends
            to it, after moving lines of later steps to ``<path>.dropped``.
    """

    def __call__(self, report: Report) -> None:
        line: dict[str, Any] = {"step": report.step}
        if report.measured_step is not None:
            line["measured_step"] = report.measured_step
        line |= {name: value if isfinite(value) else str(value) for name, value in report.scalars().items()}
        self._write(json.dumps(line, allow_nan=False) + "\n")

    def _step(self, line: str) -> int | None:
        return step_of_json(line)


def read_json_lines(path: str | PathLike[str]) -> list[dict[str, float]]:
    """Return the reports of a file in order, as dicts {name: number} with the key ``"step"``.

    An incomplete last line is left out. Raise ValueError if another line is not a report of `JsonLines`.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    reports = []
    for number, line in enumerate(lines, 1):
        figures = _figures(_read(line))
        if figures is not None:
            reports.append(figures)
        elif number < len(lines) or line.endswith("\n"):
            raise ValueError(f"line {number} of {path} is no report; give a file written by JsonLines")
    return reports


def _read(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None


def step_of_json(line: str) -> int | None:
    """Return the entry ``"step"`` of a line with a JSON object; None if the line has none."""
    found = _read(line)
    return None if found is None else int(found["step"])


def _figures(report: dict[str, Any] | None) -> dict[str, float] | None:
    """Return the values of a report as floats; None if ``report`` is None or a value can't be converted."""
    try:
        return None if report is None else {name: float(value) for name, value in report.items()}
    except (TypeError, ValueError, OverflowError):
        return None


# TensorBoard ----------------------------------------------------------------------------------------------------------


class TensorBoardWriter(ClosedAtExit):
    """`Monitor` callback that writes each report's numbers to TensorBoard.

    Use it as a context manager, or call `close`.

        monitor = Monitor(registry, TensorBoardWriter("runs/first"))

    Args:
        log_dir: Directory of the run. The first report creates a file in it, which exists on global rank 0 only.

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
        """Write each number of ``report`` as a point of a curve."""
        if self._writer is None:
            self._writer = self._make(self.log_dir)
        for name, value in report.scalars().items():
            self._writer.add_scalar(name, value, report.step)

    def close(self) -> None:
        """Write pending data and close the file. A second call does nothing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


# Weights & Biases -----------------------------------------------------------------------------------------------------


class WeightsAndBiases(ClosedAtExit):
    """`Monitor` callback that logs each report's numbers to Weights & Biases.

    Use it as a context manager, or call `close`.

        monitor = Monitor(registry, WeightsAndBiases(project="digits"))

    To resume a run, pass the options ``id="...", resume="must"`` of ``wandb.init``: the service ignores steps that it
    already has. With ``resume_from="<id>?_step=100"``, the service discards steps after 100.

    Args:
        **options: Options of ``wandb.init``, such as ``project="...", mode="offline"``. The first report calls
            ``wandb.init``, on global rank 0 only.

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
        """Log the numbers of ``report``, each as a point of a curve."""
        if self._run is None:
            self._run = self._wandb.init(**self.options)
        self._run.log(report.scalars(), step=report.step)

    def close(self, exit_code: int = 0) -> None:
        """Send pending data and finish the run. A second call does nothing.

        Args:
            exit_code: Exit code of the run; a value other than 0 marks the run as failed. Default: 0.
        """
        if self._run is not None:
            self._run.finish(exit_code=exit_code)
            self._run = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(exit_code=0 if kind is None else 1)


# Terminal -------------------------------------------------------------------------------------------------------------

BARS = "▁▂▃▄▅▆▇█"
HISTORY = 24  # number of reports that a curve in the terminal shows
FIRST = ("loss", "grad_norm")


class Terminal(ClosedAtExit):
    """`Monitor` callback that shows reports in the terminal. Use it as a context manager, or call `close`.

    It shows a live table if ``file`` is a terminal with Unicode and the package rich is installed (extra
    ``meshstep[terminal]``). Otherwise it prints one line per report. Names are shown as plain text: markup and control
    characters in them have no effect.

        monitor = Monitor(registry, Terminal())

    Args:
        file: Output stream. None (default): ``sys.stdout``.
        rows: Maximum number of rows in the table. The order is: loss and gradient norm, other numbers of the full
            model, singular values, numbers of single parameters, layers or groups. Default: 24.
    """

    def __init__(self, file: TextIO | None = None, rows: int = 24) -> None:
        self.file, self.rows = file, rows
        self._live: Any = None
        self._started = False
        self._courses: dict[str, deque[float]] = {}

    def __call__(self, report: Report) -> None:
        """Update the table with ``report``, or print it as a line."""
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
            table.add_row(Text(name), f"{course[-1]:.4g}", drawn(course))  # rich interprets a str as markup
        if len(names) > self.rows:
            table.caption = f"and {len(names) - self.rows} more"
        return table

    def close(self) -> None:
        """Stop updating the table, which remains visible. A second call does nothing."""
        if self._live is not None:
            self._live.stop()
        self._live, self._started = None, False


def _can_write(file: TextIO, text: str) -> bool:
    try:
        text.encode(file.encoding or "utf-8")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def _place(name: str) -> int:
    """Return the sort key of a number by its name: loss, norm, other totals, singular values, all other numbers."""
    kind, _, label = name.partition("/")
    if kind in FIRST and label in ("", TOTAL):
        return FIRST.index(kind)
    return len(FIRST) + (0 if label in ("", TOTAL) else 1 if kind == "spectral_norm" else 2)


def drawn(values: deque[float]) -> str:
    """Return one bar character per value, relative to the range of the finite values; ``!`` for a non-finite value."""
    finite = [value for value in values if isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    if low == high:
        low = min(low, 0.0)  # so that a constant 1 is drawn higher than a constant 0
    span = high - low or 1.0
    return "".join(
        BARS[min(int((value - low) / span * len(BARS)), len(BARS) - 1)] if isfinite(value) else "!" for value in values
    )
