"""The table of kernel launches and bytes in STAGES.md agrees with a new count on fake CUDA tensors."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "STAGES.md"
SPEED = PAGE.with_name("SPEED.md").read_text()
pytestmark = [
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
    pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch built with CUDA for the fake GPU"),
]
benchmark: Any = importlib.import_module("benchmarks.launches")
timed: Any = importlib.import_module("benchmarks.gpu")
ROWS = [
    line for line in PAGE.read_text().splitlines() if line.startswith("| `") and line.split("`")[1] in benchmark.CASES
]


def test_launch_table_has_one_row_per_benchmark_case() -> None:
    assert [line.split("`")[1] for line in ROWS] == [*benchmark.CASES]


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("line", ROWS, ids=lambda line: line.split("`")[1])
def test_launch_table_figures_match_counted_launches_and_bytes(line: str) -> None:
    """Versions of torch may add or remove kernels, so launches may differ by 3 %, and bytes by 1 in the table's unit."""
    found = [cell.strip() for cell in benchmark.row(line.split("`")[1]).split("|")[2:-1]]
    for index, (written, counted) in enumerate(zip(line.split("|")[2:-1], found, strict=True)):
        assert bool(written.strip()) == bool(counted)
        if counted:
            written_number, number = (int(cell.strip().replace(",", "")) for cell in (written, counted))
            assert abs(written_number - number) <= (1 if index % 2 else 0.03 * number), f"{line}: counted {counted}"


def test_speed_page_repeats_kernels_of_muon_in_launch_table() -> None:
    (line,) = [line for line in ROWS if line.startswith("| `Muon`")]
    assert f"estimates {line.split('|')[4].strip()} for `Muon`" in SPEED


@pytest.mark.slow
def test_estimate_of_kernels_of_muon_on_speed_page_matches_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks.gpu` gives all matrices of the transformer to Muon."""
    found = re.search(r"For the\s+(\d+)\s+matrices of this\s+one, the same estimate is (\d+);", SPEED)
    assert found is not None
    matrices, kernels = map(int, found.groups())
    shapes = [shape for shape in timed.MODELS["30M-parameter transformer"] if len(shape) == 2]
    monkeypatch.setattr(benchmark, "shapes_of", lambda *_: {f"{i}.weight": shape for i, shape in enumerate(shapes)})
    log, _ = benchmark.count(benchmark.CASES["Muon"])
    assert len(shapes) == matrices
    assert abs(log.kernels - kernels) <= 0.03 * kernels
