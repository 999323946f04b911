"""Steps with Lightning Fabric: stock, with the recipe, and resumed with the recipe: run_fabric.py FOLDER."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "harness"))

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision
from lightning_fabric.strategies import DDPStrategy
from recipes import in_turn, recipe
from torch import Tensor, nn

MAX_NORM = 0.05


def build_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))


def sgd(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5, momentum=0.9, fused=True)  # type: ignore[arg-type]


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return nn.functional.mse_loss(model(x), x[:, :3])


def main(how: str, folder: Path, first: int, last: int) -> None:
    folder = folder / how
    folder.mkdir(exist_ok=True)
    if how == "ours":
        fabric, model, optimizer = recipe("LIGHTNING_FABRIC.md")["set_up"](build_model, sgd, MAX_NORM)
    else:
        fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy())
        fabric.launch()
        model = fabric.setup_module(build_model())
        optimizer = fabric.setup_optimizers(sgd(model.parameters()))
    state = {"model": model, "optimizer": optimizer}
    if first:
        fabric.load(folder / f"{first}.ckpt", state)
    for step in range(first, last):
        optimizer.zero_grad()
        fabric.backward(loss_of(model, step, fabric.global_rank))
        if how == "stock":
            fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
    fabric.save(folder / f"{last}.ckpt", state)
    torch.save([param.detach() for param in model.parameters()], folder / f"{first} {last} {fabric.global_rank}.pt")


def check_scaled() -> None:
    """Assert that the recipe raises if Fabric has a scaler of its own, as with `precision="16-mixed"` on a GPU."""
    names = recipe("LIGHTNING_FABRIC.md")
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    names["Fabric"] = partial(Fabric, plugins=scaled)
    with pytest.raises(ValueError, match='use "bf16-mixed"'):
        names["set_up"](build_model, sgd, MAX_NORM)


if __name__ == "__main__":
    runs = [("stock", 0, 6), ("ours", 0, 6), ("ours", 0, 3), ("ours", 3, 6)]
    in_turn(*(partial(main, how, Path(sys.argv[1]), first, last) for how, first, last in runs), check_scaled)
