"""The documented recipes with the Booster, LR schedules that are handed over, and combinations that cannot work."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from meshstep.amp import NaiveFp16
from meshstep.optim import Booster, CosineAnnealingLR, LinearWarmupLR, ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from torch import Tensor, nn
from torch.optim import lr_scheduler as torch_lr
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from world import World


def dataset(count: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(count, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


# The recipes ----------------------------------------------------------------------------------------------------------


def gradient_clipping(precision: str, data_parallel: Any) -> list[float]:
    """Clip by norm; one schedule step an iteration. The model's own zero_grad is as good as the optimizer's."""
    model = build()
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


def mixed_precision(precision: str, data_parallel: Any) -> list[float]:
    """A warm-up, stepped once an epoch; arguments by name."""
    model = build()
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


def gradient_accumulation(precision: str, data_parallel: Any) -> list[float]:
    """Windows of 4 by hand, without the schedule."""
    GRADIENT_ACCUMULATION = 4
    model = build()
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


RECIPES: list[Callable[[str, Any], list[float]]] = [gradient_clipping, mixed_precision, gradient_accumulation]


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("precision", "data_parallel"), [("fp32", "ddp"), ("fp16", "zero1"), ("fp16", "ddp")])
def test_a_recipe_on_two_ranks_has_the_curve_of_one(
    recipe: Callable[[str, Any], list[float]], precision: str, data_parallel: Any, world: World
) -> None:
    one = torch.tensor(recipe(precision, data_parallel))
    two = torch.tensor(world.run(2, recipe, precision, data_parallel)).mean(0)
    assert one[-4:].mean() < 0.6 * one[:4].mean(), "it should learn"
    torch.testing.assert_close(two, one, rtol=2e-5 if precision == "fp32" else 5e-3, atol=1e-4)


def test_the_clipping_recipe_is_plain_torch() -> None:
    model = build()
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


def test_a_model_alone_is_prepared_for_evaluation() -> None:
    model, optimizer, criterion, loader, schedule = Booster("bf16").boost(build())
    assert (optimizer, criterion, loader, schedule) == (None,) * 4
    assert model(torch.ones(2, 6)).dtype == torch.bfloat16


# Schedules ------------------------------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: torch_lr.StepLR(optimizer, 2, 0.5),
    "lambda": lambda optimizer: torch_lr.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one cycle": lambda optimizer: torch_lr.OneCycleLR(optimizer, 0.3, total_steps=20),
    "sequence": lambda optimizer: torch_lr.SequentialLR(
        optimizer, [torch_lr.LinearLR(optimizer), torch_lr.ExponentialLR(optimizer, 0.7)], [3]
    ),
    "chain": lambda optimizer: torch_lr.ChainedScheduler(
        [torch_lr.ConstantLR(optimizer, 0.5, 2), torch_lr.ExponentialLR(optimizer, 0.9)]
    ),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 9, warmup_steps=2),
}


def rates(
    schedule: Any, optimizer: torch.optim.Optimizer, model: nn.Module, booster: Booster | None
) -> Iterator[float]:
    for _ in range(6):
        loss = model(torch.ones(2, 6)).square().mean()
        if booster is None:
            loss.backward()
        else:
            assert isinstance(optimizer, ParallelOptimizer)
            booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        yield optimizer.param_groups[0]["lr"]
        schedule.step()


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_schedule_goes_on_as_without_the_booster(kind: str, precision: str) -> None:
    """Also where masters take the place of the parameters whose rates it writes."""
    model, dense = build(), build()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(dense.parameters(), lr=0.1, momentum=0.9)
    expected = list(rates(SCHEDULES[kind](plain), plain, dense, None))
    booster = Booster(precision)
    model, optimizer, _, _, schedule = booster.boost(model, optimizer, lr_scheduler=SCHEDULES[kind](optimizer))
    assert list(rates(schedule, optimizer, model, booster)) == expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize("fused", [True, False])
def test_no_warning_where_the_first_steps_are_skipped(fused: bool) -> None:
    """torch's schedules move all the same, as they do beside GradScaler; ours wait for a step."""
    model = build()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    booster = Booster(NaiveFp16(init_scale=2.0**40))
    theirs, ours = torch_lr.StepLR(optimizer, 1, 0.5), LinearWarmupLR(optimizer, 10, 2)
    model, optimizer, _, _, theirs = booster.boost(model, optimizer, lr_scheduler=theirs)
    ours.watch(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            booster.backward(model(torch.ones(2, 6)).square().mean(), optimizer)
            optimizer.step()
            theirs.step()
            ours.step()
    assert optimizer.skipped_steps == 3
    assert theirs.last_epoch == 3
    assert ours.last_epoch == 0


def test_no_warning_in_the_middle_of_a_window() -> None:
    model = build()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    booster = Booster(accumulation_steps=3)
    ours: Any = LinearWarmupLR(sgd, 10, 2)
    model, optimizer, _, _, ours = booster.boost(model, sgd, lr_scheduler=ours)
    for _ in range(7):
        booster.backward(model(torch.ones(2, 6)).square().mean(), optimizer)
        optimizer.step()
        ours.step()
        optimizer.zero_grad()
    assert ours.last_epoch == 2


@pytest.mark.parametrize("way", ["norm", "value"])
@pytest.mark.parametrize("micro_batches", [2, 5])
def test_clipping_called_in_every_micro_batch_waits_for_the_window(way: str, micro_batches: int) -> None:
    """A window of 3, ended early or by the third; then two more, ended early too: torch clips once a window."""
    model, dense = build(), build()
    sgd, plain = (torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (model, dense))
    booster = Booster(accumulation_steps=3)
    _, optimizer, _, _, _ = booster.boost(model, sgd)
    inputs = torch.randn(micro_batches, 4, 6, generator=torch.Generator().manual_seed(5))
    for index, x in enumerate(inputs):
        booster.backward(model(x).square().mean(), optimizer)
        stats = optimizer.clip_grad_by_norm(0.1) if way == "norm" else optimizer.clip_grad_by_value(0.02)
        assert (stats is None) == (index != 2)
        optimizer.step(last=index == micro_batches - 1)
        optimizer.zero_grad()
    for part in inputs.split(3):
        plain.zero_grad()
        dense(part.flatten(0, 1)).square().mean().backward()
        if way == "norm":
            assert nn.utils.clip_grad_norm_(dense.parameters(), 0.1) > 0.1
        else:
            nn.utils.clip_grad_value_(dense.parameters(), 0.02)
        plain.step()
    for param, expected in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-5, atol=1e-7)


def test_torch_still_warns_of_a_wrong_order() -> None:
    model = build()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, _, _, schedule = Booster().boost(model, sgd, lr_scheduler=torch_lr.StepLR(sgd, 2))
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step"):
        schedule.step()


# What does not fit together -------------------------------------------------------------------------------------------


def boost(*_: object, **changes: Any) -> Any:
    """Boost a small model; ``changes`` to the arguments of boost and, the rest, of Booster."""
    model = changes.pop("model", None) or build()
    optimizer = changes.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    given = {name: changes.pop(name) for name in ("criterion", "dataloader", "lr_scheduler") if name in changes}
    return Booster(**changes).boost(model, optimizer, **given)


def boosted_optimizer() -> torch.optim.Optimizer:
    return boost()[1]  # type: ignore[no-any-return]


def other_schedule() -> Any:
    return torch_lr.StepLR(torch.optim.SGD(build().parameters(), lr=0.1), 2)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (ValueError, lambda: {"mixed_precision": "half"}, "precision='half' is no mode; give one of 'fp32'"),
        (ValueError, lambda: {"data_parallel": "zero3"}, "data_parallel='zero3': give one of 'ddp', 'zero1'"),
        (ValueError, lambda: {"max_norm": -1.0}, "max_norm"),
        (ValueError, lambda: {"accumulation_steps": 0}, "accumulation_steps=0: give a whole number"),
        (TypeError, lambda: {"precision": "fp16"}, "precision= is ParallelOptimizer's; here it is mixed_precision"),
        (TypeError, lambda: {"shard_states": "data"}, "here it is data_parallel='zero1'"),
        (TypeError, lambda: {"clip": 1.0}, "clip= is no argument of Booster, and none of ParallelOptimizer: accum"),
        (TypeError, lambda: {"optimizer": boosted_optimizer()}, "optimizer is a ParallelOptimizer; give a plain torch"),
        (ValueError, lambda: {"optimizer": torch.optim.SGD(build().parameters())}, "4 of the optimizer's parameters"),
        (ValueError, lambda: {"lr_scheduler": other_schedule()}, "StepLR was made on another SGD than the one given"),
        (TypeError, lambda: {"lr_scheduler": 3}, "lr_scheduler is a int; give one of torch's or meshstep's"),
        (ValueError, lambda: {"model": Booster("bf16").boost(build())[0]}, "has been prepared for 'bf16' already"),
    ],
)
def test_wrong_arguments(kind: type[Exception], changes: Callable[[], dict[str, Any]], message: str) -> None:
    with pytest.raises(kind, match=message):
        boost(**changes())


def test_a_schedule_needs_its_optimizer() -> None:
    with pytest.raises(ValueError, match="lr_scheduler is given without the optimizer"):
        Booster().boost(build(), None, lr_scheduler=other_schedule())  # type: ignore[call-overload]


def test_backward_and_no_sync_take_what_boost_returned() -> None:
    model = build()
    sgd: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    booster = Booster()
    booster.boost(model, sgd)
    with pytest.raises(TypeError, match="optimizer is a SGD; give the one that boost returned"):
        booster.backward(model(torch.ones(1, 6)).sum(), sgd)
    with pytest.raises(ValueError, match="the model or the optimizer that boost returned"):
        booster.no_sync(build())


def test_torchrun_without_init_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match=r"torchrun started 4 processes.*call meshstep.parallel.launch.init_dist"):
        Booster()


def first_words(
    axes: dict[str, int], how: str, data_parallel: Any, roles: dict[str, Any] | None = None
) -> tuple[str, bool]:
    """The error, and whether the model was left alone."""
    with ProcessGroupRegistry(Topology(roles=roles, **axes)) as registry:
        model = build()
        before = [param.clone() for param in model.parameters()]
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader: Any = None
        if how == "split":
            annotate(model[0].weight, P("data"), "0.weight")  # type: ignore[index]
        elif how == "stepped":
            model(torch.ones(1, 6)).sum().backward()
            optimizer.step()
            before = [param.clone() for param in model.parameters()]
        elif how == "wrapped":
            model = nn.parallel.DistributedDataParallel(model)
        elif how == "shuffled":
            loader = DataLoader(dataset(), batch_size=4, shuffle=True)
        elif how == "world":
            loader = DataLoader(dataset(), batch_size=4, sampler=DistributedSampler(dataset()))
        elif how == "rank 1" and dist.get_rank() == 1:
            optimizer = torch.optim.SGD(build().parameters(), lr=0.1)
        try:
            Booster("bf16", registry, data_parallel).boost(model, optimizer, None, loader)
        except ValueError as error:
            return str(error), all(map(torch.equal, before, model.parameters()))
        return "no error", False


WRONG: list[tuple[dict[str, int], str, Any, str]] = [
    ({"tensor": 2}, "", "ddp", "data_parallel='ddp' needs a data axis.*or name an axis 'data'"),
    ({"tensor": 2}, "", None, "no spec for 0.weight, 0.bias.*say how each parameter is laid out"),
    ({"data": 2}, "split", "ddp", r"0.weight is declared P\('data'\), which names 'data': take data_parallel=None"),
    ({"data": 2}, "split", "fsdp", "treats all parameters alike over the data axes"),
    ({"data": 2}, "stepped", "fsdp", "has state of the old ones: boost it before its first step"),
    ({"data": 2}, "wrapped", "ddp", "a DistributedDataParallel is data parallel already; give the bare model"),
    (
        {"data": 2},
        "shuffled",
        None,
        "each of the 2 data ranks would see all of the loader's samples; make the loader w",
    ),
    ({"tensor": 2}, "world", None, "DistributedSampler is part [01] of 2, but this rank is data coordinate 0 of 1"),
    ({"data": 2}, "rank 1", "ddp", "of the optimizer's parameters are not the model's"),
]


@pytest.mark.parametrize(("axes", "how", "data_parallel", "message"), WRONG, ids=lambda item: str(item)[:20])
def test_a_combination_that_cannot_work(
    axes: dict[str, int], how: str, data_parallel: Any, message: str, world: World
) -> None:
    """An error on every rank that says which one does; nothing is changed."""
    for text, untouched in world.run(2, first_words, axes, how, data_parallel):
        assert re.search(message, text), text
        assert untouched


def one_sampler_a_rank() -> Tensor:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        sampler: Any = DistributedSampler(dataset(), shuffle=False)
        model = build()
        loader = DataLoader(dataset(), batch_size=4, sampler=sampler)
        _, _, _, loader, _ = Booster("fp32", registry).boost(model, torch.optim.SGD(model.parameters()), None, loader)
        return torch.cat([x for x, _ in loader])


def test_a_distributed_sampler_over_the_data_axes_is_right(world: World) -> None:
    assert len(torch.cat(world.run(2, one_sampler_a_rank)).unique(dim=0)) == 48
