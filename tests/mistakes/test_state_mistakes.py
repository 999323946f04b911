"""Mistakes after the optimizer was made: changed models and optimizers, checkpoints, reports, calls on one rank only."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from meshstep.optim import (
    Booster,
    Monitor,
    Offloaded,
    ParallelOptimizer,
    ReplicaMismatchError,
    Sharded,
    Telemetry,
    load_checkpoint,
    save_checkpoint,
)
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare, gather_objects
from mistakes import (
    LR,
    SPECS,
    Dense,
    Error,
    Mistake,
    Right,
    Run,
    Warned,
    cases_of,
    check,
    full_model,
    mistake,
    mse,
)
from torch import nn
from world import World

# The model is changed -------------------------------------------------------------------------------------------------


@mistake("data=2,tensor=2", Right(), write="the tensors stay the same")
def model_moved_to_its_device(run: Run) -> None:
    """`model.to(device)` to the model's present device, after the optimizer was created."""
    optimizer = run.optimizer()
    run.model.to("cpu")
    run.train(optimizer)


def without_down_bias(dense: Dense) -> None:
    dense.model.down.bias.requires_grad_(False)
    dense.train(range(17))


@mistake(
    "data=2", Warned("down.bias", Right(without_down_bias)), write="create the optimizer after all changes of the model"
)
def parameter_replaced(run: Run) -> None:
    """A parameter replaced after the optimizer was created: the new parameter is not stepped."""
    optimizer = run.optimizer()
    run.model.down.bias = nn.Parameter(run.model.down.bias.detach().clone())
    run.train(optimizer, range(17))  # the warning comes in the 16th step


@mistake(
    "data=2",
    Error(RuntimeError, "trainable parameters that the optimizer does not have ... on ranks 0-1: down.bias"),
    write="change the model before `boost`, or call `add_param_group`",
)
def parameter_replaced_after_boost(run: Run) -> None:
    """A parameter replaced after `booster.boost`: the new parameter would not be stepped."""
    run.model = run.make_model()  # `boost` prepares the model, which `run` has done already
    _, optimizer, *_ = Booster(registry=run.registry).boost(run.model, run.sgd())
    run.model.down.bias = nn.Parameter(run.model.down.bias.detach().clone())
    run.train(optimizer)


@mistake(
    "data=2",
    Error(
        RuntimeError,
        "no parameter of the optimizer has a gradient ... create the torch optimizer from model.parameters()",
    ),
    write="create the optimizer from the model that you train",
)
def model_replaced(run: Run) -> None:
    """A model replaced after the optimizer was created."""
    optimizer = run.optimizer()
    run.model = run.make_model()
    run.train(optimizer)


@mistake(
    "data=2",
    Error(
        RuntimeError,
        "no parameter of the optimizer has a gradient ... create the torch optimizer from model.parameters()",
    ),
    write="create the optimizer from the copy",
)
def copy_of_the_model_trained(run: Run) -> None:
    """`copy.deepcopy(model)` trained with the optimizer of the original."""
    optimizer = run.optimizer()
    run.model = copy.deepcopy(run.model)
    run.train(optimizer)


@mistake(
    "data=2",
    Error(RuntimeError, "must have the same dtype"),
    write="call `precision.prepare(model)`, then create the optimizer; do not cast later",
    mode="bf16",
)
def model_cast_to_float32_after_masters(run: Run) -> None:
    """`model.float()` after an optimizer with master weights was created."""
    optimizer = run.optimizer()
    run.model.float()
    run.train(optimizer)


@mistake(
    "data=2", Error(RuntimeError, "make the torch optimizer"), write="cast the model before you create the optimizer"
)
def model_cast_after_sharded_states(run: Run) -> None:
    """`model.float()` of a float64 model, after steps with ZeRO-1."""
    optimizer = run.optimizer(states=Sharded("data"))
    run.train(optimizer, [0])
    run.model.float()
    x, y = run.batch(1)
    optimizer.zero_grad()
    optimizer.backward(mse(run.model, x.float(), y.float()))
    optimizer.step()


@mistake(
    "data=2", Error(RuntimeError, "make the torch optimizer"), write="cast the model before you create the optimizer"
)
def model_cast_after_first_step(run: Run) -> None:
    """`model.float()` of a float64 model after the first step."""
    optimizer = run.optimizer()
    run.train(optimizer, [0])
    run.model.float()
    x, y = run.batch(1)
    optimizer.zero_grad()
    optimizer.backward(mse(run.model, x.float(), y.float()))
    optimizer.step()


def frozen_after_one_step(dense: Dense) -> None:
    dense.train([0])
    dense.model.up.requires_grad_(False)
    dense.model.zero_grad()
    dense.train([1, 2])


@mistake("data=2,tensor=2", Right(frozen_after_one_step), write="freeze on every rank")
def frozen_later_on_all_ranks(run: Run) -> None:
    """A layer frozen during training, on all ranks."""
    optimizer = run.optimizer()
    run.train(optimizer, [0])
    run.model.up.requires_grad_(False)
    optimizer.zero_grad()
    run.train(optimizer, [1, 2])


@mistake("data=2", Error(RuntimeError, "up.bias"), write="freeze on every rank")
def frozen_later_on_one_rank(run: Run) -> None:
    """A parameter frozen during training, on one rank only."""
    optimizer = run.optimizer()
    for step in range(20):
        if step == 1 and run.rank == 1:
            run.model.up.bias.requires_grad_(False)
        run.train(optimizer, [step])


@mistake(
    "data=2",
    Error(RuntimeError, "up.bias was frozen when the optimizer was made ... call optimizer.refresh() on every rank"),
    write="call `optimizer.refresh()`",
)
def unfrozen_later(run: Run) -> None:
    """A parameter that was frozen when the optimizer was created, and is unfrozen later."""
    run.model.up.bias.requires_grad_(False)
    optimizer = run.optimizer()
    run.model.up.bias.requires_grad_(True)
    run.train(optimizer)


def clamped(dense: Dense) -> None:
    for step in range(3):
        dense.train([step])
        for param in dense.model.parameters():
            param.data.clamp_(-0.2, 0.2)


@mistake("data=2,tensor=2", Right(clamped), write="works without master weights and without `Offloaded`")
def weights_clamped(run: Run) -> None:
    """Weights clamped through `.data` after every step."""
    optimizer = run.optimizer()
    for step in range(3):
        run.train(optimizer, [step])
        for param in run.model.parameters():
            param.data.clamp_(-0.2, 0.2)


def clamped_once(dense: Dense) -> None:
    dense.train([0])
    for param in dense.model.parameters():
        param.data.clamp_(-0.2, 0.2)


@mistake(
    "data=2",
    Error(RuntimeError, "reload_from_model()", dense=clamped_once),
    write="call `optimizer.reload_from_model()` after it",
    mode="bf16",
)
def weights_clamped_beside_masters(run: Run) -> None:
    """Weights clamped through `.data` after every step, with master weights."""
    optimizer = run.optimizer()
    for step in range(20):
        run.train(optimizer, [step])
        for param in run.model.parameters():
            param.data.clamp_(-0.2, 0.2)


@mistake(
    "data=2",
    Error(RuntimeError, "reload_from_model()"),
    write="call `optimizer.reload_from_model()` after it",
    mode="bf16",
)
def weights_copied_beside_masters(run: Run) -> None:
    """`model.load_state_dict()` after an optimizer with master weights was created."""
    optimizer = run.optimizer()
    run.train(optimizer, [0])
    run.model.load_state_dict(full_model().state_dict())
    run.train(optimizer, [1, 2])


def loaded_after_a_step(dense: Dense) -> None:
    dense.train([0])
    dense.model.load_state_dict(full_model().state_dict())
    dense.train([1, 2])


@mistake("data=2", Right(loaded_after_a_step), write="the next step uses the loaded weights")
def weights_copied_beside_offloaded(run: Run) -> None:
    """`model.load_state_dict()` after a float32 optimizer with `states=Offloaded(1.0)` was created."""
    optimizer = run.optimizer(states=Offloaded(1.0))
    run.train(optimizer, [0])
    run.model.load_state_dict(full_model().state_dict())
    run.train(optimizer, [1, 2])


@mistake("data=2", Right(), write="the first step uses the loaded weights")
def weights_loaded_before_the_first_step(run: Run) -> None:
    """`model.load_state_dict()` after a float32 optimizer with ZeRO-1 was created, before its first step."""
    start = {name: value.clone() for name, value in run.model.state_dict().items()}
    with torch.no_grad():
        run.model.up.weight.zero_()
    optimizer = run.optimizer(states=Sharded("data"))
    run.model.load_state_dict(start)
    run.train(optimizer)


@mistake(
    "data=2",
    Error(ReplicaMismatchError, "up.weight: the parameter differs"),
    write="load on every rank, or call `broadcast_weights`",
)
def weights_loaded_on_one_rank(run: Run) -> None:
    """`model.load_state_dict()` on rank 0 only."""
    if run.rank == 0:
        run.model.load_state_dict(full_model(seed=5).state_dict())
    run.begin()
    run.train(run.optimizer())


@mistake("data=2,tensor=2", Right(), write="no change needed")
def non_contiguous_parameters(run: Run) -> None:
    """Parameters that are transposed, non-contiguous views."""
    for linear in (run.model.up, run.model.down):
        linear.weight.data = linear.weight.data.t().contiguous().t()
    run.train(run.optimizer())


def hooked(dense: Dense) -> None:
    dense.model.up.weight.register_hook(lambda grad: grad / 2)
    dense.train()


@mistake("data=2,tensor=2", Right(hooked), write="use the same hook on every rank")
def hook_changes_gradients(run: Run) -> None:
    """A tensor hook that changes a parameter's gradient."""
    run.model.up.weight.register_hook(lambda grad: grad / 2)
    run.train(run.optimizer())


@mistake(
    "tensor=2",
    Error(ReplicaMismatchError, "down.bias: the gradient differs"),
    write="add the same noise on all replicas",
)
def noise_differs_between_replicas(run: Run) -> None:
    """A hook that adds different noise to the gradients on each tensor rank."""
    torch.manual_seed(run.rank)
    run.model.down.bias.register_hook(lambda grad: grad + torch.randn_like(grad))
    run.train(run.optimizer())


@mistake(
    "data=2",
    Right(),
    write="a missing gradient counts as zero, [except with `fully_shard`](LIMITS.md#grad-is-none-on-some-ranks)",
)
def parameter_without_gradient_on_one_rank(run: Run) -> None:
    """A branch of the model that one data rank does not use: its parameters have no gradient there."""
    extra = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = run.optimizer(torch.optim.SGD([*run.model.parameters(), extra], lr=LR, momentum=0.9))
    for step in range(3):
        optimizer.zero_grad()
        loss = run.loss(step)
        optimizer.backward(loss + extra.sum() * 0 if run.rank == 0 else loss)
        optimizer.step()


@mistake(
    "data=2,tensor=2",
    Error(RuntimeError, "the gradient of down.bias at data=0 is present on rank 0 and missing on rank 1"),
    write="use the parameter on all tensor ranks",
)
def gradient_missing_on_one_tensor_rank(run: Run) -> None:
    """A replicated parameter that one tensor rank no longer uses, after the first step."""
    optimizer = run.optimizer()
    bias = run.model.down.bias
    try:
        for step in range(20):
            optimizer.zero_grad()
            if step == 1 and run.registry.rank("tensor"):
                del run.model.down.bias
                run.model.down.register_buffer("bias", bias.detach().clone())
            optimizer.backward(run.loss(step))
            optimizer.step()
    finally:
        del run.model.down.bias
        run.model.down.bias = bias  # the weights are compared afterwards


@mistake("data=2", Right(), write="both share their parameters")
def compiled_model(run: Run) -> None:
    """An optimizer created from the bare model, and training with the compiled model."""
    optimizer = run.optimizer()
    model: nn.Module = torch.compile(run.model, backend="eager")  # type: ignore[assignment]
    for step in range(3):
        optimizer.zero_grad()
        optimizer.backward(mse(model, *run.batch(step)))
        optimizer.step()


# The optimizer is changed ---------------------------------------------------------------------------------------------


@mistake(
    "data=2",
    Error(RuntimeError, "call step() of the ParallelOptimizer"),
    write="call `step()` of the `ParallelOptimizer`",
)
def inner_step(run: Run) -> None:
    """`step()` of the wrapped torch optimizer."""
    sgd = run.sgd()
    optimizer = run.optimizer(sgd)
    for step in range(3):
        optimizer.zero_grad()
        optimizer.backward(run.loss(step))
        sgd.step()


@mistake("data=2", Right(), write="it calls `add_param_group()` of the `ParallelOptimizer`")
def inner_add_param_group(run: Run) -> None:
    """`add_param_group()` of the wrapped torch optimizer."""
    sgd = torch.optim.SGD(run.model.up.parameters(), lr=LR, momentum=0.9)
    optimizer = run.optimizer(sgd)
    sgd.add_param_group({"params": list(run.model.down.parameters())})
    run.train(optimizer)


def momentum_forgotten(dense: Dense) -> None:
    dense.train([0])
    dense.sgd.state.clear()
    dense.train([1, 2])


@mistake("data=2,tensor=2", Right(momentum_forgotten), write="no change needed")
def state_cleared(run: Run) -> None:
    """`optimizer.state.clear()` during training, to reset the momentum."""
    optimizer = run.optimizer()
    run.train(optimizer, [0])
    optimizer.state.clear()
    run.train(optimizer, [1, 2])


@mistake(
    "data=2",
    Error(RuntimeError, "in different calls ... Every rank must"),
    write="make the same calls on every rank",
    waits=True,
)
def group_added_on_one_rank(run: Run) -> None:
    """`add_param_group()` on rank 0 only."""
    optimizer = run.optimizer()
    run.train(optimizer, [0])
    run.wait_briefly()
    if run.rank == 0:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.float64))]})
    else:
        optimizer.load_state_dict(optimizer.state_dict())


@mistake(
    "data=2",
    Error(RuntimeError, "no parameter of the optimizer has a gradient"),
    write="create a new optimizer from the copied model",
)
def optimizer_copied(run: Run) -> None:
    """`copy.deepcopy(optimizer)`: the copy steps copies of the parameters."""
    optimizer = copy.deepcopy(run.optimizer())
    run.train(optimizer)


@mistake("data=2,tensor=2", Right(), write="no change needed")
def average_of_weights_beside(run: Run) -> None:
    """An exponential average of the weights in a copy of the model."""
    optimizer, ema = run.optimizer(), copy.deepcopy(run.model)
    for step in range(3):
        run.train(optimizer, [step])
        with torch.no_grad():
            for mean, param in zip(ema.parameters(), run.model.parameters(), strict=True):
                mean.lerp_(param, 0.1)


@mistake(
    "data=2",
    Error(RuntimeError, "reload_from_model()"),
    write="average into a copy of the model, and evaluate the copy",
    mode="bf16",
)
def average_swapped_in_beside_masters(run: Run) -> None:
    """Averaged weights copied into the model for an evaluation, and not restored before training continues."""
    optimizer, ema = run.optimizer(), copy.deepcopy(run.model)
    run.train(optimizer, [0])
    with torch.no_grad():
        for mean, param in zip(ema.parameters(), run.model.parameters(), strict=True):
            param.copy_(mean)
    run.train(optimizer, [1])


# Checkpoints ----------------------------------------------------------------------------------------------------------


@mistake(
    "data=2",
    Error(RuntimeError, "got no reply in ... Every rank must make the same calls"),
    write="call `save_checkpoint` on every rank",
    waits=True,
)
def saved_on_one_rank(run: Run) -> None:
    """`save_checkpoint` on rank 0 only."""
    optimizer = run.optimizer()
    run.train(optimizer, [0])
    run.wait_briefly()
    if run.rank == 0:
        save_checkpoint(run.folder / "run", run.model, optimizer)
    else:
        run.train(optimizer, [1])


@mistake("data=2", Right(), write="all ranks use the path of rank 0")
def saved_to_a_path_for_each_rank(run: Run) -> None:
    """A separate checkpoint path per rank, for saving and loading."""
    optimizer = run.optimizer()
    run.train(optimizer, [0])
    path = run.folder / f"rank-{run.rank}"
    save_checkpoint(path, run.model, optimizer)
    run.train(optimizer, [1])
    load_checkpoint(path, run.model, optimizer)
    run.train(optimizer, [1, 2])


@mistake("data=2", Error(TypeError, "give the ParallelOptimizer that wraps it"), write="pass the `ParallelOptimizer`")
def saved_with_the_inner_optimizer(run: Run) -> None:
    """`save_checkpoint(path, model, optimizer)` with the wrapped torch optimizer."""
    sgd = run.sgd()
    run.optimizer(sgd)
    save_checkpoint(run.folder / "run", run.model, sgd)  # type: ignore[arg-type]


@mistake("data=2", Error(TypeError, "give the ParallelOptimizer that wraps it"), write="pass the `ParallelOptimizer`")
def loaded_with_the_inner_optimizer(run: Run) -> None:
    """`load_checkpoint(path, model, optimizer)` with the wrapped torch optimizer."""
    sgd = run.sgd()
    save_checkpoint(run.folder / "run", run.model, run.optimizer(sgd))
    load_checkpoint(run.folder / "run", run.model, sgd)  # type: ignore[arg-type]


@mistake(
    "data=2",
    Error(
        ValueError,
        "a checkpoint would lose the gradients ... call save_checkpoint after the step()",
    ),
    write="save after `step()`",
)
def saved_within_a_window(run: Run) -> None:
    """`save_checkpoint` in the middle of an accumulation window."""
    optimizer = run.optimizer(accumulation_steps=2)
    optimizer.backward(run.loss(0, 2, 0))
    save_checkpoint(run.folder / "run", run.model, optimizer)


@mistake(
    "data=2",
    Error(ValueError, "there is no complete checkpoint under"),
    write="pass the directory that `save_checkpoint` got",
)
def loaded_from_nowhere(run: Run) -> None:
    """`load_checkpoint` from a directory without a checkpoint."""
    load_checkpoint(run.folder / "nothing", run.model, run.optimizer())


@mistake("tensor=2", Error(ValueError, "down.weight"), write='declare `P(None, "tensor")`, and save again')
def loaded_elsewhere_with_a_wrong_dim(run: Run) -> None:
    """A checkpoint of a sharded model with a wrongly declared dim, loaded into the unsharded model."""
    declare(run.model, SPECS)
    model = run.make_model()
    declare(model, {**SPECS, "down.weight": P("tensor", None)})
    optimizer = ParallelOptimizer(torch.optim.SGD(model.named_parameters(), lr=LR), run.registry)
    save_checkpoint(run.folder / "run", model, optimizer)
    with ProcessGroupRegistry(Topology(data=2), exclusive_groups=True) as registry:
        load_checkpoint(run.folder / "run", full_model(), None, registry=registry)


@mistake("data=2", Error(ValueError, "up.weight"), write="load it into the model that you saved")
def loaded_into_another_model(run: Run) -> None:
    """A checkpoint of a model of another size."""
    save_checkpoint(run.folder / "run", run.model, run.optimizer())
    other = nn.Module()
    other.up, other.down = nn.Linear(6, 10).double(), nn.Linear(10, 4).double()
    optimizer = ParallelOptimizer(torch.optim.SGD(other.named_parameters(), lr=LR), run.registry)
    load_checkpoint(run.folder / "run", other, optimizer)


@mistake("tensor=2", Error(ValueError, "rank"), write="use `save_checkpoint`, or load each rank's own `state_dict`")
def state_of_rank_0_for_all(run: Run) -> None:
    """`optimizer.state_dict()` of rank 0 loaded on all ranks of a sharded model."""
    optimizer = run.optimizer()
    run.train(optimizer, [0])
    optimizer.load_state_dict(gather_objects(optimizer.state_dict(), run.registry)[0])


@mistake("data=2", Right(), write="replicas have equal states")
def state_of_rank_0_for_all_replicas(run: Run) -> None:
    """`optimizer.state_dict()` of rank 0 loaded on all replicas."""
    optimizer = run.optimizer()
    run.train(optimizer, [0])
    optimizer.load_state_dict(gather_objects(optimizer.state_dict(), run.registry)[0])
    run.train(optimizer, [1, 2])


def one_step(dense: Dense) -> None:
    dense.train([0])


@mistake(
    "data=2",
    Right(one_step),
    write="it calls `load_state_dict()` of the `ParallelOptimizer`",
    mode="bf16",
)
def inner_load_state_dict(run: Run) -> None:
    """`load_state_dict()` of the wrapped torch optimizer, with master weights."""
    sgd = run.sgd()
    optimizer = run.optimizer(sgd)
    run.train(optimizer, [0])
    sgd.load_state_dict(optimizer.state_dict())


# Calls on one rank only -----------------------------------------------------------------------------------------------


@mistake(
    "data=2",
    Error(RuntimeError, "Monitor"),
    write="create a `Monitor` on every rank; its outputs run on rank 0",
    waits=True,
)
def monitor_on_one_rank(run: Run) -> None:
    """A `Monitor` on rank 0 only."""
    optimizer = run.optimizer()
    run.train(optimizer, [0])
    run.wait_briefly()
    monitor = Monitor(run.registry, every=1) if run.rank == 0 else None
    for step in (1, 2):
        optimizer.zero_grad()
        optimizer.backward(run.loss(step))
        stats = optimizer.step()
        if monitor is not None:
            monitor(stats, 0.0)


@mistake("data=2", Error(RuntimeError, "Monitor"), write="call `monitor(...)` on every rank", waits=True)
def monitor_called_on_one_rank(run: Run) -> None:
    """A `Monitor` on every rank, called on rank 0 only."""
    optimizer = run.optimizer()
    run.train(optimizer, [0])
    monitor = Monitor(run.registry, every=1)
    run.wait_briefly()
    for step in (1, 2):
        optimizer.zero_grad()
        optimizer.backward(run.loss(step))
        stats = optimizer.step()
        if run.rank == 0:
            monitor(stats, 0.0)


@mistake("data=2", Error(RuntimeError, "Telemetry"), write="create a `Telemetry` on every rank", waits=True)
def telemetry_on_one_rank(run: Run) -> None:
    """A `Telemetry` on rank 0 only."""
    optimizer = run.optimizer()
    run.wait_briefly()
    if run.rank == 0:
        Telemetry(optimizer)
    run.train(optimizer)


@mistake("data=2,tensor=2", Right(), write="reading them needs no other rank")
def reports_on_one_rank(run: Run) -> None:
    """Norms, skip counts, the plan and the optimizer state read on rank 0 only."""
    optimizer = run.optimizer()
    for step in range(3):
        run.train(optimizer, [step])
        if run.rank == 0:
            assert float(optimizer.last_stats.total_norm) > 0  # type: ignore[union-attr]
            assert optimizer.skipped_steps == 0
            assert "up.weight" in str(optimizer.stepped_tensors())
            assert str(optimizer.plan)
            assert optimizer.state_dict()
            optimizer.poll()


@mistake(
    "tensor=2",
    Error(RuntimeError, "got no reply ... Every rank must make the same calls", ranks=(0,)),
    write="evaluate on all ranks that hold a shard",
    waits=True,
)
def evaluated_on_one_rank(run: Run) -> None:
    """A sharded model evaluated on rank 0 only."""
    optimizer = run.optimizer()
    run.train(optimizer, [0])
    run.wait_briefly()
    if run.rank == 0:
        with torch.no_grad():
            run.loss(1)
    else:
        time.sleep(6)


@mistake("data=2", Right(), write="evaluating a replica needs no other rank")
def replica_evaluated_on_one_rank(run: Run) -> None:
    """A replica evaluated on rank 0 only, between two steps."""
    optimizer = run.optimizer()
    for step in range(3):
        run.train(optimizer, [step])
        if run.rank == 0:
            with torch.no_grad():
                run.loss(step)


@pytest.mark.parametrize("one", cases_of(__name__))
def test_mistake_after_setup_has_the_documented_outcome(one: Mistake, world: World) -> None:
    check(one, world)
