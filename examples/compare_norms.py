"""Measure the gradient norm of one sharded linear layer in several ways, and compare it with the dense layer.

    torchrun --standalone --nproc-per-node 4 examples/compare_norms.py --topology row=2,col=2

On this mesh each rank holds a quarter of the weight. The bias is sharded over `col` and replicated over `row`: each rank
holds half of it. Layer and input are random; the reference is the dense layer in float64. Gradients are first averaged
over `data`, as every method of measuring requires.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from command_line import CommandLine, main
from meshstep.optim import global_norm, sync_gradients
from meshstep.parallel import P, ProcessGroupRegistry, declare, gather_objects, shard, spec_of
from models.layers import DenseLayers, layers_for
from torch import Tensor, nn

FEATURES, BATCH = 64, 64


def squares(param: Tensor | None) -> float:
    """Return the sum of squares of this rank's shard of the gradient."""
    assert param is not None
    assert param.grad is not None
    return param.grad.double().square().sum().item()


def layer_input() -> Tensor:
    """Return a random input [batch, feature] after a GELU, like the input of an MLP's second layer."""
    return F.gelu(torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(1)))


def dense_norm(input: Tensor) -> float:
    """Return the gradient norm of the dense layer in float64, which is the exact norm."""
    torch.manual_seed(0)
    layer = nn.Linear(FEATURES, FEATURES).double()
    layer(input.double()).square().sum().backward()
    return sqrt(squares(layer.weight) + squares(layer.bias))


class Comparison(NamedTuple):
    """A sharded layer with a gradient, and its registry."""

    layer: nn.Module
    registry: ProcessGroupRegistry


def prepare(options: argparse.Namespace, registry: ProcessGroupRegistry) -> Comparison:
    """Return the layer, sharded over the topology, with the gradient for the full input.

    Raises:
        ValueError: There is no layer for the topology, or the batch does not divide over it.
    """
    family = layers_for(registry)
    torch.manual_seed(0)
    layer = family.first_linear(FEATURES, FEATURES)
    if type(family) is DenseLayers:
        declare(layer, {"*": P()})
    data_axes = registry.topology.data_axes
    part = shard(layer_input(), P((*data_axes, *family.batch_axes), family.feature_axes), registry)
    # Scale the loss so that the average over data axes is the full sum.
    loss = layer(part).square().sum() * registry.topology.size(*data_axes)
    loss.backward()
    sync_gradients(layer.parameters(), registry)
    return Comparison(layer, registry)


def measure(layer: nn.Module, registry: ProcessGroupRegistry) -> list[tuple[str, float]]:
    """Return a (method, norm) pair for each method of measuring the norm."""
    weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
    everywhere = gather_objects((squares(weight), squares(bias)), registry)
    model_axes = registry.topology.model_axes
    ranks = registry.ranks(*model_axes) if model_axes else (registry.global_rank,)
    weights, biases = zip(*(everywhere[rank] for rank in ranks), strict=True)
    local = [(rank, sqrt(sum(everywhere[rank]))) for rank in ranks]
    rows = [(f"torch clip_grad_norm_ on rank {rank}", norm) for rank, norm in local]
    if model_axes:
        rows += [
            ("one flag, bias marked as sharded: all ranks count it", sqrt(sum(weights) + sum(biases))),
            ("one flag, bias marked as replicated: rank 0 counts it", sqrt(sum(weights) + biases[0])),
        ]
    found = float(global_norm(layer.parameters(), registry).total_norm)
    return [*rows, (f"meshstep, bias declared {spec_of(bias)}", found)]


def run(comparison: Comparison) -> None:
    """Print the norms on rank 0."""
    truth, rows = dense_norm(layer_input()), measure(*comparison)
    if comparison.registry.global_rank == 0:
        print(f"{'dense layer, float64':55}{truth:10.3f}")
        for method, norm in rows:
            print(f"{method:55}{norm:10.3f}{round(norm / truth - 1, 6) + 0.0:+10.2%}")


def read_options(processes: int, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line. Raise ValueError if a flag is wrong."""
    axes = "data: shards the batch; tensor: 1-D layer; row and col: 2-D layer"
    return CommandLine(__doc__, axes).read(processes, arguments)


if __name__ == "__main__":
    main(read_options, prepare, run)
