"""Time `whole`: a step of third-party optimizers, wrapped on sharded weights, relative to the dense step.

    python tests/benchmarks/whole_any.py [--ranks 2] [--width 128] [--layers 2] [--rounds 5]

Needs timm and pytorch_optimizer; an optimizer of a missing package has a row with the error. The parameters are matrices
and vectors of a transformer in float32. The columns: relative difference from one process after five steps of a small
model, wrapped and on bare shards; CPU time of the dense step in one process; CPU time of a wrapped step on the slowest rank
and on all ranks, relative to the dense step. Times are medians over rounds, over gloo with one thread per rank.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

import torch
from meshstep.optim import ParallelOptimizer
from meshstep.optim.whole import whole
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, shard
from torch import nn
from whole_optimizers import MAKE, apart
from world import World


def specs_of(width: int, layers: int) -> list[tuple[tuple[int, ...], P]]:
    """Return shape and spec of each parameter: four matrices and two vectors per layer of a transformer."""
    one = [
        ((3 * width, width), P("tensor")),
        ((width, width), P(None, "tensor")),
        ((4 * width, width), P("tensor")),
        ((width, 4 * width), P(None, "tensor")),
        ((4 * width,), P("tensor")),
        ((width,), P()),
    ]
    return one * layers


def seconds(kind: str, ranks: int, width: int, layers: int, rounds: int) -> float:
    """Return the CPU seconds of a step on this rank; with one rank, of the unwrapped optimizer."""
    torch.set_num_threads(1)
    with ProcessGroupRegistry(Topology(tensor=ranks)) as registry:
        params = []
        for index, (shape, spec) in enumerate(specs_of(width, layers)):
            generator = torch.Generator().manual_seed(index)
            params.append(nn.Parameter(shard(torch.randn(shape, generator=generator), spec, registry)))
            annotate(params[-1], spec, f"w{index}")
            params[-1].grad = shard(torch.randn(shape, generator=generator), spec, registry)
        step = (
            MAKE[kind](params).step
            if ranks == 1
            else ParallelOptimizer(whole(MAKE[kind](params)), registry).optimizer.step
        )
        times = []
        for _ in range(rounds + 2):
            begin = time.thread_time()
            step()
            times.append(time.thread_time() - begin)
        return median(times[2:])


def row(world: World, kind: str, ranks: int, sizes: tuple[int, int, int]) -> str:
    (dense,) = world.run(1, seconds, kind, 1, *sizes)
    wrapped = world.run(ranks, seconds, kind, ranks, *sizes)
    found = [apart(world, kind, "wrapped"), apart(world, kind, "on pieces")]
    errors = " | ".join("equal" if error == 0 else f"{error:.0e}" for error in found)
    return f"| {kind} | {errors} | {dense * 1e3:.1f} | {max(wrapped) / dense:.2f} | {sum(wrapped) / dense:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 2), ("width", 128), ("layers", 2), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    world = World()
    print("| optimizer | wrapped, error | on pieces, error | dense step, ms | slowest rank | all ranks |")
    print("|---|---|---|---|---|---|")
    try:
        for kind in MAKE:
            try:
                print(row(world, kind, given.ranks, (given.width, given.layers, given.rounds)), flush=True)
            except Exception as error:
                print(f"| {kind} | {str(error).strip().splitlines()[-1][:80]} |", flush=True)
    finally:
        world.close()


if __name__ == "__main__":
    main()
