"""Time saving and loading 200 MiB with meshstep, which also computes checksums, and with `torch.distributed.checkpoint`.

    python tests/benchmarks/checkpoint.py [--rounds 15] [--mib 200] [--directory /tmp]

One process; linear layers and their AdamW states, in float32. The four operations alternate in each round, with a file
system cache that holds the last written files. Both libraries write beside the previous checkpoint; only the time of
meshstep includes removing that one. A ratio compares two times of one round; the output has the median and the quartiles.
Memory is the peak resident memory above the memory before the call, in MiB.
"""

from __future__ import annotations

import argparse
import gc
import platform
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
from meshstep.optim import ParallelOptimizer, load_checkpoint, save_checkpoint
from meshstep.parallel import ProcessGroupRegistry, Topology
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

WIDTH = 1024


class Cost(NamedTuple):
    """Seconds of one call, and its peak resident memory above the memory before the call, in bytes."""

    seconds: float
    memory: int


def resident(field: str) -> int:
    """Return the bytes of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def cost(call: Callable[[], object]) -> Cost:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, start = resident("VmRSS"), time.perf_counter()
    call()
    return Cost(time.perf_counter() - start, resident("VmHWM") - before)


def trained(mib: float) -> tuple[nn.Module, ParallelOptimizer]:
    """Return a model and its optimizer; parameters and AdamW states together have ``mib`` MiB."""
    depth = max(1, round(mib * 2**20 / (3 * 4 * (WIDTH**2 + WIDTH))))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))
    adamw = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer = ParallelOptimizer(adamw, ProcessGroupRegistry(Topology()))
    optimizer.backward(model(torch.randn(4, WIDTH)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def all_tensors(model: nn.Module, optimizer: ParallelOptimizer) -> dict[str, Tensor]:
    """Return all tensors of model and optimizer by name, for `torch.distributed.checkpoint`."""
    found = {f"model.{name}": param.detach() for name, param in model.named_parameters()}
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"optim.{index}.{key}": value for key, value in state.items()}
    return found


def measure(rounds: int, mib: float, directory: Path) -> dict[str, list[Cost]]:
    """Return the costs of each operation, without the first round, which is a warm-up."""
    model, optimizer = trained(mib)
    plain, own = [directory / "plain-0", directory / "plain-1"], directory / "own"

    def save_plain() -> None:
        save(dict(all_tensors(model, optimizer)), storage_writer=FileSystemWriter(plain[1]), no_dist=True)

    def load_plain() -> None:
        state: dict[str, Any] = dict(all_tensors(model, optimizer))
        load(state, storage_reader=FileSystemReader(plain[1]), no_dist=True)

    calls: dict[str, Callable[[], object]] = {
        "save, plain": save_plain,
        "save": lambda: save_checkpoint(own, model, optimizer),
        "load, plain": load_plain,
        "load": lambda: load_checkpoint(own, model, optimizer),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in calls}
    for index in range(rounds + 1):
        plain.reverse()
        for name, call in calls.items():
            found = cost(call)
            if call is save_plain:
                shutil.rmtree(plain[0], ignore_errors=True)
            if index:
                costs[name].append(found)
    return costs


def report(costs: dict[str, list[Cost]]) -> list[str]:
    lines = ["| | plain, s | own, s | own / plain (quartiles) | plain, MiB | own, MiB |", "|---|---|---|---|---|---|"]
    for what in ("save", "load"):
        plain, own = costs[f"{what}, plain"], costs[what]
        ratios = [one.seconds / other.seconds for one, other in zip(own, plain, strict=True)]
        low, _, high = quantiles(ratios, n=4)
        cells = [
            what,
            f"{median(one.seconds for one in plain):.3f}",
            f"{median(one.seconds for one in own):.3f}",
            f"{median(ratios):.2f} ({low:.2f} to {high:.2f})",
            f"{max(one.memory for one in plain) / 2**20:.0f}",
            f"{max(one.memory for one in own) / 2**20:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=float, default=200)
    parser.add_argument("--directory", default=None, help="folder for the files; default: the temporary folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        costs = measure(arguments.rounds, arguments.mib, Path(folder))
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {arguments.mib:g} MiB of tensors")
    print("\n".join(report(costs)))


if __name__ == "__main__":
    main()
