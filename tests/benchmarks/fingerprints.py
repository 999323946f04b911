"""Time the comparison of replicas, and count false alarms in correct runs.

    python tests/benchmarks/fingerprints.py [--seconds 20] [--clean 10000]

Cost: CPU time of one of two gloo ranks (one thread per rank) for a clipping step of AdamW on the parameters of a
transformer, as a ratio to the same step without comparison, with interleaved rounds. The cost of a run that compares every
N steps follows from the two rows: ``between + (compares - between) / N``.

False alarms: ``--clean`` steps over several layouts, with accumulation, clipping and (in fp16) overflows, compared in
every step. The exit status is 1 if any step reports a difference.
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

from flips import LAYOUTS, Run
from meshstep.optim import Fingerprints, ParallelOptimizer, Replayable, ReplicaMismatchError
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from world import World

AT_A_TIME = 500  # steps per call, because a call may take three minutes at most


def contenders(registry: ProcessGroupRegistry, width: int) -> dict[str, Callable[[], object]]:
    """Return the contenders by name: functions that make one step, each with its own parameters and gradients."""
    sizes = [(3072, width), (512, width), *[(width,), (3 * width, width), (width, width), (4 * width, width)] * 9]
    ways: dict[str, dict[str, Any]] = {
        "no watch": {},
        "a step that compares": {"check_replicas": Fingerprints(every=1)},
        "a step between": {"check_replicas": Fingerprints(every=10**6)},
        "commit=": {"commit": lambda: True},
        "Replayable": {"states": Replayable()},
    }
    steps: dict[str, Callable[[], object]] = {}
    for name, options in ways.items():
        generator = torch.Generator().manual_seed(0)
        model = nn.ParameterList([torch.randn(size, generator=generator) * 0.02 for size in sizes])
        declare(model, {"*": P()})
        for param in model:
            param.grad = torch.randn(param.shape, generator=generator)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        steps[name] = ParallelOptimizer(adamw, registry, max_norm=0.7, **options).step
    return steps


def timed(seconds: float, width: int) -> dict[str, float]:
    """Return the CPU milliseconds of this process by contender, the median of the rounds."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        steps = contenders(registry, width)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for step in steps.values():
            step()
        rounds = torch.tensor(0.0)
        end = time.perf_counter() + seconds
        while not rounds:
            for name, step in steps.items():
                start = time.process_time()
                step()
                times[name].append((time.process_time() - start) * 1e3)
            rounds = torch.tensor(float(time.perf_counter() > end))
            torch.distributed.all_reduce(rounds)  # all ranks stop after the same round
        return {name: median(values) for name, values in times.items()}


def clean(name: str, steps: int) -> str:
    """Run ``steps`` correct steps; return the error of a false alarm, or the number of skipped steps."""
    with ProcessGroupRegistry(LAYOUTS[name].topology) as registry:
        run = Run(name, registry, every=1, accumulation_steps=2)
        try:
            for step in range(steps):
                run.step(1e6 if step % 50 == 7 else 1.0)
            run.optimizer.poll()
        except ReplicaMismatchError as error:
            return f"step {run.steps}: {error}"
        return f"nothing found, {run.optimizer.skipped_steps} skipped"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="time for the table")
    parser.add_argument("--width", type=int, default=256, help="of the transformer: 512 has 21M parameters")
    parser.add_argument("--clean", type=int, default=10_000, help="steps in all layouts together")
    arguments = parser.parse_args()
    world, parted = World(), False
    if arguments.seconds:
        found = world.run(2, timed, arguments.seconds, arguments.width)[0]
        print(f"AdamW on data=2, float32, width {arguments.width}, torch {torch.__version__}")
        for name, milliseconds in found.items():
            print(f"  {name:22s} {milliseconds:9.2f} ms   {milliseconds / found['no watch']:5.2f}x")
    each = -(-arguments.clean // len(LAYOUTS))
    for name in sorted(LAYOUTS) if arguments.clean else ():
        for start in range(0, each, AT_A_TIME):
            steps = min(AT_A_TIME, each - start)
            said = {*world.run(LAYOUTS[name].topology.world_size, clean, name, steps)}
            parted |= any("nothing found" not in text for text in said)
            print(f"  {name:28s} {steps:5d} steps: {'; '.join(said)}", flush=True)
    world.close()
    sys.exit(int(parted))


if __name__ == "__main__":
    main()
