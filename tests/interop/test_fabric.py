"""Lightning Fabric with the recipe of docs/integrations/LIGHTNING_FABRIC.md, compared with the stock run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning_fabric", reason="needs lightning-fabric, of the extra `interop`")

from recipes import torchrun

SCRIPT = Path(__file__).parent / "run_fabric.py"


def weights(folder: Path, first: int, last: int) -> list[list[torch.Tensor]]:
    """Return the weights of both ranks after steps ``first`` to ``last``."""
    return [torch.load(folder / f"{first} {last} {rank}.pt") for rank in range(2)]


def test_fabric_recipe_equals_stock_run_and_resumes(tmp_path: Path) -> None:
    torchrun(SCRIPT, 2, str(tmp_path))
    (expected, _), ours = weights(tmp_path / "stock", 0, 6), weights(tmp_path / "ours", 0, 6)
    for found in ours:
        assert all(torch.equal(one, other) for one, other in zip(found, ours[0], strict=True))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    for found in weights(tmp_path / "ours", 3, 6):
        assert all(torch.equal(one, other) for one, other in zip(found, ours[0], strict=True))
