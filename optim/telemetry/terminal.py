"""Reports in the terminal: a table that stays where it is, or a line each where there is no terminal."""

from __future__ import annotations

import sys
from collections import deque
from math import isfinite
from types import TracebackType
from typing import Any, TextIO

from .labels import TOTAL
from .report import Report

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
