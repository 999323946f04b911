"""Time the whole clip+step against torch's recipe and against the bare optimizer, as ratios within one run.

    python tests/benchmarks/step.py [--seconds 20]

Rounds of all contenders are interleaved, so that a noisy machine is noisy for all of them; each row is the median over
the rounds of (contender / bare) in the same round.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from statistics import median

import torch
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import ProcessGroupRegistry, Topology
from torch import nn

Step = Callable[[], object]


def transformer_parameters(
    device: torch.device, width: int = 512, depth: int = 9, vocab: int = 3072
) -> list[nn.Parameter]:
    """The shapes of a 30M-parameter transformer."""
    shapes: list[tuple[int, ...]] = [(vocab, width), (512, width)]
    for _ in range(depth):
        shapes += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in [*shapes, (width,), (width,)]]


def tiny_parameters(device: torch.device, count: int = 1000) -> list[nn.Parameter]:
    """1,000 parameters of 64 elements."""
    return [nn.Parameter(torch.randn(64, device=device)) for _ in range(count)]


def contenders(make: Callable[[], list[nn.Parameter]]) -> dict[str, Step]:
    """Name -> one step, each on its own parameters and gradients."""
    steps: dict[str, Step] = {}

    def fused() -> tuple[list[nn.Parameter], torch.optim.AdamW]:
        params = make()
        for param in params:
            param.grad = torch.randn_like(param)
        return params, torch.optim.AdamW(params, lr=1e-4, fused=True)

    _, bare = fused()
    steps["bare fused AdamW"] = bare.step
    torch_params, torch_adamw = fused()

    def torch_recipe() -> None:
        nn.utils.clip_grad_norm_(torch_params, 0.7)
        torch_adamw.step()

    steps["torch clip_grad_norm_ + fused AdamW"] = torch_recipe
    ours = ParallelOptimizer(fused()[1], ProcessGroupRegistry(Topology()), max_norm=0.7)
    steps["meshstep, clipping"] = ours.step
    measuring = ParallelOptimizer(fused()[1], ProcessGroupRegistry(Topology()))
    steps["meshstep, measuring only"] = measuring.step
    return steps


def time_rounds(steps: dict[str, Step], seconds: float, synchronize: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds of each contender in each round, after one round of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, step in steps.items():
            synchronize()
            start = time.perf_counter()
            step()
            synchronize()
            times[name].append(time.perf_counter() - start)
    return times


def report(title: str, times: dict[str, list[float]]) -> None:
    """One row a contender: median milliseconds, median ratio to the first one."""
    base = next(iter(times.values()))
    print(f"\n{title} ({len(base)} rounds)")
    for name, values in times.items():
        ratio = median(value / reference for value, reference in zip(values, base, strict=True))
        print(f"  {name:40s} {median(values) * 1e3:9.2f} ms   {ratio:5.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="time for each table")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads on a CPU")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    synchronize: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    hardware = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"{platform.machine()} CPU, {arguments.threads} threads"
    )
    print(f"torch {torch.__version__}, {hardware}")
    tables: dict[str, Callable[[], list[nn.Parameter]]] = {
        "30M-parameter transformer": lambda: transformer_parameters(device),
        "1,000 parameters of 64 elements": lambda: tiny_parameters(device),
    }
    for title, make in tables.items():
        numel = sum(param.numel() for param in make())
        report(f"{title}: {numel:,} elements", time_rounds(contenders(make), arguments.seconds, synchronize))


if __name__ == "__main__":
    main()
