"""The training loop of timm with the recipe of docs/integrations/TIMM.md, compared with the stock run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("timm", reason="needs timm, of the extra `interop`")

from recipes import torchrun
from torch import Tensor

SCRIPT = Path(__file__).parent / "run_timm.py"


def weights(folder: Path, first: int, last: int) -> list[dict[str, dict[str, Tensor]]]:
    """Return weights and averages of both ranks after epochs ``first`` to ``last``."""
    return [torch.load(folder / f"{first} {last} {rank}.pt") for rank in range(2)]


def largest_difference(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> float:
    pairs = [(one[kind][name], other[kind][name]) for kind in other for name in other[kind]]
    return max(float((left - right).abs().max()) for left, right in pairs)


def test_timm_recipe_equals_stock_run_and_resumes(tmp_path: Path) -> None:
    torchrun(SCRIPT, 2, str(tmp_path))
    (expected, _), ours = weights(tmp_path / "stock", 0, 4), weights(tmp_path / "ours", 0, 4)
    for found in ours:
        assert largest_difference(found, ours[0]) == 0.0
        assert largest_difference(found, expected) <= 1e-5
    for found in weights(tmp_path / "ours", 2, 4):
        assert largest_difference(found, ours[0]) == 0.0
