"""Draw the memory of one of four data ranks for each state placement, in bytes per element of the model.

The bytes are counted from the tensors of a step: bfloat16 weights, float32 gradients and master weights, AdamW.
"""

from __future__ import annotations

from typing import Any

import torch
from common import Figures, main
from meshstep.amp import Bf16
from meshstep.optim import Offloaded, ParallelOptimizer, Sharded
from meshstep.optim.states.sharded import Shards
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from meshstep.parallel.layout.picture import COLOURS, box, page, text
from meshstep.testing import run_ranks
from torch import Tensor, nn

RANKS, WIDTH, DEPTH = 4, 64, 4
PLACEMENTS: dict[str, Any] = {
    "replicated states": (),
    "ZeRO-1: Sharded('data')": Sharded("data"),
    "ZeRO-2: Sharded('data', gradients=True)": Sharded("data", gradients=True),
    "ZeRO-2 and Offloaded(1.0)": (Sharded("data", gradients=True), Offloaded(1.0)),
}
PARTS = ("weights", "gradients", "gradient shards", "master weights", "optimizer states")


def kept() -> Figures:
    """Return placement -> part -> bytes per element of the model, on each rank. Offloaded tensors count as "on the CPU"."""
    with ProcessGroupRegistry(Topology(data=RANKS)) as registry:
        return {name: of_placement(states, registry) for name, states in PLACEMENTS.items()}


def of_placement(states: Any, registry: ProcessGroupRegistry) -> dict[str, float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    declare(model, {"*": P()})
    Bf16().prepare(model, registry)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    optimizer = ParallelOptimizer(adamw, registry, precision="bf16", states=states)
    optimizer.backward(model(torch.randn(8, WIDTH)).float().square().mean())
    optimizer.step()
    weights = list(model.parameters())
    pieces = [piece.tensor for piece in optimizer.stepped_tensors()]
    moments = [value for piece in pieces for value in adamw.state[piece].values()]
    moments = [value for value in moments if isinstance(value, Tensor) and value.dim()]
    found: dict[str, list[Any]] = {
        "weights": weights,
        "gradients": [weight.grad for weight in weights if weight.grad is not None],
        "gradient shards": gradient_shards(optimizer),
        "master weights": pieces,
        "optimizer states": moments,
    }
    numel = sum(weight.numel() for weight in weights)
    bytes_of = {name: memory_of(tensors) / numel for name, tensors in found.items()}
    if (
        isinstance(states, tuple) and states
    ):  # everything is on the CPU here, so devices do not identify offloaded tensors
        offloaded = bytes_of["master weights"] + bytes_of["optimizer states"]
        bytes_of |= {"master weights": 0.0, "optimizer states": 0.0, "on the CPU": offloaded}
    return bytes_of


def gradient_shards(optimizer: ParallelOptimizer) -> list[Tensor]:
    """Return this rank's shards of the reduced gradients."""
    transforms = [transform for transform in optimizer._chain.transforms if isinstance(transform, Shards)]
    shards = [shard for transform in transforms for bucket in transform.buckets for shard in bucket.shards]
    return [shard.gradient for shard in shards if shard.gradient is not None]


def memory_of(tensors: list[Any]) -> int:
    """Return the bytes of the tensors. Tensors that share memory count once."""
    seen = {(tensor.data_ptr(), tensor.numel()): tensor.nbytes for tensor in tensors}
    return sum(seen.values())


def measure() -> Figures:
    by_rank = run_ranks(kept, RANKS)
    return {name: {part: max(rank[name][part] for rank in by_rank) for part in by_rank[0][name]} for name in PLACEMENTS}


def draw(figures: Figures) -> str:
    parts, scale, top = [], 26, 104
    colours = dict(
        zip(
            (*PARTS, "on the CPU"),
            (COLOURS[0], COLOURS[1], COLOURS[5], COLOURS[2], COLOURS[3], COLOURS[7]),
            strict=True,
        )
    )
    x = 36.0
    for name, colour in colours.items():
        parts += [box(x, 62, 14, 14, "", 3, colour), text(x + 20, 74, name)]
        x += 44 + 7.2 * len(name)
    for index, (placement, found) in enumerate(figures.items()):
        y, x = top + 46 * index, 320.0
        parts.append(text(308, y + 19, placement, "code", "end"))
        for name, value in found.items():
            if value:
                parts.append(box(x, y, scale * value, 28, "", 2, colours[name]))
                parts.append(text(x + scale * value / 2, y + 19, f"{value:g}", "inside", "middle"))
                x += scale * value
        elsewhere = found.get("on the CPU", 0)
        said = f"{sum(found.values()) - elsewhere:g}" + (f", and {elsewhere:g} on the CPU" if elsewhere else "")
        parts.append(text(x + 10, y + 19, said, "name"))
    height = top + 46 * len(figures) + 44
    zero1 = figures["ZeRO-1: Sharded('data')"]
    notes = (
        f"ZeRO-1 keeps the full gradient ({zero1['gradients']:g}) and this rank's shard of the reduced gradient "
        f"({zero1['gradient shards']:g}). ZeRO-2 keeps only the shard.",
        f"data={RANKS}, bfloat16 weights with float32 master weights, AdamW; counted from the tensors of a step",
    )
    parts += [text(36, height - 34 + 20 * index, note, "quiet") for index, note in enumerate(notes)]
    return page("Memory of one of four data ranks, in bytes per element of the model", 872, height, parts)


if __name__ == "__main__":
    main("memory", measure, draw)
