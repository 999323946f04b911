"""`ParallelOptimizer.for_model` on models of DTensors, models in DistributedDataParallel, and replicated models."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from dtensor_layouts import LAYOUTS, Net, batch, expert_gradient, net
from meshstep.optim import ParallelOptimizer, ReplicaMismatchError
from meshstep.parallel import ProcessGroupRegistry, Topology
from torch import Tensor, nn
from world import World

STEPS, MAX_NORM = 5, 0.4


def loss_of(model: nn.Module, inner: Net, samples: Tensor, step: int) -> Tensor:
    experts: Any = inner.experts
    gradient, loss = expert_gradient() * (step + 1), model(samples).square().mean() * (step + 1)
    if hasattr(experts, "to_local"):
        from torch.distributed.tensor import distribute_tensor

        gradient = distribute_tensor(gradient, experts.device_mesh, experts.placements).to_local()
        experts = experts.to_local()
    total: Tensor = loss + (experts * gradient).sum()
    return total


def full(param: Tensor) -> Tensor:
    gathered: Any = param.full_tensor() if hasattr(param, "full_tensor") else param
    full_tensor: Tensor = gathered.detach().clone()
    return full_tensor


def trained(name: str, kind: str = "fused") -> tuple[dict[str, Tensor], list[float]]:
    """Train on this rank's samples; return full parameters and norms."""
    inner, data = net(), 1
    model: nn.Module = inner
    if name == "ddp":
        model, data = nn.parallel.DistributedDataParallel(inner), dist.get_world_size()
    elif name == "replicas":
        data = dist.get_world_size()
    elif name != "dense":
        data = LAYOUTS[name](inner)
    inner.experts.grad = None
    rank = dist.get_rank() * data // dist.get_world_size()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, fused=kind == "fused")
    optimizer = ParallelOptimizer.for_model(model, adamw, max_norm=MAX_NORM)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, inner, batch().chunk(data)[rank], step))
        norms.append(float(optimizer.step().total_norm))
    return {key: full(param) for key, param in inner.named_parameters()}, norms


@pytest.mark.long
@pytest.mark.default_cases(9)
@pytest.mark.parametrize("kind", ["fused", "foreach"])
@pytest.mark.parametrize("name", [*LAYOUTS, "ddp", "replicas"])
def test_for_model_training_matches_dense_model(world: World, name: str, kind: str) -> None:
    ((wanted, wanted_norms),) = world.run(1, trained, "dense", kind)
    assert min(wanted_norms) > MAX_NORM, "every step should clip"
    for found, norms in world.run(4, trained, name, kind):
        assert norms == pytest.approx(wanted_norms, rel=1e-12)
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-11, atol=1e-12)


def sharded_by_hand() -> str:
    """Step a weight that has different values on each rank and no declared spec. Return the error."""
    model = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(dist.get_rank() + 1.0)
    optimizer = ParallelOptimizer.for_model(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.backward(model(torch.ones(1, 4)).sum())
    with pytest.raises(ReplicaMismatchError) as caught:
        optimizer.step()
    return str(caught.value)


def test_undeclared_shards_raise_in_first_step(world: World) -> None:
    assert all("weight: the parameter differs" in text for text in world.run(2, sharded_by_hand))


def unequal_stages() -> tuple[float, tuple[str, ...]]:
    """Give each rank a weight of a different shape. Return the norm and the pipeline axes."""
    size = 2 + dist.get_rank()
    model = nn.Linear(size, 1, bias=False)
    optimizer = ParallelOptimizer.for_model(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.backward(model(torch.ones(1, size)).sum())
    return float(optimizer.step().total_norm), optimizer.registry.topology.pipe_axes


def test_ranks_with_different_parameters_become_pipeline_stages(world: World) -> None:
    for norm, stages in world.run(2, unequal_stages):
        assert norm == pytest.approx(5**0.5)
        assert stages == ("stage_2x1",)


def weighted_error(names: tuple[str, ...] | None, role: str | None) -> tuple[float, str]:
    """Train `fully_shard` layers with micro-batch weights that differ between ranks from the second step on.

    Return the largest difference from the dense parameters, and the topology.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)).double()
    model, rank = copy.deepcopy(dense), dist.get_rank()
    if names is None:
        fully_shard(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=names))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    if role is None:
        optimizer = ParallelOptimizer.for_model(model, sgd, max_norm=0.5)
    else:
        registry = ProcessGroupRegistry(Topology(x=2, roles={"x": cast(Any, role)}))
        optimizer = ParallelOptimizer(sgd, registry, max_norm=0.5, data_parallel=model)
    plain = torch.optim.SGD(dense.parameters(), lr=0.1)
    for step in range(3):
        samples, weights = torch.randn(2, 2, 8, dtype=torch.float64), (1.0, 1.0 + 2 * step)
        optimizer.zero_grad()
        optimizer.backward(model(samples[rank]).square().sum(), weight=weights[rank])
        optimizer.step()
        plain.zero_grad()
        (sum(dense(one).square().sum() for one in samples) / sum(weights)).backward()
        nn.utils.clip_grad_norm_(dense.parameters(), 0.5)
        plain.step()
    pairs = zip(model.parameters(), dense.parameters(), strict=True)
    return max(float((full(param) - other).abs().max()) for param, other in pairs), repr(optimizer.registry.topology)


@pytest.mark.parametrize("names", [("x",), None], ids=["unknown name", "no name"])
def test_unnamed_or_unknown_mesh_dim_of_fully_shard_is_data_axis(world: World, names: tuple[str, ...] | None) -> None:
    for error, topology in world.run(2, weighted_error, names, None):
        assert error < 1e-12
        assert "'data'" in topology


def test_fully_shard_over_axis_with_model_role_differs_from_weighted_mean(world: World) -> None:
    """Negative control of the weighted mean: over a model axis, each rank divides by the weight of its own samples only."""
    for error, _ in world.run(2, weighted_error, ("x",), "model"):
        assert error > 1e-3


def test_for_model_without_process_group_rejects_none_as_model() -> None:
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with pytest.raises(TypeError, match=r"the model is a NoneType; give the nn\.Module that has the parameters"):
        ParallelOptimizer.for_model(cast(Any, None), sgd)
