"""Measure the cost of `prove`: number of forwards, and time in units of one forward and backward, on tensor=2 in float64.

    python tests/benchmarks/proof.py [MODEL ...]

The models have 10, 102 and 1,002 parameters, and one has 30M elements. Each is correct, or has one wrong spec, or lacks
one `copy_to`, so that all gradients before it are wrong. All times are CPU times.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

import torch
from meshstep.parallel import ColumnParallelLinear, P, ProcessGroupRegistry, RowParallelLinear, Topology, declare
from meshstep.parallel.mesh.text import aligned
from meshstep.testing import prove
from torch import Tensor, nn
from world import World


class Sizes(NamedTuple):
    """Sizes of a model: number of blocks with four parameters each, width, and tokens per batch. The model has two more
    parameters."""

    blocks: int
    width: int
    tokens: int


MODELS = {"10": Sizes(2, 16, 16), "100": Sizes(25, 16, 16), "1000": Sizes(250, 16, 16), "30M": Sizes(14, 512, 64)}
MISTAKES = ("none", "a spec", "a copy_to")


class Block(nn.Module):
    """x + down(gelu(up(x))) / 8."""

    def __init__(self, width: int, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        options = {"dtype": torch.float64}
        self.up = ColumnParallelLinear(width, 4 * width, registry, **options)  # type: ignore[arg-type]
        self.down = RowParallelLinear(4 * width, width, registry, **options)  # type: ignore[arg-type]
        self.copies = True

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x) if self.copies else nn.functional.linear(x, self.up.weight, self.up.bias)
        out: Tensor = x + self.down(nn.functional.gelu(up)) / 8
        return out


class Model(nn.Module):
    """x [token, feature] -> loss."""

    def __init__(self, sizes: Sizes, registry: ProcessGroupRegistry, mistake: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(sizes.width, sizes.width, dtype=torch.float64)
        self.blocks = nn.ModuleList(Block(sizes.width, registry) for _ in range(sizes.blocks))
        declare(self, {"first.*": P()})
        middle = self.blocks[sizes.blocks // 2]
        if mistake == "a spec":
            declare(middle, {"up.bias": P()})
        middle.copies = mistake != "a copy_to"  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of ``work`` in this process."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measured(sizes: Sizes, mistake: str) -> tuple[int, int, float, bool]:
    """Return numbers of parameters and forwards, time in units of a forward and backward, and whether nothing was found."""
    torch.set_num_threads(1)
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        model = Model(sizes, registry, mistake)
        x = torch.randn(sizes.tokens, sizes.width, dtype=torch.float64)

        def step() -> None:
            model(x).backward()
            model.zero_grad()

        step()
        unit = min(seconds(step) for _ in range(5))
        found = []
        taken = seconds(lambda: found.append(prove(model, lambda model: model(x), registry)))
        return len(list(model.parameters())), found[0].forwards, taken / unit, found[0].is_correct


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], help="which (default: all)")
    options = parser.parse_args()
    rows = [("model", "mistake", "forwards", "per parameter", "time / (forward + backward)")]
    world = World()
    for name in options.models or MODELS:
        for mistake in MISTAKES:
            count, forwards, times, right = world.ranks.run(measured, 2, MODELS[name], mistake, timeout=1200.0)[0]
            assert right == (mistake == "none")
            rows.append((name, mistake, str(forwards), f"{forwards / count:.3f}", f"{times:.1f}"))
            print("  ".join(rows[-1]), flush=True)
    world.close()
    print("\n".join(aligned(rows, right={2, 3, 4})))
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.processor() or platform.machine()}"
    )


if __name__ == "__main__":
    main()
