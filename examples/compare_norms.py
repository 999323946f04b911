"""The gradient norm of one 2-D linear layer on a 2 x 2 grid of processes, measured in the ways that are in use.

    torchrun --standalone --nproc-per-node 4 examples/compare_norms.py

Each process holds a quarter of the weight. The bias is split over `col` and copied over `row`: half of it is on each
process. The layer and its input are random; the dense layer in float64 says what is right.
"""

from __future__ import annotations

from math import sqrt

import torch
import torch.distributed as dist
import torch.nn.functional as F
from meshstep.optim import global_norm
from meshstep.parallel import Linear2D, P, ProcessGroupRegistry, Topology, gather_objects, init_distributed, shard
from torch import Tensor, nn

FEATURES, BATCH = 64, 64


def squares(param: Tensor | None) -> float:
    """The sum of the squares of this process's piece of the gradient."""
    assert param is not None
    assert param.grad is not None
    return param.grad.double().square().sum().item()


def layer_input() -> Tensor:
    """What the second layer of an MLP sees: [batch, feature]."""
    return F.gelu(torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(1)))


def dense_norm(input: Tensor) -> float:
    """What the norm is: the same layer, whole, in float64."""
    torch.manual_seed(0)
    layer = nn.Linear(FEATURES, FEATURES).double()
    layer(input.double()).square().sum().backward()
    return sqrt(squares(layer.weight) + squares(layer.bias))


def measure(input: Tensor, registry: ProcessGroupRegistry) -> list[tuple[str, float]]:
    """(method, norm) of each method."""
    torch.manual_seed(0)
    layer = Linear2D(FEATURES, FEATURES, registry, bias="column")
    layer(shard(input, P("row", "col"), registry)).square().sum().backward()
    weights = gather_objects(squares(layer.weight), registry)
    biases = gather_objects(squares(layer.bias), registry)
    local = [sqrt(weight + bias) for weight, bias in zip(weights, biases, strict=True)]
    return [
        *((f"each rank its own gradients: rank {rank}", norm) for rank, norm in enumerate(local)),
        ("one boolean, bias marked as split: all ranks count it", sqrt(sum(weights) + sum(biases))),
        ("one boolean, bias marked as copied: rank 0 counts it", sqrt(sum(weights) + biases[0])),
        ("meshstep, bias declared P('col')", float(global_norm(layer.parameters(), registry).total_norm)),
    ]


def main() -> None:
    init_distributed()
    with ProcessGroupRegistry(Topology(row=2, col=2)) as registry:
        input = layer_input()
        truth = dense_norm(input)
        rows = measure(input, registry)
        if registry.global_rank == 0:
            print(f"{'dense layer, float64':55}{truth:10.3f}")
            for method, norm in rows:
                print(f"{method:55}{norm:10.3f}{round(norm / truth - 1, 6) + 0.0:+10.2%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
