"""torchtitan's trainer with the recipe of MIGRATING.md, beside its own run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="needs torchtitan, of the extra `interop`")

from recipes import torchrun

SCRIPT = Path(__file__).parent / "run_torchtitan.py"
Row = tuple[float, float, float, float]


def run(how: str, folder: Path, last: int) -> list[Row]:
    """Step, loss, norm, and the norm of the gathered gradients in float64, of each step to ``last``."""
    lines = torchrun(SCRIPT, 4, how, str(folder), str(last)).splitlines()
    rows = [tuple(float(word) for word in line.split()) for line in lines if line[:1].isdecimal()]
    return [(step, loss, norm, exact) for step, loss, norm, exact in rows]


def test_losses_are_those_of_torchtitans_own_run_norms_exact_and_its_checkpoints_resume(tmp_path: Path) -> None:
    expected, found = (run(how, tmp_path / how, 10) for how in ("stock", "ours"))
    assert [row[0] for row in found] == [row[0] for row in expected] == [*range(1, 11)]
    for (_, loss, norm, exact), (_, own_loss, own_norm, _) in zip(found, expected, strict=True):
        assert loss == pytest.approx(own_loss, rel=2e-7)  # the last digit of a float32
        assert norm == pytest.approx(exact, rel=1e-6)
        assert own_norm == pytest.approx(exact, rel=1e-4)
    shutil.rmtree(tmp_path / "ours" / "checkpoint" / "step-10")
    assert run("ours", tmp_path / "ours", 10) == found[5:]
