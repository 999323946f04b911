"""`ParallelOptimizer.state_hash` on one process and with a sharded parameter."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from meshstep.optim import ParallelOptimizer, ZClip
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, shard
from torch import nn
from world import World


def hash_of_run(topology: Topology, step_count: float) -> int:
    with ProcessGroupRegistry(topology) as registry:
        spec = P("tensor") if topology.world_size > 1 else P()
        weight = nn.Parameter(shard(torch.arange(12.0).view(4, 3), spec, registry))
        annotate(weight, spec, "weight")
        optimizer = ParallelOptimizer(torch.optim.Adam([weight], lr=0.1), registry)
        optimizer.backward(weight.sum())
        optimizer.step()
        optimizer.optimizer.state[weight]["step"].fill_(step_count)
        return int(optimizer.state_hash())


def test_state_hash_contains_step_count_once_on_one_and_two_ranks(world: World) -> None:
    (alone,), (later,) = (world.run(1, hash_of_run, Topology(), count) for count in (1.0, 2.0))
    assert alone != later
    assert world.run(2, hash_of_run, Topology(tensor=2), 1.0) == [alone] * 2


def clipped(steps: int) -> ParallelOptimizer[Any]:
    weight = nn.Parameter(torch.arange(12.0).view(4, 3))
    annotate(weight, P(), "weight")
    adam = torch.optim.Adam([weight], lr=0.1)
    optimizer = ParallelOptimizer(adam, ProcessGroupRegistry(Topology()), max_norm=ZClip(warm_up=2))
    for step in range(steps):
        optimizer.zero_grad()
        optimizer.backward((weight * (step + 1)).square().sum())
        optimizer.step()
    return optimizer


def test_state_hash_after_a_load_contains_the_state_of_the_clipping_rule() -> None:
    trained, resumed = clipped(3), clipped(0)
    with torch.no_grad():
        for param, source in zip(resumed.param_groups[0]["params"], trained.param_groups[0]["params"], strict=True):
            param.copy_(source)
    saved = trained.state_dict()
    resumed.load_state_dict(saved)
    assert int(resumed.state_hash()) == int(trained.state_hash())
    other = deepcopy(saved)
    numbers = other["meshstep"]["clip"]["state"]
    numbers[next(iter(numbers))] += 1.0
    resumed.load_state_dict(other)
    assert int(resumed.state_hash()) != int(trained.state_hash())
