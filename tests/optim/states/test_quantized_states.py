"""Quantized optimizer states on shards. Only tensors of at least 4,096 elements have quantized states."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from meshstep.optim import ParallelOptimizer, Sharded
from meshstep.optim.whole import whole
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, shard, unshard
from third_party import QuantizedMomentum, under_the_name
from torch import Tensor, nn
from world import World

SHAPE = (48, 256)
SPLIT, SHARDED = Topology(tensor=2), Topology(data=4)  # shards of 6,144 and 3,072 elements


def optimizer_of(package: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW with 8-bit states; "stand-in" is a small optimizer under the name of torchao's."""
    if package == "stand-in":
        return under_the_name("torchao", "AdamW8bit", QuantizedMomentum)(params, lr=0.1)
    made: torch.optim.Optimizer = importlib.import_module(f"{package}.optim").AdamW8bit(params, lr=0.1)
    return made


def stepped(topology: Topology, package: str, how: str) -> Tensor:
    """Return the full weight after three steps. ``how``: "whole", "accepted" (declared elementwise), or neither."""
    registry = ProcessGroupRegistry(topology)
    spec = P(None, "tensor") if "tensor" in topology.axes else P()
    generator = torch.Generator().manual_seed(7)
    weight = nn.Parameter(shard(torch.randn(SHAPE, generator=generator), spec, registry))
    annotate(weight, spec, "weight")
    inner: Any = optimizer_of(package, [weight])
    if how == "accepted":
        inner.elementwise = True
    states = Sharded("data") if spec == P() and topology.world_size > 1 else ()
    optimizer = ParallelOptimizer(whole(inner) if how == "whole" else inner, registry, states=states)
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.backward((weight * shard(torch.randn(SHAPE, generator=generator), spec, registry)).sum())
        optimizer.step()
    full = unshard(weight.detach(), spec, registry)
    registry.close()
    return full


@pytest.mark.parametrize("topology", [SPLIT, SHARDED], ids=str)
@pytest.mark.parametrize("package", ["stand-in", "bitsandbytes", "torchao"])
def test_quantized_states_on_shards_differ_from_single_process_unless_wrapped_by_whole(
    world: World, package: str, topology: Topology
) -> None:
    if package != "stand-in":
        pytest.importorskip(package)
    dense = stepped(Topology(data=1), package, "alone")
    for full in world.run(topology.world_size, stepped, topology, package, "whole"):
        torch.testing.assert_close(full, dense, rtol=1e-6, atol=1e-6)
    for full in world.run(topology.world_size, stepped, topology, package, "accepted"):
        assert 1e-5 < float((full - dense).abs().max()) < 0.3
