"""`DistributedDataParallel` as ``data_parallel=``: its process group must be that of the data axes."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import nn
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
        (Topology(tensor=4), "give no DistributedDataParallel"),
    ],
    ids=str,
)
def test_ddp_over_more_ranks_is_an_error(world: World, topology: Topology, remedy: str) -> None:
    world.run(4, ddp_over_world, topology, remedy)


def ddp_over_some_data_ranks() -> None:
    with ProcessGroupRegistry(Topology(outer=2, inner=2, roles={"outer": "data", "inner": "data"})) as registry:
        with pytest.raises(ValueError, match=r"over ranks \[(0, 1|2, 3)\], but .* \[0, 1, 2, 3\]"):
            wrap(registry, registry.group("inner"))
        wrap(registry, registry.group("outer", "inner"))


def test_ddp_over_fewer_ranks_is_an_error(world: World) -> None:
    world.run(4, ddp_over_some_data_ranks)


def ddp_over_data_ranks(topology: Topology) -> None:
    with ProcessGroupRegistry(topology) as registry:
        wrap(registry, registry.group(*topology.data_axes))


@pytest.mark.parametrize("topology", [Topology(data=2, tensor=2), Topology(data=4), Topology(pipe=2, dp=2)], ids=str)
def test_ddp_over_data_ranks_is_accepted(world: World, topology: Topology) -> None:
    world.run(4, ddp_over_data_ranks, topology)
