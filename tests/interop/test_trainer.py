"""The Trainer of Transformers with the recipe of docs/integrations/TRANSFORMERS.md, compared with stock runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers, of the extra `interop`")
pytest.importorskip("accelerate", reason="needs accelerate, of the extra `interop`")

from recipes import torchrun
from trainer_runs import MAX_NORM, run
from transformers_models import made

SCRIPT = Path(__file__).parent / "run_trainer.py"
Run = tuple[list[float], dict[str, Tensor]]


def assert_close(found: Run, expected: Run) -> None:
    assert min(expected[0]) > MAX_NORM, "every step should clip"
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight, rtol=0, atol=1e-5, msg=name)


def test_trainer_recipe_equals_stock_run_and_resumes(tmp_path: Path) -> None:
    """The logged norm is the global one, also under tensor parallelism, where a q_norm has a partial gradient."""
    path = tmp_path / "model"
    made("qwen3").save_pretrained(path)
    torchrun(SCRIPT, 2, str(path), str(tmp_path))
    alone = run(str(path), tmp_path / "alone", False)
    for rank in range(2):
        found: dict[str, Run] = torch.load(tmp_path / f"{rank}.pt")
        assert_close(found["whole"], found["stock"])
        assert_close(found["sharded"], found["stock, sharded"])
        assert_close(found["tensor parallel"], alone)
        for how in ("whole", "sharded"):
            resumed, at_once = found[f"{how}, resumed"], found[how]
            assert resumed[0] == at_once[0]
            assert all(torch.equal(resumed[1][name], weight) for name, weight in at_once[1].items())
