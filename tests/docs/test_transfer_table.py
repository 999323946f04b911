"""The table of host synchronizations and transfers in STAGES.md agrees with a new count (tests/benchmarks/transfers.py)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "STAGES.md").read_text()
SECTION = PAGE.partition("\n### Host synchronizations and transfers\n")[2].partition("\n##")[0]
TABLE = [[cell.strip() for cell in line.split("|")[1:-1]] for line in SECTION.splitlines() if line[:1] == "|"]
pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="needs a torch built with CUDA for the fake GPU"
)
benchmark: Any = importlib.import_module("benchmarks.transfers")
OWN = 1 + len(benchmark.COLUMNS)  # the other columns are counts of an earlier commit
BY_DEFAULT = ("AdamW, `Offloaded(1.0)`", "AdamW, `AsyncSaver`", "SOAP")


def test_transfer_table_has_one_row_per_benchmark_case() -> None:
    assert TABLE[0][:OWN] == ["step", *benchmark.COLUMNS]
    assert [row[0] for row in TABLE[2:]] == [*benchmark.CASES]


@pytest.mark.parametrize(
    "written",
    [pytest.param(row, marks=() if row[0] in BY_DEFAULT else pytest.mark.slow, id=row[0]) for row in TABLE[2:]],
)
def test_transfer_table_figures_match_counted_waits_and_copies(written: list[str]) -> None:
    assert benchmark.row(written[0]) == written[:OWN]
