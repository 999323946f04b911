"""Time the telemetry of weights, gradients and updates.

    python tests/benchmarks/telemetry.py [--seconds 30] [--width 256] [--every 50]

CPU time of one of two gloo ranks (one thread per rank) for a backward and a clipping step of AdamW on a transformer, as a
ratio to both without telemetry, with interleaved rounds. Then runs of N steps with ``every=N``, interleaved with runs
of N steps without telemetry.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

from meshstep.optim import NoiseScale, ParallelOptimizer, SpectralNorms, Telemetry
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from world import World

LAYERS, TOKENS = 4, 512
WAYS: dict[str, dict[str, Any] | None] = {
    "no telemetry": None,
    "every step": {"every": 1},
    "between": {"every": 10**9},
    "every step, with noise": {"every": 1, "noise": NoiseScale()},
    "every step, with singular values": {"every": 1, "spectral": SpectralNorms()},
}
Contender = tuple[Callable[[], object], Callable[[], object]]


def model_of(width: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


def contenders(
    registry: ProcessGroupRegistry, width: int, ways: dict[str, dict[str, Any] | None]
) -> dict[str, Contender]:
    """Return the contenders by name: functions that run a backward and a step, each with its own model."""
    made: dict[str, Contender] = {}
    x = torch.randn(4, TOKENS // 4, width, generator=torch.Generator().manual_seed(registry.global_rank))
    for name, options in ways.items():
        torch.manual_seed(0)
        model = model_of(width)
        declare(model, {"*": P()})
        adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-4, fused=True)
        optimizer = ParallelOptimizer(adamw, registry, max_norm=0.7)
        if options is not None:
            Telemetry(optimizer, **options)

        def backward(model: nn.Module = model, optimizer: ParallelOptimizer = optimizer) -> None:
            optimizer.zero_grad()
            optimizer.backward(model(x).square().mean())

        made[name] = backward, optimizer.step
    return made


def timed(
    seconds: float, width: int, ways: dict[str, dict[str, Any] | None], steps: int = 1
) -> tuple[dict[str, tuple[float, float]], int]:
    """Return the median CPU milliseconds by contender, for ``steps`` backwards and steps, and for the steps alone.

    The second value is the number of rounds.
    """
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        made = contenders(registry, width, ways)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
        for backward, step in made.values():
            backward()
            step()
        over = torch.tensor(0.0)
        end = time.perf_counter() + seconds
        while not over:
            for name, (backward, step) in made.items():
                both = alone = 0.0
                for _ in range(steps):
                    start = time.process_time()
                    backward()
                    middle = time.process_time()
                    step()
                    stop = time.process_time()
                    both, alone = both + (stop - start) * 1e3, alone + (stop - middle) * 1e3
                times[name].append((both, alone))
            over = torch.tensor(float(time.perf_counter() > end))
            torch.distributed.all_reduce(over)  # all ranks stop after the same round
        rounds = len(times["no telemetry"])
        return {
            name: (median(a for a, _ in found), median(b for _, b in found)) for name, found in times.items()
        }, rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--width", type=int, default=256, help="of the transformer: 256 has 3.2M parameters")
    parser.add_argument("--every", type=int, default=50, help="steps of a run that measures once")
    arguments = parser.parse_args()
    world = World()
    found, _ = world.run(2, timed, arguments.seconds, arguments.width, WAYS)[0]
    run = {"no telemetry": None, "telemetry": {"every": arguments.every}}
    runs, rounds = world.run(2, timed, arguments.seconds, arguments.width, run, arguments.every)[0]
    world.close()
    parameters = sum(param.numel() for param in model_of(arguments.width).parameters())
    print(
        f"AdamW on data=2, float32, {parameters / 1e6:.1f}M parameters, {TOKENS} tokens per rank, torch {torch.__version__}"
    )
    whole, alone = found["no telemetry"]
    for name, (both, step) in found.items():
        ratios = f"backward and step {both:8.1f} ms {both / whole:5.2f}x", f"step {step:7.1f} ms {step / alone:5.2f}x"
        print(f"  {name:34s} {ratios[0]}    {ratios[1]}")
    both, step = (mine / plain for mine, plain in zip(runs["telemetry"], runs["no telemetry"], strict=True))
    print(
        f"  every={arguments.every}, {rounds} runs of {arguments.every} steps: "
        f"backward and step {both:.4f}x, step {step:.3f}x"
    )


if __name__ == "__main__":
    main()
