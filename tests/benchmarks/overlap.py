"""Time training steps of replicas: torch's DistributedDataParallel and `ParallelOptimizer`, with and without overlap.

    python tests/benchmarks/overlap.py [--ranks 2 4] [--seconds 60] [--norm]

A step is zero_grad, forward, backward, gradient reduction, clipping by the global norm, and fused AdamW, on a small
transformer over gloo ranks with one thread per rank. Each round times every contender once, and begins with another
contender, so that other load affects all of them. The columns: median and minimum wall time of the slowest rank;
median ratio to the first contender in the same round, and ratio of the minima; median CPU time of all ranks, and its median
ratio. The last two rows are the added wall and CPU time of measuring and clipping the norm, also as a share of forward and
backward: the median of the differences within rounds, with its 95% interval. ``--norm`` runs only the two contenders of
these rows.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

import torch
import torch.distributed as dist
from meshstep.optim import ParallelOptimizer
from meshstep.optim.step.wrapped_optimizer import own_calls
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from timed_transformer import VOCAB, Transformer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from world import World, printed_by

MAX_NORM = 0.7
Step = Callable[[Tensor], "Spent | None"]
WITH, WITHOUT = "ParallelOptimizer(overlap=True)", "ParallelOptimizer(overlap=True), bare AdamW"
BACKWARD = "forward and backward of it"


class Spent(NamedTuple):
    """Seconds of one step of one contender, or of a part of it."""

    wall: float
    cpu: float

    @classmethod
    def since(cls, wall: float, cpu: float) -> Spent:
        return cls(time.perf_counter() - wall, time.process_time() - cpu)


def make_model(width: int, depth: int) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(width, depth)
    declare(model, {"*": P()})
    return model


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def torch_recipe(make: Callable[[], Transformer], registry: ProcessGroupRegistry, **options: Any) -> Step:
    """Return a step with DDP, torch's clipping and fused AdamW."""
    model = DistributedDataParallel(make(), process_group=registry.group("data"), **options)
    optimizer = adamw(model)

    def step(ids: Tensor) -> None:
        optimizer.zero_grad()
        model(ids).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()

    return step


def meshstep(
    make: Callable[[], Transformer], registry: ProcessGroupRegistry, ddp: bool = False, **options: Any
) -> Step:
    """Return a step with `ParallelOptimizer`, which reduces gradients itself unless ``ddp``."""
    model: nn.Module = make()
    if ddp:
        model = DistributedDataParallel(model, process_group=registry.group("data"))
    optimizer = ParallelOptimizer(
        adamw(model), registry, max_norm=MAX_NORM, data_parallel=model if ddp else None, **options
    )

    def step(ids: Tensor) -> None:
        optimizer.zero_grad()
        optimizer.backward(model(ids))
        optimizer.step()

    return step


def without_norm(make: Callable[[], Transformer], registry: ProcessGroupRegistry, bucket_bytes: int | None) -> Step:
    """Return a step that reduces gradients during backward, without measuring and clipping the norm."""
    model = make()
    adamw_ = adamw(model)
    optimizer = ParallelOptimizer(adamw_, registry, overlap=True, bucket_bytes=bucket_bytes)

    def step(ids: Tensor) -> Spent:
        optimizer.zero_grad()
        began = time.perf_counter(), time.process_time()
        optimizer.backward(model(ids))
        backward = Spent.since(*began)
        with own_calls:
            adamw_.step()
        return backward

    return step


def contenders(
    make: Callable[[], Transformer], registry: ProcessGroupRegistry, bucket_bytes: int | None, norm: bool
) -> dict[str, Step]:
    """Return the contenders by name: functions that make one step, each with its own model.

    ``norm``: only the contenders for the cost of the norm.
    """
    pair = {
        WITH: meshstep(make, registry, overlap=True, bucket_bytes=bucket_bytes),
        WITHOUT: without_norm(make, registry, bucket_bytes),
    }
    if norm:
        return pair
    return {
        "DDP, clip_grad_norm_, AdamW": torch_recipe(make, registry),
        "DDP (gradient_as_bucket_view), the same": torch_recipe(make, registry, gradient_as_bucket_view=True),
        "DDP, ParallelOptimizer": meshstep(make, registry, ddp=True),
        "ParallelOptimizer": meshstep(make, registry),
        **pair,
    }


def time_rounds(steps: dict[str, Step], ids: Tensor, seconds: float) -> dict[str, list[Spent]]:
    """Return the time of each contender, and of `BACKWARD`, in each round after two warm-up rounds.

    A time is the wall time of the slowest rank and the CPU time of all ranks.
    """
    spent: dict[str, list[Spent]] = {name: [] for name in (*steps, BACKWARD)}
    end, rounds = time.perf_counter() + seconds, 0
    names = list(steps)
    while True:
        go_on = torch.tensor(float(rounds < 4 or time.perf_counter() < end))
        dist.all_reduce(go_on, dist.ReduceOp.MIN)
        if not go_on:
            return spent
        first = rounds % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            began = time.perf_counter(), time.process_time()
            backward = steps[name](ids)
            whole = Spent.since(*began)
            for what, mine in ((name, whole), (BACKWARD, backward)):
                if mine is not None:
                    everybody = slowest(mine)
                    if rounds >= 2:
                        spent[what].append(everybody)
        rounds += 1


def slowest(mine: Spent) -> Spent:
    """Return the wall time of the slowest rank and the CPU time of all ranks."""
    everybody = [torch.empty(2, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, torch.tensor(mine, dtype=torch.float64))
    walls, cpus = torch.stack(everybody).unbind(1)
    return Spent(float(walls.max()), float(cpus.sum()))


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    return median(value / reference for value, reference in zip(values, base, strict=True))


def report(spent: dict[str, list[Spent]]) -> None:
    base_walls, base_cpus = zip(*next(iter(spent.values())), strict=True)
    for name, values in spent.items():
        walls, cpus = zip(*values, strict=True)
        print(
            f"  {name:42s}{median(walls) * 1e3:8.1f} ms {ratio(walls, base_walls):6.3f}x"
            f"{min(walls) * 1e3:10.1f} ms {min(walls) / min(base_walls):6.3f}x"
            f"{median(cpus) * 1e3:10.1f} ms {ratio(cpus, base_cpus):6.3f}x",
            flush=True,
        )
    added = [
        Spent(both.wall - bare.wall, both.cpu - bare.cpu)
        for both, bare in zip(spent[WITH], spent[WITHOUT], strict=True)
    ]
    walls, cpus = zip(*added, strict=True)
    of_walls, of_cpus = (median(values) for values in zip(*spent[BACKWARD], strict=True))
    for what, found, of in (("wall clock", walls, of_walls), ("CPU", cpus, of_cpus)):
        low, high = (value / of for value in around_median(found))
        share = f"{median(found) / of:.1%} of forward and backward ({low:.1%} to {high:.1%})"
        print(f"  norm and clip add, {what}: {median(found) * 1e3:.1f} ms, {share}")


def around_median(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% confidence interval of the median (sign test)."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    middle = (len(values) - 1) / 2
    return ordered[max(0, round(middle - half))], ordered[min(len(values) - 1, round(middle + half))]


def run(ranks: int, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with ProcessGroupRegistry(Topology(data=ranks)) as registry:
        rank = registry.global_rank

        def make() -> Transformer:
            return make_model(arguments.width, arguments.depth)

        ids = torch.randint(VOCAB, (arguments.rows, 65), generator=torch.Generator().manual_seed(rank))
        steps = contenders(make, registry, arguments.bucket_bytes, arguments.norm)
        spent = time_rounds(steps, ids, arguments.seconds)
        if rank == 0:
            params = list(make().parameters())
            numel = sum(param.numel() for param in params)
            rounds = len(next(iter(spent.values())))
            print(f"\ndata={ranks}: {numel:,} parameters in {len(params)} tensors, {rounds} rounds")
            print(f"  {'':42s}{'median':>11s}{'':8s}{'smallest':>11s}{'':10s}{'CPU':>9s}")
            report(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=60.0, help="time for each table")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--rows", type=int, default=4, help="of 64 tokens, on each rank")
    parser.add_argument("--norm", action="store_true", help="time only the cost of the norm")
    parser.add_argument("--bucket-bytes", type=int, default=None, help="with overlap=True")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {platform.machine()} CPU, gloo, one thread per rank")
    world = World()
    for ranks in arguments.ranks:
        timeout = 600.0 + 2 * arguments.seconds
        print(world.ranks.run(printed_by, ranks, run, ranks, arguments, timeout=timeout)[0], end="", flush=True)
    world.close()


if __name__ == "__main__":
    main()
