"""A training loop of accelerate with the recipe of docs/integrations/ACCELERATE.md, compared with the stock run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="needs accelerate, of the extra `interop`")
pytest.importorskip("transformers", reason="needs transformers, of the extra `interop`")

from recipes import torchrun
from transformers_models import made

SCRIPT = Path(__file__).parent / "run_accelerate.py"


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("accelerate")
    made("qwen3").save_pretrained(folder / "model")
    torchrun(SCRIPT, 2, str(folder), str(folder / "model"))
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("model", ["replicated", "sharded"])
def test_accelerate_recipe_equals_stock_run_and_resumes(by_rank: list[dict[str, Any]], model: str) -> None:
    for found in by_rank:
        runs = found[model]
        (expected_norms, expected), (norms, weights), (later, resumed) = (
            runs[how] for how in ("stock", "ours", "resumed")
        )
        assert norms == pytest.approx(expected_norms, rel=1e-6)
        assert min(norms) > 0.1, "every step should clip"
        for one, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
        assert later == norms[len(norms) // 2 :]
        assert all(torch.equal(one, other) for one, other in zip(resumed, weights, strict=True))


def test_accelerate_clip_by_value_equals_stock_and_infinite_max_norm_uses_optimizer_max_norm(
    by_rank: list[dict[str, Any]],
) -> None:
    for found in by_rank:
        (value, stock_value), (norm, clipped), stock_norm = found["other clips"]
        assert all(torch.equal(one, other) for one, other in zip(value, stock_value, strict=True))
        assert max(float(grad.abs().max()) for grad in value) == pytest.approx(0.01)
        assert norm == pytest.approx(stock_norm, rel=1e-6)
        assert norm > clipped == pytest.approx(0.05, rel=1e-4)


def test_accelerate_norm_is_exact_on_two_meshes_but_wrong_for_column_parallel_layer(
    by_rank: list[dict[str, Any]],
) -> None:
    for found in by_rank:
        for norm, exact, clipped in found["two meshes"].values():
            assert norm == pytest.approx(exact, rel=1e-6)
            assert float(torch.nn.utils.get_total_norm(clipped)) == pytest.approx(0.05, rel=1e-4)
    own, others = (found["sharded by hand"] for found in by_rank)
    assert own[1] == others[1] == pytest.approx((own[0] ** 2 + others[0] ** 2) ** 0.5, rel=1e-6)
    assert max(own[0], others[0]) < 0.98 * own[1]


def test_wrong_use_with_accelerate_raises_clear_errors_on_every_rank(by_rank: list[dict[str, Any]]) -> None:
    for found in by_rank:
        told = found["told"]
        assert "accelerate steps this optimizer" in told["clips by itself"]
        assert "call meshstep.optim.take_over_clipping(accelerator, optimizer)" in told["clips by itself"]
        assert "write `if accelerator.sync_gradients:` before the call" in told["in a window"]
        assert "1 of the optimizer's 4 parameters are not passed to the clip function" in told["some parameters"]
        assert "leave accumulation_steps= of ParallelOptimizer out" in told["windows of both"]
        for when in ("later", "before"):
            told_when = told[f"wrapped {when}"]
            assert (
                "parameter 0 of group 0 (shape (sharded, 6)) is in a DistributedDataParallel over the ranks [0, 1]"
                in told_when
            )
        assert 'give the accelerator "bf16" or "no"' in told["a loss scale"]
        assert "take_over_clipping(..., SGD): give the ParallelOptimizer" in told["no optimizer of ours"]
        assert "take_over_clipping(ColumnParallelLinear, ...): give an Accelerator" in told["no accelerator"]
