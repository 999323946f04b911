"""Mistakes before the training loop: the mesh, the declaration, seeds and batches, the optimizer's arguments."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from meshstep.optim import Booster, ParallelOptimizer, ReplicaMismatchError, Sharded, clip_grad_norm_
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare, gather_objects, shard
from mistakes import (
    LR,
    MAX_NORM,
    SPECS,
    AsTorch,
    Dense,
    Error,
    Mistake,
    Right,
    Run,
    Warned,
    cases_of,
    check,
    full_batch,
    full_model,
    mistake,
    mse,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from world import World

# The mesh -------------------------------------------------------------------------------------------------------------


@mistake(
    "data=2",
    Error(ValueError, "has 4 ranks but the world has 2; the product of the sizes must be 2"),
    write="choose sizes whose product is the number of processes",
)
def topology_of_another_size(run: Run) -> None:
    """The product of the axis sizes is not the number of processes."""
    ProcessGroupRegistry(Topology(data=2, tensor=2))


@mistake(
    "data=2",
    Error(ValueError, "construct the same registries in the same order on every rank", ranks=(1,)),
    write="create the same topology on every rank",
)
def topologies_differ(run: Run) -> None:
    """Different topologies on different ranks."""
    if run.rank == 0:
        run.close_later(ProcessGroupRegistry(Topology(data=2)))
    gather_objects(None, run.registry)
    if run.rank == 1:
        run.close_later(ProcessGroupRegistry(Topology(tensor=2)))


@mistake(
    "data=2",
    Error(AttributeError, "a topology has no process groups; give ProcessGroupRegistry(...) instead"),
    write="pass `ProcessGroupRegistry(topology)`",
)
def topology_for_a_registry(run: Run) -> None:
    """A `Topology` passed as the registry."""
    ParallelOptimizer(run.sgd(), Topology(data=2))  # type: ignore[call-overload]


@mistake("data=2", Error(TypeError, "registry"), write="pass the registry: `ParallelOptimizer(optimizer, registry)`")
def registry_forgotten(run: Run) -> None:
    """`ParallelOptimizer(optimizer)` without the registry."""
    ParallelOptimizer(run.sgd())  # type: ignore[call-overload]


@mistake(
    "data=2",
    Error(TypeError, "ProcessGroupRegistry(Topology("),
    write="pass `ProcessGroupRegistry(Topology(data=...))`",
)
def process_group_for_a_registry(run: Run) -> None:
    """A process group of torch passed as the registry."""
    ParallelOptimizer(run.sgd(), dist.group.WORLD)  # type: ignore[call-overload]


@mistake(
    "data=2",
    Error(TypeError, "ProcessGroupRegistry.from_device_mesh(mesh)"),
    write="pass `ProcessGroupRegistry.from_device_mesh(mesh)`",
)
def device_mesh_for_a_registry(run: Run) -> None:
    """A `DeviceMesh` of torch passed as the registry."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    ParallelOptimizer(run.sgd(), mesh)  # type: ignore[call-overload]


@mistake(
    "data=2",
    Error(RuntimeError, "a closed registry ... make a new registry"),
    write="close the registry after training",
)
def closed_registry(run: Run) -> None:
    """An optimizer created inside `with ProcessGroupRegistry(...)` and used after it."""
    with ProcessGroupRegistry(Topology(data=2), exclusive_groups=True) as registry:
        optimizer = ParallelOptimizer(run.sgd(), registry, max_norm=MAX_NORM)
    run.train(optimizer)


@mistake(
    "data=2,tensor=2",
    Error(ReplicaMismatchError, "up.weight: the parameter differs along axis 'data'"),
    write="list the axes in the order of your groups; the last axis varies fastest",
)
def axes_in_another_order(run: Run) -> None:
    """Axes in the wrong order: the model is sharded over adjacent ranks, but in the topology data ranks are adjacent."""
    registry = run.close_later(ProcessGroupRegistry(Topology(tensor=2, data=2)))
    optimizer = ParallelOptimizer(run.sgd(), registry, max_norm=MAX_NORM)
    run.train(optimizer)


@mistake(
    "data=2",
    Error(ReplicaMismatchError, "the gradient differs along axis 'batch'"),
    write='pass a role: `Topology(batch=2, roles={"batch": "data"})`',
)
def data_axis_of_another_name(run: Run) -> None:
    """A data axis with an unknown name and without a role."""
    registry = run.close_later(ProcessGroupRegistry(Topology(batch=2)))
    declare(run.model, {"*": P()})
    run.train(ParallelOptimizer(run.sgd(), registry, max_norm=MAX_NORM))


@mistake("data=2", Error(ValueError, "'dta'"), write='write `Sharded("data")`')
def axis_misspelled_in_sharded(run: Run) -> None:
    """A misspelled axis: `states=Sharded("dta")`."""
    run.optimizer(states=Sharded("dta"))


@mistake(
    "data=2,tensor=2",
    Right(),
    write='over `tensor`, only replicated parameters have states to shard; `Sharded("data")` shards all',
)
def states_sharded_over_tensor(run: Run) -> None:
    """`states=Sharded("tensor")`, over an axis that already shards most parameters."""
    run.train(run.optimizer(states=Sharded("tensor")))


# The declaration ------------------------------------------------------------------------------------------------------


@mistake("data=2,tensor=2", Error(ValueError, "no spec for up.weight"), write="call `declare(model, {...})`")
def nothing_declared(run: Run) -> None:
    """No `declare()` for a sharded model."""
    run.model = run.make_model()
    run.optimizer()


@mistake(
    "tensor=2",
    Error(ValueError, "no rule declares the layout of down.bias; add a rule"),
    write="add a rule for every parameter",
)
def bias_not_declared(run: Run) -> None:
    """A bias for which `declare` has no rule."""
    run.model = run.make_model()
    declare(run.model, {name: spec for name, spec in SPECS.items() if name != "down.bias"})
    run.optimizer()


@mistake("tensor=2", Error(ValueError, "'up.wieght'"), write="write the parameter's name")
def name_misspelled_in_declare(run: Run) -> None:
    """A misspelled parameter name in `declare`."""
    declare(run.model, {**SPECS, "up.wieght": P("tensor")})


@mistake("tensor=2", Error(ValueError, "'tensr'"), write="write the name of an axis")
def axis_misspelled_in_spec(run: Run) -> None:
    """A misspelled axis in a spec."""
    declare(run.model, {**SPECS, "up.weight": P("tensr", None)})
    run.optimizer()


@mistake("tensor=2", Error(ValueError, "up.bias"), write='for a bias, write `P("tensor")`')
def spec_of_too_many_dims(run: Run) -> None:
    """A spec has more entries than the parameter has dims."""
    declare(run.model, {**SPECS, "up.bias": P(None, "tensor")})
    run.optimizer()


@mistake(
    "data=2,tensor=2",
    Error(ReplicaMismatchError, "up.weight: the parameter differs along axis 'tensor'"),
    write='declare `P("tensor", None)`',
)
def shard_declared_replicated(run: Run) -> None:
    """A shard declared as `P()`."""
    run.model = run.make_model()
    declare(run.model, {"*": P()})
    run.train(run.optimizer())


@mistake(
    "data=2,tensor=2",
    Error(ValueError, "down.bias is declared sharded along axis 'tensor' ... declare it without 'tensor': P()"),
    write="declare `P()`; `prove` finds this mistake too",
)
def replica_declared_sharded(run: Run) -> None:
    """A replica declared as `P("tensor")`: the norm would count it twice."""
    run.model = run.make_model()
    declare(run.model, {**SPECS, "down.bias": P("tensor")})
    run.train(run.optimizer())


@mistake(
    "tensor=2",
    Right(),
    write='the norm is correct, but checkpoints are wrong on another layout; declare `P(None, "tensor")`',
)
def wrong_dim_declared(run: Run) -> None:
    """The wrong dim of a weight declared as sharded."""
    run.model = run.make_model()
    declare(run.model, {**SPECS, "down.weight": P("tensor", None)})
    run.train(run.optimizer())


@mistake("tensor=2", Error(ValueError, "no spec for up.weight"), write="call `declare` on every rank")
def declared_on_one_rank(run: Run) -> None:
    """`declare()` on rank 0 only."""
    run.model = run.make_model()
    if run.rank == 0:
        declare(run.model, SPECS)
    run.optimizer()


@mistake("tensor=2", Error(ValueError, "rank 0 has ["), write="declare the same specs on every rank")
def declared_differently(run: Run) -> None:
    """Different specs on different ranks."""
    run.model = run.make_model()
    declare(run.model, SPECS if run.rank == 0 else {**SPECS, "up.bias": P()})
    run.optimizer()


@mistake("tensor=2", Right(), write="earlier rules stay; one `declare()` with all rules is clearer")
def declared_twice(run: Run) -> None:
    """A second `declare()` with `"*"`, the default for parameters without a rule."""
    declare(run.model, {"*": P()})
    run.train(run.optimizer())


@mistake(
    "tensor=2",
    Error(
        ValueError,
        "was declared P('tensor') by an earlier rule, but the pattern 'up.*' declares P(); give the full name",
    ),
    write="declare once with all rules, or use the full name",
)
def declared_twice_by_patterns(run: Run) -> None:
    """A pattern of a second `declare()` that contradicts the first one."""
    declare(run.model, {"up.*": P()})


@mistake("tensor=2", Right(), write="it has no effect; declare before you create the optimizer")
def declared_after_the_optimizer(run: Run) -> None:
    """Another `declare()` after the optimizer was created."""
    optimizer = run.optimizer()
    declare(run.model, {"*": P()})
    run.train(optimizer)


@mistake(
    "tensor=2", Error(ValueError, "no spec for up.weight"), write="call `declare` after you replace the parameters"
)
def declared_before_splitting(run: Run) -> None:
    """`declare()` before the parameters are replaced by their shards."""
    model = full_model()
    declare(model, SPECS)
    for name, spec in SPECS.items():
        linear, kind = name.split(".")
        setattr(
            getattr(model, linear), kind, nn.Parameter(shard(model.get_parameter(name).detach(), spec, run.registry))
        )
    run.model = model
    run.optimizer()


# Initial weights, and batches -----------------------------------------------------------------------------------------


@mistake(
    "data=2",
    Error(ReplicaMismatchError, "up.weight: the parameter differs ... broadcast_weights(model, registry)"),
    write="use one seed, or call `broadcast_weights(model, registry)`",
)
def replicas_of_different_seeds(run: Run) -> None:
    """Each replica draws its own initial weights."""
    run.model.load_state_dict(full_model(seed=run.rank).state_dict())
    run.begin()
    run.train(run.optimizer())


@mistake(
    "tensor=2",
    Error(ValueError, "up.weight ... from the same seed, draw the full tensor"),
    write="draw the full weight from one seed and `shard` it, or use one seed per shard",
)
def shards_of_the_same_seed(run: Run) -> None:
    """Each tensor rank draws its shard from the same seed: all shards are equal."""
    with torch.no_grad():
        for name in ("up.weight", "up.bias", "down.weight"):
            torch.manual_seed(1)
            nn.init.normal_(run.model.get_parameter(name))
    run.begin()
    run.train(run.optimizer())


@mistake(
    "data=2,tensor=2",
    Error(ReplicaMismatchError, "down.bias: the gradient differs along axis 'tensor' ... from another batch"),
    write='select samples by `registry.rank("data")`',
)
def batches_by_global_rank(run: Run) -> None:
    """A loader that selects samples by global rank: tensor ranks see different samples."""
    optimizer = run.optimizer()
    x, y = full_batch(0)
    optimizer.backward(mse(run.model, x.chunk(4)[run.rank], y.chunk(4)[run.rank]))
    optimizer.step()


def first_half(dense: Dense) -> None:
    for step in range(3):
        dense.sgd.zero_grad()
        dense.backward(step, rows=slice(4))
        dense.step()


@mistake("data=2", AsTorch(first_half), write='use `prepare_dataloader`, or `shard(batch, P("data"), registry)`')
def same_samples_on_all_data_ranks(run: Run) -> None:
    """All data ranks see the same samples."""
    optimizer = run.optimizer()
    for step in range(3):
        x, y = full_batch(step)
        optimizer.zero_grad()
        optimizer.backward(mse(run.model, x[:4], y[:4]))
        optimizer.step()


@mistake(
    "data=2",
    Error(ValueError, "doesn't divide its samples between the 2 data coordinates ... booster.prepare_dataloader("),
    write="use `booster.prepare_dataloader(dataset)`",
)
def booster_with_a_plain_loader(run: Run) -> None:
    """A plain `DataLoader` passed to `booster.boost`."""
    data = torch.utils.data.TensorDataset(*full_batch(0))
    booster = Booster(registry=run.registry)
    booster.boost(run.model, run.sgd(), dataloader=torch.utils.data.DataLoader(data, batch_size=2))


def uneven_rows(dense: Dense) -> None:
    for step in range(3):
        dense.sgd.zero_grad()
        dense.backward(step, 0.5, slice(5))
        dense.backward(step, 0.5, slice(5, 8))
        dense.step()


@mistake("data=2", AsTorch(uneven_rows), write="pass a sum as the loss, and `weight=len(batch)`")
def batches_of_different_sizes(run: Run) -> None:
    """Data ranks have batches of different sizes, and the loss is a mean."""
    optimizer = run.optimizer()
    for step in range(3):
        x, y = (full[:5] if run.rank == 0 else full[5:] for full in full_batch(step))
        optimizer.zero_grad()
        optimizer.backward(mse(run.model, x, y))
        optimizer.step()


# Arguments of the optimizer -------------------------------------------------------------------------------------------


@mistake(
    "data=2",
    Error(
        TypeError,
        "the optimizer is a generator, not a torch optimizer: create a torch optimizer from the parameters first",
    ),
    write="pass an optimizer: `ParallelOptimizer(torch.optim.AdamW(model.parameters()), registry)`",
)
def parameters_for_an_optimizer(run: Run) -> None:
    """`ParallelOptimizer(model.parameters(), registry)`."""
    ParallelOptimizer(run.model.parameters(), run.registry)  # type: ignore[call-overload]


@mistake(
    "data=2",
    Error(TypeError, "ParallelOptimizer already; wrap a plain torch optimizer"),
    write="wrap the torch optimizer once",
)
def wrapped_twice(run: Run) -> None:
    """A `ParallelOptimizer` wrapped again."""
    run.optimizer(run.optimizer())


@mistake("data=2", Right(), write="one `ParallelOptimizer` is enough")
def one_inner_optimizer_for_two(run: Run) -> None:
    """Two `ParallelOptimizer`s around one torch optimizer, used alternately."""
    sgd = run.sgd()
    optimizers = [run.optimizer(sgd), run.optimizer(sgd)]
    for step in range(3):
        run.train(optimizers[step % 2], [step])


def two_optimizers(dense: Dense) -> None:
    up = torch.optim.SGD(dense.model.up.parameters(), lr=LR, momentum=0.9)
    down = torch.optim.SGD(dense.model.down.parameters(), lr=LR, momentum=0.9)
    for step in range(3):
        dense.model.zero_grad()
        dense.backward(step)
        for linear, sgd in ((dense.model.up, up), (dense.model.down, down)):
            nn.utils.clip_grad_norm_(linear.parameters(), 1.0)
            sgd.step()


@mistake(
    "data=2,tensor=2", Right(two_optimizers), write="for one norm, use `ParallelOptimizer([one, another], registry)`"
)
def two_optimizers_of_one_model(run: Run) -> None:
    """Two `ParallelOptimizer`s for two parts of a model: each clips by the norm of its part."""
    optimizers = [
        ParallelOptimizer(torch.optim.SGD(part.named_parameters(), lr=LR, momentum=0.9), run.registry, max_norm=1.0)
        for part in (run.model.up, run.model.down)
    ]
    for step in range(3):
        run.model.zero_grad()
        optimizers[0].backward(run.loss(step))
        for optimizer in optimizers:
            optimizer.step()


@mistake("data=2", Error(ValueError, "more than one parameter group"), write="put each parameter into one group")
def parameter_in_two_groups(run: Run) -> None:
    """A parameter is in two param groups."""
    run.optimizer(torch.optim.SGD([{"params": run.model.parameters()}, {"params": run.model.up.parameters()}], lr=LR))


def stepped_with_a_duplicate(dense: Dense) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dense.sgd = torch.optim.SGD([*dense.model.parameters(), dense.model.up.weight], lr=LR)
    for step in range(3):
        dense.sgd.zero_grad()
        dense.backward(step)
        dense.step(max_norm=None)


@mistake(
    "data=2",
    Warned("contains a parameter group with duplicate parameters", AsTorch(stepped_with_a_duplicate)),
    write="pass each parameter once; `model.parameters()` omits duplicates of tied parameters",
)
def parameter_twice_in_a_group(run: Run) -> None:
    """A parameter twice in one param group."""
    sgd = torch.optim.SGD([*run.model.parameters(), run.model.up.weight], lr=LR)
    run.train(run.optimizer(sgd, max_norm=None))


@mistake(
    "data=2",
    Error(ValueError, "exhausted generator"),
    write="pass `list(model.parameters())`, or call `model.parameters()` again",
)
def generator_of_parameters_used_up(run: Run) -> None:
    """An exhausted generator of parameters passed to `clip_grad_norm_`."""
    params = run.model.parameters()
    sgd = torch.optim.SGD(params, lr=LR, momentum=0.9)
    for step in range(3):
        sgd.zero_grad()
        run.loss(step).backward()
        clip_grad_norm_(params, MAX_NORM, run.registry)
        sgd.step()


@mistake(
    "data=2", Error(ValueError, "exhausted generator"), write="pass `list(params)`, or call `module.parameters()` again"
)
def generator_used_up_for_a_new_group(run: Run) -> None:
    """An exhausted generator of parameters passed to `add_param_group`."""
    params = run.model.down.parameters()
    assert sum(param.numel() for param in params) > 0
    optimizer = run.optimizer(torch.optim.SGD(run.model.up.parameters(), lr=LR, momentum=0.9))
    optimizer.add_param_group({"params": params})
    run.train(optimizer)


@mistake(
    "data=2",
    Error(
        ValueError,
        "2 parameters of the optimizer are not parameters of the model ... "
        "create the optimizer from model.parameters() after the last change of the model",
    ),
    write="create the optimizer from `model.parameters()` after the last change of the model",
)
def booster_with_an_optimizer_of_another_model(run: Run) -> None:
    """`booster.boost(model, optimizer)` with an optimizer of another model."""
    Booster(registry=run.registry).boost(run.model, torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=LR))


@mistake(
    "data=2",
    Error(ValueError, "declare the same parameters in the same order"),
    write="pass the same parameters in the same order on every rank",
)
def parameters_in_another_order(run: Run) -> None:
    """Parameters in another order on one rank."""
    named = list(run.model.named_parameters())
    run.train(run.optimizer(torch.optim.SGD(named if run.rank else named[::-1], lr=LR, momentum=0.9)))


@mistake("data=2", Error(ValueError, "up.bias ... frozen"), write="freeze the same parameters on every rank")
def frozen_on_one_rank(run: Run) -> None:
    """A parameter frozen on one rank only, before the optimizer is created."""
    run.model.up.bias.requires_grad_(run.rank == 0)
    run.train(run.optimizer())


@mistake(
    "data=2",
    Error(TypeError, "use an optimizer that steps without a closure"),
    write="use an optimizer whose `step` needs no closure",
)
def lbfgs(run: Run) -> None:
    """L-BFGS, which needs a closure."""
    run.optimizer(torch.optim.LBFGS(run.model.parameters()))


@mistake("data=2", Error(TypeError, "sparse"), write="use `torch.nn.Embedding(..., sparse=False)`")
def sparse_gradients(run: Run) -> None:
    """An embedding with `sparse=True`."""
    embedding = nn.Embedding(8, 2, sparse=True)
    optimizer = ParallelOptimizer(torch.optim.SGD(embedding.named_parameters(), lr=LR), run.registry)
    optimizer.backward(embedding(torch.tensor([1, 2])).sum())
    optimizer.step()


@mistake("data=2", Error(TypeError, "has no argument max_grad_norm=: write max_norm=..."), write="write `max_norm=`")
def argument_of_another_library(run: Run) -> None:
    """`max_grad_norm=` or another argument of another library."""
    run.optimizer(max_grad_norm=1.0)


@mistake("data=2", Error(TypeError, "give placements, such as Sharded('data')"), write='write `states=Sharded("data")`')
def states_by_name(run: Run) -> None:
    """`states="zero1"`."""
    run.optimizer(states="zero1")


@mistake(
    "data=2", Error(ValueError, "accumulation_steps=0: give a whole number >= 1"), write="pass a whole number >= 1"
)
def accumulation_steps_zero(run: Run) -> None:
    """`accumulation_steps=0`."""
    run.optimizer(accumulation_steps=0)


@mistake(
    "data=2",
    Error(ValueError, "accumulation_steps ... rank 0 ... rank 1"),
    write="pass the same settings on every rank",
)
def settings_differ(run: Run) -> None:
    """Different arguments on different ranks, such as `accumulation_steps=`."""
    run.optimizer(accumulation_steps=1 + run.rank)


@mistake("data=2", Error(ValueError, "rank 0 ... rank 1"), write="use the same learning rate on every rank")
def learning_rates_differ(run: Run) -> None:
    """Different learning rates of the torch optimizers on different ranks."""
    run.optimizer(torch.optim.SGD(run.model.parameters(), lr=LR * (1 + run.rank)))


@mistake(
    "data=2",
    Error(ValueError, "the optimizer is 'AdamW' on rank 0 and 'SGD' on rank 1: give the same value on all ranks"),
    write="use the same optimizer on every rank",
)
def optimizers_differ(run: Run) -> None:
    """Different torch optimizers on different ranks."""
    kind = torch.optim.SGD if run.rank else torch.optim.AdamW
    run.optimizer(kind(run.model.parameters(), lr=LR))


# torch's data parallelism ------------------------------------------------------------------------------------------------


@mistake("data=2", Right(), write="the result is the same; `data_parallel=model` averages once")
def ddp_not_named(run: Run) -> None:
    """A model in `DistributedDataParallel`, without `data_parallel=`: gradients are averaged twice."""
    model = DistributedDataParallel(run.model, process_group=run.registry.group("data"))
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.zero_grad()
        optimizer.backward(mse(model, x, y))
        optimizer.step()


@mistake(
    "data=2,tensor=2",
    Error(ValueError, "data_parallel=DistributedDataParallel averages gradients over ranks", stepped_before=True),
    write='create it with `process_group=registry.group("data")`',
)
def ddp_over_the_world(run: Run) -> None:
    """`DistributedDataParallel` over all ranks of a sharded model, passed as `data_parallel=`."""
    run.optimizer(data_parallel=DistributedDataParallel(run.model))


@mistake(
    "data=2,tensor=2",
    Error(ValueError, "a DistributedDataParallel over the ranks [0, 1, 2, 3] ... don't wrap it", stepped_before=True),
    write='create it with `process_group=registry.group("data")`, and pass `data_parallel=model`',
)
def ddp_over_the_world_not_named(run: Run) -> None:
    """`DistributedDataParallel` over all ranks of a sharded model, without `data_parallel=`."""
    model = DistributedDataParallel(run.model)
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.zero_grad()
        optimizer.backward(mse(model, x, y))
        optimizer.step()


@mistake(
    "data=2",
    Error(ValueError, "a DistributedDataParallel over the ranks [0, 1] wraps ... don't wrap it", stepped_before=True),
    write="don't wrap the model: `step()` averages gradients over the data axes",
)
def ddp_with_experts_not_named(run: Run) -> None:
    """`DistributedDataParallel` over parameters that are sharded over a data axis, without `data_parallel=`."""
    model = run.model
    for module in model.modules():
        for name in dict(module.named_parameters(recurse=False)):
            declare(module, {name: P("data")})
    wrapped = DistributedDataParallel(model)
    optimizer = run.optimizer()
    for x, y in run.batches():
        optimizer.zero_grad()
        optimizer.backward(mse(wrapped, x, y))
        optimizer.step()


@mistake(
    "data=2",
    Error(ReplicaMismatchError, "the gradient differs along axis 'data'"),
    write="use `accumulation_steps=K`",
)
def no_sync_by_hand(run: Run) -> None:
    """`model.no_sync()` of torch around all micro-batches, including the last one."""
    model = DistributedDataParallel(run.model, process_group=run.registry.group("data"))
    optimizer = run.optimizer(data_parallel=model)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            x, y = run.batch(step)
            optimizer.backward(mse(model, x, y))
        optimizer.step()


@mistake(
    "data=2",
    Error(ReplicaMismatchError, "the gradient differs along axis 'data'"),
    write="call the wrapped model",
)
def forward_past_ddp(run: Run) -> None:
    """A forward of the bare model instead of the `DistributedDataParallel` module, which then averages nothing."""
    model = DistributedDataParallel(run.model, process_group=run.registry.group("data"))
    optimizer = run.optimizer(data_parallel=model)
    run.train(optimizer)


@pytest.mark.parametrize("one", cases_of(__name__))
def test_setup_mistake_has_the_documented_outcome(one: Mistake, world: World) -> None:
    check(one, world)
