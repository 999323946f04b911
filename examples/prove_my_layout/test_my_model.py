"""Tests of `my_model`: python -m pytest, or torchrun --nproc-per-node 4 -m pytest. With --forget-sum they fail."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshstep import P, ProcessGroupRegistry, Topology, shard
from meshstep.testing import Ranks, assert_exact, prove
from meshstep.testing.strategies import topologies
from my_model import DenseNet, MyNet
from torch import Tensor, nn

WIDTH = 6
TOPOLOGIES = [Topology(tensor=2), Topology(data=2, tensor=2)]


def backward(model: nn.Module, x: Tensor) -> nn.Module:
    loss_of(model, x).backward()
    return model


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    difference: Tensor = model(x) - torch.roll(x, 1, 1)
    return difference.square().mean()


# Functions that the tests run on each rank ----------------------------------------------------------------------------


def is_exact(topology: Topology, forget_sum: bool, hidden: int = 8, samples: int = 4) -> None:
    with ProcessGroupRegistry(topology) as registry:
        dense = DenseNet(WIDTH, hidden).to(registry.device, torch.float64)
        model = MyNet(dense, registry, forget_sum)
        x = torch.randn(samples, WIDTH, device=registry.device, dtype=torch.float64)
        mine = shard(x, P(topology.data_axes), registry)
        assert_exact(lambda: backward(model, mine), lambda: backward(dense, x), registry)


def is_proved(topology: Topology, forget_sum: bool) -> None:
    with ProcessGroupRegistry(topology) as registry:
        model = MyNet(DenseNet(WIDTH, 8).to(registry.device), registry, forget_sum)
        x = torch.randn(4, WIDTH, device=registry.device, dtype=torch.float64)
        mine = shard(x, P(topology.data_axes), registry)
        prove(model, lambda model: loss_of(model, mine), registry).check()


# The tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=repr)
def test_gradients_equal_dense_gradients(ranks: Ranks, forget_sum: bool, topology: Topology) -> None:
    ranks.run(is_exact, topology.world_size, topology, forget_sum)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=repr)
def test_prove_finds_no_wrong_gradient(ranks: Ranks, forget_sum: bool, topology: Topology) -> None:
    """`prove` needs no dense reference: DenseNet only draws the weights."""
    ranks.run(is_proved, topology.world_size, topology, forget_sum)


@settings(max_examples=10, deadline=None)
@given(topology=topologies(4, axes=("data", "tensor")), hidden=st.integers(1, 3), samples=st.integers(1, 3))
def test_gradients_are_exact_on_random_topologies_and_sizes(
    ranks: Ranks, forget_sum: bool, topology: Topology, hidden: int, samples: int
) -> None:
    hidden, samples = hidden * topology.world_size, samples * topology.world_size  # divisible by the mesh
    ranks.run(is_exact, topology.world_size, topology, forget_sum, hidden, samples)
