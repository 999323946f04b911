"""Time the Python overhead of a step, and of creating an optimizer, with tiny parameters, in CPU milliseconds.

    python tests/benchmarks/host_time.py [--rounds 20]

A step of meshstep after two warm-up steps is compared with torch's `clip_grad_norm_(foreach=True)` and fused AdamW in one
process, with new gradients in every round. Further rows: `ReductionPlan.of` for 10,000 parameters on a million ranks,
`ParallelOptimizer(...)`, and `Topology.peers`. The contenders of a step alternate; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from meshstep.amp import Mode, Precision
from meshstep.optim import ParallelOptimizer, ParameterEntry, ReductionPlan
from meshstep.parallel import P, ProcessGroupRegistry, Topology
from torch import nn

Step = Callable[[], object]


def tiny(count: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(1, dtype=dtype)) for _ in range(count)]


def torchs(params: list[nn.Parameter]) -> Step:
    optimizer = torch.optim.AdamW(params, fused=True)

    @torch.no_grad()
    def step() -> None:
        nn.utils.clip_grad_norm_(params, 0.7, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(params: list[nn.Parameter], precision: Mode | Precision) -> Step:
    adamw = torch.optim.AdamW(params, fused=True)
    optimizer = ParallelOptimizer(adamw, ProcessGroupRegistry(Topology()), max_norm=0.7, precision=precision)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def milliseconds(function: Step) -> float:
    start = time.process_time()
    function()
    return (time.process_time() - start) * 1e3


def steps(count: int, rounds: int) -> None:
    modes: dict[str, Mode | Precision | None] = {
        "torch": None,
        "meshstep fp32": "fp32",
        "meshstep bf16": "bf16",
    }
    contenders = {}
    for name, mode in modes.items():
        params = tiny(count, torch.float32 if mode in (None, "fp32") else torch.bfloat16)
        contenders[name] = params, torchs(params) if mode is None else ours(params, mode)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 2):
        for name, (params, step) in contenders.items():
            for param in params:
                param.grad = torch.ones(1)
            times[name].append(milliseconds(step))
    base = times["torch"][2:]
    for name, found in times.items():
        ratio = median(one / other for one, other in zip(found[2:], base, strict=True))
        print(f"| step of {count:,} parameters: {name} | {median(found[2:]):.2f} | {ratio:.2f} |")


def before_the_first_step(count: int, rounds: int) -> None:
    topology = Topology(data=131072, tensor=8)
    specs = (P(), P("tensor"), P(None, "tensor"), P(partial="tensor"))
    entries = [ParameterEntry(f"layers.{i}.weight", specs[i % 4], (64, 64)) for i in range(count)]
    params = tiny(count)

    def plan() -> None:
        made = ReductionPlan.of(entries, topology, 777_777)
        assert len(made.replica_weights) == len(made.bucket_indices) == count

    questions: dict[str, Step] = {
        f"plan of {count:,} parameters at {topology.world_size:,} ranks": plan,
        f"ParallelOptimizer of {count:,} parameters": lambda: ours(params, "fp32"),
        "peers of a data axis of 131,072 ranks": lambda: topology.peers(777_777, "data"),
    }
    for name, question in questions.items():
        print(f"| {name} | {median(milliseconds(question) for _ in range(rounds)):.2f} | |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--counts", type=int, nargs="+", default=[1_000, 10_000], help="parameters")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one CPU thread\n\n| | ms | of torch's |\n|---|---|---|")
    for count in arguments.counts:
        steps(count, arguments.rounds)
    before_the_first_step(arguments.counts[-1], min(arguments.rounds, 5))


if __name__ == "__main__":
    main()
