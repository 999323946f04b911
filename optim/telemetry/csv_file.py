"""Reports as rows of a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

from .continued import ReportFile
from .report import Report


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
