"""Time a step of Muon on 4 ranks: each matrix at its owner rank, or duplicated on all ranks (meshstep, torch, DTensors).

    python tests/benchmarks/muon.py [--width 512] [--layers 4] [--rounds 5] [--kinds homes duplicated]

With owner ranks and with DTensors, the matrices of a transformer are replicated over ``data=2`` and sharded over
``tensor=2``; the other methods have full matrices on every rank. The methods alternate, one step each, so that other load
affects all of them. The output has medians over rounds: time until the slowest rank is done, and CPU time of all ranks. It
also shows how evenly Newton-Schulz is divided over the ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, process_time, thread_time

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from meshstep.optim import Muon, ParallelOptimizer
from meshstep.optim.step.wrapped_optimizer import own_calls
from meshstep.optim.whole import muon as of_muon
from meshstep.optim.whole.muon import newton_schulz
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, gather_objects, shard
from torch import Tensor, nn
from world import World

OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
KINDS = ("homes", "same, duplicated", "duplicated", "DTensor")
CPU = ", processors"


def shapes_of(width: int, layers: int) -> dict[str, tuple[tuple[int, int], P]]:
    """Return shape and spec of each matrix of all layers."""
    one = {
        "q": ((width, width), P("tensor")),
        "k": ((width, width), P("tensor")),
        "v": ((width, width), P("tensor")),
        "out": ((width, width), P(None, "tensor")),
        "up": ((4 * width, width), P("tensor")),
        "down": ((width, 4 * width), P(None, "tensor")),
    }
    return {f"{layer}.{name}": value for layer in range(layers) for name, value in one.items()}


def _full(shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Ours:
    """meshstep's `Muon` on sharded matrices: the owner rank of a matrix computes its update."""

    def __init__(self, registry: ProcessGroupRegistry, width: int, layers: int) -> None:
        self.params: dict[str, nn.Parameter] = {}
        for index, (name, (shape, spec)) in enumerate(shapes_of(width, layers).items()):
            self.params[name] = nn.Parameter(shard(_full(shape, index), spec, registry))
            annotate(self.params[name], spec, name)
            self.params[name].grad = shard(_full(shape, 1000 + index), spec, registry)
        inner = Muon(self.params.items(), **OPTIONS)
        self.optimizer = ParallelOptimizer(inner, registry)
        self.inner = inner

    def step(self) -> None:
        """Step as `ParallelOptimizer` does, with its skip decision."""
        self.inner.found_inf = torch.zeros(())
        with own_calls:
            self.inner.step()


class SameOnEvery:
    """meshstep's `Muon` on unsharded matrices: every rank computes every update."""

    def __init__(self, width: int, layers: int) -> None:
        params = {}
        for index, (name, (shape, _)) in enumerate(shapes_of(width, layers).items()):
            params[name] = nn.Parameter(_full(shape, index))
            params[name].grad = _full(shape, 1000 + index)
        self.inner = Muon(params.items(), **OPTIONS)

    def step(self) -> None:
        self.inner.found_inf = torch.zeros(())
        self.inner.step()


class Duplicated:
    """torch's `Muon`: on full matrices on every rank, or with ``mesh`` on sharded DTensors."""

    def __init__(self, width: int, layers: int, mesh: Any = None) -> None:
        params = []
        for index, (shape, spec) in enumerate(shapes_of(width, layers).values()):
            tensors = [_full(shape, index), _full(shape, 1000 + index)]
            if mesh is not None:
                from torch.distributed.tensor import Replicate, Shard, distribute_tensor

                split = Shard(0 if spec.dim_axes(0) else 1)
                tensors = [distribute_tensor(tensor, mesh, [Replicate(), split]) for tensor in tensors]
            param = nn.Parameter(tensors[0])
            param.grad = tensors[1]
            params.append(param)
        self.optimizer = torch.optim.Muon(params, **OPTIONS)

    def step(self) -> None:
        self.optimizer.step()


def timed(width: int, layers: int, rounds: int, chosen: list[str]) -> dict[str, list[float]]:
    """Return wall and CPU seconds of each step by method, and for "homes" the CPU seconds of Newton-Schulz on this rank.

    "share of the work" is the largest cost of a rank by the library's estimate, divided by the mean.
    """
    busy = [0.0]

    def clocked(*args: Any) -> Tensor:
        begin = thread_time()
        found = newton_schulz(*args)
        busy[0] += thread_time() - begin
        return found

    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        makes: dict[str, Callable[[], Any]] = {
            "homes": lambda: Ours(registry, width, layers),
            "same, duplicated": lambda: SameOnEvery(width, layers),
            "duplicated": lambda: Duplicated(width, layers),
            "DTensor": lambda: Duplicated(width, layers, registry.device_mesh("data", "tensor")),
        }
        kinds = {kind: makes[kind]() for kind in chosen}
        names = ["newton-schulz", *(kind + of for kind in kinds for of in ("", CPU))]
        found: dict[str, list[float]] = {name: [] for name in names}
        for number in range(rounds + 1):
            for kind, one in kinds.items():
                dist.barrier()
                busy[0], begin, used = 0.0, perf_counter(), process_time()
                with mock.patch.object(of_muon, "newton_schulz", clocked):
                    one.step()
                used = process_time() - used
                dist.barrier()
                if number:
                    found[kind].append(perf_counter() - begin)
                    found[kind + CPU].append(used)
                    found["newton-schulz"] += [busy[0]] if kind == "homes" else []
        ours = kinds["homes"]
        shares = gather_objects(ours.inner._homes.load.get(registry.global_rank, 0.0), registry)
        found["share of the work"] = [max(shares) / fmean(shares)]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="homes and duplicated always run")
    options = parser.parse_args()
    chosen = [kind for kind in KINDS if kind in {*options.kinds, "homes", "duplicated"}]
    world = World()
    by_rank = world.run(4, timed, options.width, options.layers, options.rounds, chosen)
    world.close()
    times = {kind: median(by_rank[0][kind]) for kind in chosen}
    used = {kind: sum(median(found[kind + CPU]) for found in by_rank) for kind in chosen}
    work = [fmean(found["newton-schulz"]) for found in by_rank]
    print(
        f"width {options.width}, {options.layers} layers, data=2, tensor=2; torch {torch.__version__}, one thread per rank"
    )
    for kind in chosen:
        of_time, of_work = times[kind] / times["duplicated"], used[kind] / used["duplicated"]
        print(
            f"{kind:18}{1e3 * times[kind]:9.1f} ms per step{of_time:7.2f} of duplicated;"
            f"{1e3 * used[kind]:9.1f} ms of processors{of_work:7.2f}"
        )
    planned = by_rank[0]["share of the work"][0]
    print(f"Newton-Schulz, slowest rank: {max(work) / fmean(work):.2f} x the mean; by its cost {planned:.2f}")


if __name__ == "__main__":
    main()
