"""Experts and `DistributedDataParallel`, which would average the gradients of different experts.

Experts that DDP ignores are rejected only if the DDP is passed as ``data_parallel=``, because `step` would not divide
their gradients by the number of data ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshstep.optim import ParallelOptimizer, Sharded
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World

EXPERTS: list[tuple[Topology, P]] = [
    (Topology(data=2), P("data")),
    (Topology(expert=2, roles={"expert": "data"}), P("expert")),
    (Topology(mid=2, tensor=1, aliases={"data": ("mid",), "expert": ("mid", "tensor")}), P("expert")),
]


def refused(topology: Topology, spec: P, ignored: bool) -> None:
    with ProcessGroupRegistry(topology) as registry:
        model = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in ("experts", "router")})
        declare(model, {"experts": spec, "router": P()})
        if ignored:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["experts"])
        ddp = DistributedDataParallel(model)
        said = (
            r"experts is declared P\(.*, with different shards along a data axis, so DistributedDataParallel must not"
        )
        with pytest.raises(ValueError, match=said):
            ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), registry, data_parallel=ddp)


@pytest.mark.parametrize("ignored", [False, True])
def test_experts_inside_ddp_are_rejected_on_all_ranks(world: World, ignored: bool) -> None:
    for topology, spec in EXPERTS:
        world.run(2, refused, topology, spec, ignored)


class Moe(nn.Module):
    """Returns the sum of (experts + router)^2 times the input. Initially, experts are rank + 1 and the router is 1."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.full((2,), rank + 1.0))
        self.router = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.experts + self.router).square().mul(x).sum()


def step_without_data_parallel(topology: Topology, spec: P, ignored: bool, options: dict[str, Any]) -> str:
    """Step experts in a DDP that the optimizer does not know; return the error."""
    with ProcessGroupRegistry(topology) as registry:
        rank = registry.global_rank
        model = Moe(rank)
        layer = nn.Sequential(model)
        declare(layer, {"0.experts": spec, "0.router": P()})
        if ignored:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layer, ["0.experts"])
        ddp = DistributedDataParallel(layer)
        optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), registry, **options)
        optimizer.backward(ddp(torch.tensor(float(rank + 1))))
        before = [param.detach().clone() for param in model.parameters()]
        try:
            optimizer.step()
        except ValueError as error:
            assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
            return str(error)
        # The loss is the mean of (experts + router)^2 * (rank + 1) over the ranks, with experts = rank + 1 and router = 1.
        assert model.experts.tolist() == [rank + 1 - 0.5 * (rank + 2) * (rank + 1)] * 2
        assert model.router.tolist() == [1 - 0.5 * (2 * 1 + 3 * 2)] * 2
        return "no error"


@pytest.mark.parametrize(
    "options",
    [{}, {"states": Sharded("data")}, {"states": Sharded("data", gradients=True)}, {"overlap": True}],
    ids=str,
)
def test_experts_in_a_ddp_not_passed_as_data_parallel_raise_on_all_ranks(world: World, options: dict[str, Any]) -> None:
    for topology, spec in EXPERTS:
        if "data" not in topology.axes and options:
            continue
        for text in world.run(2, step_without_data_parallel, topology, spec, False, options):
            assert "a DistributedDataParallel over the ranks [0, 1] wraps 0.experts, of which these ranks hold" in text
            assert "don't wrap it: step() averages gradients over the data axes" in text


def test_experts_ignored_by_a_ddp_not_passed_as_data_parallel_are_stepped_exactly(world: World) -> None:
    for topology, spec in EXPERTS:
        assert world.run(2, step_without_data_parallel, topology, spec, True, {}) == ["no error"] * 2


def step_beside_a_ddp_of_a_destroyed_group(shared: bool) -> list[float]:
    """Return the experts after a step. ``shared``: the unused DDP has the same parameters."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = Moe(0)
        group = dist.new_group()
        unused = DistributedDataParallel(model if shared else nn.Linear(2, 2), process_group=group)
        dist.destroy_process_group(group)
        declare(model, {"experts": P("data"), "router": P()})
        optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), registry, max_norm=None)
        optimizer.backward(model(torch.tensor(1.0)))
        optimizer.step()
        assert unused.module is not None
        found: list[float] = model.experts.tolist()
        return found


@pytest.mark.parametrize("shared", [False, True])
def test_ddp_whose_process_group_was_destroyed_is_ignored(world: World, shared: bool) -> None:
    assert world.run(2, step_beside_a_ddp_of_a_destroyed_group, shared) == [[0.0, 0.0]] * 2
