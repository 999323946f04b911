"""What one of four data ranks keeps, by what is sharded: bytes an element of the model, counted from a step's tensors.

bfloat16 weights with float32 gradients and masters, AdamW. `fully_shard`, which shards the weights as well, is torch's.
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
    "whole": (),
    "ZeRO-1: Sharded('data')": Sharded("data"),
    "ZeRO-2: Sharded('data', gradients=True)": Sharded("data", gradients=True),
    "ZeRO-2 and Offloaded(1.0)": (Sharded("data", gradients=True), Offloaded(1.0)),
}
PARTS = ("weights", "gradients", "masters", "states")


def kept() -> Figures:
    """On each rank: placement -> part -> bytes an element of the model; what is offloaded counts as 'on the CPU'."""
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
    pieces = [piece.tensor for piece in optimizer.pieces()]
    moments = [value for piece in pieces for value in adamw.state[piece].values()]
    moments = [value for value in moments if isinstance(value, Tensor) and value.dim()]
    found: dict[str, list[Any]] = {
        "weights": weights,
        "gradients": gradients_of(weights, optimizer),
        "masters": pieces,
        "states": moments,
    }
    numel = sum(weight.numel() for weight in weights)
    bytes_of = {name: memory_of(tensors) / numel for name, tensors in found.items()}
    if isinstance(states, tuple) and states:  # on a CPU there is nothing to tell the two memories apart by
        bytes_of |= {"masters": 0.0, "states": 0.0, "on the CPU": bytes_of["masters"] + bytes_of["states"]}
    return bytes_of


def gradients_of(weights: list[nn.Parameter], optimizer: ParallelOptimizer) -> list[Tensor]:
    """Those that are there when the update begins: of the weights, and the slices that they were reduced into."""
    shards = [link for link in optimizer._states.links if isinstance(link, Shards)]
    slices = [gradient for link in shards for bucket in link.buckets for gradient in bucket.gradients]
    return [grad for grad in (*(weight.grad for weight in weights), *slices) if grad is not None]


def memory_of(tensors: list[Any]) -> int:
    """Bytes, each element once, however many tensors show it."""
    seen = {(tensor.data_ptr(), tensor.numel()): tensor.nbytes for tensor in tensors}
    return sum(seen.values())


def measure() -> Figures:
    by_rank = run_ranks(kept, RANKS)
    return {name: {part: max(rank[name][part] for rank in by_rank) for part in by_rank[0][name]} for name in PLACEMENTS}


def draw(figures: Figures) -> str:
    parts, scale, top = [], 26, 104
    colours = dict(
        zip((*PARTS, "on the CPU"), (COLOURS[0], COLOURS[1], COLOURS[2], COLOURS[3], COLOURS[7]), strict=True)
    )
    x = 36.0
    for name, colour in colours.items():
        parts += [box(x, 62, 14, 14, "", 3, colour), text(x + 20, 74, name)]
        x += 48 + 7.4 * len(name)
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
    height = top + 46 * len(figures) + 24
    parts.append(
        text(36, height - 14, f"data={RANKS}, AdamW; counted from a step's tensors when the update begins", "quiet")
    )
    return page("Bytes an element of the model on one of four data ranks, in bfloat16 with masters", 872, height, parts)


if __name__ == "__main__":
    main("memory", measure, draw)
