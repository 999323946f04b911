"""Time the exchange and the norm of ``sum_order="fixed"`` compared with "any" and DDP, in wall time of rank 0.

    python tests/benchmarks/fixed_order.py [--ranks 2 4] [--elements 12000000] [--rounds 7]

One window of one micro-batch. Columns, in milliseconds; each is the smallest of all rounds, which alternate:

    all-reduce   `torch.distributed.all_reduce` of one flat tensor of all gradients, the bytes that every method must send
    any          the reduction of ``sum_order="any"``: gradient buckets
    fixed        the reduction of ``sum_order="fixed"``: all-to-all, sums in the order of the tree, all-gather
    DDP          backward with `DistributedDataParallel` minus backward without it
    norm any     `GlobalNorm` of the reduced gradients
    norm fixed   `ExactNorm` of the reduced gradients
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

from world import World


def seconds(function: Callable[[], object]) -> float:
    """Return the wall time of one call in seconds, with all ranks starting together."""
    dist.barrier()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measured(elements: int, rounds: int) -> list[float]:
    """Return the figures of the columns in milliseconds."""
    from meshstep.optim.gradients.buckets import gradient_buckets, reduce_all
    from meshstep.optim.gradients.fixed_order import FixedOrderSum, TreeRanks
    from meshstep.optim.norm.exact_norm import ExactNorm
    from meshstep.optim.norm.global_norm import GlobalNorm
    from meshstep.optim.norm.plan import ReductionPlan, entries_of
    from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
    from torch.nn.parallel import DistributedDataParallel

    ranks = dist.get_world_size()
    width = int((elements / 12) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(12)))
    declare(model, {"*": P()})
    topology = Topology(data=ranks)
    registry = ProcessGroupRegistry(topology)
    params = [*model.parameters()]
    plan = ReductionPlan.of(entries_of([params], topology), topology, registry.global_rank)
    buckets = gradient_buckets(params, plan, registry)
    total = FixedOrderSum(params, TreeRanks(("data",), registry.group("data"), registry.rank("data"), ranks, 1))
    norms = GlobalNorm(plan, registry), ExactNorm(plan, registry)
    gradients = [torch.randn_like(param) for param in params]
    flat = torch.randn(sum(param.numel() for param in params))
    parallel = DistributedDataParallel(model)
    inputs = torch.randn(4, width)

    def set_gradients() -> None:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.clone()

    def fixed() -> None:
        total.take()
        total.finish()

    def backward(module: nn.Module) -> Callable[[], None]:
        model.zero_grad()
        loss: Tensor = module(inputs).sum()
        return loss.backward

    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        found.setdefault("all-reduce", []).append(seconds(lambda: dist.all_reduce(flat)))
        set_gradients()
        found.setdefault("any", []).append(seconds(lambda: reduce_all(buckets)))
        found.setdefault("norm any", []).append(seconds(lambda: norms[0]([param.grad for param in params])))
        set_gradients()
        found.setdefault("fixed", []).append(seconds(fixed))
        found.setdefault("norm fixed", []).append(seconds(lambda: norms[1]([param.grad for param in params])))
        plain = seconds(backward(model))
        found.setdefault("DDP", []).append(seconds(backward(parallel)) - plain)
    return [1e3 * min(found[name]) for name in ("all-reduce", "any", "fixed", "DDP", "norm any", "norm fixed")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of gloo processes")
    parser.add_argument("--elements", type=int, default=12_000_000, help="number of gradient elements")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    world = World()
    print(f"torch {torch.__version__}, gloo, {args.elements:,} float32 gradients; milliseconds")
    print(f"{'ranks':>5} {'all-reduce':>10} {'any':>8} {'fixed':>8} {'DDP':>8} {'norm any':>9} {'norm fixed':>10}")
    for ranks in args.ranks:
        row = world.run(ranks, measured, args.elements, args.rounds)[0]
        print(
            f"{ranks:5d} {row[0]:10.1f} {row[1]:8.1f} {row[2]:8.1f} {row[3]:8.1f} {row[4]:9.1f} {row[5]:10.1f}",
            flush=True,
        )
    world.close()


if __name__ == "__main__":
    main()
