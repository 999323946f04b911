"""Compare Newton-Schulz on a matrix and on its Gram matrix, and on sharded matrices at an owner rank or in place.

    python tests/benchmarks/gram.py [--widths 512 1024] [--aspects 1 2 4] [--rounds 5]
    python tests/benchmarks/gram.py --split [--width 512] [--aspect 4] [--matrices 4] [--rounds 5]

The first command compares both forms of `meshstep.optim.whole.muon` with one thread: the CPU time for a random matrix of
each size, and the relative error to the first form in float64 for matrices of `spectra.SPECTRA` with 256 rows.

The second command steps matrices whose long dim is sharded over ``tensor=2``: rows in half of them, columns in the
others. Four methods alternate. Two gather each matrix at its owner rank ("homes"), in either form. Two sum the Gram
matrices of the shards instead, and multiply the shards with the polynomial of the sum, which all ranks compute
("summed") or one rank per matrix, with an all-to-all and an all-gather instead of the all-reduce ("summed at homes").
The library has only the first two; the others show the possible gain. The output has medians: time until the slowest
rank is done, CPU time of the slowest rank, and CPU time of all ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, thread_time

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from meshstep.optim import Muon, ParallelOptimizer
from meshstep.optim.whole import muon as of_matrix
from meshstep.optim.whole.muon import COEFFICIENTS, RUN, on_gram, on_matrix, scale_of
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, shard
from spectra import SPECTRA
from torch import Tensor, nn
from world import World

STEPS = 5
HOW = ("homes", "homes, on Gram", "summed", "summed at homes")
OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}

# First command: both forms with one thread -----------------------------------------------------------------------------


def seconds(functions: list[Callable[[], object]], rounds: int) -> list[float]:
    """Return the median CPU seconds of each function; the calls alternate."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds + 1):
        for function, own in zip(functions, times, strict=True):
            begin = thread_time()
            function()
            own.append(thread_time() - begin)
    return [median(own[1:]) for own in times]


def errors(spectrum: str, shape: tuple[int, int], dtype: torch.dtype) -> list[float]:
    """Return the relative errors of both forms in the Frobenius norm."""
    given = SPECTRA[spectrum](*shape).to(dtype)
    given = given / given.norm()
    exact = on_matrix(given.double(), COEFFICIENTS, STEPS)
    found = [form(given.clone(), COEFFICIENTS, STEPS).double() for form in (on_matrix, on_gram)]
    return [float((one - exact).norm() / exact.norm()) for one in found]


def forms(widths: list[int], aspects: list[float], rounds: int) -> None:
    torch.set_num_threads(1)
    print("| matrix | dtype | on it, ms | on its Gram matrix, of that | " + " | ".join(SPECTRA) + " |")
    print("|---" * (4 + len(SPECTRA)) + "|")
    for width in widths:
        for aspect in aspects:
            for dtype in (torch.bfloat16, torch.float32):
                shape = width, int(aspect * width)
                x = SPECTRA["random"](*shape).to(dtype)
                x = x / x.norm()
                times = seconds([partial(form, x, COEFFICIENTS, STEPS) for form in (on_matrix, on_gram)], rounds)
                cells = [
                    " and ".join(f"{error:.1e}" for error in errors(name, (256, int(256 * aspect)), dtype))
                    for name in SPECTRA
                ]
                print(
                    f"| {shape[0]} x {shape[1]} | {str(dtype)[6:]} | {1e3 * times[0]:.1f} | {times[1] / times[0]:.2f} | "
                    + " | ".join(cells)
                    + " |",
                    flush=True,
                )


# Second command: sharded matrices --------------------------------------------------------------------------------------


def weights(registry: ProcessGroupRegistry, shape: tuple[int, int], matrices: int) -> dict[str, nn.Parameter]:
    """Return sharded weights with gradients; every other weight is tall."""
    found = {}
    for index in range(matrices):
        size, spec = (shape, P(None, "tensor")) if index % 2 else (shape[::-1], P("tensor"))
        random = partial(torch.randn, size)
        param = nn.Parameter(shard(random(generator=torch.Generator().manual_seed(index)), spec, registry))
        annotate(param, spec, f"w{index}")
        param.grad = shard(random(generator=torch.Generator().manual_seed(1000 + index)), spec, registry)
        found[f"w{index}"] = param
    return found


class AtHomes:
    """The library's method: each matrix is gathered and stepped at its owner rank."""

    def __init__(self, registry: ProcessGroupRegistry, shape: tuple[int, int], matrices: int, gram: bool) -> None:
        self.params, self.gram = weights(registry, shape, matrices), gram
        self.inner = Muon(self.params.items(), **OPTIONS)
        ParallelOptimizer(self.inner, registry)

    def step(self) -> None:
        self.inner.found_inf = torch.zeros(())
        with mock.patch.object(of_matrix, "uses_gram", return_value=self.gram):
            self.inner.step()


class Summed:
    """The method that sums Gram matrices: shards [short, long / 2], or transposed, stay on their ranks."""

    def __init__(self, registry: ProcessGroupRegistry, shape: tuple[int, int], matrices: int, homes: bool) -> None:
        self.params, self.homes = list(weights(registry, shape, matrices).values()), homes
        self.momenta = [torch.zeros_like(param) for param in self.params]
        self.ranks, self.scale = dist.get_world_size(), scale_of("match_rms_adamw", shape)

    @torch.no_grad()
    def step(self) -> None:
        towards = []
        for param, m in zip(self.params, self.momenta, strict=True):
            assert param.grad is not None
            m.lerp_(param.grad, 0.05)
            u = param.grad.lerp(m, 0.95).bfloat16()
            towards.append(u.mT if len(u) > u.size(1) else u)
        for first in range(0, STEPS, RUN):
            sums = self.of_all([x @ x.mT for x in towards], min(RUN, STEPS - first), first == 0)
            towards = [q @ x for q, x in zip(sums, towards, strict=True)]
        for param, o in zip(self.params, towards, strict=True):
            o = o.mT if len(param) > param.size(1) else o
            param.mul_(1 - OPTIONS["lr"] * OPTIONS["weight_decay"]).add_(o, alpha=-OPTIONS["lr"] * self.scale)

    def of_all(self, grams: list[Tensor], steps: int, first: bool) -> list[Tensor]:
        """Return per matrix the factor for its shards, from this rank's contributions to the Gram matrices."""
        if not self.homes:
            packed = torch.stack(grams)
            dist.all_reduce(packed)
            return [polynomial(gram, steps, first) for gram in packed]
        there = torch.stack([gram for home in range(self.ranks) for gram in grams[home :: self.ranks]])
        arrived = torch.empty_like(there)
        dist.all_to_all_single(arrived, there)
        own = arrived.view(self.ranks, -1, *grams[0].shape).sum(0)
        back = torch.stack([polynomial(gram, steps, first) for gram in own])
        found = back.new_empty(len(grams), *grams[0].shape)
        dist.all_gather_into_tensor(found, back)
        by_home = found.view(self.ranks, -1, *grams[0].shape)
        return [by_home[index % self.ranks, index // self.ranks] for index in range(len(grams))]


def polynomial(gram: Tensor, steps: int, first: bool) -> Tensor:
    """Return the factor of X after ``steps`` Newton-Schulz iterations, from ``gram`` = X X^T; with ``first``, X is
    normalized first.
    """
    norm = gram.diagonal().sum().sqrt() if first else torch.ones((), dtype=gram.dtype)
    gram = gram / norm.square()
    p = q = one_step(gram)
    for _ in range(steps - 1):
        gram = p @ gram @ p
        p = one_step(gram)
        q = p @ q
    return q / norm


def one_step(gram: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    p = torch.addmm(gram, gram, gram, beta=b, alpha=c)
    p.diagonal().add_(a)
    return p


def timed(shape: tuple[int, int], matrices: int, rounds: int) -> tuple[dict[str, list[tuple[float, float]]], float]:
    """Return wall and CPU seconds by method, and the relative difference between in-place and owner-rank methods."""
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        kinds: dict[str, Any] = {
            "homes": AtHomes(registry, shape, matrices, False),
            "homes, on Gram": AtHomes(registry, shape, matrices, True),
            "summed": Summed(registry, shape, matrices, False),
            "summed at homes": Summed(registry, shape, matrices, True),
        }
        kinds = {name: kind for name, kind in kinds.items() if name != "summed at homes" or matrices % 2 == 0}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
        for number in range(rounds + 1):
            for name, kind in kinds.items():
                dist.barrier()
                begin, used = perf_counter(), process_time()
                kind.step()
                used = process_time() - used
                dist.barrier()
                if number:
                    found[name].append((perf_counter() - begin, used))
        pairs = zip(kinds["homes, on Gram"].params.values(), kinds["summed"].params, strict=True)
        apart = max(float((one - other).detach().norm() / other.detach().norm()) for one, other in pairs)
        return found, apart


def split(width: int, aspect: float, matrices: int, rounds: int) -> None:
    shape, world = (width, int(aspect * width)), World()
    by_rank = world.run(2, timed, shape, matrices, rounds)
    world.close()
    print(f"{matrices} of {shape[0]} x {shape[1]}, tensor=2; torch {torch.__version__}, one thread per rank")
    base = 0.0
    for name in by_rank[0][0]:
        elapsed = median(seconds for seconds, _ in by_rank[0][0][name])
        used = [median(of_rank for _, of_rank in found[name]) for found, _ in by_rank]
        base = base or sum(used)
        print(
            f"{name:16}{1e3 * elapsed:9.1f} ms; processors{1e3 * max(used):9.1f} ms the slowest,{1e3 * sum(used):9.1f} all,"
            f"{sum(used) / base:6.2f} of homes"
        )
    print(f"weights end {by_rank[0][1]:.1e} apart, relative")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--aspects", type=float, nargs="+", default=[1, 2, 4])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--aspect", type=float, default=4)
    parser.add_argument("--matrices", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.split:
        split(given.width, given.aspect, given.matrices, given.rounds)
    else:
        forms(given.widths, given.aspects, given.rounds)


if __name__ == "__main__":
    main()
