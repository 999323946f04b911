"""The documented Booster recipes, compared with one process and, for clipping, with plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from meshstep.amp import Mode
from meshstep.optim import Booster, CosineAnnealingLR, LinearWarmupLR
from small_models import classifier, dataset
from torch import nn
from torch.optim import lr_scheduler as torch_lr
from world import World

# The recipes ----------------------------------------------------------------------------------------------------------


def gradient_clipping(precision: Mode, data_parallel: Any) -> list[float]:
    """Clip by norm, with one schedule step per iteration and the model's own zero_grad. Return the losses."""
    model = classifier()
    criterion = nn.CrossEntropyLoss()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=5e-4)
    lr_scheduler = CosineAnnealingLR(optimizer, total_steps=12)

    booster = Booster(mixed_precision=precision, data_parallel=data_parallel)
    train_dataloader = booster.prepare_dataloader(dataset(), batch_size=12 // size(), shuffle=True)
    model, optimizer, criterion, train_dataloader, lr_scheduler = booster.boost(
        model, optimizer, criterion, train_dataloader, lr_scheduler
    )

    losses = []
    model.train()
    for _ in range(3):
        for img, label in train_dataloader:
            model.zero_grad()
            output = model(img)
            train_loss = criterion(output, label)
            booster.backward(train_loss, optimizer)
            optimizer.clip_grad_by_norm(max_norm=0.5)
            optimizer.step()
            lr_scheduler.step()
            losses.append(float(train_loss.detach()))
    return losses


def mixed_precision(precision: Mode, data_parallel: Any) -> list[float]:
    """Use a warm-up stepped once per epoch, and pass arguments by name. Return the losses."""
    model = classifier()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.03)
    lr_scheduler = LinearWarmupLR(optimizer, warmup_steps=1, total_steps=3)
    criterion = nn.CrossEntropyLoss()

    booster = Booster(mixed_precision=precision, data_parallel=data_parallel)
    train_dataloader = booster.prepare_dataloader(dataset(), batch_size=12 // size(), shuffle=True)
    model, optimizer, criterion, train_dataloader, lr_scheduler = booster.boost(
        model=model, optimizer=optimizer, lr_scheduler=lr_scheduler, criterion=criterion, dataloader=train_dataloader
    )

    losses = []
    model.train()
    for _ in range(3):
        for img, label in train_dataloader:
            optimizer.zero_grad()
            output = model(img)
            loss = criterion(output, label)
            booster.backward(loss, optimizer)
            optimizer.step()
            losses.append(float(loss.detach()))
        lr_scheduler.step()
    return losses


def gradient_accumulation(precision: Mode, data_parallel: Any) -> list[float]:
    """Accumulate 4 micro-batches per step with `no_sync`, without a schedule. Return the losses."""
    GRADIENT_ACCUMULATION = 4
    model = classifier()
    criterion = nn.CrossEntropyLoss()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    booster = Booster(mixed_precision=precision, data_parallel=data_parallel)
    train_dataloader = booster.prepare_dataloader(dataset(), batch_size=4 // size(), shuffle=True)
    model, optimizer, criterion, train_dataloader, _ = booster.boost(
        model=model, optimizer=optimizer, criterion=criterion, dataloader=train_dataloader
    )

    losses = []
    model.train()
    optimizer.zero_grad()
    for _ in range(3):
        for idx, (img, label) in enumerate(train_dataloader):
            sync_context = booster.no_sync(model)
            if (idx + 1) % GRADIENT_ACCUMULATION != 0:
                with sync_context:
                    output = model(img)
                    train_loss = criterion(output, label)
                    train_loss = train_loss / GRADIENT_ACCUMULATION
                    booster.backward(train_loss, optimizer)
            else:
                output = model(img)
                train_loss = criterion(output, label)
                train_loss = train_loss / GRADIENT_ACCUMULATION
                booster.backward(train_loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(train_loss.detach()) * GRADIENT_ACCUMULATION)
    return losses


RECIPES: list[Callable[[Mode, Any], list[float]]] = [gradient_clipping, mixed_precision, gradient_accumulation]


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("precision", "data_parallel"), [("fp32", "ddp"), ("fp16", "zero1"), ("fp16", "ddp")])
def test_booster_recipe_on_two_ranks_has_loss_curve_of_one_process(
    recipe: Callable[[Mode, Any], list[float]], precision: Mode, data_parallel: Any, world: World
) -> None:
    one = torch.tensor(recipe(precision, data_parallel))
    two = torch.tensor(world.run(2, recipe, precision, data_parallel)).mean(0)
    assert one[-4:].mean() < 0.6 * one[:4].mean(), "the loss must decrease"
    torch.testing.assert_close(two, one, rtol=2e-5 if precision == "fp32" else 5e-3, atol=1e-4)


def test_booster_clipping_recipe_matches_plain_torch() -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=5e-4)
    schedule = torch_lr.CosineAnnealingLR(optimizer, 12)
    loader = Booster().prepare_dataloader(dataset(), batch_size=12, shuffle=True)
    losses = []
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
    assert gradient_clipping("fp32", "ddp") == pytest.approx(losses, rel=1e-5)


def test_boost_without_optimizer_casts_model_and_returns_none_for_other_objects() -> None:
    model, *others = Booster("bf16").boost(classifier())
    assert others == [None] * 4
    assert model(torch.ones(2, 6)).dtype == torch.bfloat16
