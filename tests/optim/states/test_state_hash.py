"""`ParallelOptimizer.state_hash` on one process and with a sharded parameter."""

from __future__ import annotations

import torch
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, shard
from torch import nn
from world import World


def hash_of_run(topology: Topology, step_count: float) -> int:
    """Return the hash after a step of Adam and a change of its step count."""
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
