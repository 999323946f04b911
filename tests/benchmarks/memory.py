"""Measure the memory of one rank with replicated, sharded and offloaded states, as the sum of tensor bytes.

    python tests/benchmarks/memory.py [--ranks 4] [--width 1024] [--depth 24]

The model is a stack of linear layers, trained by AdamW over gloo ranks on one machine. The columns, in MiB, each of
the rank with the largest value: parameters; peak of their gradients within a window of two micro-batches; shard of the
reduced gradients; masters; optimizer states; masters, states and copies on the CPU. Two further columns: the time of a
window, and for sharded states the bytes of masters and states relative to the replicated ones divided by the number of
ranks.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

import torch
from arguments import arguments
from meshstep.amp import precision_of
from meshstep.optim import ParallelOptimizer
from meshstep.optim.states.offloaded import OffloadTransform
from meshstep.optim.states.sharded import Shards
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn
from world import World

PLACEMENTS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "ZeRO-1": {"shard_states": "data"},
    "ZeRO-2": {"shard_states": "data", "shard_gradients": True},
    "offload 0.5": {"offload": 0.5},
    "ZeRO-2, offload 0.5": {"shard_states": "data", "shard_gradients": True, "offload": 0.5},
}


class Usage(NamedTuple):
    """Bytes on one rank, and the seconds of a window."""

    parameters: float
    gradients: float
    slices: float
    masters: float
    states: float
    offloaded: float
    seconds: float


def measured(ranks: int, mode: str, options: dict[str, Any], width: int, depth: int) -> Usage:
    """Return the memory and the time that this rank needs for the steps of a small model on ``ranks`` data ranks."""
    torch.set_num_threads(1)
    with ProcessGroupRegistry(Topology(data=ranks)) as registry:
        return measure(registry, mode, options, width, depth)


def measure(registry: ProcessGroupRegistry, mode: str, options: dict[str, Any], width: int, depth: int) -> Usage:
    """Train two windows of two micro-batches, and return the usage."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    declare(model, {"*": P()})
    model = precision_of(mode).prepare(model)
    optimizer = ParallelOptimizer(
        torch.optim.AdamW(model.parameters(), fused=True),
        registry,
        **arguments(precision=mode, max_norm=1.0, **options),
    )
    most = [0]

    def watch(_: Tensor) -> None:
        most[0] = max(most[0], sum(param.grad.nbytes for param in model.parameters() if param.grad is not None))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(watch)
    x = torch.randn(8, width)
    for _ in range(2):
        start = time.perf_counter()
        for _ in range(2):
            optimizer.backward(model(x).float().square().mean())
        optimizer.step()
        seconds = time.perf_counter() - start
        slices = _slices(optimizer)
        optimizer.zero_grad()
    pieces = optimizer.stepped_tensors()
    masters = sum(piece.tensor.nbytes for piece in pieces if piece.tensor.dtype != piece.param.dtype)
    states = {piece: _state_bytes(optimizer, piece.tensor) for piece in pieces}
    # The keys are tensors on the device of the gradients: shards (with sharded states) or parameters. The values are copies
    # on the CPU.
    copies = next(
        (transform.copies for transform in optimizer._chain.transforms if isinstance(transform, OffloadTransform)), {}
    )
    beside = [piece for piece in pieces if piece.grad_tensor in copies]
    offloaded = sum(_state_bytes(optimizer, piece.tensor) + piece.tensor.nbytes for piece in beside)
    parameters = sum(param.nbytes for param in model.parameters())
    return Usage(parameters, most[0], slices, masters, sum(states.values()), offloaded, seconds)


def _state_bytes(optimizer: ParallelOptimizer, stepped: Tensor) -> int:
    return sum(value.nbytes for value in optimizer.state[stepped].values() if isinstance(value, Tensor))


def _slices(optimizer: ParallelOptimizer) -> int:
    shards = (transform for transform in optimizer._chain.transforms if isinstance(transform, Shards))
    gradients = [shard.gradient for transform in shards for bucket in transform.buckets for shard in bucket.shards]
    return sum(gradient.nbytes for gradient in gradients if gradient is not None)


def report(mode: str, name: str, usage: Usage, ratio: float | None) -> None:
    figures = "  ".join(f"{value / 2**20:10.2f}" for value in usage[:-1])
    shown = "" if ratio is None else f"{ratio:.4f}"
    print(f"{mode:6s}{name:22s}{figures}  {usage.seconds * 1e3:8.0f}  {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=24)
    arguments = parser.parse_args()
    numel = arguments.depth * arguments.width * (arguments.width + 1)
    print(f"torch {torch.__version__}, {platform.machine()} CPU, data={arguments.ranks}; {numel:,} parameters; MiB")
    columns = ("parameters", "gradients", "slices", "masters", "states", "on the CPU")
    print(f"{'':28s}" + "  ".join(f"{column:>10s}" for column in columns) + f"  {'ms':>8s}  of replicated / ranks")
    world, ranks = World(), arguments.ranks
    for mode in ("fp32", "bf16"):
        replicated = 0.0
        for name, options in PLACEMENTS.items():
            usages = world.run(ranks, measured, ranks, mode, options, arguments.width, arguments.depth)
            usage = Usage(*map(max, zip(*usages, strict=True)))
            kept = usage.masters + usage.states
            replicated = replicated or kept
            report(mode, name, usage, kept / (replicated / ranks) if "shard_states" in options else None)
    world.close()


if __name__ == "__main__":
    main()
