"""Mistakes with numbers: clipping, learning rates and schedules, precision modes and loss scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
import torch
from meshstep.amp import GradScaler, precision_of
from meshstep.optim import (
    ReplicaMismatchError,
    Skip,
)
from mistakes import BATCH, LR, MAX_NORM, AsTorch, Dense, Error, Mistake, Right, Run, Warned, cases_of, check, mistake
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from world import World

# Clipping -------------------------------------------------------------------------------------------------------------


@mistake("data=2", Error(TypeError, "max_norm='1.0'"), write="write `max_norm=1.0`")
def max_norm_as_text(run: Run) -> None:
    """A text as threshold: `max_norm="1.0"`."""
    run.optimizer(max_norm="1.0")


@mistake("data=2", Error(TypeError, "max_norm=True"), write="write `max_norm=1.0`")
def max_norm_true(run: Run) -> None:
    """`max_norm=True`."""
    run.optimizer(max_norm=True)


@mistake("data=2", Error(ValueError, "max_norm=0"), write="write `max_norm=None` to measure only")
def max_norm_zero(run: Run) -> None:
    """`max_norm=0`, which disables clipping in other libraries."""
    run.optimizer(max_norm=0)


@mistake("data=2", Error(ValueError, "max_norm=-1"), write="pass a threshold > 0")
def max_norm_negative(run: Run) -> None:
    """`max_norm=-1.0`."""
    run.optimizer(max_norm=-1.0)


@mistake("data=2", Error(ValueError, "max_norm ... rank 0 ... rank 1"), write="pass the same threshold on every rank")
def max_norm_differs(run: Run) -> None:
    """Different `max_norm` on different ranks."""
    run.optimizer(max_norm=1.0 + run.rank)


@mistake("data=2", Error(RuntimeError, "max_norm"), write="set it on every rank")
def max_norm_changed_on_one_rank(run: Run) -> None:
    """`optimizer.max_norm = ...` between two steps, on one rank only."""
    optimizer = run.optimizer()
    for step in range(20):
        if step == 1 and run.rank == 1:
            optimizer.max_norm = 0.1
        run.train(optimizer, [step])


@mistake("data=2", Error(RuntimeError, "max_norm"), write="set it in the constructor, or in all groups on every rank")
def group_threshold_changed_on_one_rank(run: Run) -> None:
    """A change of `param_groups[0]["max_norm"]` between two steps, on one rank only."""
    optimizer = run.optimizer()
    for step in range(20):
        if step == 1 and run.rank == 1:
            optimizer.param_groups[0]["max_norm"] = 0.1
        run.train(optimizer, [step])


@mistake(
    "data=2", Error(RuntimeError, "clip_grad_by_norm", left_out=(1,)), write="pass the same threshold on every rank"
)
def explicit_threshold_differs(run: Run) -> None:
    """`clip_grad_by_norm(threshold)` with a threshold that differs between ranks."""
    optimizer = run.optimizer(max_norm=None)
    for step in range(20):
        optimizer.zero_grad()
        optimizer.backward(run.loss(step))
        optimizer.clip_grad_by_norm(0.5 + run.rank if step == 1 else MAX_NORM)
        optimizer.step()


@mistake("data=2", Error(RuntimeError, "clip_grad_by_norm", left_out=(1,)), write="call it on every rank")
def explicit_clipping_on_one_rank(run: Run) -> None:
    """`clip_grad_by_norm()` on rank 0 only."""
    optimizer = run.optimizer()
    for step in range(20):
        optimizer.zero_grad()
        optimizer.backward(run.loss(step))
        if run.rank == 0 and step == 1:
            optimizer.clip_grad_by_norm(0.5)
        optimizer.step()


@mistake("data=2,tensor=2", Right(), write="the explicit threshold replaces `max_norm=` in that step")
def explicit_clipping_beside_max_norm(run: Run) -> None:
    """`clip_grad_by_norm()` of an optimizer that was created with `max_norm=`."""
    optimizer = run.optimizer(max_norm=0.5)
    for step in range(3):
        optimizer.zero_grad()
        optimizer.backward(run.loss(step))
        optimizer.clip_grad_by_norm(MAX_NORM)
        optimizer.step()


def clipped_twice_in_torch(dense: Dense) -> None:
    for step in range(3):
        dense.sgd.zero_grad()
        dense.backward(step)
        nn.utils.clip_grad_norm_(dense.model.parameters(), MAX_NORM)
        dense.step()


@mistake("data=2,tensor=2", Right(clipped_twice_in_torch), write="one call is enough")
def clipped_twice(run: Run) -> None:
    """`clip_grad_by_norm()` twice in one step."""
    optimizer = run.optimizer(max_norm=None)
    for step in range(3):
        optimizer.zero_grad()
        optimizer.backward(run.loss(step))
        optimizer.clip_grad_by_norm(MAX_NORM)
        optimizer.clip_grad_by_norm(MAX_NORM)
        optimizer.step()


def clipped_on_each_rank(dense: Dense, clip: Callable[[Iterable[Tensor]], object], micro_batches: int = 1) -> None:
    """Clip the gradient of each of two ranks after every micro-batch, before the average."""
    params, rows = list(dense.model.parameters()), BATCH // 2 // micro_batches
    for step in range(3):
        total = [torch.zeros_like(param) for param in params]
        for rank in range(2):
            dense.sgd.zero_grad()
            for part in range(rank * micro_batches, (rank + 1) * micro_batches):
                dense.backward(step, rows=slice(part * rows, (part + 1) * rows))
                clip(params)
            for mean, param in zip(total, params, strict=True):
                mean += param.grad / 2 / micro_batches  # type: ignore[operator]
        for mean, param in zip(total, params, strict=True):
            param.grad = mean
        dense.step()


def clipped_by_norm_on_each_rank(dense: Dense) -> None:
    clipped_on_each_rank(dense, lambda params: nn.utils.clip_grad_norm_(params, 0.5))


def clipped_by_norm_in_windows(dense: Dense) -> None:
    clipped_on_each_rank(dense, lambda params: nn.utils.clip_grad_norm_(params, 0.5), micro_batches=2)


def clipped_by_value_on_each_rank(dense: Dense) -> None:
    clipped_on_each_rank(dense, lambda params: nn.utils.clip_grad_value_(params, 0.1))


WRITTEN = (
    "written to between backward and step, as by torch.nn.utils.clip_grad_norm_ ... give ParallelOptimizer max_norm="
)


@mistake(
    "data=2,tensor=2",
    Warned(
        WRITTEN,
        Error(ReplicaMismatchError, "the gradient differs ... use max_norm= instead of torch.nn.utils.clip_grad_norm_"),
    ),
    write="remove it, and pass `max_norm=`",
)
def torch_clipping_on_shards(run: Run) -> None:
    """`torch.nn.utils.clip_grad_norm_` in the loop, with a sharded model."""
    optimizer = run.optimizer()
    for step in range(3):
        optimizer.zero_grad()
        optimizer.backward(run.loss(step))
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        optimizer.step()


@mistake("data=2", Warned(WRITTEN, Right(clipped_by_norm_on_each_rank)), write="remove it, and pass `max_norm=`")
def torch_clipping_on_replicas(run: Run) -> None:
    """`torch.nn.utils.clip_grad_norm_` in the loop, with replicas: it clips before the average."""
    optimizer = run.optimizer()
    for step in range(3):
        optimizer.zero_grad()
        optimizer.backward(run.loss(step))
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        optimizer.step()


@mistake(
    "data=2", Warned(WRITTEN, Right(clipped_by_value_on_each_rank)), write="remove it, and pass `max_norm=ByValue(...)`"
)
def torch_clipping_by_value_on_replicas(run: Run) -> None:
    """`torch.nn.utils.clip_grad_value_` in the loop, with replicas: it clips before the average."""
    optimizer = run.optimizer()
    for step in range(3):
        optimizer.zero_grad()
        optimizer.backward(run.loss(step))
        nn.utils.clip_grad_value_(run.model.parameters(), 0.1)
        optimizer.step()


@mistake("data=2", Warned(WRITTEN, Right(clipped_by_norm_in_windows)), write="remove it, and pass `max_norm=`")
def torch_clipping_after_every_micro_batch(run: Run) -> None:
    """torch's clipping after every micro-batch of a window."""
    optimizer = run.optimizer(accumulation_steps=2)
    for step in range(3):
        for part in (0, 1):
            optimizer.backward(run.loss(step, 2, part))
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


@mistake(
    "data=2",
    Error(RuntimeError, "a clip was called before optimizer.backward ... call optimizer.backward(loss) first"),
    write="call `backward`, then `clip_grad_by_norm`, then `step`",
)
def clipped_before_backward(run: Run) -> None:
    """`clip_grad_by_norm()` before the first `backward()`."""
    optimizer = run.optimizer(max_norm=None)
    optimizer.clip_grad_by_norm(MAX_NORM)
    optimizer.backward(run.loss(0))


# Learning rates -------------------------------------------------------------------------------------------------------


def decayed(dense: Dense) -> None:
    for step in range(3):
        dense.train([step])
        dense.sgd.param_groups[0]["lr"] *= 0.5


@mistake("data=2", Right(decayed), write="both optimizers share their param groups")
def schedule_of_the_inner_optimizer(run: Run) -> None:
    """A torch schedule created with the wrapped optimizer."""
    sgd = run.sgd()
    optimizer, schedule = run.optimizer(sgd), StepLR(sgd, 1, gamma=0.5)
    for step in range(3):
        run.train(optimizer, [step])
        schedule.step()


@mistake("data=2", Right(decayed), write="both optimizers share their param groups")
def schedule_made_before_the_optimizer(run: Run) -> None:
    """A torch schedule created with the torch optimizer before you wrap it."""
    sgd = run.sgd()
    schedule = StepLR(sgd, 1, gamma=0.5)
    optimizer = run.optimizer(sgd)
    for step in range(3):
        run.train(optimizer, [step])
        schedule.step()


@mistake("data=2", Right(decayed), write="both optimizers share their param groups")
def learning_rate_of_the_inner_optimizer(run: Run) -> None:
    """A learning rate set in the wrapped optimizer's `param_groups`."""
    sgd = run.sgd()
    optimizer = run.optimizer(sgd)
    for step in range(3):
        run.train(optimizer, [step])
        sgd.param_groups[0]["lr"] *= 0.5


def decayed_per_micro_batch(dense: Dense) -> None:
    dense.sgd.param_groups[0]["lr"] *= 0.5
    for step in range(3):
        dense.train([step])
        dense.sgd.param_groups[0]["lr"] *= 0.25


@mistake(
    "data=2",
    AsTorch(decayed_per_micro_batch),
    write="call `schedule.step()` only if `stats = optimizer.step()` is not None",
)
def schedule_stepped_for_every_micro_batch(run: Run) -> None:
    """`schedule.step()` of a torch schedule after every micro-batch of a window."""
    optimizer = run.optimizer(accumulation_steps=2)
    schedule = StepLR(optimizer, 1, gamma=0.5)
    for step in range(3):
        for part in (0, 1):
            optimizer.backward(run.loss(step, 2, part))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()


def one_step_skipped(dense: Dense) -> None:
    for step in range(3):
        if step != 1:
            dense.train([step])
        dense.sgd.param_groups[0]["lr"] *= 0.5


@mistake("data=2", AsTorch(one_step_skipped), write="use a schedule of `meshstep.optim`, or `HoldOnSkip(schedule)`")
def schedule_stepped_with_a_skipped_step(run: Run) -> None:
    """`schedule.step()` of a torch schedule after a skipped step."""
    optimizer = run.optimizer()
    schedule = StepLR(optimizer, 1, gamma=0.5)
    for step in range(3):
        optimizer.zero_grad()
        optimizer.backward(run.loss(step) * (math.inf if step == 1 else 1.0))
        optimizer.step()
        schedule.step()


@mistake(
    "data=2",
    Error(RuntimeError, "lr"),
    write="reduce the loss over the ranks first",
)
def plateau_schedule_on_local_losses(run: Run) -> None:
    """`ReduceLROnPlateau` with each rank's own loss."""
    optimizer = run.optimizer()
    schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for step in range(20):
        run.train(optimizer, [step])
        schedule.step(step if run.rank == 0 else -step)


@mistake("data=2", Error(RuntimeError, "lr"), write="set it on every rank")
def learning_rate_changed_on_one_rank(run: Run) -> None:
    """A learning rate changed on rank 0 only."""
    optimizer = run.optimizer()
    for step in range(20):
        if step == 1 and run.rank == 0:
            optimizer.param_groups[0]["lr"] *= 0.5
        run.train(optimizer, [step])


@mistake("data=2", Error(RuntimeError, "weight_decay"), write="set it on every rank")
def weight_decay_changed_on_one_rank(run: Run) -> None:
    """A weight decay changed on rank 0 only."""
    optimizer = run.optimizer()
    for step in range(20):
        if step == 1 and run.rank == 0:
            optimizer.param_groups[0]["weight_decay"] = 0.1
        run.train(optimizer, [step])


@mistake("data=2", Error(RuntimeError, "lr"), write="set it on every rank")
def tensor_learning_rate_differs(run: Run) -> None:
    """A tensor learning rate changed in place on rank 0 only."""
    lr = torch.tensor(LR, dtype=torch.float64)
    optimizer = run.optimizer(torch.optim.SGD(run.model.parameters(), lr=lr, momentum=0.9, fused=True))
    for step in range(20):
        if step == 1 and run.rank == 0:
            optimizer.param_groups[0]["lr"] *= 0.5
        run.train(optimizer, [step])


# Precision and loss scales --------------------------------------------------------------------------------------------


@mistake("data=2", Error(ValueError, "fp61"), write='write `precision="fp16"`')
def mode_misspelled(run: Run) -> None:
    """A misspelled mode: `precision="fp61"`."""
    run.optimizer(precision="fp61")


@mistake(
    "data=2",
    Error(
        ValueError,
        "precision='bf16' needs half-precision parameters ... .prepare(model) before you create the optimizer",
    ),
    write='call `precision_of("bf16").prepare(model)` before you create the optimizer',
)
def mode_without_prepare(run: Run) -> None:
    """`precision="bf16"` without `prepare(model)`."""
    run.optimizer(precision="bf16")


@mistake("data=2", Right(), write="`prepare` keeps the parameter objects", mode="bf16")
def torch_optimizer_made_before_prepare(run: Run) -> None:
    """A torch optimizer created before `prepare(model)`, and wrapped after it."""
    run.model = run.make_model()
    sgd = run.sgd()
    precision_of("bf16").prepare(run.model, run.registry)
    run.begin()
    run.train(run.optimizer(sgd))


@mistake(
    "data=2",
    Error(RuntimeError, "torch's GradScaler decides on each rank separately ... use meshstep.amp.GradScaler(registry)"),
    write="use `meshstep.amp.GradScaler(registry)`, or a `precision=` with a loss scale",
)
def torch_grad_scaler(run: Run) -> None:
    """torch's `GradScaler` around the optimizer."""
    optimizer, scaler = run.optimizer(), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(run.loss(0)).backward()
    scaler.step(optimizer)


@mistake("data=2", Right(), write='`precision="fp16"` needs no scaler')
def own_grad_scaler(run: Run) -> None:
    """`meshstep.amp.GradScaler` with the optimizer's `max_norm=`, without `unscale_`."""
    optimizer, scaler = run.optimizer(), GradScaler(run.registry, init_scale=8.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(run.loss(step)).backward()
        scaler.step(optimizer)
        scaler.update()


@mistake(
    "data=2", Error(RuntimeError, "loss scale"), write='use `precision="fp16"` without a scaler', mode="fp16_naive"
)
def grad_scaler_beside_a_loss_scale(run: Run) -> None:
    """`meshstep.amp.GradScaler` with a precision mode that has a loss scale."""
    optimizer, scaler = run.optimizer(), GradScaler(run.registry, init_scale=8.0)
    optimizer.backward(scaler.scale(run.loss(0)))
    scaler.step(optimizer)
    scaler.update()


@mistake(
    "data=2",
    Error(RuntimeError, "use meshstep.amp.GradScaler(registry)"),
    write="use `meshstep.amp.GradScaler(registry)` without `unscale_`",
)
def unscaled_by_a_scaler(run: Run) -> None:
    """`scaler.unscale_(optimizer)`, then `scaler.step(optimizer)`, with torch's `GradScaler`."""
    optimizer, scaler = run.optimizer(), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(run.loss(0)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


@mistake("data=2", Right(), write='it has no effect; `precision="bf16"` casts', mode="fp32")
def autocast_of_another_dtype(run: Run) -> None:
    """`torch.autocast` around a float64 model, which it does not cast."""
    optimizer = run.optimizer()
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = run.loss(step)
        optimizer.backward(loss)
        optimizer.step()


@mistake("data=2", Right(), write='`precision="bf16"` needs no autocast', mode="bf16")
def autocast_beside_bf16(run: Run) -> None:
    """`torch.autocast` around a model in bfloat16 with master weights."""
    optimizer = run.optimizer()
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = run.loss(step)
        optimizer.backward(loss)
        optimizer.step()


@mistake(
    "data=2",
    Error(FloatingPointError, "steps in a row were skipped"),
    write='set `on_nonfinite="raise"`, which names the parameters',
)
def every_step_skipped(run: Run) -> None:
    """The loss becomes NaN in all later steps, and the script ignores `stats`."""
    optimizer = run.optimizer(on_nonfinite=Skip(max_consecutive=4))
    run.train(optimizer, [0])
    for _ in range(30):
        optimizer.zero_grad()
        optimizer.backward(run.loss(1) * math.nan)
        optimizer.step()


def without_step_1(dense: Dense) -> None:
    dense.train([0, 2])


@mistake("data=2", Right(without_step_1), write="all ranks skip the step")
def nan_on_one_rank(run: Run) -> None:
    """The loss of one rank is NaN in one step."""
    optimizer = run.optimizer()
    for step in range(3):
        optimizer.zero_grad()
        optimizer.backward(run.loss(step) * (math.nan if step == 1 and run.rank == 1 else 1.0))
        optimizer.step()


@mistake("data=2", Error(RuntimeError, "must have the same dtype"), write="call `prepare(model)` only", mode="bf16")
def model_half_by_hand(run: Run) -> None:
    """`model.half()` after `prepare(model)` of another mode."""
    run.model.half()
    run.train(run.optimizer())


@pytest.mark.parametrize("one", cases_of(__name__))
def test_mistake_in_clipping_or_learning_rate_or_precision_has_the_documented_outcome(
    one: Mistake, world: World
) -> None:
    check(one, world)
