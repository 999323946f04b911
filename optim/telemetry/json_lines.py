"""Reports as JSON, one object a line."""

from __future__ import annotations

import json
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import Any

from .continued import ReportFile
from .report import Report


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
