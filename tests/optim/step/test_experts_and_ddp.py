"""Experts in a `DistributedDataParallel` are rejected, because DDP would average the gradients of different experts.

If DDP ignores the experts, their gradients would lack the division by the number of data ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World


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
    roles: dict[str, Any] = {"expert": "data"}
    folded = Topology(mid=2, tensor=1, aliases={"data": ("mid",), "expert": ("mid", "tensor")})
    for topology, spec in (
        (Topology(data=2), P("data")),
        (Topology(expert=2, roles=roles), P("expert")),
        (folded, P("expert")),
    ):
        world.run(2, refused, topology, spec, ignored)
