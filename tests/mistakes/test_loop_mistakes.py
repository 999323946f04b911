"""Mistakes in the training loop: the order of calls, gradients that are not cleared, losses, windows of micro-batches."""

from __future__ import annotations

import time

import pytest
from meshstep.optim import Sharded
from meshstep.parallel import reduce_from
from mistakes import MAX_NORM, AsTorch, Dense, Error, Mistake, Right, Run, cases_of, check, mistake, mse
from torch import nn
from world import World

# The order of calls ---------------------------------------------------------------------------------------------------


@mistake("data=2,tensor=2", Right(), write="nothing: both orders are right")
def zero_grad_after_step(run: Run) -> None:
    """`zero_grad()` is called after `step()`, not before `backward()`."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.backward(mse(run.model, x, y))
        optimizer.step()
        optimizer.zero_grad()


@mistake("data=2,tensor=2", Right(), write="nothing; `set_to_none=True`, the default, is faster")
def zero_grad_keeps_tensors(run: Run) -> None:
    """`zero_grad(set_to_none=False)`."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.zero_grad(set_to_none=False)
        optimizer.backward(mse(run.model, x, y))
        optimizer.step()


@mistake(
    "data=2,tensor=2", Right(), write="nothing; with `accumulation_steps=` it is an error: `optimizer.zero_grad()`"
)
def model_zero_grad(run: Run) -> None:
    """`model.zero_grad()` in place of `optimizer.zero_grad()`."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        run.model.zero_grad()
        optimizer.backward(mse(run.model, x, y))
        optimizer.step()


@mistake("data=2", Right(), write="`optimizer.zero_grad()`", mode="bf16")
def model_zero_grad_with_masters(run: Run) -> None:
    """`model.zero_grad()` in place of `optimizer.zero_grad()`, with master weights."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        run.model.zero_grad()
        optimizer.backward(mse(run.model, x, y))
        optimizer.step()


@mistake("data=2,tensor=2", Right(), write="`optimizer.zero_grad()`")
def inner_zero_grad(run: Run) -> None:
    """`zero_grad()` of the wrapped torch optimizer."""
    adamw = run.sgd()
    optimizer = run.optimizer(adamw)
    for x, y in run.batches():
        adamw.zero_grad()
        optimizer.backward(mse(run.model, x, y))
        optimizer.step()


@mistake("data=2", Right(), write="`optimizer.zero_grad()`", mode="bf16")
def inner_zero_grad_with_masters(run: Run) -> None:
    """`zero_grad()` of the wrapped torch optimizer, which has the master weights."""
    adamw = run.sgd()
    optimizer = run.optimizer(adamw)
    for x, y in run.batches():
        adamw.zero_grad()
        optimizer.backward(mse(run.model, x, y))
        optimizer.step()


def without_zero_grad(dense: Dense) -> None:
    for step in range(3):
        dense.backward(step)
        dense.step(max_norm=None)


@mistake("data=2", AsTorch(without_zero_grad), write="`optimizer.zero_grad()` in every step")
def forgotten_zero_grad(run: Run) -> None:
    """No `zero_grad()` at all: gradients of all steps add up."""
    optimizer = run.optimizer(max_norm=None)
    for x, y in run.batches():
        optimizer.backward(mse(run.model, x, y))
        optimizer.step()


@mistake(
    "data=2", Error(RuntimeError, "no parameter of the optimizer has a gradient"), write="call `backward` before `step`"
)
def step_before_backward(run: Run) -> None:
    """`step()` is called before the first `backward()`."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.step()
        optimizer.zero_grad()
        optimizer.backward(mse(run.model, x, y))


def stepped_twice(dense: Dense) -> None:
    for step in range(3):
        dense.sgd.zero_grad()
        dense.backward(step)
        dense.step(max_norm=None)
        dense.step(max_norm=None)


@mistake("data=2,tensor=2", AsTorch(stepped_twice), write="one `step()` for each window")
def step_twice(run: Run) -> None:
    """`step()` is called twice for one `backward()`."""
    optimizer = run.optimizer(max_norm=None)
    for x, y in run.batches():
        optimizer.zero_grad()
        optimizer.backward(mse(run.model, x, y))
        optimizer.step()
        optimizer.step()


@mistake("data=2", Error(RuntimeError, "call zero_grad() after every step"), write="one `step()` for each window")
def step_twice_with_sharded_gradients(run: Run) -> None:
    """`step()` is called twice for one `backward()`, with ZeRO-2."""
    optimizer = run.optimizer(max_norm=None, states=Sharded("data", gradients=True))
    for x, y in run.batches():
        optimizer.zero_grad()
        optimizer.backward(mse(run.model, x, y))
        optimizer.step()
        optimizer.step()


@mistake(
    "data=2",
    Error(ValueError, "step takes no closure: ... call backward, then step"),
    write="`backward`, then `step()`",
)
def closure(run: Run) -> None:
    """`step(closure)`, as for L-BFGS."""
    optimizer = run.optimizer()
    optimizer.step(lambda: run.loss(0).backward())


# The loss -------------------------------------------------------------------------------------------------------------


@mistake("data=2,tensor=2", Right(), write="`optimizer.backward(loss)`: needed for accumulation and a loss scale")
def plain_backward(run: Run) -> None:
    """`loss.backward()`, without accumulation and loss scale."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(run.model, x, y).backward()
        optimizer.step()


@mistake(
    "data=2",
    Error(RuntimeError, "their loss was not multiplied by the loss scale ...: write optimizer.backward(loss) instead"),
    write="`optimizer.backward(loss)`",
    mode="fp16_naive",
)
def plain_backward_with_loss_scale(run: Run) -> None:
    """`loss.backward()` in a mode with a loss scale."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(run.model, x, y).backward()
        optimizer.step()


@mistake(
    "data=2",
    Error(RuntimeError, "the window ... has no micro-batch ...: write optimizer.backward(loss)"),
    write="`optimizer.backward(loss)`",
)
def plain_backward_with_accumulation(run: Run) -> None:
    """`loss.backward()` with `accumulation_steps=2`."""
    optimizer = run.optimizer(accumulation_steps=2)
    for part in (0, 1):
        run.loss(0, 2, part).backward()
        optimizer.step()


@mistake(
    "data=2",
    Error(RuntimeError, "write optimizer.backward(loss)"),
    write="`optimizer.backward(loss)` for every micro-batch",
)
def plain_backward_for_some_micro_batches(run: Run) -> None:
    """`loss.backward()` for some micro-batches of a window, `optimizer.backward(loss)` for others."""
    optimizer = run.optimizer(accumulation_steps=2)
    for step in range(3):
        for part in (0, 1):
            loss = run.loss(step, 2, part)
            if part == 0:
                loss.backward()
            else:
                optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


@mistake(
    "data=2",
    Error(RuntimeError, "write optimizer.backward(loss)"),
    write="`optimizer.backward(loss)` for every micro-batch",
)
def plain_backward_for_the_last_micro_batch(run: Run) -> None:
    """`loss.backward()` for the last micro-batch of a window."""
    optimizer = run.optimizer(accumulation_steps=2)
    for step in range(3):
        for part in (0, 1):
            loss = run.loss(step, 2, part)
            if part == 1:
                loss.backward()
            else:
                optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


@mistake("data=2", Error(TypeError, "loss"), write="the loss itself, a tensor")
def backward_of_a_number(run: Run) -> None:
    """`backward(loss.item())`."""
    run.optimizer().backward(run.loss(0).item())  # type: ignore[arg-type]


@mistake("data=2", Error(RuntimeError, "does not require grad"), write="the loss itself")
def backward_of_a_detached_loss(run: Run) -> None:
    """`backward(loss.detach())`."""
    run.optimizer().backward(run.loss(0).detach())


@mistake("data=2", Error(RuntimeError, "can be implicitly created only for scalar outputs"), write="`loss.mean()`")
def backward_of_a_vector(run: Run) -> None:
    """The loss has `reduction="none"`: one number per sample."""
    x, y = run.batch(0)
    run.optimizer().backward(nn.functional.mse_loss(run.model(x), y, reduction="none"))


def half_the_loss(dense: Dense) -> None:
    for step in range(3):
        dense.sgd.zero_grad()
        dense.backward(step, factor=0.5)
        dense.step()


@mistake("data=2", AsTorch(half_the_loss), write="the loss as it is: `accumulation_steps=` divides")
def loss_divided_by_micro_batches_twice(run: Run) -> None:
    """`loss / K` with `accumulation_steps=K`, which divides as well."""
    optimizer = run.optimizer(accumulation_steps=2)
    for step in range(3):
        for part in (0, 1):
            optimizer.zero_grad()
            optimizer.backward(run.loss(step, 2, part) / 2)
            optimizer.step()


@mistake("data=2", AsTorch(half_the_loss), write="the mean over this rank's samples: `step` averages over data ranks")
def loss_divided_by_ranks(run: Run) -> None:
    """`loss / world_size`, though `step` averages over the data ranks."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.zero_grad()
        optimizer.backward(mse(run.model, x, y) / 2)
        optimizer.step()


def loss_times_1024(dense: Dense) -> None:
    for step in range(3):
        dense.sgd.zero_grad()
        dense.backward(step, factor=1024.0)
        dense.step()


@mistake("data=2", AsTorch(loss_times_1024), write="the loss as it is: the mode has a loss scale")
def loss_scaled_by_hand(run: Run) -> None:
    """The loss is multiplied by a scale by hand, and the gradient is not divided by it."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.zero_grad()
        optimizer.backward(mse(run.model, x, y) * 1024)
        optimizer.step()


@mistake(
    "data=2",
    Error(RuntimeError, "the loss is scaled already: give backward(loss) the loss itself"),
    write="`optimizer.backward(loss)` alone",
    mode="fp16_naive",
)
def loss_scaled_twice(run: Run) -> None:
    """`optimizer.backward(optimizer.scale_loss(loss))`: the loss is scaled twice."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.zero_grad()
        optimizer.backward(optimizer.scale_loss(mse(run.model, x, y)))
        optimizer.step()


@mistake("data=2", Right(), write="nothing; the loss that is logged is summed by `Monitor`")
def loss_summed_over_ranks_for_the_log(run: Run) -> None:
    """The loss is summed over the data ranks before it is logged, and the sum is not used for backward."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse(run.model, x, y)
        float(reduce_from(loss.detach(), run.registry, "data"))
        optimizer.backward(loss)
        optimizer.step()


@mistake("data=2", Right(), write="one `backward(loss_1 + loss_2)`; two calls add up as in torch")
def one_backward_for_each_loss(run: Run) -> None:
    """Two losses, each with its own `optimizer.backward()`, without accumulation."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.zero_grad()
        optimizer.backward(mse(run.model, x, y) * 0.25)
        optimizer.backward(mse(run.model, x, y) * 0.75)
        optimizer.step()


@mistake(
    "data=2",
    Error(ValueError, "the window of accumulation_steps=1 micro-batches is full; call step() before the next backward"),
    write="one `backward(loss_1 + loss_2)`",
)
def one_backward_for_each_loss_with_accumulation(run: Run) -> None:
    """Two losses, each with its own `optimizer.backward()`, with `accumulation_steps=1`."""
    optimizer = run.optimizer(accumulation_steps=1)
    optimizer.backward(run.loss(0))
    optimizer.backward(run.loss(0))


@mistake("data=2", Right(), write="nothing")
def retained_graph(run: Run) -> None:
    """`backward(loss, retain_graph=True)` in every step."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.zero_grad()
        optimizer.backward(mse(run.model, x, y), retain_graph=True)
        optimizer.step()


# Windows of micro-batches ---------------------------------------------------------------------------------------------


@mistake("data=2", Right(), write="nothing: both do nothing before the K-th micro-batch")
def step_and_zero_grad_for_every_micro_batch(run: Run) -> None:
    """`step()` and `zero_grad()` after every micro-batch, with `accumulation_steps=K`."""
    optimizer = run.optimizer(accumulation_steps=2)
    for step in range(3):
        for part in (0, 1):
            optimizer.backward(run.loss(step, 2, part))
            optimizer.step()
            optimizer.zero_grad()


@mistake(
    "data=2",
    Error(RuntimeError, "gradients were cleared ... clear them with this optimizer's zero_grad()"),
    write="`optimizer.zero_grad()`",
)
def model_zero_grad_within_a_window(run: Run) -> None:
    """`model.zero_grad()` for every micro-batch, with `accumulation_steps=2`."""
    optimizer = run.optimizer(accumulation_steps=2)
    for part in (0, 1):
        run.model.zero_grad()
        optimizer.backward(run.loss(0, 2, part))
        optimizer.step()


@mistake(
    "data=2",
    Error(RuntimeError, "a backward of this window raised ... call zero_grad() of this optimizer"),
    write="`optimizer.zero_grad()` in the `except` clause",
)
def error_in_backward_caught(run: Run) -> None:
    """An exception in `backward()` is caught, and the loop goes on without `zero_grad()`."""
    optimizer = run.optimizer(accumulation_steps=2)
    broken = run.model.down.weight.register_hook(lambda gradient: 1 / 0)
    try:
        optimizer.backward(run.loss(0))
    except ZeroDivisionError:
        broken.remove()
    optimizer.backward(run.loss(1))


@mistake("data=2", Right(), write="nothing: `zero_grad()` gives the window up")
def error_in_backward_caught_and_cleared(run: Run) -> None:
    """An exception in `backward()` is caught on every rank, then `zero_grad()`."""
    optimizer = run.optimizer()
    broken = run.model.down.weight.register_hook(lambda gradient: 1 / 0)
    try:
        optimizer.backward(run.loss(0))
    except ZeroDivisionError:
        broken.remove()
        optimizer.zero_grad()
    run.train(optimizer)


SOME_RANKS = "... micro-batch..."


@mistake(
    "data=2",
    Error(RuntimeError, SOME_RANKS, left_out=(1,)),
    write="the same number of micro-batches on every rank; `backward(None)` for one without data",
)
def bad_batch_left_out_on_one_rank(run: Run) -> None:
    """One rank catches an exception in its forward and goes on to `step()` without a `backward()`."""
    optimizer = run.optimizer()
    for step in range(20):
        optimizer.zero_grad()
        if not (step == 1 and run.rank == 1):
            optimizer.backward(run.loss(step))
        optimizer.step()


@mistake(
    "data=2,tensor=2",
    Error(RuntimeError, SOME_RANKS, left_out=(1,)),
    write="the same number of micro-batches on every rank; `backward(None)` for one without data",
)
def one_more_micro_batch_on_one_rank(run: Run) -> None:
    """One rank makes one `backward()` more than the others before `step()`."""
    optimizer = run.optimizer()
    for step in range(20):
        optimizer.zero_grad()
        optimizer.backward(run.loss(step))
        if step == 1 and run.registry.coordinate["data"] == 1:
            optimizer.backward(run.loss(step))
        optimizer.step()


@mistake(
    "data=2",
    Error(RuntimeError, "waited in vain ... Every rank must make the same calls in the same order", ranks=(0,)),
    write="loaders of equal length on all ranks: `prepare_dataloader`",
    waits=True,
)
def loader_ends_earlier_on_one_rank(run: Run) -> None:
    """The loader of one rank has one batch less."""
    optimizer = run.optimizer()
    run.train(optimizer, range(1))
    run.wait_briefly()
    run.train(optimizer, range(1, 3 if run.rank == 0 else 2))
    if run.rank:
        time.sleep(6)


@mistake(
    "data=2",
    Error(ValueError, "give every micro-batch of a window a weight, or none"),
    write="`weight=` for every micro-batch",
)
def weight_for_some_micro_batches(run: Run) -> None:
    """`weight=` for one micro-batch of a window, none for another."""
    optimizer = run.optimizer(accumulation_steps=2)
    optimizer.backward(run.loss(0, 2, 0), weight=3)
    optimizer.backward(run.loss(0, 2, 1))


@mistake("data=2", Error(RuntimeError, "weight"), write="`weight=` on every rank, or on none")
def weight_on_one_rank(run: Run) -> None:
    """`weight=` on one rank and none on the other."""
    optimizer = run.optimizer()
    for step in range(20):
        optimizer.zero_grad()
        optimizer.backward(run.loss(step), weight=4 if run.rank else None)
        optimizer.step()


@mistake("tensor=2", Error(RuntimeError, "weight"), write="the same `weight=` on all ranks that see the same samples")
def weight_differs_between_tensor_ranks(run: Run) -> None:
    """`weight=` differs between ranks that see the same samples."""
    optimizer = run.optimizer()
    for step in range(20):
        optimizer.zero_grad()
        optimizer.backward(run.loss(step) * 8, weight=8 - run.rank)
        optimizer.step()


@mistake("data=2", Error(ValueError, "weight=-1: give a finite number >= 0"), write="the number of samples or tokens")
def negative_weight(run: Run) -> None:
    """`weight=-1`."""
    run.optimizer().backward(run.loss(0), weight=-1)


def divided_by_eight(dense: Dense) -> None:
    for step in range(3):
        dense.sgd.zero_grad()
        dense.backward(step, factor=1 / 4)
        dense.step()


@mistake("data=2", AsTorch(divided_by_eight), write="a sum with `weight=`, or a mean without")
def weight_with_a_mean(run: Run) -> None:
    """`weight=` beside a loss that is a mean already: it is divided by its number of samples twice."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.zero_grad()
        optimizer.backward(mse(run.model, x, y), weight=len(x))
        optimizer.step()


@mistake(
    "data=2",
    Error(RuntimeError, "the gradients of this window have been clipped ... call step() or zero_grad() before"),
    write="clip after the last micro-batch",
)
def backward_after_clipping(run: Run) -> None:
    """`clip_grad_by_norm()` before the window's last `backward()`."""
    optimizer = run.optimizer(max_norm=None)
    optimizer.backward(run.loss(0, 2, 0))
    optimizer.clip_grad_by_norm(MAX_NORM)
    optimizer.backward(run.loss(0, 2, 1))


@mistake(
    "data=2",
    Error(RuntimeError, "backward was called within window() ... write one of them"),
    write="`optimizer.backward(loss)` alone: it is a micro-batch itself",
)
def backward_within_window(run: Run) -> None:
    """`with optimizer.window():` around `optimizer.backward(loss)`: two micro-batches for one."""
    optimizer = run.optimizer(accumulation_steps=2)
    for step in range(3):
        for part in (0, 1):
            with optimizer.window():
                optimizer.backward(run.loss(step, 2, part))
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("one", cases_of(__name__))
def test_loop_mistake_is_right_or_an_error(one: Mistake, world: World) -> None:
    check(one, world)
