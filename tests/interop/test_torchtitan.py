"""The trainer of torchtitan with the recipe of docs/integrations/TORCHTITAN.md, compared with the stock run."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="needs torchtitan, of the extra `interop`")

from recipes import torchrun

SCRIPT = Path(__file__).parent / "run_torchtitan.py"
Row = tuple[float, float, float, float]


def rows(how: str, printed: str) -> list[Row]:
    """Return step, loss, norm, and float64 norm of the gathered gradients for each step of a run."""
    lines = [line.split() for line in printed.splitlines()]
    found = [tuple(float(word) for word in numbers) for run, *numbers in filter(None, lines) if run == how]
    return [(step, loss, norm, exact) for step, loss, norm, exact in found]


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("layout", ["fsdp x tp", "hsdp", "pp x fsdp"])
def test_torchtitan_recipe_equals_stock_run_with_exact_norms_and_resumes(tmp_path: Path, layout: str) -> None:
    printed = torchrun(SCRIPT, 4, str(tmp_path), layout)
    expected, found, resumed = (rows(how, printed) for how in ("stock", "ours", "resumed"))
    assert [row[0] for row in found] == [row[0] for row in expected] == [*range(1, 5)]
    for (_, loss, norm, exact), (_, own_loss, own_norm, _) in zip(found, expected, strict=True):
        assert loss == pytest.approx(own_loss, rel=2e-7)  # the last digit of a float32
        assert norm == pytest.approx(exact, rel=1e-6)
        assert own_norm == pytest.approx(exact, rel=1e-4)
    assert resumed == found[2:]


def test_torchtitan_recipe_for_expert_parallelism_gives_exact_norms(tmp_path: Path) -> None:
    printed = torchrun(SCRIPT, 4, str(tmp_path), "fsdp x ep")
    expected, found = rows("stock", printed), rows("ours", printed)
    assert [row[0] for row in found] == [row[0] for row in expected] == [1, 2]
    for (_, loss, norm, exact), (_, own_loss, own_norm, _) in zip(found, expected, strict=True):
        assert exact > 1.0, "every step should clip"
        assert loss == pytest.approx(own_loss, rel=1e-5)  # AdamW and the routing amplify the last digit of the norm
        assert norm == pytest.approx(exact, rel=1e-6)
        assert own_norm == pytest.approx(exact, rel=1e-4)
