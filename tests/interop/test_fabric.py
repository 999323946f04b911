"""Lightning Fabric with the recipe of MIGRATING.md, beside its own run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning_fabric", reason="needs lightning-fabric, of the extra `interop`")

from recipes import torchrun

SCRIPT = Path(__file__).parent / "run_fabric.py"


def run(folder: Path, how: str, first: int, last: int) -> list[list[torch.Tensor]]:
    """The weights of both ranks after steps ``first`` to ``last``."""
    torchrun(SCRIPT, 2, how, str(folder), str(first), str(last))
    return [torch.load(folder / f"{how} {first} {last} {rank}.pt") for rank in range(2)]


def test_weights_are_those_of_fabrics_own_run_and_its_checkpoints_resume(tmp_path: Path) -> None:
    folders = {how: tmp_path / how for how in ("ours", "stock")}
    for folder in folders.values():
        folder.mkdir()
    (expected, _), ours = run(folders["stock"], "stock", 0, 6), run(folders["ours"], "ours", 0, 6)
    for found in ours:
        assert all(torch.equal(one, other) for one, other in zip(found, ours[0], strict=True))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    run(folders["ours"], "ours", 0, 3)
    for found in run(folders["ours"], "ours", 3, 6):
        assert all(torch.equal(one, other) for one, other in zip(found, ours[0], strict=True))
