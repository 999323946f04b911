"""Mistakes in the training loop: the order of calls, gradients that are not cleared, losses, windows of micro-batches."""

from __future__ import annotations

import time

import pytest
from meshstep.optim import Sharded
from meshstep.parallel import reduce_from
from mistakes import BATCH, MAX_NORM, AsTorch, Dense, Error, Mistake, Right, Run, cases_of, check, mistake, mse
from torch import nn
from world import World

# The order of calls ---------------------------------------------------------------------------------------------------


@mistake("data=2,tensor=2", Right(), write="both orders are correct")
def zero_grad_after_step(run: Run) -> None:
    """`zero_grad()` after `step()` instead of before `backward()`."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.backward(mse(run.model, x, y))
        optimizer.step()
        optimizer.zero_grad()


@mistake("data=2,tensor=2", Right(), write="`set_to_none=True`, the default, is faster")
def zero_grad_keeps_tensors(run: Run) -> None:
    """`zero_grad(set_to_none=False)`."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.zero_grad(set_to_none=False)
        optimizer.backward(mse(run.model, x, y))
        optimizer.step()


@mistake("data=2,tensor=2", Right(), write="with `accumulation_steps=`, call `optimizer.zero_grad()`")
def model_zero_grad(run: Run) -> None:
    """`model.zero_grad()` instead of `optimizer.zero_grad()`."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        run.model.zero_grad()
        optimizer.backward(mse(run.model, x, y))
        optimizer.step()


@mistake("data=2", Right(), write="`optimizer.zero_grad()` also works with accumulation", mode="bf16")
def model_zero_grad_with_masters(run: Run) -> None:
    """`model.zero_grad()` instead of `optimizer.zero_grad()`, with master weights."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        run.model.zero_grad()
        optimizer.backward(mse(run.model, x, y))
        optimizer.step()


@mistake("data=2,tensor=2", Right(), write="it calls `optimizer.zero_grad()`")
def inner_zero_grad(run: Run) -> None:
    """`zero_grad()` of the wrapped torch optimizer."""
    adamw = run.sgd()
    optimizer = run.optimizer(adamw)
    for x, y in run.batches():
        adamw.zero_grad()
        optimizer.backward(mse(run.model, x, y))
        optimizer.step()


@mistake("data=2", Right(), write="it calls `optimizer.zero_grad()`", mode="bf16")
def inner_zero_grad_with_masters(run: Run) -> None:
    """`zero_grad()` of the wrapped torch optimizer, with master weights."""
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


@mistake("data=2", AsTorch(without_zero_grad), write="call `optimizer.zero_grad()` in every step")
def forgotten_zero_grad(run: Run) -> None:
    """No `zero_grad()`: the gradients of all steps add up."""
    optimizer = run.optimizer(max_norm=None)
    for x, y in run.batches():
        optimizer.backward(mse(run.model, x, y))
        optimizer.step()


@mistake(
    "data=2", Error(RuntimeError, "no parameter of the optimizer has a gradient"), write="call `backward` before `step`"
)
def step_before_backward(run: Run) -> None:
    """`step()` before the first `backward()`."""
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


@mistake("data=2,tensor=2", AsTorch(stepped_twice), write="call `step()` once per accumulation window")
def step_twice(run: Run) -> None:
    """`step()` twice for one `backward()`."""
    optimizer = run.optimizer(max_norm=None)
    for x, y in run.batches():
        optimizer.zero_grad()
        optimizer.backward(mse(run.model, x, y))
        optimizer.step()
        optimizer.step()


@mistake(
    "data=2",
    Error(RuntimeError, "call zero_grad() of this optimizer after every step"),
    write="call `step()` once per accumulation window",
)
def step_twice_with_sharded_gradients(run: Run) -> None:
    """`step()` twice for one `backward()`, with ZeRO-2."""
    optimizer = run.optimizer(max_norm=None, states=Sharded("data", gradients=True))
    for x, y in run.batches():
        optimizer.zero_grad()
        optimizer.backward(mse(run.model, x, y))
        optimizer.step()
        optimizer.step()


@mistake(
    "data=2",
    Error(ValueError, "step takes no closure: ... call backward, then step"),
    write="call `backward`, then `step()`",
)
def closure(run: Run) -> None:
    """`step(closure)`, as for L-BFGS."""
    optimizer = run.optimizer()
    optimizer.step(lambda: run.loss(0).backward())


# The loss -------------------------------------------------------------------------------------------------------------


@mistake("data=2,tensor=2", Right(), write="accumulation and loss scales need `optimizer.backward(loss)`")
def plain_backward(run: Run) -> None:
    """`loss.backward()` without accumulation and without a loss scale."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(run.model, x, y).backward()
        optimizer.step()


@mistake(
    "data=2",
    Error(RuntimeError, "their loss was not multiplied by the loss scale ...: write optimizer.backward(loss) instead"),
    write="call `optimizer.backward(loss)`",
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
    Error(
        RuntimeError,
        "there are gradients, but none of the ... micro-batches was counted ...: write optimizer.backward(loss)",
    ),
    write="call `optimizer.backward(loss)`",
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
    write="call `optimizer.backward(loss)` for every micro-batch",
)
def plain_backward_for_some_micro_batches(run: Run) -> None:
    """`loss.backward()` for some micro-batches of a window, and `optimizer.backward(loss)` for the others."""
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
    write="call `optimizer.backward(loss)` for every micro-batch",
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


@mistake("data=2", Error(TypeError, "loss"), write="pass the loss tensor")
def backward_of_a_number(run: Run) -> None:
    """`backward(loss.item())`."""
    run.optimizer().backward(run.loss(0).item())  # type: ignore[arg-type]


@mistake("data=2", Error(RuntimeError, "does not require grad"), write="pass the loss tensor itself")
def backward_of_a_detached_loss(run: Run) -> None:
    """`backward(loss.detach())`."""
    run.optimizer().backward(run.loss(0).detach())


@mistake("data=2", Error(RuntimeError, "can be implicitly created only for scalar outputs"), write="pass `loss.mean()`")
def backward_of_a_vector(run: Run) -> None:
    """A loss with `reduction="none"`: one number per sample."""
    x, y = run.batch(0)
    run.optimizer().backward(nn.functional.mse_loss(run.model(x), y, reduction="none"))


def half_the_loss(dense: Dense) -> None:
    for step in range(3):
        dense.sgd.zero_grad()
        dense.backward(step, factor=0.5)
        dense.step()


@mistake("data=2", AsTorch(half_the_loss), write="pass the loss undivided")
def loss_divided_by_micro_batches_twice(run: Run) -> None:
    """`loss / K` with `accumulation_steps=K`, which divides by K too."""
    optimizer = run.optimizer(accumulation_steps=2)
    for step in range(3):
        for part in (0, 1):
            optimizer.zero_grad()
            optimizer.backward(run.loss(step, 2, part) / 2)
            optimizer.step()


@mistake("data=2", AsTorch(half_the_loss), write="pass the mean over the samples of this rank")
def loss_divided_by_ranks(run: Run) -> None:
    """`loss / world_size`, although `step` averages over the data ranks."""
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


@mistake("data=2", AsTorch(loss_times_1024), write="pass the loss unscaled; the precision mode has a loss scale")
def loss_scaled_by_hand(run: Run) -> None:
    """The loss is multiplied by a scale, and the gradient is not divided by it."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.zero_grad()
        optimizer.backward(mse(run.model, x, y) * 1024)
        optimizer.step()


@mistake(
    "data=2",
    Error(
        RuntimeError,
        "optimizer.backward was given the result of optimizer.scale_loss(loss) ... write optimizer.backward(loss)",
    ),
    write="call `optimizer.backward(loss)` only",
    mode="fp16_naive",
)
def loss_scaled_twice(run: Run) -> None:
    """`optimizer.backward(optimizer.scale_loss(loss))`: the loss is scaled twice."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.zero_grad()
        optimizer.backward(optimizer.scale_loss(mse(run.model, x, y)))
        optimizer.step()


@mistake("data=2", Right(), write="`Monitor` sums the loss for you")
def loss_summed_over_ranks_for_the_log(run: Run) -> None:
    """A loss summed over the data ranks for the log, and not used in backward."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse(run.model, x, y)
        float(reduce_from(loss.detach(), run.registry, "data"))
        optimizer.backward(loss)
        optimizer.step()


@mistake("data=2", Right(), write="the gradients add up, as in torch")
def one_backward_for_each_loss(run: Run) -> None:
    """Two losses with one `optimizer.backward()` each, without accumulation."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.zero_grad()
        optimizer.backward(mse(run.model, x, y) * 0.25)
        optimizer.backward(mse(run.model, x, y) * 0.75)
        optimizer.step()


@mistake(
    "data=2",
    Error(
        ValueError,
        "this step already has all its micro-batches (accumulation_steps=1): call step() before the next backward",
    ),
    write="call `backward(loss_1 + loss_2)` once",
)
def one_backward_for_each_loss_with_accumulation(run: Run) -> None:
    """Two losses with one `optimizer.backward()` each, with `accumulation_steps=1`."""
    optimizer = run.optimizer(accumulation_steps=1)
    optimizer.backward(run.loss(0))
    optimizer.backward(run.loss(0))


@mistake("data=2", Right(), write="no change needed")
def retained_graph(run: Run) -> None:
    """`backward(loss, retain_graph=True)` in every step."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.zero_grad()
        optimizer.backward(mse(run.model, x, y), retain_graph=True)
        optimizer.step()


# Windows of micro-batches ---------------------------------------------------------------------------------------------


def last_micro_batch_only(dense: Dense) -> None:
    """Train with half of the loss of the second micro-batch of both data ranks."""
    quarter = BATCH // 4
    for step in range(3):
        dense.sgd.zero_grad()
        for start in (quarter, 3 * quarter):
            dense.backward(step, 0.25, slice(start, start + quarter))
        dense.step()


@mistake("data=2", AsTorch(last_micro_batch_only), write="call `optimizer.zero_grad()` once per window")
def zero_grad_within_a_window(run: Run) -> None:
    """`zero_grad()` between the micro-batches of a window, without `accumulation_steps`: only the last one counts."""
    optimizer = run.optimizer()
    for step in range(3):
        for part in (0, 1):
            optimizer.zero_grad()
            optimizer.backward(run.loss(step, 2, part) / 2)
        optimizer.step()


@mistake("data=2", Right(), write="both do nothing before the K-th micro-batch")
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
    Error(RuntimeError, "gradients were cleared ... clear gradients only with zero_grad() of this optimizer"),
    write="call `optimizer.zero_grad()`",
)
def model_zero_grad_within_a_window(run: Run) -> None:
    """`model.zero_grad()` in every micro-batch, with `accumulation_steps=2`."""
    optimizer = run.optimizer(accumulation_steps=2)
    for part in (0, 1):
        run.model.zero_grad()
        optimizer.backward(run.loss(0, 2, part))
        optimizer.step()


@mistake(
    "data=2",
    Error(RuntimeError, "a backward since the last step raised ... call optimizer.zero_grad()"),
    write="call `optimizer.zero_grad()` in the `except` clause on every rank; "
    "[if one rank alone raised](../howto/ACCUMULATION.md#an-exception-on-one-rank), call `step()`",
)
def error_in_backward_caught(run: Run) -> None:
    """An exception in `backward()` is caught, and the loop continues without `zero_grad()`."""
    optimizer = run.optimizer(accumulation_steps=2)
    broken = run.model.down.weight.register_hook(lambda gradient: 1 / 0)
    try:
        optimizer.backward(run.loss(0))
    except ZeroDivisionError:
        broken.remove()
    optimizer.backward(run.loss(1))


@mistake("data=2", Right(), write="`zero_grad()` discards the window")
def error_in_backward_caught_and_cleared(run: Run) -> None:
    """An exception in `backward()` is caught on every rank, followed by `zero_grad()`."""
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
    write="make the same number of micro-batches on every rank; call `backward(None)` on a rank without data",
)
def bad_batch_left_out_on_one_rank(run: Run) -> None:
    """One rank catches an exception in its forward and calls `step()` without a `backward()`."""
    optimizer = run.optimizer()
    for step in range(20):
        optimizer.zero_grad()
        if not (step == 1 and run.rank == 1):
            optimizer.backward(run.loss(step))
        optimizer.step()


@mistake(
    "data=2,tensor=2",
    Error(RuntimeError, SOME_RANKS, left_out=(1,)),
    write="make the same number of micro-batches on every rank; call `backward(None)` on a rank without data",
)
def one_more_micro_batch_on_one_rank(run: Run) -> None:
    """One rank calls `backward()` once more than the others before `step()`."""
    optimizer = run.optimizer()
    for step in range(20):
        optimizer.zero_grad()
        optimizer.backward(run.loss(step))
        if step == 1 and run.registry.coordinate["data"] == 1:
            optimizer.backward(run.loss(step))
        optimizer.step()


@mistake(
    "data=2",
    Error(RuntimeError, "got no reply ... Every rank must make the same calls in the same order", ranks=(0,)),
    write="use loaders of equal length: `prepare_dataloader`",
    waits=True,
)
def loader_ends_earlier_on_one_rank(run: Run) -> None:
    """The loader of one rank has one batch fewer."""
    optimizer = run.optimizer()
    run.train(optimizer, range(1))
    run.wait_briefly()
    run.train(optimizer, range(1, 3 if run.rank == 0 else 2))
    if run.rank:
        time.sleep(6)


@mistake(
    "data=2",
    Error(ValueError, "some micro-batches of this step have a weight"),
    write="pass `weight=` for every micro-batch",
)
def weight_for_some_micro_batches(run: Run) -> None:
    """`weight=` for some micro-batches of a window only."""
    optimizer = run.optimizer(accumulation_steps=2)
    optimizer.backward(run.loss(0, 2, 0), weight=3)
    optimizer.backward(run.loss(0, 2, 1))


@mistake("data=2", Error(RuntimeError, "weight"), write="pass `weight=` on every rank, or on none")
def weight_on_one_rank(run: Run) -> None:
    """`weight=` on one rank only."""
    optimizer = run.optimizer()
    for step in range(20):
        optimizer.zero_grad()
        optimizer.backward(run.loss(step), weight=4 if run.rank else None)
        optimizer.step()


@mistake("tensor=2", Error(RuntimeError, "weight"), write="pass the same `weight=` on these ranks")
def weight_differs_between_tensor_ranks(run: Run) -> None:
    """Different `weight=` on ranks that see the same samples."""
    optimizer = run.optimizer()
    for step in range(20):
        optimizer.zero_grad()
        optimizer.backward(run.loss(step) * 8, weight=8 - run.rank)
        optimizer.step()


@mistake(
    "data=2", Error(ValueError, "weight=-1: give a finite number >= 0"), write="pass the number of samples or tokens"
)
def negative_weight(run: Run) -> None:
    """`weight=-1`."""
    run.optimizer().backward(run.loss(0), weight=-1)


def divided_by_four(dense: Dense) -> None:
    for step in range(3):
        dense.sgd.zero_grad()
        dense.backward(step, factor=1 / 4)
        dense.step()


@mistake("data=2", AsTorch(divided_by_four), write="pass a sum with `weight=`, or a mean without")
def weight_with_a_mean(run: Run) -> None:
    """`weight=` with a loss that is already a mean: the loss is divided by the number of samples twice."""
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.zero_grad()
        optimizer.backward(mse(run.model, x, y), weight=len(x))
        optimizer.step()


@mistake(
    "data=2",
    Error(
        RuntimeError,
        "backward was called after the gradients of this step had been clipped: call step() before the next backward",
    ),
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
    Error(
        RuntimeError,
        "optimizer.backward() or optimizer.window() was called within optimizer.window() ... use only one of them",
    ),
    write="call `optimizer.backward(loss)` without `window()`",
)
def backward_within_window(run: Run) -> None:
    """`with optimizer.window():` around `optimizer.backward(loss)`: each of the two counts a micro-batch."""
    optimizer = run.optimizer(accumulation_steps=2)
    for step in range(3):
        for part in (0, 1):
            with optimizer.window():
                optimizer.backward(run.loss(step, 2, part))
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("one", cases_of(__name__))
def test_training_loop_mistake_has_the_documented_outcome(one: Mistake, world: World) -> None:
    check(one, world)
