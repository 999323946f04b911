"""Epochs of the training loop of timm: stock, with the recipe, and resumed with the recipe: run_timm.py FOLDER."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "harness"))

import torch
from recipes import in_turn, recipe
from timm.models import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, NativeScaler
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

MAX_NORM, EPOCHS = 0.5, 4


def batches(epoch: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(10 * epoch + torch.distributed.get_rank())
    return [
        (torch.randn(4, 3, 32, 32, generator=generator), torch.randint(5, (4,), generator=generator)) for _ in range(2)
    ]


def main(how: str, folder: Path, first: int, last: int) -> None:
    torch.distributed.init_process_group("gloo")
    folder = folder / how
    folder.mkdir(exist_ok=True)
    torch.manual_seed(3)
    sizes = {"embed_dim": 16, "depth": 2, "num_heads": 2, "img_size": 32, "patch_size": 8, "num_classes": 5}
    model: nn.Module = create_model("vit_tiny_patch16_224", **sizes)
    loss_of = nn.functional.cross_entropy
    steps = recipe("TIMM.md")
    if how == "ours":
        optimizer, schedule, scaler, average = steps["set_up"](model, MAX_NORM, EPOCHS)
        train = steps["train_one_epoch"]
    else:
        optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-2, weight_decay=0.05)
        schedule = CosineLRScheduler(optimizer, t_initial=EPOCHS, warmup_t=1, warmup_lr_init=1e-3)
        scaler, average, wrapped = NativeScaler("cpu"), ModelEmaV3(model, decay=0.9), DistributedDataParallel(model)

        def train(model: nn.Module, pairs: list[tuple[Tensor, Tensor]], *_: object) -> None:
            for inputs, targets in pairs:
                optimizer.zero_grad()
                loss = loss_of(wrapped(inputs), targets)
                scaler(loss, optimizer, clip_grad=MAX_NORM, parameters=model.parameters())
                average.update(model)

    parts = {"model": model, "optimizer": optimizer, "scaler": scaler, "schedule": schedule, "average": average}
    if first:
        for name, state in torch.load(folder / f"{first}.pt").items():
            parts[name].load_state_dict(state)
    for epoch in range(first, last):
        train(model, batches(epoch), loss_of, optimizer, scaler, average)
        schedule.step(epoch + 1)
    if torch.distributed.get_rank() == 0:
        torch.save({name: part.state_dict() for name, part in parts.items()}, folder / f"{last}.pt")
    weights = {"model": model.state_dict(), "average": average.module.state_dict()}
    torch.save(weights, folder / f"{first} {last} {torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    runs = [("stock", 0, 4), ("ours", 0, 4), ("ours", 0, 2), ("ours", 2, 4)]
    in_turn(*(partial(main, how, Path(sys.argv[1]), first, last) for how, first, last in runs))
