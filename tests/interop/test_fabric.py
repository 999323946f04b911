"""Lightning Fabric with the recipe of docs/integrations/LIGHTNING_FABRIC.md, compared with the stock run."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lightning_fabric", reason="needs lightning-fabric, of the extra `interop`")

from recipes import recipe, torchrun

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


@pytest.mark.parametrize(("scaled", "fused"), [(False, False), (False, True), (True, False), (True, True)])
def test_lightning_trainer_recipe_clips_gradients_and_raises_if_they_are_still_scaled(
    scaled: bool, fused: bool
) -> None:
    """With a fused optimizer, Lightning's scaler unscales the gradients after clipping, so the recipe raises.

    A non-finite norm raises without a scaler only, because a scaler skips such a step.
    """
    clipping = recipe("LIGHTNING_FABRIC.md", "Inside the Trainer")["ExactClipping"]

    class Module(clipping, torch.nn.Linear):  # type: ignore[misc, valid-type]
        trainer = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=object() if scaled else None))

    module: Any = Module(2, 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, fused=fused)
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    if scaled and fused:
        with pytest.raises(ValueError, match="leave fused=True out"):
            module.configure_gradient_clipping(optimizer, 1.0)
        return
    module.configure_gradient_clipping(optimizer, 1.0)
    torch.testing.assert_close(module.weight.grad, torch.tensor([[0.6, 0.8]]))
    module.weight.grad = torch.tensor([[torch.inf, 4.0]])
    with nullcontext() if scaled else pytest.raises(RuntimeError, match="the gradients' norm of order"):
        module.configure_gradient_clipping(optimizer, 1.0)
