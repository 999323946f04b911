"""The process group of a `DistributedDataParallel`, also Megatron's, and of `fully_shard`, compared with the data
axes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshstep.optim import ParallelOptimizer, Sharded, clip_grad_norm_
from meshstep.optim.step.data_parallel import MegatronGradSync
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from meshstep.parallel.interop.dtensor import keep_specs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from world import World


def wrap(registry: ProcessGroupRegistry, group: dist.ProcessGroup | None) -> None:
    model = nn.ParameterDict({"weight": nn.Parameter(torch.ones(2)), "bias": nn.Parameter(torch.ones(2))})
    declare(model, {"weight": P("tensor") if "tensor" in registry.topology.axes else P(), "bias": P()})
    ddp = DistributedDataParallel(model, process_group=group)
    ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), registry, data_parallel=ddp)


def ddp_over_world(topology: Topology, remedy: str) -> None:
    with ProcessGroupRegistry(topology) as registry:
        axes = topology.data_axes
        own = re.escape(str(list(registry.ranks(*axes)) if axes else [registry.global_rank]))
        with pytest.raises(ValueError, match=rf"over ranks \[0, 1, 2, 3\], but .* have the ranks {own}\..*{remedy}"):
            wrap(registry, None)


@pytest.mark.parametrize(
    ("topology", "remedy"),
    [
        (Topology(data=2, tensor=2), r"process_group=registry.group\('data'\)"),
        (Topology(tensor=2, data=2), r"process_group=registry.group\('data'\)"),
        (Topology(dp=2, cp=1, pipe=2), r"process_group=registry.group\('dp', 'cp'\)"),
        (Topology(tensor=4), "and don't wrap it with DistributedDataParallel"),
    ],
    ids=str,
)
def test_ddp_over_more_ranks_than_the_data_axes_raises(world: World, topology: Topology, remedy: str) -> None:
    world.run(4, ddp_over_world, topology, remedy)


def ddp_over_some_data_ranks() -> None:
    with ProcessGroupRegistry(Topology(outer=2, inner=2, roles={"outer": "data", "inner": "data"})) as registry:
        with pytest.raises(ValueError, match=r"over ranks \[(0, 1|2, 3)\], but .* \[0, 1, 2, 3\], so .*diverge: wrap"):
            wrap(registry, registry.group("inner"))
        wrap(registry, registry.group("outer", "inner"))


def test_ddp_over_a_subset_of_the_data_ranks_raises(world: World) -> None:
    world.run(4, ddp_over_some_data_ranks)


def ddp_over_data_ranks(topology: Topology) -> None:
    with ProcessGroupRegistry(topology) as registry:
        wrap(registry, registry.group(*topology.data_axes))


@pytest.mark.parametrize("topology", [Topology(data=2, tensor=2), Topology(data=4), Topology(pipe=2, dp=2)], ids=str)
def test_ddp_over_exactly_the_data_ranks_is_accepted(world: World, topology: Topology) -> None:
    world.run(4, ddp_over_data_ranks, topology)


def stepped_by_unnamed_ddp(topology: Topology, axes: tuple[str, ...], options: dict[str, Any]) -> str:
    with ProcessGroupRegistry(topology) as registry:
        torch.manual_seed(registry.rank("tensor"))
        model = nn.Linear(4, 2)
        nn.init.zeros_(model.bias)
        declare(model, {"weight": P("tensor"), "bias": P()})
        ddp = DistributedDataParallel(model, process_group=registry.group(*axes))
        optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), registry, **options)
        before = model.weight.detach().clone()
        optimizer.backward(ddp(torch.ones(3, 4)).square().sum())
        try:
            optimizer.step()
        except ValueError as error:
            assert torch.equal(before, model.weight)
            return str(error)
        return "no error"


UNCOMPARED: dict[str, Any] = {
    "check_replicas": False
}  # a check would fail, because the model lacks all-reduces over "tensor"


@pytest.mark.parametrize(
    "options", [UNCOMPARED, {**UNCOMPARED, "states": Sharded("data")}, {**UNCOMPARED, "bucket_bytes": 64}]
)
def test_ddp_over_tensor_shards_not_passed_as_data_parallel_raises(world: World, options: dict[str, Any]) -> None:
    topology = Topology(data=2, tensor=2)
    for text in world.run(4, stepped_by_unnamed_ddp, topology, ("data", "tensor"), options):
        assert "a DistributedDataParallel over the ranks [0, 1, 2, 3] wraps" in text
        assert "of which these ranks hold different shards" in text
        assert "don't wrap it: step() averages gradients over the data axes" in text
        assert "wrap the model with DistributedDataParallel(model, process_group=registry.group(...)), with" in text


def test_ddp_over_data_axes_not_passed_as_data_parallel_is_accepted(world: World) -> None:
    topology = Topology(data=2, tensor=2)
    assert world.run(4, stepped_by_unnamed_ddp, topology, ("data",), UNCOMPARED) == ["no error"] * 4


def fully_sharded_over_the_world(dims: tuple[str, ...], shape: tuple[int, ...], spec: P) -> str:
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        model = nn.Linear(8, 8, bias=False)
        declare(model, {"weight": spec})
        with keep_specs(model):
            fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=dims))
        try:
            ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), registry, data_parallel=model)
        except ValueError as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize(
    ("dims", "shape", "spec", "text"),
    [
        (("data",), (4,), P("tensor"), "dim 'data' has ranks"),
        (("world",), (4,), P("tensor"), "tensor"),
        (("tensor",), (4,), P("tensor"), "dim 'tensor' has ranks"),
    ],
    ids=["data", "world", "tensor"],
)
def test_fully_shard_over_tensor_shards_raises(
    world: World, dims: tuple[str, ...], shape: tuple[int, ...], spec: P, text: str
) -> None:
    for found in world.run(4, fully_sharded_over_the_world, dims, shape, spec):
        assert text in found
        assert found != "no error"


class AsInMegatron(nn.Module):
    """The attributes of Megatron's `DistributedDataParallel` that the optimizer reads when it is made."""

    def __init__(self, group: dist.ProcessGroup | None, distributed: bool = False, per_token: bool = False) -> None:
        super().__init__()
        self.ddp_config = SimpleNamespace(
            overlap_grad_reduce=False, grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
        )
        self.config = SimpleNamespace(calculate_per_token_loss=per_token)
        if group is not None:
            self.dp_cp_group = group


def checked_groups_of_megatron() -> None:
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        MegatronGradSync(AsInMegatron(registry.group("data"))).check_groups(registry)
        MegatronGradSync(AsInMegatron(None)).check_groups(registry)
        with pytest.raises(ValueError, match="averages gradients over ranks"):
            MegatronGradSync(AsInMegatron(registry.group("tensor"))).check_groups(registry)


def test_megatron_data_parallel_group_that_differs_from_data_axes_raises(world: World) -> None:
    world.run(4, checked_groups_of_megatron)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"distributed": True}, "use_distributed_optimizer=True: give"),
        ({"per_token": True}, "calculate_per_token_loss=True"),
    ],
)
def test_unsupported_settings_of_megatron_ddp_raise(options: dict[str, bool], said: str) -> None:
    with pytest.raises(ValueError, match=f"unsupported setting: {said}"):
        MegatronGradSync(AsInMegatron(None, **options))


def flattened(how: str, original: bool) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = FullyShardedDataParallel(nn.Linear(8, 8), use_orig_params=original, device_id=torch.device("cpu"))
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        calls: dict[str, Callable[[], object]] = {
            "module": partial(ParallelOptimizer, sgd, registry, data_parallel=model),
            "parameters": partial(ParallelOptimizer, sgd, registry, check_replicas=False),
            "clip": partial(clip_grad_norm_, model.parameters(), 1.0, registry),
        }
        model(torch.ones(2, 8)).sum().backward()
        with pytest.raises(TypeError, match=r"\(FSDP1\).* is not supported: .*fully_shard instead") as caught:
            calls[how]()
        return str(caught.value)


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("how", ["module", "parameters", "clip"])
def test_fsdp1_raises_because_its_shards_would_count_as_replicas(world: World, how: str, original: bool) -> None:
    for text in world.run(2, flattened, how, original):
        assert ("data_parallel=" if how == "module" else "is a flattened shard of") in text
