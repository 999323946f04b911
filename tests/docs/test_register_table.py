"""The table of registers in STAGES.md agrees with newly compiled Triton kernels (tests/benchmarks/registers.py)."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from interpreted import why_no_triton

PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "STAGES.md").read_text()
SECTION = PAGE.partition("\n### Registers and memory accesses\n")[2].partition("\n##")[0]
TABLE = [[cell.strip() for cell in line.split("|")[1:-1]] for line in SECTION.splitlines() if line[:1] == "|"]
ROWS = TABLE[2:]
VERSION = re.search(r"Triton (\d+\.\d+\.\d+)", SECTION)
pytestmark = pytest.mark.skipif(bool(why_no_triton()), reason=why_no_triton())
benchmark: Any = importlib.import_module("benchmarks.registers")
OWN = len(benchmark.HEADER)  # the other columns are figures of an earlier commit


def test_register_table_has_one_row_per_compiled_kernel() -> None:
    assert TABLE[0][:OWN] == benchmark.HEADER
    assert [row[0] for row in ROWS] == [*benchmark.kernels()]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("written", ROWS, ids=lambda row: row[0])
def test_register_table_figures_match_compiled_kernels(
    written: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All figures are equal for the page's version of Triton. Other versions may use other registers and barriers."""
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = benchmark.row(written[0])
    assert VERSION is not None
    compared = benchmark.HEADER if triton.__version__ == VERSION[1] else ["spilled", "load", "store"]
    at = [benchmark.HEADER.index(name) for name in compared]
    assert [found[index] for index in at] == [written[index] for index in at]


def test_register_limits_above_the_table_hold_for_its_rows() -> None:
    limits = re.search(
        r"^\| registers \| at most (\d+) per thread \(stochastic rounding: (\d+)\), none spilled", PAGE, re.M
    )
    assert limits is not None
    for name, *figures in ROWS:
        limit = int(limits[2] if name == "stochastic rounding" else limits[1])
        assert max(map(int, figures[: len(benchmark.CAPABILITIES)])) <= limit
        assert figures[len(benchmark.CAPABILITIES)] == "0"
